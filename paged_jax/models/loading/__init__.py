"""Loading and saving of weights: Hugging Face folders and Orbax checkpoints."""
