"""Benchmark of our GPU decode kernel with batches divided as in vLLM's kernels.

vLLM's paged attention has two kernels. V1 uses one program instance per sequence and head. V2
divides sequences into parts of 512 tokens and merges them in a second launch.
`benchmarks.schedule` predicts which division is faster for our kernel, and
``python -m benchmarks.attention --divisions`` measures it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.attention.cases import Case, Inputs
from benchmarks.attention.peers import Peer, Variants
from benchmarks.attention.programs import JaxCall
from benchmarks.common.process import PeerUnavailable
from benchmarks.schedule.rules import PARTITION
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.triton import decode


def _divided(num_parts: Callable[[Case], int]) -> Peer:
    def make(case: Case, inputs: Inputs) -> Variants:
        if case.chunk:
            raise PeerUnavailable("prompt chunks are not divided")
        count = num_parts(case)

        def op(q: jax.Array, layer: Any, inputs: Inputs) -> jax.Array:
            _, pools, tables, lengths, query_lens = inputs
            args = AttentionArgs(q, pools, tables, lengths, query_lens, None, layer)
            return decode.decode(args, Options(scale=1.0), num_parts=count)[0]

        return {"": JaxCall(op, inputs)}

    return Peer(("gpu",), lambda case: 0, make)


def _count_partitions(case: Case) -> int:
    return max(int(case.lengths.sum()) // PARTITION, 1)


DIVISIONS: Mapping[str, Peer] = {
    "whole sequences": _divided(lambda case: 0),
    f"parts of {PARTITION}": _divided(_count_partitions),
}
"""Other ways to divide a batch, by name."""
