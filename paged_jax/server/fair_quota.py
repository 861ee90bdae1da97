"""`FairQuota`: limits the samples and streams of each client. `scheduler.queue` orders them."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from paged_jax.server.api_error import ApiError


class FairQuota:
    """Quota of places that many clients share, with a fair share for every client.

    A client may take free places. Even if no places are free, it may take more while it has less
    than its fair share, which is `most` divided by the number of clients that have places,
    including itself. So n clients have at most ``1 + 1/2 + ... + 1/n`` times `most` places.

    Args:
      things: plural noun for the places, such as "samples"; for error messages.
      limit: name of the limit, for error messages.
      most: number of places. A single client may take all of them.

    Attributes:
      total: number of places that clients have taken.

    In the example, client "a" has taken all 8 places. Then client "b" may take 4, its fair share.

    Example:
      >>> quota = FairQuota("samples", limit="max_queue", most=8)
      >>> with quota.take("a", 8):
      ...     [quota.has_room(client, count) for client, count in (("a", 1), ("b", 4), ("b", 5))]
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
        """Whether clients have taken all places of the quota."""
        return self.total >= self._most

    def has_room(self, client: str, count: int) -> bool:
        """Return whether a client may take `count` more places of the quota."""
        num_clients = len(self._taken.keys() | {client})
        is_fair = self._taken[client] + count <= self._most // num_clients
        return is_fair or self.total + count <= self._most

    def check(self, client: str, count: int) -> None:
        """Raise an `ApiError` if a client may not take `count` more places."""
        if not self.has_room(client, count):
            raise too_many(
                self._things,
                limit=self._limit,
                most=self._most,
                now=self.total,
                own=self._taken[client],
                count=count,
            )

    @contextlib.contextmanager
    def take(self, client: str, count: int) -> Iterator[None]:
        """Take `count` places for a client during the ``with`` statement.

        Raises:
          ApiError: the client may not take `count` more places.
        """
        self.check(client, count)
        self._add(client, count)
        try:
            yield
        finally:
            self._add(client, -count)

    def _add(self, client: str, count: int) -> None:
        self.total += count
        self._taken[client] += count
        if not self._taken[client]:
            del self._taken[client]


def too_many(
    things: str, *, limit: str, most: int, now: int, own: int | None = None, count: int = 1
) -> ApiError:
    """Return the 429 error for samples, streams or connections that would exceed a limit.

    Args:
      things: plural noun, such as "streams".
      limit: name of the limit.
      most: value of the limit.
      now: current number for all clients.
      own: current number for this client; None leaves it out of the message.
      count: number that the client requested in addition.
    """
    yours = "" if own is None else f", {own} of them yours"
    return ApiError(
        429,
        f"There are {now} {things} already{yours}, and {count} more would exceed the {most} that "
        f"are allowed ({limit}). Try again later.",
        code=f"{limit}_exceeded",
        headers={"Retry-After": "1"},
    )
