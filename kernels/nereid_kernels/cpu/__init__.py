"""The CPU's implementation of each operation that the engine needs there, in plain PyTorch. Arguments are checked by
the wrappers of `nereid_kernels`."""
