"""Benchmark of quantised weights on CPUs, compared with llama.cpp on the same files."""
