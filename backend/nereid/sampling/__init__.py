"""Logits to tokens: the batched sampler, and the keys of the noise that it draws with."""
