"""Continuous batching, beside one request at a time and transformers' own."""
