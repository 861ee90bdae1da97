"""Benchmark of text generation on CPUs, compared with transformers and llama.cpp."""
