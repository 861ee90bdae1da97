"""Hands requests that have made progress to the calls that wait for them."""

from collections.abc import Callable, Iterable

from paged_jax.scheduler.request import Request


class Delivery:
    """Where the requests go that a step has touched.

    Requests share steps, so a step that one call runs may bring tokens for the request of another
    call. That call gets them by the function it has subscribed with. A request without a subscriber
    is kept until it is taken.

    Example:
      >>> delivery = Delivery()
      >>> delivery.kept
      []
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Callable[[Request], None]] = {}
        # Not by their ids: one that has ended and one that has taken its id may both be there.
        self._kept: dict[Request, None] = {}

    def subscribe(self, request_id: str, receive: Callable[[Request], None]) -> None:
        """Call a function with a request whenever it has new tokens, and when it has ended."""
        self._receivers[request_id] = receive

    def unsubscribe(self, request_id: str) -> None:
        """End a subscription; nothing if there is none."""
        self._receivers.pop(request_id, None)

    def deliver(self, requests: Iterable[Request]) -> None:
        """Give each request to its subscriber, or keep it."""
        for request in requests:
            if not self.notify(request):
                self._kept[request] = None

    def notify(self, request: Request) -> bool:
        """Give a request to its subscriber, if it has one."""
        receive = self._receivers.get(request.request_id)
        if receive is not None:
            receive(request)
        return receive is not None

    @property
    def kept(self) -> list[Request]:
        """The requests without a subscriber that were delivered, until they are dropped."""
        return list(self._kept)

    def keep(self, requests: Iterable[Request]) -> None:
        """Keep requests again that were dropped."""
        self._kept |= dict.fromkeys(requests)

    def drop(self, requests: Iterable[Request]) -> None:
        """Forget requests that were kept."""
        gone = set(requests)
        self._kept = {request: None for request in self._kept if request not in gone}
