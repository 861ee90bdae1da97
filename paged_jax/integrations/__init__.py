"""Adapters for training frameworks that generate samples with an engine.

Each adapter needs the extra of this package that is named after the framework.
"""
