"""Benchmark of continuous batching, compared with sequential requests and transformers."""
