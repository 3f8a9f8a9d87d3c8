"""One reference for each operation: the definition in PyTorch, as plain as it can be, in the dtype that it is given.
Given float64 it is what kernels are compared with; given their own dtype it is what plain PyTorch would make of it."""
