"""Continuous batching: schedule, run, postprocess."""

from paged_jax.engine.engine import Engine, EngineStats

__all__ = ["Engine", "EngineStats"]
