"""A histogram that counts equal values at once says what prometheus-client's does."""

import re

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from paged_jax.server.metrics import BulkHistogram

LABELS = {"model_name": "tiny", "engine": "0"}
BUCKETS = (0.001, 0.5, 2.5, 300)
# Below, at, between and above the bounds.
VALUES = {0.0: 2, 0.001: 1, 0.25: 5, 0.5: 3, 300.0: 1, 1e9: 4}


def without_times(text: bytes) -> str:
    return re.sub(r"(_created\S*) \S+", r"\1", text.decode())


@pytest.mark.parametrize("labels", [LABELS, {}])
def test_bulk_histogram_is_written_as_one_of_prometheus_client(labels) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    one = Histogram("gap_seconds", "Gaps.", list(labels), registry=theirs, buckets=BUCKETS)
    histogram = BulkHistogram("gap_seconds", "Gaps.", labels, BUCKETS)
    ours.register(histogram)
    for value, count in VALUES.items():
        histogram.observe(value, count)
        for _ in range(count):
            (one.labels(**labels) if labels else one).observe(value)
    assert without_times(generate_latest(ours)) == without_times(generate_latest(theirs))
