"""Scheduler: decides what runs next. Plain Python, imports no jax."""
