"""A bar on a terminal: how many requests are done, how fast tokens come, how full the cache is."""

from typing import Any

from tqdm import tqdm

from paged_jax.engine.engine import Engine


class Progress:
    """A bar on stderr around the running of some requests; use it in a ``with`` statement.

    Args:
      engine: the engine that runs them.
      num_requests: requests in all.
      disable: whether nothing is shown; None shows the bar on a terminal only.
    """

    def __init__(self, engine: Engine, num_requests: int, *, disable: bool | None = None):
        self._engine = engine
        self._num_tokens = engine.stats.num_generated_tokens
        self._bar: Any = tqdm(total=num_requests, desc="requests", unit="req", disable=disable)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    @property
    def is_shown(self) -> bool:
        """Whether there is a bar."""
        return not self._bar.disable

    def clear(self) -> None:
        """Clear the bar, so that something else can be written; the next update shows it again."""
        if self.is_shown:
            self._bar.clear()

    def say(self, line: str) -> None:
        """Show a line to the left of the bar."""
        self._bar.set_description_str(line)

    def update(self, is_finished: bool) -> None:
        """Count a request that has new tokens."""
        if not self.is_shown:
            return
        self._bar.update(int(is_finished))
        self.say("requests")
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            num_tokens = self._engine.stats.num_generated_tokens - self._num_tokens
            use = self._engine.cache_use
            self._bar.set_postfix_str(
                f"{num_tokens / elapsed:.0f} tokens/s, cache {use:.0%}", refresh=False
            )
