"""The KV cache's memory, behind the executor seam: what blocks are made of, how many there are, what moves them."""
