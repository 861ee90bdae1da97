"""`Sleep`: gives back the memory of an engine's device for a while: its pool and its weights."""

from collections.abc import Collection
from typing import Any

import jax

from paged_jax.runner.runner import ModelRunner

# What vLLM calls the parts that come back.
TAGS = ("weights", "kv_cache")


class EngineAsleepError(RuntimeError):
    """A call that needs an engine that is awake."""


class Sleep:
    """Whether an engine sleeps, and where its weights are meanwhile.

        awake --begin(1)--> weights on the host --end--> awake
        awake --begin(2)--> no weights --replaced--> weights on the device --end--> awake

    Args:
      runner: has the weights and the pool.

    Attributes:
      level: 0 awake; 1 asleep, with the weights in host memory; 2 asleep, without weights.
    """

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.level = 0
        self._on_host: list[Any] | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        return bool(self._runner.weights.arrays)

    def begin(self, level: int) -> None:
        """Take the weights from the device; the pool goes with the next `ModelRunner.reset`."""
        if level == 1 and self.has_weights:
            self._on_host = jax.device_get(self._runner.weights.originals)
        if level == 2:
            self._on_host = None
        self.level = max(level, self.level)
        self._runner.set_asleep(True)
        self._runner.weights.replace([])

    def notice_lost_weights(self) -> None:
        """Sleep without weights if they are gone: new ones were cut short on their way."""
        if any(array.is_deleted() for array in self._runner.weights.arrays):
            self.begin(2)

    def weights_replaced(self) -> None:
        """Forget what waits on the host: the device has other weights."""
        self._on_host = None

    def end(self, tags: Collection[str]) -> None:
        """Bring the weights back, then the pool with the next `ModelRunner.reset`.

        Args:
          tags: of `TAGS`, which of the two.

        Raises:
          RuntimeError: the pool is asked for, and there are no weights to run with.
        """
        if "weights" in tags and self._on_host is not None:
            weights = self._runner.weights
            places = [each.sharding for each in weights.layout]
            weights.replace(jax.device_put(self._on_host, places))
            self._on_host = None
        if "kv_cache" not in tags:
            return
        if not self.has_weights:
            raise RuntimeError(
                "Engine.wake_up: the engine must have weights, and those of before were given up "
                "(level 2) or are not asked for. Call update_params first, or wake_up()."
            )
        self._runner.set_asleep(False)
        self.level = 0

    def check_awake(self, function: str) -> None:
        """Refuse a call while the engine sleeps.

        Raises:
          EngineAsleepError: it does.
        """
        if self.level:
            raise EngineAsleepError(
                f"Engine.{function}: the engine must be awake, got one that sleeps. "
                "Call wake_up first."
            )
