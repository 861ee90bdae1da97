"""Adapters for training frameworks that generate samples with an engine.

Each adapter needs its own extra.
"""
