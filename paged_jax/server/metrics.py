"""Metrics for Prometheus, under vLLM's names where they mean the same, so that dashboards fit."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from paged_jax.scheduler.request import Request

if TYPE_CHECKING:
    from paged_jax.server.monitor import Reading

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a sample.", _SECONDS),
    "request_time_per_output_token_seconds": (
        "Of a finished request, the mean after its first token.",
        _SECONDS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
}


@dataclasses.dataclass
class _Progress:
    """What has been observed of a request that runs."""

    time: float
    num_tokens: int


class Metrics:
    """Histograms and counters of requests, and the engine's own counts at the time of a scrape.

    Args:
      model_name: the label of all.
      num_blocks: in the pool.
    """

    def __init__(self, model_name: str, num_blocks: int):
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._num_blocks = num_blocks
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
            ).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._prompt_tokens, self._generation_tokens = (
            Counter(f"vllm:{name}_tokens", text, ["model_name"], registry=self._registry).labels(
                model_name
            )
            for name, text in (
                ("prompt", "Tokens of prompts that were read."),
                ("generation", "Tokens generated."),
            )
        )
        self._running: dict[str, _Progress] = {}

    def watch(self, read: Callable[[], "Reading"]) -> None:
        """Take the engine's own counts from here at each scrape."""
        self._registry.register(_EngineCollector(read, self._model_name, self._num_blocks))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe(self, requests: Iterable[Request], now: float) -> None:
        """Note what a step has brought."""
        for request in requests:
            num_tokens = sum(len(sample.token_ids) for sample in request.samples)
            self._observe_tokens(request, num_tokens, now)
            if request.is_finished:
                self._observe_end(request, num_tokens)
                self._running.pop(request.request_id, None)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        histograms, metrics = self._histograms, request.metrics
        before = self._running.get(request.request_id)
        if before is None:
            if metrics.first_scheduled_time is not None:
                waited = metrics.first_scheduled_time - metrics.arrival_time
                histograms["request_queue_time_seconds"].observe(waited)
                self._prompt_tokens.inc(len(request.prompt_token_ids))
            if metrics.first_token_time is not None:
                seconds = metrics.first_token_time - metrics.arrival_time
                histograms["time_to_first_token_seconds"].observe(seconds)
        self._generation_tokens.inc(num_tokens - (before.num_tokens if before else 0))
        if before is not None and num_tokens > before.num_tokens:
            # Of n samples each got its share of the tokens in this time.
            per_sample = (num_tokens - before.num_tokens) / len(request.samples)
            for _ in range(max(1, round(per_sample))):
                histograms["inter_token_latency_seconds"].observe(
                    (now - before.time) / max(1, per_sample)
                )
        self._running[request.request_id] = _Progress(now, num_tokens)

    def _observe_end(self, request: Request, num_tokens: int) -> None:
        histograms, metrics = self._histograms, request.metrics
        reason = request.samples[0].finish_reason or "abort"
        self._success.labels(self._model_name, reason).inc()
        histograms["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        histograms["request_generation_tokens"].observe(num_tokens)
        end, first = metrics.finished_time, metrics.first_token_time
        if end is None:
            return
        histograms["e2e_request_latency_seconds"].observe(end - metrics.arrival_time)
        per_sample = num_tokens / len(request.samples)
        if first is not None and per_sample > 1:
            histograms["request_time_per_output_token_seconds"].observe(
                (end - first) / (per_sample - 1)
            )


class _EngineCollector(Collector):
    """What the engine counts itself."""

    def __init__(self, read: Callable[[], "Reading"], model_name: str, num_blocks: int):
        self._read = read
        self._model_name = model_name
        self._num_blocks = num_blocks

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        stats = reading.stats
        gauges = {
            "vllm:num_requests_running": ("Samples in a slot.", reading.num_running),
            "vllm:num_requests_waiting": ("Samples that wait.", reading.num_waiting),
            "vllm:kv_cache_usage_perc": (
                "The fraction of blocks that samples hold, 0 to 1.",
                reading.num_used_blocks / self._num_blocks,
            ),
        }
        counters = {
            "vllm:num_preemptions": ("Preemptions.", stats.num_preemptions),
            "vllm:prefix_cache_queries": (
                "Tokens looked up in the prefix cache.",
                stats.num_queried_tokens,
            ),
            "vllm:prefix_cache_hits": ("Tokens found there.", stats.num_cached_tokens),
            "vllm:spec_decode_num_draft_tokens": ("Tokens guessed.", stats.num_draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": (
                "Guesses that were right.",
                stats.num_accepted_tokens,
            ),
            "paged_jax:recomputed_tokens": (
                "Tokens computed again after a preemption.",
                stats.num_recomputed_tokens,
            ),
            "paged_jax:swap_preemptions": (
                "Preemptions to host memory.",
                stats.num_swap_preemptions,
            ),
            "paged_jax:steps": ("Steps of the engine.", stats.num_steps),
        }
        for family, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = family(name, text, labels=["model_name"])
                metric.add_metric([self._model_name], value)
                yield metric
