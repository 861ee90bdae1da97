"""Continuous batching: schedule, run, postprocess."""

from paged_jax.engine.engine import Engine
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.engine.stats import EngineStats

__all__ = ["Engine", "EngineAsleepError", "EngineStats"]
