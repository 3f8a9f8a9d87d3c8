"""The OpenAI-compatible gateway: HTTP in front of any Triton server whose models have Nereid's tensors.

It knows a model only by what Triton says of it, and speaks to it by gRPC streams: it may run on another machine.

What always holds: each answer of a model is a gRPC stream of its own, which ends with its answer, or is cancelled when
the client leaves; no request ends another's. What a client sent wrong is an error object that names the field.
"""
