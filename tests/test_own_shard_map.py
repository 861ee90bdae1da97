"""Test of examples/own_shard_map.py on several numbers of devices."""

import pytest

from tests.support.processes import run_on_devices

_PROGRAM = """
from examples.own_shard_map import L, generate

alone, num_sums = generate(1, 12)
assert num_sums == 0
assert len(set(alone[0])) > 3 and alone[0] != alone[1], "tokens depend on those before"
for num_devices in (2, 4):
    sequences, num_sums = generate(num_devices, 12)
    assert sequences == alone
    assert num_sums == L, "one a layer, behind the output projection"
"""


@pytest.mark.slow
def test_example_gives_the_same_tokens_on_any_number_of_devices() -> None:
    """A new process is needed, because the number of devices is fixed when JAX starts."""
    run_on_devices(_PROGRAM)
