"""Sampling: parameters, the state of each slot, and the choice of tokens from logits."""
