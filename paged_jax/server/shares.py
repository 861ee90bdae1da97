"""`Shares`: places that many clients use, of which none can take those of all others."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from paged_jax.server.errors import too_many


class Shares:
    """Counts places by clients, and says who may have more.

    Whoever comes while there is room may have it. Where there is none left, a client still gets an
    equal share, ``most`` divided by the clients there are: so one that takes all there is holds up
    nobody. With n clients there may be ``1 + 1/2 + ... + 1/n`` times `most` in the worst case.

    Args:
      things: plural noun for what is counted.
      limit: the name of the limit.
      most: places for one client alone.

    Attributes:
      total: places taken.

    Example:
      >>> shares = Shares("samples", limit="max_queue", most=8)
      >>> with shares.take("a", 8):
      ...     [shares.has_room(client, asked) for client, asked in (("a", 1), ("b", 4), ("b", 5))]
      [False, True, False]
    """

    def __init__(self, things: str, *, limit: str, most: int):
        self.total = 0
        self._things = things
        self._limit = limit
        self._most = most
        self._taken: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether all places are taken."""
        return self.total >= self._most

    def has_room(self, client: str, asked: int) -> bool:
        """Whether a client may have so many more places."""
        num_clients = len(self._taken.keys() | {client})
        is_share = self._taken[client] + asked <= self._most // num_clients
        return is_share or self.total + asked <= self._most

    def check(self, client: str, asked: int) -> None:
        """Raise an `ApiError` if a client may not have so many more places."""
        if not self.has_room(client, asked):
            raise too_many(
                self._things,
                limit=self._limit,
                most=self._most,
                now=self.total,
                own=self._taken[client],
                asked=asked,
            )

    @contextlib.contextmanager
    def take(self, client: str, asked: int) -> Iterator[None]:
        """A context in which a client has so many more places.

        Raises:
          ApiError: it may not have them.
        """
        self.check(client, asked)
        self._add(client, asked)
        try:
            yield
        finally:
            self._add(client, -asked)

    def _add(self, client: str, count: int) -> None:
        self.total += count
        self._taken[client] += count
        if not self._taken[client]:
            del self._taken[client]
