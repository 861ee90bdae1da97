"""Text generation on CPUs, beside transformers and llama.cpp."""
