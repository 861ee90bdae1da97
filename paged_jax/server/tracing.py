"""`span`: a span of OpenTelemetry around each request, where its API is installed."""

import contextlib
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import Scope

from paged_jax.server.records import RequestRecord

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    propagate = trace = None

# Names of OpenTelemetry's conventions for HTTP and for generative models, and vLLM's for times.
_USAGE = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "queued_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
}


@contextlib.contextmanager
def span(record: RequestRecord, scope: Scope, model_name: str) -> Iterator[None]:
    """A context for serving a request; its span continues the trace that the client began.

    Without the API, or an SDK that collects spans, this does nothing.

    Args:
      record: the request, complete when the context is left.
      scope: the request's ASGI scope.
      model_name: the model that is served.
    """
    if trace is None or propagate is None or _is_unused(trace.get_tracer_provider()):
        yield
        return
    tracer = trace.get_tracer("paged_jax")
    with tracer.start_as_current_span(
        f"{record.method} {record.handler}",
        context=propagate.extract(dict(Headers(scope=scope))),
        kind=trace.SpanKind.SERVER,
    ) as current:
        yield
        attributes = {
            "http.request.method": record.method,
            "http.route": record.handler,
            "http.response.status_code": record.status,
            "gen_ai.request.id": record.request_id,
        }
        usage = record.usage()
        if usage:
            attributes["gen_ai.request.model"] = model_name
        current.set_attributes(attributes | {_USAGE[name]: value for name, value in usage.items()})
        if record.status >= 500:
            current.set_status(trace.Status(trace.StatusCode.ERROR, record.error_code))


def _is_unused(provider: object) -> bool:
    """Whether nobody collects spans, which would cost as much as to parse a request."""
    return trace is not None and isinstance(provider, trace.ProxyTracerProvider)
