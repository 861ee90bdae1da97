"""Metrics for Prometheus at ``/metrics``.

Metrics that have the same meaning as a metric of vLLM have the same name and labels, so that vLLM's
dashboards can be used.
"""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paged_jax.scheduler.outputs import RequestMetrics, WaitReason
from paged_jax.scheduler.request import Request
from paged_jax.server.request_log import RequestRecord
from paged_jax.server.snapshot import EngineSnapshot

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 300)
_HTTP_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# Histograms of requests and steps. The keys are bucket bounds, and the values are dicts from the
# names of the histograms with these bounds to their help texts.
_HISTOGRAMS = {
    _SECONDS: {
        "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
        "request_time_per_output_token_seconds": "Mean time per token after the first token.",
        "e2e_request_latency_seconds": "Time from a request's arrival to its end.",
        "request_queue_time_seconds": "Time from a request's arrival to its first step.",
        "request_prefill_time_seconds": "Time from a request's first step to its first token.",
        "request_decode_time_seconds": "Time from a request's first token to its end.",
        "request_inference_time_seconds": "Time from a request's first step to its end.",
    },
    _TOKENS: {
        "request_prompt_tokens": "Prompt tokens of a request.",
        "request_generation_tokens": "Tokens generated for a request.",
        "request_max_num_generation_tokens": "Tokens generated for the longest sample.",
        "request_params_max_tokens": "Maximum tokens per sample that a request asks for.",
        "iteration_tokens_total": "Prompt tokens and generated tokens of a step.",
    },
    (1, 2, 4, 8, 16, 32, 64): {"request_params_n": "Number of samples that a request asks for."},
}
# Maps names of gauges to a help text and a function that reads the value from a snapshot.
_GAUGES: dict[str, tuple[str, Callable[[EngineSnapshot], float]]] = {
    "vllm:num_requests_running": ("Samples that have a slot.", lambda now: now.num_running),
    "vllm:num_requests_waiting": ("Samples that wait for a slot.", lambda now: now.num_waiting),
    "vllm:kv_cache_usage_perc": (
        "Fraction of blocks that samples use, 0 to 1.",
        lambda now: now.groups[0].num_used / now.groups[0].num_blocks,
    ),
}
# Maps the name of each counter to the field of `EngineStats` with its value, and to a help text.
_COUNTERS = {
    "vllm:num_preemptions": ("num_preemptions", "Preemptions."),
    "vllm:prefix_cache_queries": (
        "num_queried_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "vllm:prefix_cache_hits": ("num_cached_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Drafts of speculative decoding."),
    "vllm:spec_decode_num_draft_tokens": (
        "num_draft_tokens",
        "Tokens in the drafts of speculative decoding.",
    ),
    "vllm:spec_decode_num_accepted_tokens": (
        "num_accepted_tokens",
        "Draft tokens that the model accepted.",
    ),
    "paged_jax:recomputed_tokens": ("num_recomputed_tokens", "Tokens recomputed after preemption."),
    "paged_jax:swap_preemptions": ("num_swap_preemptions", "Preemptions that swapped out blocks."),
    "paged_jax:steps": ("num_steps", "Engine steps."),
    "paged_jax:failed_steps": ("num_failed_steps", "Engine steps that raised an exception."),
}
# Reasons for waiting that vLLM's metric calls "deferred". It calls all other reasons "capacity".
_DEFERRED = ("same prefix", "fork")
_FINISH_REASONS = ("stop", "length", "abort", "error")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Metrics:
    """Metrics of the engine, of its requests and of HTTP responses.

    Args:
      model_name: value of the label ``model_name`` of the engine's metrics.
      cache_config: a dict from labels of vLLM's metric ``cache_config_info`` to their values.
      snapshot: snapshot of the engine before its first step.

    Attributes:
      snapshot: the newest snapshot of the engine.
    """

    def __init__(
        self, model_name: str, cache_config: Mapping[str, object], snapshot: EngineSnapshot
    ):
        self.snapshot = snapshot
        self._registry = CollectorRegistry(auto_describe=False)
        # In vLLM, the label `engine` is the index of the engine. This server has only one engine.
        self._labels = {"model_name": model_name, "engine": "0"}
        names = list(self._labels)
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, names, registry=self._registry, buckets=buckets
            ).labels(**self._labels)
            for buckets, texts in _HISTOGRAMS.items()
            for name, text in texts.items()
        }
        self._latency = BulkHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens of a sample.",
            self._labels,
            _SECONDS,
        )
        self._registry.register(self._latency)
        self._success = self._counter(
            "vllm:request_success", "Finished requests.", [*names, "finished_reason"]
        )
        # Create all counters with the value 0: otherwise rates would miss the first request.
        for reason in _FINISH_REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self._prompt_tokens, self._cached_tokens, self._generation_tokens = (
            self._counter(f"vllm:{name}", text, names).labels(**self._labels)
            for name, text in (
                ("prompt_tokens", "Prompt tokens processed."),
                ("prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
                ("generation_tokens", "Tokens generated."),
            )
        )
        # Maps the id of each running request to the time of its newest tokens and the number of its
        # generated tokens.
        self._progress: dict[str, tuple[float, int]] = {}
        # These metrics have the names of prometheus-fastapi-instrumentator, which vLLM uses.
        self._http_responses = self._counter(
            "http_requests",
            "Requests by method, status and handler.",
            ["handler", "method", "status"],
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time from a request's arrival to the end of its response, by handler.",
            ["handler", "method"],
            registry=self._registry,
            buckets=_HTTP_SECONDS,
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(self, self._labels))
        config = self._labels | {k: str(v) for k, v in cache_config.items()}
        name, text = "vllm:cache_config_info", "Configuration of the cache, in labels."
        Gauge(name, text, list(config), registry=self._registry).labels(**config).set(1)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe_response(self, record: RequestRecord) -> None:
        """Count a finished HTTP request and record its duration."""
        self.count_response(record.handler, record.method, record.status)
        self._http_seconds.labels(record.handler, record.method).observe(record.seconds)

    def count_response(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP response. Its label ``status`` is a class such as ``"4xx"``."""
        self._http_responses.labels(handler, method, f"{status // 100}xx").inc()

    def observe(self, snapshot: EngineSnapshot, requests: Iterable[Request]) -> None:
        """Record the metrics of a step. This is called in the engine's thread.

        Args:
          snapshot: snapshot of the engine after the step.
          requests: the requests that got new tokens or ended.
        """
        before, self.snapshot = self.snapshot.stats, snapshot
        num_tokens = snapshot.stats.num_prompt_tokens - before.num_prompt_tokens
        num_tokens += snapshot.stats.num_generated_tokens - before.num_generated_tokens
        # Skip calls without a new step, such as the call after an abort.
        if snapshot.stats.num_steps > before.num_steps:
            self._histograms["iteration_tokens_total"].observe(num_tokens)
        num_generated = 0  # add to the counter only once per step, because it takes a lock
        for request in requests:
            num_tokens = sum([sequence.num_generated for sequence in request.sequences])
            num_generated += self._observe_tokens(request, num_tokens, snapshot.time)
            if request.is_finished:
                self._observe_end(request, num_tokens)
                self._progress.pop(request.request_id, None)
        self._generation_tokens.inc(num_generated)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> int:
        """Record the latency of a request's new tokens, and return the number of new tokens."""
        progress = self._progress.get(request.request_id)
        self._progress[request.request_id] = now, num_tokens
        if progress is None:
            self._observe_beginning(request)
            return num_tokens
        before, num_before = progress
        num_new = num_tokens - num_before
        if num_new > 0:
            # Assume that each of the n samples received an equal share of the tokens.
            tokens_per_sample = num_new / len(request.sequences)
            count = max(1, round(tokens_per_sample))
            self._latency.observe((now - before) / max(1, tokens_per_sample), count)
        return num_new

    def _observe_beginning(self, request: Request) -> None:
        histograms, metrics = self._histograms, request.metrics
        if metrics.first_scheduled_time is not None:
            queue_seconds = metrics.first_scheduled_time - metrics.arrival_time
            histograms["request_queue_time_seconds"].observe(queue_seconds)
            self._prompt_tokens.inc(len(request.prompt_token_ids))
            self._cached_tokens.inc(request.num_cached_tokens)
        if metrics.first_token_time is not None:
            seconds = metrics.first_token_time - metrics.arrival_time
            histograms["time_to_first_token_seconds"].observe(seconds)

    def _observe_end(self, request: Request, num_tokens: int) -> None:
        reason = request.sequences[0].completion.finish_reason or "abort"
        self._success.labels(**self._labels, finished_reason=reason).inc()
        values: dict[str, float | None] = {
            "request_prompt_tokens": len(request.prompt_token_ids),
            "request_generation_tokens": num_tokens,
            "request_max_num_generation_tokens": max(
                sequence.num_generated for sequence in request.sequences
            ),
            "request_params_n": request.params.n,
            "request_params_max_tokens": request.params.max_tokens,
            **_durations(request.metrics, num_tokens / len(request.sequences)),
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)


def _durations(metrics: RequestMetrics, tokens_per_sample: float) -> dict[str, float | None]:
    """Return a dict from the names of histograms to a request's durations in seconds.

    A duration is None if the event where it starts or ends did not happen: an aborted request may
    have no first token, for example. The dict is empty if the request has not finished.
    """
    scheduled, first = metrics.first_scheduled_time, metrics.first_token_time
    if (end := metrics.finished_time) is None:
        return {}
    decode = None if first is None else end - first
    return {
        "e2e_request_latency_seconds": end - metrics.arrival_time,
        "request_inference_time_seconds": None if scheduled is None else end - scheduled,
        "request_prefill_time_seconds": (
            None if scheduled is None or first is None else first - scheduled
        ),
        "request_decode_time_seconds": decode,
        "request_time_per_output_token_seconds": (
            decode / (tokens_per_sample - 1)
            if decode is not None and tokens_per_sample > 1
            else None
        ),
    }


class _EngineCollector(Collector):
    """Collector that reads metrics from the engine's newest snapshot at each scrape."""

    def __init__(self, metrics: Metrics, labels: Mapping[str, str]):
        self._metrics = metrics
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        now = self._metrics.snapshot
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for name, (text, read) in _GAUGES.items():
            yield self._metric(gauge, name, text, {(): read(now)})
        for name, (field, text) in _COUNTERS.items():
            yield self._metric(counter, name, text, {(): getattr(now.stats, field)})
        if len(now.groups) > 1:
            yield self._metric(
                gauge,
                "paged_jax:kv_cache_usage_of_group",
                "Fraction of blocks that samples hold, 0 to 1, by group of layers that keep the "
                "same tokens: all tokens, or the tokens of a sliding window; or the fraction of "
                "states of recurrent layers.",
                {
                    (str(index), group.kept): group.num_used / group.num_blocks
                    for index, group in enumerate(now.groups)
                },
                ("group", "window"),
            )
        waiting = now.num_waiting_for
        num_deferred = sum(waiting[reason] for reason in _DEFERRED)
        text = "Samples that wait for a slot, by reason."
        yield self._metric(
            gauge,
            "vllm:num_requests_waiting_by_reason",
            text,
            {("capacity",): waiting.total() - num_deferred, ("deferred",): num_deferred},
            ("reason",),
        )
        reasons = {(reason,): waiting[reason] for reason in get_args(WaitReason) if reason}
        yield self._metric(gauge, "paged_jax:num_requests_waiting", text, reasons, ("reason",))
        yield self._metric(
            counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that the model accepted, by their position in the draft.",
            {(str(position),): count for position, count in enumerate(now.stats.num_accepted_at)},
            ("position",),
        )
        yield self._metric(
            gauge,
            "vllm:engine_sleep_state",
            "1 for the engine's current state: awake, or asleep with or without its weights.",
            {(name,): now.sleep_level == level for level, name in enumerate(_SLEEP_STATES)},
            ("sleep_state",),
        )

    def _metric(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        labels: Sequence[str] = (),
    ) -> Metric:
        metric = family(name, text, labels=[*self._labels, *labels])
        for label_values, value in values.items():
            metric.add_metric([*self._labels.values(), *label_values], value)
        return metric


class BulkHistogram(Collector):
    """Prometheus histogram that can record many equal values in a single call.

    `prometheus_client.Histogram` records one value per call. With 64 requests that get 8 tokens per
    step, this takes 590 us per step in the engine's thread, and here 10 us. Only one thread may
    call `observe`. Other threads may call `collect` at the same time.

    Args:
      name: name of the metric.
      text: help text.
      labels: a dict from labels to their values.
      buckets: upper bounds of the buckets, ascending. The value of a bucket counts all observations
        up to its bound. A last bucket with the bound +Inf is added.

    Example:
      >>> gaps = BulkHistogram("gap_seconds", "Seconds between two tokens.", {}, (0.1, 1.0))
      >>> gaps.observe(0.1, 3)
      >>> gaps.observe(5.0)
      >>> [(sample.labels.get("le"), sample.value) for sample in next(gaps.collect()).samples[:3]]
      [('0.1', 3), ('1.0', 3), ('+Inf', 4)]
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]):
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, count: int = 1) -> None:
        """Record `count` observations with the same value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += count * value

    def collect(self) -> Iterator[Metric]:
        """Yield the current state of the histogram. The registry calls this."""
        metric = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        totals = itertools.accumulate(self._counts.copy())
        buckets = list(zip(map(floatToGoString, self._bounds), totals, strict=True))
        metric.add_metric(list(self._labels.values()), buckets, self._sum)
        metric.add_sample(f"{self._name}_created", self._labels, self._created)
        yield metric
