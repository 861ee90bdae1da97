"""Conversion between text and token ids: tokenizers, chat templates and grammars."""
