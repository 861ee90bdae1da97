"""`Delivery`: passes requests with new tokens to the calls that wait for them."""

from collections.abc import Callable, Iterable

from paged_jax.scheduler.request import Request


class Delivery:
    """Passes requests with new tokens to the calls that wait for them.

    If several calls, such as `LLM.stream`, use the same engine, a step generates tokens for the
    requests of all calls, no matter which call runs it. So each call subscribes to its requests.
    Requests without a subscriber are stored in `kept` until `drop` removes them.

    Example:
      >>> delivery = Delivery()
      >>> delivery.kept
      []
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Callable[[Request], None]] = {}
        # Use requests as keys, not ids, because an ended request and a newer request may have the
        # same id.
        self._kept: dict[Request, None] = {}

    def subscribe(self, request_id: str, receive: Callable[[Request], None]) -> None:
        """Subscribe to a request: call `receive(request)` when it gets new tokens or ends."""
        self._receivers[request_id] = receive

    def unsubscribe(self, request_id: str) -> None:
        """End the subscription to a request, if there is one."""
        self._receivers.pop(request_id, None)

    def deliver(self, requests: Iterable[Request]) -> None:
        """Pass each request to its subscriber; add requests without a subscriber to `kept`."""
        for request in requests:
            if not self.notify(request):
                self._kept[request] = None

    def notify(self, request: Request) -> bool:
        """Pass a request to its subscriber; return whether there is a subscriber."""
        receive = self._receivers.get(request.request_id)
        if receive is not None:
            receive(request)
        return receive is not None

    @property
    def kept(self) -> list[Request]:
        """Requests passed to `deliver` that had no subscriber and were not removed by `drop`."""
        return list(self._kept)

    def keep(self, requests: Iterable[Request]) -> None:
        """Add requests to `kept`, for example if a call was interrupted after it dropped them."""
        self._kept |= dict.fromkeys(requests)

    def drop(self, requests: Iterable[Request]) -> None:
        """Remove requests from `kept`."""
        dropped = set(requests)
        self._kept = {request: None for request in self._kept if request not in dropped}
