"""`FairQuota`: limits the samples and streams of each client. `scheduler.queue` orders them."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from paged_jax.server.api_error import ApiError


class FairQuota:
    """Quota of places that many clients share, with a fair share for every client.

    A client may take free places. Even if no places are free, it may take more while it has less
    than its fair share, which is `num_places` divided by the number of clients that have places,
    including itself. So n clients have at most ``1 + 1/2 + ... + 1/n`` times `num_places` places.

    Args:
      noun: plural noun for the places, such as "samples"; for error messages.
      limit: name of the limit, for error messages.
      num_places: number of places. A single client may take all of them.

    Attributes:
      total: number of places that clients have taken.

    In the example, client "a" has taken all 8 places. Then client "b" may take 4, its fair share.

    Example:
      >>> quota = FairQuota("samples", limit="max_queue", num_places=8)
      >>> with quota.take("a", 8):
      ...     [quota.has_room(client, count) for client, count in (("a", 1), ("b", 4), ("b", 5))]
      [False, True, False]
    """

    def __init__(self, noun: str, *, limit: str, num_places: int):
        self.total = 0
        self._noun = noun
        self._limit = limit
        self._num_places = num_places
        self._num_taken: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether clients have taken all places of the quota."""
        return self.total >= self._num_places

    def has_room(self, client: str, count: int) -> bool:
        """Return whether a client may take `count` more places of the quota."""
        num_clients = len(self._num_taken.keys() | {client})
        is_within_share = self._num_taken[client] + count <= self._num_places // num_clients
        return is_within_share or self.total + count <= self._num_places

    def check(self, client: str, count: int) -> None:
        """Raise an `ApiError` if a client may not take `count` more places."""
        if not self.has_room(client, count):
            raise too_many(
                self._noun,
                limit=self._limit,
                maximum=self._num_places,
                now=self.total,
                num_taken=self._num_taken[client],
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
        self._num_taken[client] += count
        if not self._num_taken[client]:
            del self._num_taken[client]


def too_many(
    noun: str, *, limit: str, maximum: int, now: int, num_taken: int | None = None, count: int = 1
) -> ApiError:
    """Return the 429 error for samples, streams or connections that would exceed a limit.

    Args:
      noun: plural noun, such as "streams".
      limit: name of the limit.
      maximum: value of the limit.
      now: current number for all clients.
      num_taken: current number for this client; None leaves it out of the message.
      count: number that the client requested in addition.
    """
    share = "" if num_taken is None else f", {num_taken} of them yours"
    return ApiError(
        429,
        f"There are {now} {noun} already{share}, and {count} more would exceed the {maximum} that "
        f"are allowed ({limit}). Try again later.",
        code=f"{limit}_exceeded",
        headers={"Retry-After": "1"},
    )
