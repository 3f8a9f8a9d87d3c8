"""What the number of a sequence's query tokens decides in attention: launches, trees, formulas."""

SPLIT_QUERY = 16
"""Up to so many, a sequence's context is split among programs."""
MAX_TREE = 64
"""Up to so many, they may form a tree: their ancestors fit into one int64. More are a chunk."""
