"""The CPU's own implementation of the layers' operations, in C++: csrc/ has one file an operation.

`build` compiles it once on a machine with a compiler; `library` loads what fits the processor; `program` records a
model's operations at load and runs all of them in one call a step. Where there is no compiler, PyTorch does the same
work through `nereid_kernels.cpu`.
"""
