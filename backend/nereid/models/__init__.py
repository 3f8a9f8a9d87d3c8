"""Models: where they come from (source, gguf), how their weights are read (weights), what they compute (llama)."""
