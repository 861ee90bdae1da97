"""Sleep of an engine, which frees the weights and the KV cache on the device."""

from collections.abc import Collection
from typing import Any

import jax

from paged_jax.runner.executor import Executor

# Names of the resources that `Engine.wake_up` can restore, as in vLLM.
TAGS = ("weights", "kv_cache")


class EngineAsleepError(RuntimeError):
    """Raised by methods that an engine does not support while it sleeps."""


class Sleep:
    """Sleep state of an engine. It holds the weights in host memory during a sleep of level 1.

        awake --begin(1)--> weights on the host --end--> awake
        awake --begin(2)--> no weights --update_params--> weights on the device --end--> awake

    Args:
      executor: executor that holds the weights and the pools.

    Attributes:
      level: 0 if awake; 1 if asleep with the weights in host memory; 2 if asleep without weights.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self.level = 0
        self._on_host: list[Any] | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        return bool(self._executor.weights.arrays)

    def begin(self, level: int) -> None:
        """Free the weights to begin a sleep; the next `ModelRunner.reset` then frees the pools.

        If `level` is 1, first copy the weights to the host. A second call may only raise the level.
        """
        if level == 1 and self.has_weights:
            self._on_host = jax.device_get(self._executor.weights.originals)
        if level == 2:
            self._on_host = None
        self.level = max(level, self.level)
        self._executor.is_asleep = True
        self._executor.weights.replace([])

    def notice_lost_weights(self) -> None:
        """Begin a sleep of level 2 (no weights) if an interrupted `update_params` deleted them."""
        if any(array.is_deleted() for array in self._executor.weights.arrays):
            self.begin(2)

    def weights_replaced(self) -> None:
        """Discard the weights in host memory, because there are new weights on the device."""
        self._on_host = None

    def end(self, tags: Collection[str]) -> None:
        """Restore the weights and end a sleep; `ModelRunner.reset` then allocates the pools.

        Args:
          tags: the resources to restore, from `TAGS`. Without ``"kv_cache"``, the engine stays
            asleep.

        Raises:
          RuntimeError: `tags` contain ``"kv_cache"``, but the engine has no weights.
        """
        if "weights" in tags and self._on_host is not None:
            weights = self._executor.weights
            shardings = [array.sharding for array in weights.layout]
            weights.replace(jax.device_put(self._on_host, shardings))
            self._on_host = None
        if "kv_cache" not in tags:
            return
        if not self.has_weights:
            raise RuntimeError(
                "Engine.wake_up: the engine must have weights, but sleep(level=2) or an "
                "interrupted update_params discarded them, or tags do not include 'weights'. Call "
                "update_params first (after level 2), or wake_up() without tags (after level 1)."
            )
        self._executor.is_asleep = False
        self.level = 0

    def check_awake(self, function: str) -> None:
        """Check that the engine is awake.

        Raises:
          EngineAsleepError: the engine sleeps.
        """
        if self.level:
            raise EngineAsleepError(
                f"Engine.{function}: the engine must be awake, but it sleeps. Call wake_up first."
            )
