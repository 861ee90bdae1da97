"""Formats of weights in files: one file per format, from its config entries to its values."""
