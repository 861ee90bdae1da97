"""`HttpMetrics`: how many requests there were, with which statuses, and how long they took."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from paged_jax.server.records import RequestRecord

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class HttpMetrics:
    """Counts answers, under the names that vLLM's server has from its library for FastAPI.

    Args:
      registry: the registry of all metrics.
    """

    def __init__(self, registry: CollectorRegistry):
        self._requests = Counter(
            "http_requests",
            "Requests by method, status and handler.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from a request's arrival to the end of its answer, by handler.",
            ["handler", "method"],
            registry=registry,
            buckets=_SECONDS,
        )

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.count(record.handler, record.method, record.status)
        self._seconds.labels(record.handler, record.method).observe(record.seconds)

    def count(self, handler: str, method: str, status: int) -> None:
        """Count an answer, in the class of its status, such as ``"4xx"``."""
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
