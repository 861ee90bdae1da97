"""Other attention kernels that read the same pools, for `benchmarks.attention`.

Each peer gets K and V in its own layout, converted before the clock starts. A peer with settings
has several variants, and the fastest variant counts. A peer that does not support a case, or is
not installed, gives the reason. Scores are not scaled, because one of the peers cannot scale them.
"""

import functools
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.attention.cases import Case, Inputs
from benchmarks.attention.programs import JaxCall, TorchCall, our_call, torch_on_gpu
from benchmarks.harness import PeerUnavailable, reason
from benchmarks.schedule import PARTITION
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.triton import decode as triton_decode

K_SPLITS = (1, 4, 16, 64)
"""Values of `k_splits` to try with JAX's GPU kernel."""


Variants = dict[str, JaxCall | TorchCall]
Make = Callable[[Case, Inputs], Variants]


class Peer(NamedTuple):
    """Another attention kernel.

    Attributes:
      platforms: platforms that it supports.
      own_bytes: memory that it needs in addition to the pools.
      make: creates its variants for a case.
    """

    platforms: tuple[str, ...]
    own_bytes: Callable[[Case], int]
    make: Make


def make_peers(
    case: Case, inputs: Inputs, free_bytes: int, chosen: Mapping[str, Peer] | None = None
) -> tuple[dict[str, Variants], dict[str, str]]:
    """Create the peers for a case.

    Args:
      case: the call to compute.
      inputs: arrays of the case.
      free_bytes: memory in which all peers together may store K and V in their own layouts.
      chosen: the peers; `KNOWN` if None. See `peer_of_file` for others.

    Returns:
      ``(peers, left_out)``: the variants of each peer by their settings, and the reasons why other
      peers are missing.
    """
    peers: dict[str, Variants] = {}
    left_out: dict[str, str] = {}
    for name, (platforms, own_bytes, make) in (KNOWN if chosen is None else chosen).items():
        if jax.devices()[0].platform not in platforms:
            continue
        if own_bytes(case) > free_bytes:
            left_out[name] = f"needs {own_bytes(case) / 1e9:.1f} GB that are not free"
            continue
        try:
            peers[name] = make(case, inputs)
            free_bytes -= own_bytes(case)
        except Exception as error:  # the benchmark continues without a peer that fails
            left_out[name] = reason(error)
    return peers, left_out


NUM_SPLITS = (1, 2, 4, 32)
"""Numbers of parts of a sequence to try with the `decode` function of a file."""


def peer_of_file(path: Path) -> Peer:
    """Return a peer for a kernel outside of this project, such as a prototype.

    The file defines ``make(case, inputs)``, which returns functions by their settings:
    ``op(q, layer, (pools, block_tables, context_lens))`` returns the result of `paged_attention`
    with a scale of 1, and raises an exception for unsupported cases. The file may import files next
    to it.

    Alternatively it defines only ``decode(q, k_pool, v_pool, block_tables, context_lens, *,
    num_splits, layer)`` with a scale of 1. It is tried with several numbers of parts of a sequence.

    Raises:
      ValueError: the file defines neither function.
    """
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make_ops = getattr(module, "make", None)
    if make_ops is None and callable(decode := getattr(module, "decode", None)):
        make_ops = functools.partial(_decodes, decode)
    if not callable(make_ops):
        raise ValueError(
            f"peer_of_file: {path} must define make(case, inputs), or decode(q, k_pool, v_pool, "
            "block_tables, context_lens, *, num_splits, layer). Add one of them."
        )

    def make(case: Case, inputs: Inputs) -> Variants:
        arrays = (inputs.pools, inputs.block_tables, inputs.context_lens)
        ops: Any = make_ops(case, inputs)
        return {str(s): JaxCall(op, arrays) for s, op in ops.items()}

    return Peer(("cpu", "gpu", "tpu"), _no_bytes, make)


def _decodes(decode: Callable[..., Any], case: Case, inputs: Inputs) -> dict[str, Any]:
    if case.chunk or case.is_quantised:
        raise PeerUnavailable("only decoding over unquantised pools is measured")

    def variant(num_splits: int) -> Callable[..., Any]:
        def op(q, layer, arrays):
            pools, tables, lengths = arrays
            return decode(q, pools.k, pools.v, tables, lengths, num_splits=num_splits, layer=layer)

        return op

    return {f"num_splits={n}": variant(n) for n in NUM_SPLITS}


def _gathered(pool, scale, layer, tables, dtype):
    """Return the tokens of every sequence in order, ``[B, M * C, K, D]``."""
    blocks = pool.at[layer, tables].get(mode="promise_in_bounds")  # [B, M, K, C, D]
    if scale is not None:
        scales = scale.at[layer, tables].get(mode="promise_in_bounds")
        blocks = blocks.astype(jnp.float32) * scales[..., None]
    B, M, K, C, D = blocks.shape
    return blocks.astype(dtype).transpose(0, 1, 3, 2, 4).reshape(B, M * C, K, D)


def _gather(implementation: Literal["xla", "cudnn"]) -> Make:
    def make(case: Case, inputs: Inputs) -> Variants:
        if case.chunk and (case.is_ragged or case.context != case.chunk):
            raise PeerUnavailable(
                "it has no mask, so only chunks that are whole sequences are measured"
            )

        def op(q, layer, arrays):
            # Make the tables depend on the query. Otherwise XLA may gather one layer once, before
            # the loop.
            pools, tables, lengths, q = lax.optimization_barrier((*arrays, q))
            k = _gathered(pools.k, pools.k_scale, layer, tables, q.dtype)
            v = _gathered(pools.v, pools.v_scale, layer, tables, q.dtype)
            if case.chunk:
                return jax.nn.dot_product_attention(
                    q, k, v, scale=1.0, is_causal=True, implementation=implementation
                )
            return jax.nn.dot_product_attention(
                q[:, None],
                k,
                v,
                scale=1.0,
                key_value_seq_lengths=lengths,
                implementation=implementation,
            )[:, 0]

        return {"": JaxCall(op, (inputs.pools, inputs.block_tables, inputs.context_lens))}

    return make


def _mosaic_gpu(case: Case, inputs: Inputs) -> Variants:
    """Return our own backend without Triton, for decode and for prompts."""
    return {"": our_call(inputs, backend="mosaic_gpu")}


def jax_kernel() -> ModuleType:
    """Return the module of JAX's GPU kernel."""
    # importing Pallas' Triton backend raises a DeprecationWarning since JAX 0.11
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")


def _jax_pallas(case: Case, inputs: Inputs) -> Variants:
    """Return `jax.experimental.pallas.ops.gpu.paged_attention`, over pools ``[K, L * P, C, D]``."""
    if case.chunk:
        raise PeerUnavailable("it supports only one query token per sequence")
    theirs = jax_kernel()
    L, P, K, C, D = inputs.pools.k.shape

    def heads_first(pool):
        if pool is None:
            return None
        return jnp.moveaxis(pool, 2, 0).reshape(K, L * P, *pool.shape[3:])

    pools = jax.tree.map(jax.jit(heads_first), inputs.pools)

    def variant(k_splits: int) -> JaxCall:
        # A loop step of 128 tokens, as in JAX's own benchmark, or the part if that is smaller.
        pages = case.blocks_per_sequence // k_splits
        pages_per_step = math.gcd(pages, max(128 // C, 1))

        def op(q, layer, arrays):
            pools, tables, lengths = arrays
            with warnings.catch_warnings():  # lowering a kernel warns as well
                warnings.simplefilter("ignore", DeprecationWarning)
                return theirs.paged_attention(
                    q,
                    pools.k,
                    pools.v,
                    tables[layer],
                    lengths,
                    pools.k_scale,
                    pools.v_scale,
                    k_splits=k_splits,
                    pages_per_compute_block=pages_per_step,
                )

        # The tables of each layer are an array, so no launch is needed to compute them.
        tables = tuple(inputs.block_tables + layer * P for layer in range(L))
        return JaxCall(op, (pools, tables, inputs.context_lens))

    divides = [n for n in K_SPLITS if case.blocks_per_sequence % n == 0]
    return {f"k_splits={n}": variant(n) for n in divides}


def _cudnn_paged(case: Case, inputs: Inputs) -> Variants:
    """Return cuDNN's paged attention, which JAX contains without a public name."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if case.chunk or case.pool_dtype != "bfloat16":
        raise PeerUnavailable("only decoding over bfloat16 pools is measured")
    if case.is_skewed:
        raise PeerUnavailable("it requires pools with as many blocks as the tables have entries")
    L, P, K, C, D = inputs.pools.k.shape
    ones = jnp.ones_like(inputs.context_lens)
    # cuDNN requires as many blocks in the pool as entries in the tables. The pool has the blocks of
    # all layers, so the tables are padded to L times their width.
    padding = ((0, 0), (0, (L - 1) * case.blocks_per_sequence))
    tables = tuple(
        jnp.pad(inputs.block_tables + layer * P, padding)[:, None, :, None] for layer in range(L)
    )

    def op(q, layer, arrays):
        k_pool, v_pool, tables, lengths, ones = arrays
        out: Any = cudnn.paged_attention(
            q[:, :, None],
            k_pool.reshape(L * P, K, C, D),
            v_pool.reshape(L * P, K, C, D),
            ones,
            lengths,
            tables[layer],
            tables[layer],
            scale=1.0,
            mask_type=cudnn.MaskType.PADDING,
            qkv_layout="BNTH",
        )
        return out[:, :, 0]

    pools = inputs.pools
    arrays = (pools.k, pools.v, tables, inputs.context_lens, ones)
    return {"": JaxCall(op, arrays)}


def _torch_sdpa(case: Case, inputs: Inputs) -> Variants:
    """Return PyTorch's attention over contiguous K and V, gathered before the clock starts."""
    torch = torch_on_gpu()
    is_even = not case.is_ragged and not case.is_skewed
    if not is_even or case.is_quantised or (case.chunk and case.context != case.chunk):
        raise PeerUnavailable("only even, unquantised batches without a mask are measured")

    @jax.jit
    def gather(pool: jax.Array, layer: jax.Array) -> jax.Array:
        tokens = _gathered(pool, None, layer, inputs.block_tables, case.q_dtype)
        return tokens.transpose(0, 2, 1, 3)  # [B, K, M * C, D]

    keys, values = (
        [torch.from_dlpack(gather(pool, jnp.int32(layer))) for layer in range(case.num_layers)]
        for pool in (inputs.pools.k, inputs.pools.v)
    )
    q = torch.from_dlpack(inputs.q)
    q = q.transpose(1, 2) if case.chunk else q[:, :, None]

    def op(layer: int) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, keys[layer], values[layer], is_causal=bool(case.chunk), scale=1.0, enable_gqa=True
        )
        return out.transpose(1, 2) if case.chunk else out[:, :, 0]

    return {"": TorchCall(op)}


def _flashinfer(case: Case, inputs: Inputs) -> Variants:
    """Return FlashInfer's decode kernel over the same blocks; its layout "HND" equals one layer."""
    torch = torch_on_gpu()
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PeerUnavailable("flashinfer is not installed") from error
    if case.chunk or case.is_quantised:
        raise PeerUnavailable("only decoding over unquantised pools is measured")
    num_heads, num_kv_heads, head_dim, _ = case.heads
    counts = -(-case.lengths // case.block_size)
    tables = np.asarray(inputs.block_tables)
    indices = np.concatenate([row[:n] for row, n in zip(tables, counts, strict=True)])
    starts = np.pad(np.cumsum(counts, dtype=np.int32), (1, 0))
    last = (case.lengths - 1) % case.block_size + 1
    q = torch.from_dlpack(inputs.q)
    k, v = torch.from_dlpack(inputs.pools.k), torch.from_dlpack(inputs.pools.v)

    def variant(use_tensor_cores: bool) -> TorchCall:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=use_tensor_cores
        )
        wrapper.plan(
            *(torch.from_numpy(x).cuda() for x in (starts, indices, last)),
            num_heads,
            num_kv_heads,
            head_dim,
            case.block_size,
            sm_scale=1.0,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        return TorchCall(lambda layer: wrapper.run(q, (k[layer], v[layer])))

    return {f"tensor_cores={use}": variant(use) for use in (False, True)}


def _no_bytes(case: Case) -> int:
    return 0


def _copy_bytes(case: Case) -> int:
    return case.num_layers * case.layer_bytes


def _gather_bytes(case: Case) -> int:
    # K and V in the dtype of the query, gathered, in the order of tokens.
    wider = jnp.dtype(case.q_dtype).itemsize // jnp.dtype(case.pool_dtype).itemsize
    return 2 * wider * case.gathered_bytes


KNOWN: Mapping[str, Peer] = {
    "mosaic_gpu": Peer(("gpu",), _no_bytes, _mosaic_gpu),
    "jax pallas": Peer(("gpu",), _copy_bytes, _jax_pallas),
    "cudnn paged": Peer(("gpu",), _no_bytes, _cudnn_paged),
    "gather + xla": Peer(("cpu", "gpu", "tpu"), _gather_bytes, _gather("xla")),
    "gather + cudnn": Peer(("gpu",), _gather_bytes, _gather("cudnn")),
    "torch sdpa, contiguous": Peer(("gpu",), _copy_bytes, _torch_sdpa),
    "flashinfer": Peer(("gpu",), _no_bytes, _flashinfer),
}
"""Other kernels, by name. The first is the second backend of paged_jax for GPUs."""


def _divided(num_parts: Callable[[Case], int]) -> Peer:
    """Return our GPU decode kernel with a batch divided as in vLLM's kernels.

    vLLM's paged attention has two kernels. V1 uses one program instance per sequence and head. V2
    divides sequences into parts of 512 tokens and merges them in a second launch.
    `benchmarks.schedule` predicts which division is faster for our kernel, and
    ``python -m benchmarks.attention --divisions`` measures it.
    """

    def make(case: Case, inputs: Inputs) -> Variants:
        if case.chunk:
            raise PeerUnavailable("prompt chunks are not divided")
        count = num_parts(case)

        def op(q: jax.Array, layer: Any, inputs: Inputs) -> jax.Array:
            _, pools, tables, lengths, query_lens = inputs
            args = AttentionArgs(q, pools, tables, lengths, query_lens, None, layer)
            return triton_decode.decode(args, Options(scale=1.0), num_parts=count)[0]

        return {"": JaxCall(op, inputs)}

    return Peer(("gpu",), _no_bytes, make)


def _count_partitions(case: Case) -> int:
    return max(int(case.lengths.sum()) // PARTITION, 1)


DIVISIONS: Mapping[str, Peer] = {
    "whole sequences": _divided(lambda case: 0),
    f"parts of {PARTITION}": _divided(_count_partitions),
}
"""Other ways to divide a batch, by name."""
