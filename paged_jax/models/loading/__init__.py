"""Loading and saving of weights: Hugging Face folders, Orbax checkpoints, GGUF files."""
