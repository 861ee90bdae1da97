"""Scheduler: chooses the sequences that each step runs. Plain Python without jax."""
