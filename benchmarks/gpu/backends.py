"""Times of all ops on each backend for GPUs, on the same inputs, compared with JAX's own op.

    python -m benchmarks.gpu.backends --json results.json         # all ops, pools of all dtypes
    python -m benchmarks.gpu.backends --ops write copy_blocks --models TinyLlama
    python -m benchmarks.gpu.backends --quick                     # small sizes, also on a CPU
    python -m benchmarks.gpu.defaults results.json                # use the faster backends

The results of all kernels are compared with the XLA backend before they are timed, and their runs
are interleaved. `benchmarks.gpu.defaults` derives the default backends from the file of `--json`.
On a CPU the backends for CPUs are timed.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

# JAX would otherwise allocate most of the memory at the start, see `benchmarks.attention`.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention.cases import (
    LATENT_MODELS,
    MODELS,
    POOL_DTYPES,
    Case,
    Heads,
    make_inputs,
    random_values,
)
from benchmarks.attention.peers import KNOWN, Variants
from benchmarks.attention.programs import (
    JaxCall,
    TorchCall,
    drop_different,
    fastest_settings,
    our_call,
    pad_to_queries,
    plan_calls,
    prepare_all,
)
from benchmarks.common.device_time import Rates, measure_rates, median_seconds
from benchmarks.gpu.defaults import default_lines
from benchmarks.harness import Budget, command_line, environment, reason, write_json
from paged_jax.kernels import (
    BACKENDS,
    copy_blocks,
    paged_rope_write,
    paged_write,
    ragged_paged_attention,
)
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op import backends_of
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import ATTENTION, PoolOp

# Calls of all ops to time.

UPDATES: tuple[PoolOp, ...] = ("write", "rope_write", "copy_blocks")
"""Ops that change the pools."""

DEFAULT_MODELS = ("Llama-3 8B", "DeepSeek-V2-Lite")
"""Models whose calls are timed by default."""

# Name and time of JAX's own op. JAX has none for the other ops.
JAX_OP = "jax pallas"

# Models compute projections in float32.
_NEW_DTYPE = "float32"
# Layers of the pools that are updated.
_UPDATED_LAYERS = 4
# In a ragged batch, one of 16 sequences has a chunk, and the others have a single token.
_ROWS_PER_CHUNK = 16


@dataclass(frozen=True)
class OpCase:
    """A call of an op.

    Attributes:
      op: the op.
      batch: number of sequences, or of pairs of blocks to copy.
      context: number of tokens of the longest sequence.
      chunk: number of new tokens of each sequence; 1 in a decode. In a ragged batch, only one of 16
        sequences has a chunk, and the others have a single token.
      pool_dtype: name of the dtype of the pools.
      is_ragged: whether the lengths of the sequences of a decode differ.
      model: a key of `MODELS` or `LATENT_MODELS`.
      block_size: number of tokens in a block.
    """

    op: PoolOp
    batch: int
    context: int
    chunk: int = 1
    pool_dtype: str = "bfloat16"
    is_ragged: bool = False
    model: str = "Llama-3 8B"
    block_size: int = 16

    def __str__(self) -> str:
        """Return the sizes that are not in the key."""
        if self.op == "copy_blocks":
            return f"{self.batch} pairs"
        chunk = f" chunk {self.chunk}" if self.chunk > 1 else ""
        return f"{self.batch} x {self.context}{' ragged' if self.is_ragged else ''}{chunk}"

    @property
    def heads(self) -> Heads:
        """Attention heads of the model."""
        return self.attention.heads

    @property
    def kv(self) -> KVDtype:
        """The rules for storing keys and values in the dtype of the pools."""
        return KVDtype.of(self.pool_dtype)

    @property
    def key(self) -> CallShape:
        """The key of the call in the table of defaults."""
        num_heads, num_kv_heads, head_dim, value_dim = self.heads
        has_queries = self.op in (*ATTENTION, "rope_write")
        group = num_heads // num_kv_heads if has_queries else 0
        q_dtype = self.kv.query_dtype.name if self.op in ATTENTION else _NEW_DTYPE
        if self.op == "copy_blocks":
            q_dtype = self.pool_dtype
        dtypes = (q_dtype, self.pool_dtype)
        return CallShape(head_dim, group, self.block_size, *dtypes, value_dim or 0)

    @property
    def attention(self) -> Case:
        """The sequences of an attention op."""
        chunk = self.chunk if self.op == "prefill" else 0
        sizes = (self.batch, self.context, self.block_size, self.pool_dtype)
        return Case(self.model, *sizes, is_ragged=self.is_ragged, chunk=chunk)

    @property
    def query_lens(self) -> np.ndarray:
        """Number of new tokens of each sequence, i32[B]."""
        lens = np.full(self.batch, self.chunk, np.int32)
        if self.op == "ragged":
            lens[np.arange(self.batch) % _ROWS_PER_CHUNK > 0] = 1
        return lens

    @property
    def num_layers(self) -> int:
        """Number of layers in the pools."""
        if self.op == "ragged":
            return 1  # pages have a single layer
        return self.attention.num_layers if self.op in ATTENTION else _UPDATED_LAYERS

    @property
    def num_bytes(self) -> int:
        """Bytes that a call must move."""
        num_heads, num_kv_heads, head_dim, _ = self.heads
        if self.op in ("decode", "prefill"):
            return self.attention.num_bytes
        num_tokens = int(self.query_lens.sum())
        if self.op == "ragged":
            queries = num_tokens * num_heads * (head_dim + self.heads.output_dim)
            return self.attention.kv_bytes + queries * self.kv.query_dtype.itemsize
        itemsize = jnp.dtype(self.pool_dtype).itemsize
        scale_bytes = self.kv.scale_bytes
        token_bytes = 2 * num_kv_heads * (head_dim * itemsize + scale_bytes)
        if self.op == "copy_blocks":
            return 2 * self.batch * self.num_layers * self.block_size * token_bytes
        new_heads = 2 * num_kv_heads + (num_heads if self.op == "rope_write" else 0)
        new_bytes = new_heads * head_dim * jnp.dtype(_NEW_DTYPE).itemsize
        return num_tokens * (token_bytes + new_bytes)

    @property
    def flops(self) -> int:
        """Operations of both matrix multiplications, for pairs that are not masked."""
        if self.op not in ATTENTION:
            return 0
        lengths, chunks = self.attention.lengths.astype(np.int64), self.query_lens
        pairs = chunks * (lengths - chunks) + chunks * (chunks + 1) // 2
        elements = self.heads.head_dim + self.heads.output_dim
        return 2 * self.heads.num_heads * elements * int(pairs.sum())


class OpInputs(NamedTuple):
    """Arrays of a case, and calls of the op with them.

    Attributes:
      start: the queries, or the values that the op updates.
      call: returns a call on a backend.
      others: variants of other kernels, by name and settings.
    """

    start: Any
    call: Callable[[str | None], JaxCall]
    others: Mapping[str, Variants]


def make_op_inputs(case: OpCase) -> OpInputs:
    """Create the arrays of a case on the first device."""
    if case.op == "ragged":
        return _ragged_inputs(case)
    if case.op in UPDATES:
        return _update_inputs(case)
    inputs = make_inputs(case.attention)
    others: dict[str, Variants] = {}
    value_dim = case.heads.value_dim
    if case.op == "decode" and jax.devices()[0].platform == "gpu" and value_dim is None:
        others[JAX_OP] = KNOWN[JAX_OP].make(case.attention, inputs)
    return OpInputs(inputs.q, functools.partial(our_call, inputs, value_dim=value_dim), others)


def _ragged_inputs(case: OpCase) -> OpInputs:
    num_heads, num_kv_heads, head_dim, value_dim = case.heads
    tables = _make_tables(case)
    keys = jax.random.split(jax.random.key(0), 2)
    shape = (tables.size, case.block_size, case.heads.num_pools * num_kv_heads, head_dim)
    starts = np.pad(np.cumsum(case.query_lens, dtype=np.int32), (1, 0))
    q = random_values(keys[0], (int(starts[-1]), num_heads, head_dim), case.key.q_dtype)
    arrays = (
        random_values(keys[1], shape, case.pool_dtype),
        *map(jnp.asarray, (case.attention.lengths, tables, starts)),
        jnp.array([case.batch], jnp.int32),
    )
    # Pages have a single factor, so that keys and values are in -1..1.
    unit = 1 / (case.kv.largest or 1.0)
    options: dict[str, Any] = {"sm_scale": head_dim**-0.5, "k_scale": unit, "v_scale": unit}
    options["value_dim"] = value_dim

    def call(backend: str | None) -> JaxCall:
        def op(q: jax.Array, layer: Any, arrays: Any) -> jax.Array:
            del layer
            out = ragged_paged_attention(q, *arrays, backend=backend, **options)
            return pad_to_queries(out, q)

        return JaxCall(op, arrays)

    return OpInputs(q, call, {})


def _update_inputs(case: OpCase) -> OpInputs:
    num_heads, num_kv_heads, head_dim, _ = case.heads
    tables, chunk = _make_tables(case), case.chunk
    keys = jax.random.split(jax.random.key(0), 8)
    num_tokens = case.batch * chunk
    positions = np.arange(case.context - chunk, case.context)
    blocks = jnp.asarray(tables[:, positions // case.block_size].ravel())
    offsets = jnp.asarray(np.tile(positions % case.block_size, case.batch).astype(np.int32))
    pools = _make_pools(case, keys[:4], tables.size)
    if case.op == "copy_blocks":
        pairs = jnp.asarray(tables[:, :2].T)
        return OpInputs(pools, lambda backend: JaxCall(_copy_op(backend), tuple(pairs)), {})
    if case.op == "write":
        new = [
            random_values(key, (num_tokens, num_kv_heads, head_dim), _NEW_DTYPE)
            for key in keys[4:6]
        ]
        arrays = (*new, blocks, offsets)
        return OpInputs(pools, lambda backend: JaxCall(_write_op(backend), arrays), {})
    width = num_heads // num_kv_heads + 2
    qkv = random_values(keys[4], (num_tokens, num_kv_heads, width, head_dim), _NEW_DTYPE)
    angles = jnp.pi * random_values(keys[5], (num_tokens, head_dim // 2), "float32")
    arrays = (qkv, jnp.cos(angles), jnp.sin(angles), blocks, offsets)
    q = jnp.zeros((num_tokens, num_heads, head_dim), case.kv.query_dtype)
    return OpInputs((q, pools), lambda backend: JaxCall(_rope_write_op(backend), arrays), {})


def _write_op(backend: str | None) -> Callable[..., Pools]:
    def op(pools: Pools, layer: Any, arrays: Any) -> Pools:
        return paged_write(pools.k, pools.v, *arrays, **_options(pools, backend), layer=layer)

    return op


def _rope_write_op(backend: str | None) -> Callable[..., tuple[jax.Array, Pools]]:
    def op(state: tuple[jax.Array, Pools], layer: Any, arrays: Any) -> tuple[jax.Array, Pools]:
        _, pools = state
        assert pools.v is not None
        options = _options(pools, backend)
        return paged_rope_write(pools.k, pools.v, *arrays, **options, layer=layer)

    return op


def _copy_op(backend: str | None) -> Callable[..., Pools]:
    def op(pools: Pools, layer: Any, arrays: Any) -> Pools:
        del layer
        return copy_blocks(pools.k, pools.v, *arrays, **_options(pools, backend))

    return op


def _options(pools: Pools, backend: str | None) -> dict[str, Any]:
    return {"k_scale": pools.k_scale, "v_scale": pools.v_scale, "backend": backend}


def _make_tables(case: OpCase) -> np.ndarray:
    """Return the blocks of each sequence, scattered over the pool, i32 ``[B, M]``."""
    width = case.attention.blocks_per_sequence
    blocks = np.random.default_rng(0).permutation(case.batch * width)
    return blocks.astype(np.int32).reshape(case.batch, width)


def _make_pools(case: OpCase, keys: Any, num_blocks: int) -> Pools:
    _, num_kv_heads, head_dim, _ = case.heads
    shape = (case.num_layers, num_blocks, num_kv_heads, case.block_size, head_dim)
    k, v = (random_values(key, shape, case.pool_dtype) for key in keys[:2])
    if not case.attention.is_quantised:
        return Pools(k, v)
    return Pools(k, v, *(random_values(key, shape[:-1], "float32") for key in keys[2:]))


def attention_cases(models: Sequence[str] = DEFAULT_MODELS) -> list[OpCase]:
    """Return the cases of the attention ops: one of each op and dtype of each model first."""
    decode = OpCase("decode", 64, 8192)
    prefill = OpCase("prefill", 1, 2048, 2048)
    rows = [
        [decode, prefill, OpCase("ragged", 64, 4096, 512)],
        [
            dataclasses.replace(decode, is_ragged=True),
            OpCase("decode", 1, 32768),
            OpCase("prefill", 4, 8192, 2048),
        ],
    ]
    return _in_all_dtypes(rows, models)


def update_cases(models: Sequence[str] = DEFAULT_MODELS) -> list[OpCase]:
    """Return the cases of the other ops: new tokens of decode steps and of a prompt, and copies.

    Models with latent attention are left out.
    """
    rows = [
        [OpCase("write", 64, 128), OpCase("rope_write", 64, 128), OpCase("copy_blocks", 64, 32)],
        [
            OpCase("write", 1, 2048, 2048),
            OpCase("rope_write", 1, 2048, 2048),
            OpCase("copy_blocks", 8, 32),
        ],
    ]
    return _in_all_dtypes(rows, [model for model in models if model not in LATENT_MODELS])


def _in_all_dtypes(rows: list[list[OpCase]], models: Sequence[str]) -> list[OpCase]:
    """Return cases of all models and dtypes of pools; only bfloat16 in latent attention."""
    return [
        dataclasses.replace(case, pool_dtype=dtype, model=model)
        for row, model in itertools.product(rows, models)
        for case, dtype in itertools.product(row, POOL_DTYPES)
        if model not in LATENT_MODELS or dtype == "bfloat16"
    ]


def quick_op_cases(cases: list[OpCase]) -> list[OpCase]:
    """Return a small case of each op and dtype, and of latent attention, for a run of seconds."""
    first: dict[tuple[str, str, bool], OpCase] = {}
    for case in cases:
        first.setdefault((case.op, case.pool_dtype, case.model in LATENT_MODELS), case)
    return [
        dataclasses.replace(
            case,
            model=case.model if is_latent else "TinyLlama",
            batch=2,
            context=64,
            chunk=min(case.chunk, 24),
        )
        for (_, _, is_latent), case in first.items()
    ]


# Times.

# JAX's name of the platform of a program, by the platform of a device.
_PLATFORMS = {"gpu": "cuda"}


def backends_to_time(op: PoolOp) -> list[str]:
    """Return the names of the backends for the platform that have an op; on CPUs also XLA."""
    platform = jax.devices()[0].platform
    names = [
        name
        for name in backends_of(op)
        if BACKENDS[name].platform == _PLATFORMS.get(platform, platform)
    ]
    return names if platform == "gpu" else [*names, "xla"]


def measure(case: OpCase, rates: Rates, num_rounds: int, turn_seconds: float) -> dict[str, Any]:
    """Time one case on all backends, interleaved, and return its record.

    Args:
      case: the call to time.
      rates: rates of the device.
      num_rounds: number of turns of each kernel.
      turn_seconds: seconds of a turn, if the kernel reaches the rates of the device.
    """
    inputs = make_op_inputs(case)
    calls: dict[tuple[str, str], JaxCall | TorchCall] = {}
    calls |= {(name, ""): inputs.call(name) for name in backends_to_time(case.op)}
    calls |= {(name, s): call for name, made in inputs.others.items() for s, call in made.items()}
    plan = plan_calls(case, rates, turn_seconds)
    prepared, failures = prepare_all(calls, case, inputs.start, plan)
    reference, start = inputs.call("xla"), inputs.start
    expected = jax.jit(lambda start, arrays: reference.op(start, 0, arrays))(
        start, reference.arrays
    )
    before = start if case.op in UPDATES else None
    failures |= drop_different(prepared, lambda result: result_error(result, expected, before))
    settings = fastest_settings(prepared)
    programs = {name: prepared[name, setting].program for name, setting in settings.items()}
    seconds = median_seconds(programs, num_rounds)
    left_out = {name: why for (name, _), why in failures.items() if name not in settings}
    return record_of(case) | {
        "us": {name: round(1e6 * s, 2) for name, s in seconds.items()},
        "settings": {name: setting for name, setting in settings.items() if setting},
        "left_out": left_out,
    }


def record_of(case: OpCase) -> dict[str, Any]:
    """Return the record of a case without times."""
    return {
        "op": case.op,
        "key": str(case.key),
        "name": str(case),
        "bytes": case.num_bytes,
        "flops": case.flops,
        "us": {},
    }


def result_error(actual: Any, expected: Any, before: Any) -> float:
    """Return the largest relative error of the arrays of a result; NaN if any value is NaN.

    Args:
      actual: the result.
      expected: the correct result.
      before: the values that the op has updated, or None. The error is relative to the changes,
        because most elements of a pool do not change.
    """
    if before is None:
        before = jax.tree.map(jnp.zeros_like, expected)
    return float(_largest_error(actual, expected, before))


@jax.jit
def _largest_error(actual: Any, expected: Any, before: Any) -> jax.Array:
    def error(actual: jax.Array, expected: jax.Array, before: jax.Array) -> jax.Array:
        actual, expected, before = (x.astype(jnp.float32) for x in (actual, expected, before))
        return jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected - before)

    errors = jax.tree.map(error, actual, expected, before)
    return jnp.max(jnp.stack(jax.tree.leaves(errors)))


def run(cases: list[OpCase], path: Path | None, budget: float, **options: Any) -> dict[str, Any]:
    """Measure cases until `budget` seconds have passed, print and save the results.

    Cases that were not measured have records without times.

    Args:
      cases: cases in order of importance.
      path: file of the report, which is written after every case; or None.
      budget: seconds after which no new case starts.
      **options: arguments of `measure`.
    """
    limit, rates, device = Budget(budget), measure_rates(), jax.devices()[0]
    report = {
        **environment(),
        "accelerator": None if device.platform == "cpu" else device.device_kind,
        **rates._asdict(),
        "results": [],
    }
    print(report["accelerator"] or report["device"], report["versions"], rates, sep="\n")
    for case in cases:
        if limit.is_over():
            record = record_of(case) | {"left_out": {"": "not reached in time"}}
        else:
            try:
                record = measure(case, rates, **options)
            except RuntimeError as error:  # an error of XLA; the other cases are still measured
                record = record_of(case) | {"left_out": {"": reason(error)}}
        report["results"].append(record)
        print(record_line(record), flush=True)
        write_json(path, report)
    print(*default_lines(report), sep="\n")
    return report


def record_line(record: dict[str, Any]) -> str:
    """Return one line: the case, and the time of each kernel or the reason why it has none."""
    times = [f"{name} {us:.1f} us" for name, us in record["us"].items()]
    others = [f"{name} {why}".strip() for name, why in record["left_out"].items()]
    return f"{record['op']}, {record['key']}, {record['name']}: {'; '.join([*times, *others])}"


def _choose_cases(options: argparse.Namespace) -> list[OpCase]:
    cases = [*attention_cases(options.models), *update_cases(options.models)]
    chosen = [
        case for case in cases if case.op in options.ops and case.pool_dtype in options.dtypes
    ]
    return quick_op_cases(chosen) if options.quick else chosen


def _parser() -> argparse.ArgumentParser:
    parser = command_line("Time all ops on each backend for GPUs.", budget=240, rounds=5)
    ops: Iterable[str] = get_args(PoolOp)
    parser.add_argument("--ops", nargs="+", choices=ops, default=list(ops))
    models = [*MODELS, *LATENT_MODELS]
    parser.add_argument("--models", nargs="+", choices=models, default=list(DEFAULT_MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=POOL_DTYPES, default=list(POOL_DTYPES))
    parser.add_argument("--quick", action="store_true", help="a small case of each op")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON."""
    options = _parser().parse_args(arguments)
    run(
        _choose_cases(options),
        options.json,
        options.budget,
        num_rounds=options.rounds,
        turn_seconds=0.0 if options.quick else 0.01,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
