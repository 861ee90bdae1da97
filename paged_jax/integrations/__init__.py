"""Adapters with which training frameworks generate their samples. Each has its own extra."""
