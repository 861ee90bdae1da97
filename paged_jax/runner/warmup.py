"""The finite list of programs, and how they are compiled before the first request.

Sizes are padded to a few buckets, so that `list_calls` names all that will ever run:

    prefill          T: powers of two from 16 to max_chunk;  B: 1, 4, 16, ..., B * T <= max_chunk,
                     and half of it from B = 16 on
    score            T: 128;  B: 1, for log-probabilities of prompts
    decode, verify   B: 1, 4, 8, 16, ... up to the number of slots
    all others       one shape each

Beam search is not on the list, because its programs depend on the width: nothing compiles them
before they are used.
"""

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paged_jax.kernels import Pools
from paged_jax.runner.buckets import chunk_buckets, no_slots, prefill_rows, row_buckets
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.programs import Call, Programs
from paged_jax.runner.sizes import PUBLISH_WIDTH, Sizes

_MAX_COMPILERS = 8


def list_calls(
    programs: Programs, sizes: Sizes, pools: Sequence[Pools], *, has_swap: bool = True
) -> list[Call]:
    """Each program once, in a call that leaves every row out and changes nothing.

    Args:
      programs: the programs of the engine.
      sizes: sizes that shape the programs.
      pools: the pools of each group of layers, for shapes and dtypes.
      has_swap: whether blocks may be moved to the host.
    """
    S, C, M, W = sizes.num_slots, sizes.block_size, sizes.max_blocks_per_slot, PUBLISH_WIDTH
    zero = np.int32(0)
    return [
        *_prefill_calls(programs, sizes),
        programs.score.call(
            _zeros(1, sizes.score_width), no_slots(1), _zeros(1), _zeros(sizes.score_width)
        ),
        *_decode_calls(programs, sizes),
        programs.fork.call(no_slots(S)),
        programs.release.call(np.zeros(S, bool)),
        programs.reserve.call(_zeros(S)),
        programs.attach.call(zero, np.zeros((M, 8), np.uint32), _zeros(M, C), zero),
        programs.publish.call(no_slots(W), _zeros(W), np.zeros((W, 8), np.uint32), _zeros(W, C)),
        programs.forget.call(),
        *(_swap_calls(programs, sizes, pools) if has_swap else []),
    ]


def _prefill_calls(programs: Programs, sizes: Sizes) -> list[Call]:
    return [
        programs.prefill.call(_zeros(B, T), no_slots(B), _zeros(B))
        for T in chunk_buckets(sizes.max_chunk)
        for B in prefill_rows(T, sizes.max_chunk, sizes.num_slots)
    ]


def _decode_calls(programs: Programs, sizes: Sizes) -> list[Call]:
    calls, no = [], np.bool_(False)
    for B in row_buckets(sizes.num_slots):
        calls.append(programs.decode.call(no_slots(B), np.int32(0), no, no))
        if T := sizes.num_drafts:
            calls.append(programs.verify.call(_zeros(B, T), _zeros(B), no_slots(B), no))
    return calls


def _swap_calls(programs: Programs, sizes: Sizes, pools: Sequence[Pools]) -> list[Call]:
    zero, width, calls = np.int32(0), sizes.swap_width, []
    for group, pools_of in enumerate(pools):
        piece = jax.tree.map(
            lambda pool: np.zeros((pool.shape[0], width, *pool.shape[2:]), pool.dtype), pools_of
        )
        calls.append(programs.read_blocks.call(zero, zero, group=group))
        calls.append(programs.write_blocks.call(zero, zero, piece, group=group))
    return calls


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def shapes_of(state: DecodeState) -> Any:
    """Return the shapes, dtypes and shardings of the state, to compile programs without it."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def compile_calls(
    calls: list[Call],
    weights: list[jax.Array],
    state: DecodeState,
    bind: Callable[[Call, list[jax.Array], DecodeState], Call],
    report: Callable[[int, int, str], None],
) -> None:
    """Compile programs, several at a time. The first call of each finds what was compiled.

    Args:
      calls: the programs and the shapes to compile them for.
      weights: the arrays of the model.
      state: the state; nothing runs on it here.
      bind: function that says which program a call is of, see `LoweredPrograms.bind`.
      report: function that is called with the number of programs done, their total, and the name
        of the one just done.
    """
    # Compilers leave Python's lock alone, so that threads make use of several cores; each takes
    # some 100 MB for a model of 30 layers.
    num_threads = min(os.cpu_count() or 1, _MAX_COMPILERS)

    def compile_call(call: Call) -> None:
        call = bind(call, weights, state)
        # What is lowered from the same shapes later finds the executable that belongs to it.
        call.program.lower(weights, state, *call.args, **call.static).compile()

    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        compiling = {threads.submit(compile_call, call): call for call in calls}
        for count, future in enumerate(concurrent.futures.as_completed(compiling), 1):
            future.result()
            report(count, len(calls), compiling[future].name)
