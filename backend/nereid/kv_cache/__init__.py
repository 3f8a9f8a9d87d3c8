"""The KV cache's books, on the scheduler's side: whose blocks are which, what is found again. Ids only, no tensors."""
