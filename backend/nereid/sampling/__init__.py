"""Logits to tokens: the batched sampler and the noise it draws with. Imports torch only."""
