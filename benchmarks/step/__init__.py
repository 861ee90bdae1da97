"""Whole steps of an engine's device: decode steps and prompt chunks, beside what bounds them."""
