"""`BulkHistogram`: a histogram for Prometheus that counts many equal values as cheaply as one."""

import bisect
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class BulkHistogram(Collector):
    """What `prometheus_client.Histogram` is, which takes one value at a time.

    One thread observes, others may collect meanwhile.

    Args:
      name: the name of the metric.
      text: what it says.
      labels: its labels, with their values.
      buckets: upper bounds of the buckets, ascending.

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
        """Count a value `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += count * value

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at each scrape."""
        metric = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        totals = itertools.accumulate(self._counts.copy())
        buckets = list(zip(map(floatToGoString, self._bounds), totals, strict=True))
        metric.add_metric(list(self._labels.values()), buckets, self._sum)
        metric.add_sample(f"{self._name}_created", self._labels, self._created)
        yield metric
