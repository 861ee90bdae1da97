"""Result of serving a workload: every token with its time, and figures computed from them."""

import dataclasses
import statistics
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run over a workload. Times are seconds after the start of the run.

    Attributes:
      seconds: time until the last token was on the host.
      token_ids: generated tokens of each request.
      arrivals: arrival time of each request.
      token_times: time at which each token of each request was on the host. Tokens of a dispatch
        arrive together.
      step_seconds: time of each decode step, or the mean per sequence or batch if steps are not
        timed individually.
      details: other counts of the engine.
    """

    seconds: float
    token_ids: list[list[int]]
    arrivals: list[float]
    token_times: list[list[float]]
    step_seconds: list[float]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens of all requests."""
        return sum(map(len, self.token_ids))


def summary(outcome: Outcome) -> dict[str, float]:
    """Return the rounded figures of a run, for JSON.

    ``ttft`` is the time from the arrival of a request to its first token, ``tpot`` the mean time of
    each further token of a request, ``gap`` the time between two deliveries of tokens to a request.

    Example:
      >>> run = Outcome(2.0, [[5, 6, 7]], [0.5], [[1.0, 2.0, 2.0]], [1.0])
      >>> figures = summary(run)
      >>> figures["tokens_per_s"], figures["ttft_ms_p50"], figures["tpot_ms_p50"]
      (1.5, 500.0, 500.0)
    """
    pairs = list(zip(outcome.arrivals, outcome.token_times, strict=True))
    ttft = [times[0] - arrival for arrival, times in pairs]
    tpot = [(times[-1] - times[0]) / (len(times) - 1) for _, times in pairs if len(times) > 1]
    gaps = [gap for _, times in pairs for gap in np.diff(sorted(set(times))).tolist()]
    figures = {
        "seconds": outcome.seconds,
        "tokens_per_s": outcome.num_tokens / outcome.seconds,
        "ms_per_token": 1e3 * outcome.seconds / outcome.num_tokens,
        **_quantiles("step", outcome.step_seconds),
        **_quantiles("ttft", ttft),
        **_quantiles("tpot", tpot),
        **_quantiles("gap", gaps),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def median_summary(outcomes: list[Outcome]) -> dict[str, float]:
    """Return the median over runs of each figure, and the mean of their seconds."""
    summaries = [summary(outcome) for outcome in outcomes]
    names = [name for name in summaries[0] if all(name in each for each in summaries)]
    medians = {name: statistics.median(each[name] for each in summaries) for name in names}
    return medians | {"seconds_mean": statistics.mean(each["seconds"] for each in summaries)}


def _quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    milliseconds = 1e3 * np.array(seconds)
    return {
        f"{name}_ms_mean": float(milliseconds.mean()),
        f"{name}_ms_p50": float(np.quantile(milliseconds, 0.5)),
        f"{name}_ms_p99": float(np.quantile(milliseconds, 0.99)),
    }
