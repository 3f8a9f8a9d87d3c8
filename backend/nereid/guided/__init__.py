"""Guided decoding: outputs that a schema, a regular expression, a grammar or a list of choices describes.

A request names a Guide; `compiler` turns it into a CompiledGuide, once for all requests that name the same; `matcher`
follows one request's tokens; `masks` says for a batch which tokens may come next; `tracker` keeps the matchers of the
requests on their way. The room knows nothing of scheduler, executor or server.

The library is llguidance. Measured beside xgrammar 0.2.9 with SmolLM2's vocabulary (2 cores): it compiles a schema in
1 to 8 ms (2 to 28), 20,000 choices in 90 ms (4 s), and fills the masks of 16 rows in 0.1 ms, as fast. What decided: it
refuses keywords that it does not follow, where xgrammar ignores them; it bounds its work by fuel, where three of our
hostile schemas kept xgrammar busy for more than 25 s; it stands on nothing, where xgrammar imports torch and
transformers. It is imported by the first guided request.
"""
