"""`Metrics`: what ``/metrics`` reports to Prometheus, under vLLM's names where meanings agree.

Names and labels are as dashboards made for vLLM expect them.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from paged_jax.scheduler.outputs import RequestMetrics, WaitReason
from paged_jax.scheduler.request import Request
from paged_jax.server.bulk_histogram import BulkHistogram
from paged_jax.server.http_metrics import HttpMetrics
from paged_jax.server.reading import Reading

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean time per token of a finished request, after its first token.",
        _SECONDS,
    ),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("Time from a request's arrival to its first step.", _SECONDS),
    "request_prefill_time_seconds": (
        "Time from a request's first step to its first token.",
        _SECONDS,
    ),
    "request_decode_time_seconds": ("Time from a request's first token to its end.", _SECONDS),
    "request_inference_time_seconds": ("Time from a request's first step to its end.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "request_max_num_generation_tokens": (
        "Tokens generated for the longest sample of a request.",
        _TOKENS,
    ),
    "request_params_n": ("Samples that a request asks for.", (1, 2, 4, 8, 16, 32, 64)),
    "request_params_max_tokens": ("Most tokens of a sample that a request asks for.", _TOKENS),
    "iteration_tokens_total": ("Tokens of a step, of prompts and generated ones.", _TOKENS),
}
# What vLLM calls these reasons to wait; all others are a lack of room.
_DEFERRED = ("same prefix", "fork")


@dataclasses.dataclass
class _Observed:
    """What the metrics already hold of a running request.

    Attributes:
      time: the moment of its last tokens, in seconds of ``time.perf_counter()``.
      num_tokens: number of tokens generated for it so far.
    """

    time: float
    num_tokens: int


class CacheConfig(NamedTuple):
    """The cache, by the names of vLLM's ``cache_config_info``.

    Attributes:
      block_size: C, tokens in a block.
      num_gpu_blocks: P, blocks in the pool, on whatever device.
      cache_dtype: the dtype of K and V.
      enable_prefix_caching: whether requests share the blocks of prompts that begin alike.
    """

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool


class Metrics:
    """Histograms and counters of requests, and the engine's own counts as of the last step.

    Args:
      model_name: the label of every metric.
      cache_config: what is said once of the cache, by vLLM's names.
      reading: the engine's counts before its first step.

    Attributes:
      reading: the engine's counts after the last step.
      http: what is counted of requests whether they reach the engine or not.
    """

    def __init__(self, model_name: str, cache_config: CacheConfig, reading: Reading):
        self.reading = reading
        self._registry = CollectorRegistry(auto_describe=False)
        # vLLM numbers the engines of a server; here there is one.
        self._labels = {"model_name": model_name, "engine": "0"}
        self._num_blocks = cache_config.num_gpu_blocks
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, list(self._labels), registry=self._registry, buckets=buckets
            ).labels(**self._labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._latency = BulkHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens of a sample.",
            self._labels,
            _SECONDS,
        )
        self._registry.register(self._latency)
        self._success = Counter(
            "vllm:request_success",
            "Finished requests.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._prompt_tokens, self._cached_tokens, self._generation_tokens = (
            Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(
                **self._labels
            )
            for name, text in (
                ("prompt_tokens", "Prompt tokens processed."),
                ("prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
                ("generation_tokens", "Tokens generated."),
            )
        )
        self._running: dict[str, _Observed] = {}
        self.http = HttpMetrics(self._registry)
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(self))
        config = self._labels | {k: str(v) for k, v in cache_config._asdict().items()}
        name, text = "vllm:cache_config_info", "What the cache is, in labels."
        Gauge(name, text, list(config), registry=self._registry).labels(**config).set(1)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def engine_metrics(self) -> Iterator[Metric]:
        """The engine's own counts, as of the last step."""
        reading, stats = self.reading, self.reading.stats
        gauges = {
            "vllm:num_requests_running": ("Samples that hold a slot.", reading.num_running),
            "vllm:num_requests_waiting": ("Samples that wait for a slot.", reading.num_waiting),
            "vllm:kv_cache_usage_perc": (
                "Fraction of blocks that samples hold, 0 to 1.",
                reading.num_used_blocks / self._num_blocks,
            ),
        }
        counters = {
            "vllm:num_preemptions": ("Preemptions.", stats.num_preemptions),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.num_queried_tokens,
            ),
            "vllm:prefix_cache_hits": (
                "Prompt tokens found in the prefix cache.",
                stats.num_cached_tokens,
            ),
            "vllm:spec_decode_num_drafts": (
                "Drafts of speculative decoding.",
                stats.num_drafts,
            ),
            "vllm:spec_decode_num_draft_tokens": (
                "Draft tokens of speculative decoding.",
                stats.num_draft_tokens,
            ),
            "vllm:spec_decode_num_accepted_tokens": (
                "Draft tokens that the model accepted.",
                stats.num_accepted_tokens,
            ),
            "paged_jax:recomputed_tokens": (
                "Tokens computed again after a preemption.",
                stats.num_recomputed_tokens,
            ),
            "paged_jax:swap_preemptions": (
                "Preemptions that copied blocks to host memory.",
                stats.num_swap_preemptions,
            ),
            "paged_jax:steps": ("Engine steps.", stats.num_steps),
        }
        for family, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = family(name, text, labels=list(self._labels))
                metric.add_metric(list(self._labels.values()), value)
                yield metric
        if len(reading.groups) > 1:
            yield self._groups()
        yield from self._waiting()
        yield from self._accepted()
        yield from self._sleep_state()

    def _groups(self) -> Metric:
        metric = GaugeMetricFamily(
            "paged_jax:kv_cache_usage_of_group",
            "Fraction of blocks that samples hold, 0 to 1, of each group of layers that keep the "
            "same tokens: all, or those of a window.",
            labels=[*self._labels, "group", "window"],
        )
        for number, group in enumerate(self.reading.groups):
            window = "all" if group.window is None else str(group.window)
            labels = [*self._labels.values(), str(number), window]
            metric.add_metric(labels, group.num_used / group.num_blocks)
        return metric

    def _accepted(self) -> Iterator[Metric]:
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that the model accepted, by their position in the draft.",
            labels=[*self._labels, "position"],
        )
        for position, count in enumerate(self.reading.stats.num_accepted_at):
            accepted.add_metric([*self._labels.values(), str(position)], count)
        yield accepted

    def _sleep_state(self) -> Iterator[Metric]:
        states = ("awake", "weights_offloaded", "discard_all")
        state = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the state of the engine: awake, or asleep with weights on the host or without.",
            labels=[*self._labels, "sleep_state"],
        )
        for level, name in enumerate(states):
            state.add_metric([*self._labels.values(), name], self.reading.sleep_level == level)
        yield state

    def _waiting(self) -> Iterator[Metric]:
        """Waiting samples by reason, in vLLM's two words and in those of `Wait`."""
        num_waiting = self.reading.num_waiting_for
        num_deferred = sum(num_waiting[reason] for reason in _DEFERRED)
        by_reason: dict[str, dict[str, int]] = {
            "vllm:num_requests_waiting_by_reason": {
                "capacity": num_waiting.total() - num_deferred,
                "deferred": num_deferred,
            },
            "paged_jax:num_requests_waiting": {
                reason: num_waiting[reason] for reason in get_args(WaitReason) if reason
            },
        }
        for name, counts in by_reason.items():
            metric = GaugeMetricFamily(
                name, "Samples that wait for a slot, by reason.", labels=[*self._labels, "reason"]
            )
            for reason, count in counts.items():
                metric.add_metric([*self._labels.values(), reason], count)
            yield metric

    def observe(self, reading: Reading, requests: Iterable[Request]) -> None:
        """Record a step. Called in the engine's thread.

        Args:
          reading: the engine's counts after the step.
          requests: the requests that got tokens or ended in it.
        """
        before, self.reading = self.reading.stats, reading
        num_tokens = reading.stats.num_prompt_tokens - before.num_prompt_tokens
        num_tokens += reading.stats.num_generated_tokens - before.num_generated_tokens
        if reading.stats.num_steps > before.num_steps:  # else a request was aborted
            self._histograms["iteration_tokens_total"].observe(num_tokens)
        num_generated = 0  # counted once: each count takes a lock
        for request in requests:
            num_tokens = sum([sequence.num_generated for sequence in request.sequences])
            num_generated += self._observe_tokens(request, num_tokens, reading.time)
            if request.is_finished:
                self._observe_end(request, num_tokens)
                self._running.pop(request.request_id, None)
        self._generation_tokens.inc(num_generated)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> int:
        """Record what a request has gained since it was last seen; return its new tokens."""
        seen = self._running.get(request.request_id)
        if seen is None:
            self._observe_beginning(request)
            self._running[request.request_id] = _Observed(now, num_tokens)
            return num_tokens
        num_new = num_tokens - seen.num_tokens
        if num_new > 0:
            # Each of the n samples got an equal share of the tokens in this time.
            per_sample = num_new / len(request.sequences)
            count = max(1, round(per_sample))
            self._latency.observe((now - seen.time) / max(1, per_sample), count)
        seen.time, seen.num_tokens = now, num_tokens
        return num_new

    def _observe_beginning(self, request: Request) -> None:
        histograms, metrics = self._histograms, request.metrics
        if metrics.first_scheduled_time is not None:
            waited = metrics.first_scheduled_time - metrics.arrival_time
            histograms["request_queue_time_seconds"].observe(waited)
            self._prompt_tokens.inc(len(request.prompt_token_ids))
            self._cached_tokens.inc(request.num_cached_tokens)
        if metrics.first_token_time is not None:
            seconds = metrics.first_token_time - metrics.arrival_time
            histograms["time_to_first_token_seconds"].observe(seconds)

    def _observe_end(self, request: Request, num_tokens: int) -> None:
        histograms, metrics = self._histograms, request.metrics
        reason = request.sequences[0].completion.finish_reason or "abort"
        self._success.labels(**self._labels, finished_reason=reason).inc()
        histograms["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        histograms["request_generation_tokens"].observe(num_tokens)
        longest = max(sequence.num_generated for sequence in request.sequences)
        histograms["request_max_num_generation_tokens"].observe(longest)
        histograms["request_params_n"].observe(request.params.n)
        if request.params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(request.params.max_tokens)
        if metrics.finished_time is not None:
            self._observe_times(metrics, metrics.finished_time, num_tokens / len(request.sequences))

    def _observe_times(self, metrics: RequestMetrics, end: float, per_sample: float) -> None:
        histograms = self._histograms
        scheduled, first = metrics.first_scheduled_time, metrics.first_token_time
        histograms["e2e_request_latency_seconds"].observe(end - metrics.arrival_time)
        if scheduled is not None:
            histograms["request_inference_time_seconds"].observe(end - scheduled)
        if first is None:
            return
        if scheduled is not None:
            histograms["request_prefill_time_seconds"].observe(first - scheduled)
        histograms["request_decode_time_seconds"].observe(end - first)
        if per_sample > 1:
            histograms["request_time_per_output_token_seconds"].observe(
                (end - first) / (per_sample - 1)
            )


class _EngineCollector(Collector):
    """Lets the registry read the engine's counts at each scrape."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.engine_metrics()
