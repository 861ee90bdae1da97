"""Models with a paged KV cache, loading of their weights, and their tokenizers."""
