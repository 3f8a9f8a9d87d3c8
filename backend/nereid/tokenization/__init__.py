"""Text to tokens and back: the tokenizer, the incremental detokenizer with its hold-backs, the chat template."""
