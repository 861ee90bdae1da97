"""Between text and token ids: tokenizers and chat templates."""
