"""Benchmark of whole steps: decode steps and prompt chunks, compared with their bounds."""
