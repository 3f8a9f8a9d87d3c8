"""Kernels of Nereid: KV write and paged attention. Imports torch only; knows tensors, never requests.

Each operation is one module with one checked entry, which picks an implementation by device.
"""
