"""Attention calls to time: shapes of models, sweeps over them, and pools to read.

The values in a pool are random, never zero, because hardware may run faster on zeros. The blocks of
every sequence are scattered over the whole pool, as they are after some time of serving.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.pools import Pools


class Heads(NamedTuple):
    """Attention heads of a model.

    Attributes:
      num_heads: query heads (H).
      num_kv_heads: KV heads (K).
      head_dim: elements of a key (D).
      value_dim: elements of a value in latent attention, where each value vector is the beginning
        of its key vector; None if values have a pool and as many elements as keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None

    @property
    def output_dim(self) -> int:
        """Number of elements of the output of a head (U)."""
        return self.value_dim or self.head_dim

    @property
    def num_pools(self) -> int:
        """Number of pools: keys and values, or only keys."""
        return 1 if self.value_dim else 2


MODELS = {
    "Llama-3 8B": Heads(32, 8, 128),  # the same as Qwen3 4B and 8B
    "Llama-3 70B": Heads(64, 8, 128),
    "TinyLlama": Heads(32, 4, 64),
    "Qwen3 0.6B": Heads(16, 8, 128),
}
"""Models by name."""

LATENT_MODELS = {"DeepSeek-V2-Lite": Heads(16, 1, 576, 512)}
"""Models with latent attention, by name. Only `benchmarks.gpu.backends` times them."""

BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (512, 2048, 8192, 32768, 131072)
BLOCK_SIZES = (16, 64)
POOL_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")

CHUNK = 2048
"""Number of tokens of a prompt chunk."""

RAGGED_RATIO = 10
"""Ratio of the longest to the shortest sequence of a ragged batch."""

SKEW = 128
"""Ratio of the longest sequence to all others of a skewed batch."""

# Bytes that calls read before they read the same bytes again: more than twice the size of the
# last-level cache, 50 MB on an H100 or H200.
_ROTATED_BYTES = 128 << 20
# Maximum number of layers, because all layers are compiled into one program. Only the smallest
# cases reach this limit and fit into the cache, such as one sequence of 1K tokens of a small model.
_MOST_LAYERS = 64


@dataclass(frozen=True)
class Case:
    """One call of an attention op.

    Attributes:
      model: a key of `MODELS` or `LATENT_MODELS`.
      batch: number of sequences.
      context: number of tokens of the longest sequence.
      block_size: number of tokens in a block.
      pool_dtype: name of the dtype of K and V.
      is_ragged: whether lengths differ, with the ratio `RAGGED_RATIO` of the longest to the
        shortest.
      chunk: number of query tokens of each sequence; 0 means decode, with a single query token.
      is_skewed: whether one sequence is `SKEW` times as long as each of the others.
    """

    model: str
    batch: int
    context: int
    block_size: int = 16
    pool_dtype: str = "bfloat16"
    is_ragged: bool = False
    chunk: int = 0
    is_skewed: bool = False

    @property
    def heads(self) -> Heads:
        """Attention heads of the model."""
        return MODELS.get(self.model) or LATENT_MODELS[self.model]

    @property
    def q_dtype(self) -> str:
        """Dtype of the queries: bfloat16 for quantised pools."""
        return "float32" if self.pool_dtype == "float32" else "bfloat16"

    @property
    def is_quantised(self) -> bool:
        """Whether the pool has scales."""
        return KVDtype.of(self.pool_dtype).has_scales

    @property
    def blocks_per_sequence(self) -> int:
        """Width of the block table."""
        return -(-self.context // self.block_size)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sequence, i32[B]."""
        if self.is_skewed:
            lengths = np.full(self.batch, self.context // SKEW, np.int32)
            lengths[self.batch // 2] = self.context
            return lengths
        if not self.is_ragged:
            return np.full(self.batch, self.context, np.int32)
        lengths = np.linspace(self.context, self.context // RAGGED_RATIO, self.batch)
        # The order of arrival of sequences is independent of their lengths.
        return np.random.default_rng(0).permutation(lengths.round().astype(np.int32))

    @property
    def held_blocks(self) -> np.ndarray:
        """Number of blocks of each sequence, ``[B]``: the table width, except in skewed batches."""
        held = self.lengths if self.is_skewed else np.full(self.batch, self.context)
        return -(-held // self.block_size)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of the pools, including scales."""
        return int(self.held_blocks.sum()) * self.block_size * self._token_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one layer if each sequence is padded to the longest one."""
        return self.batch * self.blocks_per_sequence * self.block_size * self._token_bytes

    @property
    def num_layers(self) -> int:
        """Number of layers in the pools, so that no cache still contains the data of a call."""
        return min(-(-_ROTATED_BYTES // self.layer_bytes), _MOST_LAYERS)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and scales that a call must read."""
        return int(self.lengths.sum(dtype=np.int64)) * self._token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that a call must move: `kv_bytes`, the queries and the result."""
        heads = self.batch * max(self.chunk, 1) * self.heads.num_heads
        elements = heads * (self.heads.head_dim + self.heads.output_dim)
        return self.kv_bytes + elements * jnp.dtype(self.q_dtype).itemsize

    @property
    def flops(self) -> int:
        """Operations of both matrix multiplications, for pairs that are not masked."""
        last = max(self.chunk, 1) - 1
        pairs = max(self.chunk, 1) * (self.lengths.astype(np.int64) - last) + last * (last + 1) // 2
        elements = self.heads.head_dim + self.heads.output_dim
        return 2 * self.heads.num_heads * elements * int(pairs.sum())

    @property
    def _token_bytes(self) -> int:
        heads, scale_bytes = self.heads, 4 if self.is_quantised else 0
        head_bytes = heads.head_dim * jnp.dtype(self.pool_dtype).itemsize + scale_bytes
        return heads.num_pools * heads.num_kv_heads * head_bytes

    def __str__(self) -> str:
        lengths = "skewed" if self.is_skewed else "ragged" if self.is_ragged else "even"
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        return (
            f"{self.model:11s} C{self.block_size:<3d} {self.pool_dtype:13s} "
            f"{self.batch:3d} x {self.context:6d} {lengths:6s}{chunk}"
        )


class Inputs(NamedTuple):
    """Arrays of a case.

    Attributes:
      q: ``[B, H, D]``, or ``[B, T, H, D]`` for a prompt chunk.
      pools: K and V of `Case.num_layers` layers, with as many blocks as the sequences hold; only K
        in latent attention.
      block_tables: i32 ``[B, M]``.
      context_lens: i32 ``[B]``.
      query_lens: i32 ``[B]``, or None for decode.
    """

    q: jax.Array
    pools: Pools
    block_tables: jax.Array
    context_lens: jax.Array
    query_lens: jax.Array | None


def make_inputs(case: Case) -> Inputs:
    """Create the arrays of a case on the first device."""
    num_heads, num_kv_heads, head_dim, _ = case.heads
    held = case.held_blocks
    num_blocks = int(held.sum())
    shape = (case.num_layers, num_blocks, num_kv_heads, case.block_size, head_dim)
    keys = jax.random.split(jax.random.key(0), 5)
    pools = [random_values(key, shape, case.pool_dtype) for key in keys[: case.heads.num_pools]]
    k, v = pools if len(pools) == 2 else (pools[0], None)
    scales = (None, None)
    if case.is_quantised:
        largest = KVDtype.of(case.pool_dtype).largest or 1.0
        scales = tuple(random_values(key, shape[:-1], "float32", 1 / largest) for key in keys[2:4])
    rows = (case.batch, case.chunk) if case.chunk else (case.batch,)
    tables = np.zeros((case.batch, case.blocks_per_sequence), np.int32)
    is_held = np.arange(case.blocks_per_sequence) < held[:, None]
    tables[is_held] = np.random.default_rng(0).permutation(num_blocks)
    return Inputs(
        random_values(keys[4], (*rows, num_heads, head_dim), case.q_dtype),
        Pools(k, v, *scales),
        jnp.asarray(tables),
        jnp.asarray(case.lengths),
        jnp.full(case.batch, case.chunk, jnp.int32) if case.chunk else None,
    )


@partial(jax.jit, static_argnums=(1, 2))
def random_values(
    key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float = 1.0
) -> jax.Array:
    """Return uniform values: in -1..1 times `scale`, or over the range of a quantised dtype."""
    scale = KVDtype.of(dtype).largest or scale
    return (scale * jax.random.uniform(key, shape, minval=-1.0)).astype(dtype)


def goal_cases() -> list[Case]:
    """Return the cases of the goals, at least one for each goal. They are timed first."""
    large = Case("Llama-3 8B", batch=64, context=8192)
    return [
        large,
        replace(large, batch=1, context=131072),
        replace(large, is_ragged=True),
        replace(large, context=1024 * SKEW, is_skewed=True),
        *(replace(large, pool_dtype=dtype) for dtype in POOL_DTYPES[1:]),
        replace(large, batch=1, context=CHUNK, chunk=CHUNK),
        replace(large, batch=1, context=1024),
    ]


def gpu_cases(is_full: bool) -> list[Case]:
    """Return the cases for a GPU or TPU: the cases of the goals, then a sweep over all axes."""
    base = Case("Llama-3 8B", batch=16, context=8192)
    first = [*goal_cases(), base]
    whole = [replace(base, batch=b, context=CHUNK, chunk=CHUNK) for b in (1, 4)]
    chunks = whole + [replace(case, context=8 * CHUNK) for case in whole]
    if is_full:
        axes = (MODELS, BATCHES, CONTEXTS, BLOCK_SIZES, POOL_DTYPES, (False, True))
        return _unique(first + chunks + [Case(*case) for case in itertools.product(*axes)])
    few = [
        replace(base, batch=b, context=n)
        for b, n in ((16, 8192), (64, 8192), (256, 2048), (64, 2048), (1, 8192))
    ]
    axes = [
        [replace(base, batch=b, context=n) for n in CONTEXTS for b in BATCHES],
        [replace(case, is_ragged=True) for case in few],
        chunks,
        [replace(case, pool_dtype=t) for case in few for t in POOL_DTYPES[1:]],
        [replace(case, model=m) for case in few for m in MODELS],
        [replace(case, block_size=64) for case in few],
    ]
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*axes))
    return _unique(first + [case for case in in_turns if case is not None])


def cpu_cases(is_full: bool) -> list[Case]:
    """Return the cases for a CPU, which are small."""
    base = Case("TinyLlama", batch=4, context=1024, pool_dtype="float32")
    if is_full:
        types = ("float32", *POOL_DTYPES)
        axes = (MODELS, BATCHES[:3], CONTEXTS[:3], BLOCK_SIZES, types, (False, True))
        return _unique(Case(*case) for case in itertools.product(*axes))
    return [
        base,
        replace(base, is_ragged=True),
        *(replace(base, batch=b, context=n) for n in (512, 2048) for b in (1, 16)),
        *(replace(base, pool_dtype=dtype) for dtype in ("bfloat16", "int8")),
        replace(base, model="Llama-3 8B"),
        replace(base, block_size=64),
        replace(base, batch=1, context=256, chunk=256),
    ]


def quick_cases(pool_dtype: str) -> list[Case]:
    """Return a few small cases, for a run of seconds."""
    case = Case("TinyLlama", batch=2, context=256, pool_dtype=pool_dtype)
    return [case, replace(case, is_ragged=True), replace(case, context=128, chunk=128)]


def _unique(cases: Iterable[Case]) -> list[Case]:
    # A single sequence cannot be ragged.
    return list(dict.fromkeys(case for case in cases if not (case.is_ragged and case.batch == 1)))
