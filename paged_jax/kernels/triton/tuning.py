"""Launch parameters of the Triton kernels.

``python -m benchmarks.attention.tune`` writes measured parameters to `tuning.json`::

    {"NVIDIA H200": {"decode": {"D128 G4 C16 q:bfloat16 pool:bfloat16": {
        "step_tokens": 64, "num_warps": 4, "num_stages": 3,
        "measured": "jax 0.11.2, commit 0123abc"}}}}

The environment variable PAGED_JAX_TUNING may name another file to read instead.

A call uses the table entry with its shape. If there is none, it uses the nearest entry with the
same GPU, head dimension and dtypes. Without such an entry, rules choose the parameters. The rules
were not tuned by measurements. They choose sizes that fit the shared memory and the registers of a
Hopper GPU, for the dtypes and shapes of common models. Kernels for float32 queries of 256 lanes
over pools of a narrower dtype spill registers and are slower.
"""

import functools
import importlib.resources
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from paged_jax.kernels.call_table import CallShape, CallTable, parse_table
from paged_jax.kernels.gpu_device import GpuInfo, device
from paged_jax.kernels.op_args import AttentionArgs, Options


class DecodeParams(NamedTuple):
    """Launch parameters of the decode kernel.

    Attributes:
      step_tokens: number of tokens of K and V that a loop step reads.
      num_warps: number of warps of 32 threads in a program instance.
      num_stages: number of loop steps with loads in flight at the same time.
    """

    step_tokens: int
    num_warps: int
    num_stages: int


class PrefillParams(NamedTuple):
    """Launch parameters of the prefill kernel.

    Attributes:
      query_rows: number of rows of a query tile. A row is a pair of a token and a query head of the
        group.
      step_tokens: see `DecodeParams`.
      num_warps: see `DecodeParams`.
      num_stages: see `DecodeParams`.
    """

    query_rows: int
    step_tokens: int
    num_warps: int
    num_stages: int


Params = DecodeParams | PrefillParams


def shape_of(args: AttentionArgs, options: Options) -> CallShape:
    """Return the `CallShape` of a decode or prefill call, which determines its launch parameters.

    If the values are parts of the keys (latent attention), `value_dim` is the number of elements of
    a value; otherwise it is 0.
    """
    (*_, H, D), pools = args.q.shape, args.pools
    value_dim = options.output_dim(D) if pools.shares_values else 0
    group, block_size = H // pools.num_kv_heads, pools.block_size
    return CallShape(D, group, block_size, args.q.dtype.name, pools.dtype.name, value_dim)


OPS: Mapping[str, type[Params]] = {"decode": DecodeParams, "prefill": PrefillParams}

# Environment variable with the path of a table to read instead of `tuning.json`.
TABLE_VARIABLE = "PAGED_JAX_TUNING"


def decode_params(device_kind: str, shape: CallShape) -> DecodeParams:
    """Return the launch parameters of the decode kernel for a GPU and a shape.

    Example:
      >>> decode_params("", CallShape(128, 4, 16, "bfloat16", "bfloat16"))
      DecodeParams(step_tokens=64, num_warps=4, num_stages=3)
    """
    measured = _nearest(_measured(), device_kind, "decode", shape)
    return _decode_rule(shape) if measured is None else DecodeParams(*measured)


def prefill_params(device_kind: str, shape: CallShape, *, is_ragged: bool = False) -> PrefillParams:
    """Return the launch parameters of the prefill kernel for a GPU and a shape.

    Example:
      >>> prefill_params("", CallShape(128, 4, 16, "bfloat16", "bfloat16"))
      PrefillParams(query_rows=128, step_tokens=128, num_warps=8, num_stages=2)
    """
    measured = _nearest(_measured(), device_kind, "prefill", shape)
    if measured is None:
        return _prefill_rule(shape, device(), is_ragged)
    return PrefillParams(*measured)


def _lanes(shape: CallShape) -> int:
    """Return the number of lanes of a value in a tile."""
    # Triton's arrays have sizes that are powers of two, so a head dimension of 80 or 96 takes 128
    # lanes.
    return 1 << ((shape.value_dim or shape.head_dim) - 1).bit_length()


def _token_lanes(shape: CallShape) -> int:
    """Return the lanes per token and KV head, of K and V together."""
    if not shape.value_dim:
        return 2 * _lanes(shape)
    key_only_dim = shape.head_dim - shape.value_dim
    return _lanes(shape) + (1 << (key_only_dim - 1).bit_length() if key_only_dim else 0)


def token_bytes(shape: CallShape) -> int:
    """Return the bytes of K and V per token and KV head, in the dtype of the matmuls."""
    return _token_lanes(shape) * shape.kv.matmul_dtype(shape.q_dtype).itemsize


def _is_exact(shape: CallShape) -> bool:
    """Return whether the matmuls are in float32, which tensor cores do not support."""
    return shape.kv.matmul_dtype(shape.q_dtype) == jnp.float32


# Bytes of K and V that a loop step reads. With this number, three stages of two program instances
# fit the 227 KB of shared memory of an SM (CUDA C++ programming guide, compute capability 9.0).
_STEP_BYTES = 32 * 1024


def _power_of_two_below(x: int) -> int:
    return 1 << (max(x, 1).bit_length() - 1)


def _latent_decode_rule(shape: CallShape) -> DecodeParams:
    """Choose the parameters of the decode kernel for latent attention.

    In latent attention, values have up to 512 elements, and slices have up to 16 query heads.
    """
    step_tokens = min(max(_power_of_two_below(2 * _STEP_BYTES // token_bytes(shape)), 16), 64)
    return DecodeParams(step_tokens, num_warps=8 if _is_exact(shape) else 4, num_stages=2)


def _decode_rule(shape: CallShape) -> DecodeParams:
    if shape.value_dim:
        return _latent_decode_rule(shape)
    # Use shorter steps for 32 lanes. With steps of 128 tokens, kernels for groups of 12 query heads
    # and an fp8 pool would spill registers.
    max_tokens = 128 if _lanes(shape) >= 64 else 64
    step_tokens = _STEP_BYTES // token_bytes(shape)
    if shape.kv.has_scales and not _is_exact(shape) and shape.group <= 8:
        # Double the tokens of a step. Shared memory holds elements in the dtype of the pool, which
        # take at most half of the bytes that `token_bytes` counts. Large groups are excluded,
        # because they leave too few registers for longer steps.
        step_tokens *= 2
    step_tokens = min(max(step_tokens, 16), max_tokens)
    # Use 8 warps for float32, because the operands of float32 matmuls are in registers, and 8 warps
    # have twice as many registers as 4 warps.
    return DecodeParams(step_tokens, num_warps=8 if _is_exact(shape) else 4, num_stages=3)


def slice_size(shape: CallShape) -> int:
    """Return the maximum number of query heads in a slice of a group, see `decode`.

    A group is cut into slices of about equal size. There are as few slices as fit the registers.
    Larger slices would spill registers in the loop (compiled for compute capability 8.9 and 9.0).

    Example:
      Groups of 4, 32 and 71 query heads are cut into 1, 1 and 3 slices:

      >>> [slice_size(CallShape(128, group, 16, "bfloat16", "bfloat16")) for group in (4, 32, 71)]
      [4, 32, 24]
    """
    is_tight = shape.kv.has_scales and _lanes(shape) <= 64
    max_rows = 16 if _is_exact(shape) or is_tight or shape.value_dim else 32
    num_slices = math.ceil(shape.group / max_rows)
    return math.ceil(shape.group / num_slices)


# Maximum number of program instances per SM: `_MAX_PROGRAMS`, or `_MAX_LARGE_PROGRAMS` for groups
# of more than 16 query heads. Tiles of such groups have 32 rows, so they take more registers and
# shared memory. Both numbers are limited by the registers: ptxas allocates up to 168 registers per
# thread in half precision (4 warps per program instance), and 64 in float32 (8 warps).
_MAX_PROGRAMS = 3
_MAX_LARGE_PROGRAMS = 2

# Maps compute capabilities to the KB of shared memory of an SM (CUDA C++ Programming Guide). GPUs
# with any other compute capability have 228 KB.
_SHARED_KILOBYTES = {(8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (12, 0): 100, (12, 1): 100}


def programs_per_core(shape: CallShape, params: DecodeParams, device: GpuInfo) -> int:
    """Return the number of program instances of the decode kernel that run on an SM at a time.

    Example:
      >>> shape = CallShape(128, 4, 16, "bfloat16", "bfloat16")
      >>> programs_per_core(shape, DecodeParams(64, num_warps=4, num_stages=3), GpuInfo("", 132))
      3
    """
    row_bytes = _token_lanes(shape) * shape.kv.values.itemsize + 2 * shape.kv.scale_bytes
    step_bytes = params.step_tokens * row_bytes
    # Shared memory contains the tiles of all stages except the current one, and 8 KB for the
    # communication between threads.
    shared_bytes = (params.num_stages - 1) * step_bytes + 8 * 1024
    # Latent attention takes as many registers as groups of more than 16 query heads.
    is_large = shape.group > 16 or shape.value_dim > 0
    limit = _MAX_LARGE_PROGRAMS if is_large else _MAX_PROGRAMS
    return min(max(_shared_kilobytes(device) * 1024 // shared_bytes, 1), limit)


def _shared_kilobytes(device: GpuInfo) -> int:
    return _SHARED_KILOBYTES.get(device.compute_capability, 228)


# GPUs whose compute capability has one of these major versions have 227 KB of shared memory per
# program instance, and matmul instructions for groups of warps. Other GPUs have 163 or 99 KB.
_LARGE_ARCHITECTURES = (9, 10)


def _prefill_rule(shape: CallShape, device: GpuInfo, is_ragged: bool) -> PrefillParams:
    if shape.value_dim and not _is_exact(shape):
        # With this number of rows, the float32 accumulator (rows x lanes) takes 64 registers per
        # thread.
        query_rows = min(max(128 * 128 // _lanes(shape), 16), 128)
        return PrefillParams(query_rows, step_tokens=32, num_warps=8, num_stages=2)
    if _is_exact(shape):
        # Use fewer rows for a quantised pool, because its conversion needs more registers.
        query_rows = 32 if shape.pool_dtype == "float32" else 16
        return PrefillParams(query_rows, step_tokens=16, num_warps=8, num_stages=3)
    architecture = device.compute_capability[0]
    is_large = architecture in _LARGE_ARCHITECTURES
    if is_large and _lanes(shape) <= 128 and not shape.kv.has_scales:
        # Use steps of 128 tokens. At 128 lanes, a warp then executes 319 instructions per 64
        # tokens, compared with 410 for steps of 64 tokens (SASS for compute capability 9.0). The
        # kernel takes 254 registers per thread. Quantised pools are excluded, because their
        # conversion would spill registers.
        return PrefillParams(128, 128, num_warps=8, num_stages=2)
    if not shape.kv.has_scales:
        # With these sizes, code compiled for compute capability 8.0, 8.6, 8.9 and 12.0 fits in
        # shared memory and spills no registers. The code was not timed.
        if _lanes(shape) > 128 and _shared_kilobytes(device) <= 100:
            # Use two stages, because a third stage would exceed the 99 KB of shared memory by 1 KB.
            return PrefillParams(64, 32, num_warps=8, num_stages=2)
        if is_ragged and architecture == 8 and _lanes(shape) == 128:
            # Use shorter steps than below. Ragged batches need more registers, so the kernel would
            # spill registers with steps of 64 tokens.
            return PrefillParams(128, 32, num_warps=8, num_stages=3)
    step_tokens = min(max(_STEP_BYTES // token_bytes(shape), 16), 64)
    # With these sizes the float32 accumulator (rows x lanes) takes 64 registers per thread.
    query_rows = min(max(128 * 128 // _lanes(shape), 16), 128)
    return PrefillParams(query_rows, step_tokens, num_warps=8, num_stages=3)


def _nearest(
    table: CallTable[Params], device_kind: str, op: str, shape: CallShape
) -> Params | None:
    """Return the entry of the table for a shape, or for the nearest similar shape.

    Similar shapes differ only in the group or the block size, so they use tiles of the same shape.
    Return None if the table has no entry for a similar shape.
    """
    entries = table.get(device_kind, {}).get(op, {})

    def has_same_tiles(other: CallShape) -> bool:
        return other._replace(group=shape.group, block_size=shape.block_size) == shape

    def distance(other: CallShape) -> tuple[float, CallShape]:
        group = abs(math.log2(other.group / shape.group))
        return group + abs(math.log2(other.block_size / shape.block_size)), other

    nearest = min(filter(has_same_tiles, entries), key=distance, default=None)
    return None if nearest is None else entries[nearest]


@functools.cache
def _measured() -> CallTable[Params]:
    path = os.environ.get(TABLE_VARIABLE)
    shipped = importlib.resources.files("paged_jax.kernels.triton") / "tuning.json"
    return parse((Path(path) if path else shipped).read_text(encoding="utf-8"))


def parse(text: str) -> CallTable[Params]:
    """Parse a table in the format of `tuning.json`, see the module's docstring.

    Raises:
      ValueError: the format is wrong. The message names the entry.

    Example:
      >>> parse('{"NVIDIA H200": {"decode": {}}}')
      {'NVIDIA H200': {'decode': {}}}
    """
    return parse_table(text, OPS, _parse_entry)


def _parse_entry(op: str, fields: dict[str, Any]) -> Params:
    kind = OPS[op]
    if fields.keys() != set(kind._fields):
        raise ValueError(f"it must have {', '.join(kind._fields)}, got {', '.join(fields)}.")
    for name, value in fields.items():
        is_stages = name == "num_stages"
        is_allowed = type(value) is int and (
            1 <= value <= 8 if is_stages else value > 0 and value.bit_count() == 1
        )
        if not is_allowed:
            rule = "in 1..8" if is_stages else "a power of two"
            raise ValueError(f"{name} must be {rule}, got {value!r}.")
    return kind(**fields)
