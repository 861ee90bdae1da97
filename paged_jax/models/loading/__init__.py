"""Weights from files: Hugging Face folders and Orbax checkpoints."""
