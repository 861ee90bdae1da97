"""Who runs next: requests, their order, and what they wait for. Plain Python: imports no jax."""
