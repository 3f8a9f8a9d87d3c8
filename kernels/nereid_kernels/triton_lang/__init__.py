"""The Triton-lang kernels: one file an operation, with its kernel and the Launch that starts it.

Imported only where a kernel is started, since triton may be absent where the CPU serves. All offsets into a KV pool are
int64. What lies in a slot that a mask hides never reaches a result, NaN neither.
"""
