"""Weights between files and models: Hugging Face folders and Orbax checkpoints."""
