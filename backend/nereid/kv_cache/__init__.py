"""The KV cache: which blocks exist (block_pool), whose they are (manager), what they are made of (groups, storage)."""
