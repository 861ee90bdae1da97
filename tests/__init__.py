"""Tests of paged_jax: folders mirror the package, and `support` contains shared code."""

import gc

# Number of new objects after which Python looks for unreachable cycles. With the default of 700,
# this takes a tenth of the time of a test process: importing and tracing create many objects.
COLLECTOR_THRESHOLD = 20_000
gc.set_threshold(COLLECTOR_THRESHOLD)
