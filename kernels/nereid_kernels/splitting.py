"""How the attention kernels split a context among programs, for whoever reckons with it without Triton-lang."""

SPLIT_QUERY = 16  # a sequence's query tokens up to which its context is split
