"""Gradients of paged attention, against gradients of dense attention in float64.

Tables are shuffled, and sequences share blocks. Entries past the end of a sequence are out of range
or blocks of other sequences. The pool is NaN outside of the tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from paged_jax.kernels.cascade import merge_attention
from paged_jax.kernels.kv_dtypes import quantise
from paged_jax.kernels.op_args import AttentionArgs, Options, WriteArgs
from paged_jax.kernels.ops import OPS
from paged_jax.kernels.pools import Pools
from tests.support import oracles

REFERENCE, XLA = "reference", "xla"
LAYER = 1
NUM_LAYERS = 3


@dataclasses.dataclass
class Batch:
    """Sequences in a pool with NaN in unused places. The first two sequences share blocks."""

    k: list[np.ndarray]  # each [length, K, D]
    v: list[np.ndarray]
    pools: Pools
    block_tables: np.ndarray
    context_lens: np.ndarray

    def in_pool(self, tokens: list[np.ndarray]) -> np.ndarray:
        """Add values per token, each ``[length, K, D]``, at the places of the tokens in a pool."""
        total = np.zeros(self.pools.k.shape)
        C = total.shape[3]
        for table, sequence in zip(self.block_tables, tokens, strict=True):
            for t, token in enumerate(sequence):
                total[LAYER, table[t // C], :, t % C, : token.shape[-1]] += token
        return total


def attend(backend, *args):
    """Call the op, with its own gradient, with the fields of `AttentionArgs` and the options."""
    *arrays, options = args
    args = AttentionArgs(*arrays)
    op = OPS[args.op]
    return op.gradient(op.bind(args, options, backend=backend), args)


def lay_out(lengths, *, K=2, C=4, D=8, lanes=None, extra_width=2, shared_blocks=1) -> Batch:
    rng = np.random.default_rng(0)
    lengths = np.asarray(lengths, np.int32)
    counts = -(-lengths // C)
    P, M = int(counts.sum()) + 3, int(counts.max()) + extra_width
    k, v = ([rng.normal(size=(n, K, D)).astype(np.float32) for n in lengths] for _ in range(2))
    tables = rng.choice([10**6, -1, P, 0, 1], size=(len(lengths), M)).astype(np.int32)
    free = list(rng.permutation(P))
    for b, count in enumerate(counts):
        tables[b, :count] = [free.pop() for _ in range(count)]
    if shared_blocks:
        tables[1, :shared_blocks] = tables[0, :shared_blocks]
        for tokens in (k, v):
            tokens[1][: shared_blocks * C] = tokens[0][: shared_blocks * C]
    pools = np.full((2, NUM_LAYERS, P, K, C, lanes or D), np.nan, np.float32)
    for b, n in enumerate(lengths):
        for t in range(n):
            pools[0, LAYER, tables[b, t // C], :, t % C, :D] = k[b][t]
            pools[1, LAYER, tables[b, t // C], :, t % C, :D] = v[b][t]
    return Batch(k, v, Pools(*pools), tables, lengths)


def normal(shape, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected_gradients(batch: Batch, q, query_lens, sinks, options: Options, out_bar, lse_bar):
    """Return the gradients in q, the k pool, the v pool and the sinks, in float64."""
    q_bar, k_bar, v_bar = np.zeros(q.shape), [], []
    sinks_bar = np.zeros(q.shape[2])
    for b, n in enumerate(query_lens):
        q_bar[b, :n], *of_tokens, of_sinks = oracles.attention_gradients(
            q[b, :n], batch.k[b], batch.v[b], out_bar[b, :n], lse_bar[b, :n], scale=options.scale,
            sliding_window=options.sliding_window, soft_cap=options.soft_cap, sinks=sinks,
        )  # fmt: skip
        k_bar.append(of_tokens[0])
        v_bar.append(of_tokens[1])
        sinks_bar += of_sinks
    gradients = q_bar, batch.in_pool(k_bar), batch.in_pool(v_bar)
    return gradients if sinks is None else (*gradients, sinks_bar)


@functools.partial(jax.jit, static_argnames="options")
def prefill_program(q, pools, sinks, tables, context_lens, query_lens, out_bar, lse_bar, options):
    def results(q, pools, sinks):
        arrays = q, pools, tables, context_lens, query_lens, sinks
        return attend(XLA, *arrays, LAYER, options)

    return jax.tree.leaves(jax.vjp(results, q, pools, sinks)[1]((out_bar, lse_bar)))


def prefill_gradients(batch: Batch, q, query_lens, sinks, options, out_bar, lse_bar):
    lens = batch.context_lens, np.asarray(query_lens, np.int32)
    arrays = q, batch.pools, sinks, batch.block_tables, *lens, out_bar, lse_bar
    return prefill_program(*arrays, options=options)


def pull_decode_back(q, pools, sinks, tables, context_lens, out_bar, lse_bar, options):
    def results(q, pools, sinks):
        arrays = q, pools, tables, context_lens, None, sinks
        return attend(XLA, *arrays, LAYER, options)

    return jax.tree.leaves(jax.vjp(results, q, pools, sinks)[1]((out_bar, lse_bar)))


decode_program = jax.jit(pull_decode_back, static_argnames="options")


def decode_gradients(batch: Batch, q, sinks, options, out_bar, lse_bar):
    arrays = q, batch.pools, sinks, batch.block_tables, batch.context_lens, out_bar, lse_bar
    return decode_program(*arrays, options=options)


def assert_close(actual, expected, atol=1e-5) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), atol=atol, rtol=atol)


PLAIN = Options(0.4)
VARIANTS = {
    "plain": (PLAIN, False),
    "window": (Options(0.4, sliding_window=5), True),
    "all": (Options(0.7, sliding_window=150, soft_cap=3.0), True),
}


# Batches with these sizes share a program. Some sequences have more tokens than a tile.
LENGTHS, QUERY_LENS = [9, 12, 0, 300, 7, 140], [4, 12, 0, 150, 0, 140]
SHAPE = (6, 150, 4, 8)
DECODE_LENGTHS = [9, 12, 0, 300, 7, 1, 140]


@pytest.mark.parametrize(("options", "has_sinks"), VARIANTS.values(), ids=VARIANTS)
def test_prefill_gradients_match_dense_float64(options, has_sinks) -> None:
    batch, query_lens, shape = lay_out(LENGTHS), QUERY_LENS, SHAPE
    q, out_bar, lse_bar = normal(shape, 1), normal(shape, 2), normal(shape[:3], 3)
    sinks = normal((4,), 4) if has_sinks else None
    arguments = q, query_lens, sinks, options, out_bar, lse_bar
    assert_close(prefill_gradients(batch, *arguments), expected_gradients(batch, *arguments))


@pytest.mark.parametrize(("options", "has_sinks"), VARIANTS.values(), ids=VARIANTS)
def test_decode_gradients_match_dense_float64(options, has_sinks) -> None:
    batch = lay_out(DECODE_LENGTHS)
    q, out_bar, lse_bar = normal((7, 4, 8), 1), normal((7, 4, 8), 2), normal((7, 4), 3)
    sinks = normal((4,), 4) if has_sinks else None
    q_bar, *rest = expected_gradients(
        batch, q[:, None], [1] * 7, sinks, options, out_bar[:, None], lse_bar[:, None]
    )
    actual = decode_gradients(batch, q, sinks, options, out_bar, lse_bar)
    assert_close(actual, [q_bar[:, 0], *rest])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("C", "K", "G", "D", "lanes", "soft_cap"),
    [(1, 1, 1, 8, 8, 1.5), (128, 2, 7, 80, 128, None)],
)
def test_gradients_any_shape(C, K, G, D, lanes, soft_cap) -> None:
    lengths = [C + 1, C + 3, 0, 1, 70]
    batch = lay_out(lengths, K=K, C=C, D=D, lanes=lanes)
    B, T, H, options = len(lengths), 6, K * G, Options(D**-0.5, soft_cap=soft_cap)
    q, out_bar, lse_bar = normal((B, T, H, D), 1), normal((B, T, H, D), 2), normal((B, T, H), 3)
    sinks = normal((H,), 4)
    query_lens = [min(n, 5) for n in lengths]
    arguments = q, query_lens, sinks, options, out_bar, lse_bar
    assert_close(prefill_gradients(batch, *arguments), expected_gradients(batch, *arguments))


@pytest.mark.slow
def test_gradients_of_many_sequences() -> None:
    """Short chunks share a tile of queries. The last tile is not full."""
    num_sequences = 45
    batch = lay_out([6 + i % 11 for i in range(num_sequences)], K=1)
    shape = (num_sequences, 3, 2, 8)
    q, out_bar, lse_bar = normal(shape, 1), normal(shape, 2), normal(shape[:3], 3)
    arguments = q, [1 + i % 3 for i in range(num_sequences)], None, Options(0.4), out_bar, lse_bar
    assert_close(prefill_gradients(batch, *arguments), expected_gradients(batch, *arguments))


@pytest.mark.slow
def test_gradients_match_finite_differences() -> None:
    options = Options(0.7, 3, 1.5)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, sinks = rng.normal(size=(2, 3, 2, 4)), rng.normal(size=2)
        pools = Pools(*rng.normal(size=(2, 2, 3, 1, 2, 4)))
        tables = jnp.array([[2, 0], [2, 1]], jnp.int32)
        lengths = jnp.array([4, 3], jnp.int32), jnp.array([2, 3], jnp.int32)

        def prefill(q, pools, sinks):
            out, lse = attend(REFERENCE, q, pools, tables, *lengths, sinks, LAYER, options)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        arrays = q, pools, sinks
        check_grads(jax.jit(prefill), arrays, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_gradients_ignore_padding() -> None:
    """Padding rows and their output gradients are NaN."""
    batch, query_lens, shape = lay_out(LENGTHS), QUERY_LENS, SHAPE
    q, out_bar, lse_bar = normal(shape, 1), normal(shape, 2), normal(shape[:3], 3)
    sinks, (options, _) = normal((4,), 4), VARIANTS["window"]
    expected = expected_gradients(batch, q, query_lens, sinks, options, out_bar, lse_bar)
    is_padding = np.arange(shape[1]) >= np.asarray(query_lens)[:, None]
    for x in (q, out_bar, lse_bar):
        x[is_padding] = np.nan
    actual = prefill_gradients(batch, q, query_lens, sinks, options, out_bar, lse_bar)
    assert_close(actual, expected)


@pytest.mark.slow
def test_gradients_of_sequences_are_independent() -> None:
    """NaN queries of a sequence affect only its own tokens, although its table has other blocks."""
    batch, shape = lay_out(LENGTHS, shared_blocks=0), SHAPE
    batch.block_tables[1, 3:] = batch.block_tables[0, 0]
    q, out_bar, lse_bar = normal(shape, 1), normal(shape, 2), normal(shape[:3], 3)
    arguments = QUERY_LENS, None, PLAIN, out_bar, lse_bar
    _, *expected = expected_gradients(batch, q, *arguments)
    q[1] = np.nan
    _, *actual = prefill_gradients(batch, q, *arguments)
    for row, count in ((0, 3), (3, 75), (5, 35)):
        blocks = batch.block_tables[row, :count]
        assert_close(*([np.asarray(x)[:, blocks] for x in xs] for xs in (actual, expected)))


@pytest.mark.slow
def test_gradients_of_bfloat16_are_rounded_once() -> None:
    batch = lay_out([200, 12, 30])
    shape = (3, 12, 4, 8)

    def rounded(x):
        return x.astype(jnp.bfloat16)

    q, out_bar = rounded(normal(shape, 1)), rounded(normal(shape, 2))
    lse_bar, query_lens, options = normal(shape[:3], 3), [12, 12, 12], PLAIN
    batch = dataclasses.replace(
        batch,
        k=[rounded(x) for x in batch.k],
        v=[rounded(x) for x in batch.v],
        pools=jax.tree.map(rounded, batch.pools),
    )
    arguments = q, query_lens, None, options, out_bar, lse_bar
    actual = prefill_gradients(batch, *arguments)
    assert [x.dtype for x in actual] == [jnp.bfloat16] * 3
    # The gradients are rounded, and also the output of the forward pass, which they depend on.
    for a, e in zip(actual, expected_gradients(batch, *arguments), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), e, rtol=2**-8, atol=2**-7)


QUANTISE = jax.jit(quantise, static_argnums=1)


def loss(out, lse, out_bar, lse_bar):
    # In rows without a softmax, lse is the constant -inf.
    return jnp.sum(out * out_bar) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse * lse_bar))


def quantised(batch: Batch, dtype) -> tuple[Batch, Pools]:
    """Quantise the pools; return a batch with the stored values of its tokens, and the pools."""
    (k, k_scale), (v, v_scale) = (QUANTISE(pool, dtype) for pool in batch.pools[:2])
    C = k.shape[3]

    def stored(values, scale):
        values = np.asarray(values, np.float32) * np.asarray(scale)[..., None]
        return [
            values[LAYER, table[np.arange(n) // C], :, np.arange(n) % C]
            for table, n in zip(batch.block_tables, batch.context_lens, strict=True)
        ]

    as_stored = dataclasses.replace(batch, k=stored(k, k_scale), v=stored(v, v_scale))
    return as_stored, Pools(k, v, k_scale, v_scale)


QUANTISED = pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])


@pytest.mark.slow
@QUANTISED
def test_gradients_over_quantised_pools_match_float64(dtype) -> None:
    batch, pools = quantised(lay_out([9, 12, 30]), dtype)
    shape = (3, 5, 4, 8)
    q, out_bar, lse_bar = normal(shape, 1), normal(shape, 2), normal(shape[:3], 3)
    sinks, query_lens, options = normal((4,), 4), [4, 5, 2], PLAIN

    def total(q, sinks):
        out, lse = attend(
            REFERENCE, q, pools, batch.block_tables, batch.context_lens,
            np.asarray(query_lens, np.int32), sinks, LAYER, options,
        )  # fmt: skip
        return loss(out, lse, out_bar, lse_bar)

    q_bar, _, _, sinks_bar = expected_gradients(
        batch, q, query_lens, sinks, options, out_bar, lse_bar
    )
    assert_close(jax.jit(jax.grad(total, (0, 1)))(q, sinks), (q_bar, sinks_bar))


@QUANTISED
def test_gradients_in_quantised_pools_are_refused(dtype) -> None:
    batch, pools = quantised(lay_out([9, 12]), dtype)

    def total(pools):
        return attend(
            REFERENCE, normal((2, 4, 8), 1), pools, batch.block_tables, batch.context_lens, None,
            None, LAYER, PLAIN,
        )[0].sum()  # fmt: skip

    with pytest.raises(NotImplementedError, match="pools must be floating point"):
        jax.eval_shape(jax.grad(total, allow_int=True), pools)
    with pytest.raises(NotImplementedError, match="pools must be floating point"):
        jax.eval_shape(jax.grad(lambda scale: total(pools._replace(v_scale=scale))), pools.v_scale)


@pytest.mark.slow
def test_gradients_through_merge_attention_match_float64() -> None:
    """Attention over two parts of the keys is merged with `merge_attention`."""
    whole = lay_out([11], shared_blocks=0)
    q, out_bar, lse_bar = normal((1, 4, 8), 1), normal((1, 4, 8), 2), normal((1, 4), 3)
    sinks, options = normal((4,), 4), PLAIN

    def total(q, pools, sinks):
        first, rest = whole.block_tables[:, :2], whole.block_tables[:, 2:]
        parts = (
            *attend(XLA, q, pools, first, np.array([8]), None, None, LAYER, options),
            *attend(XLA, q, pools, rest, np.array([3]), None, sinks, LAYER, options),
        )
        return loss(*merge_attention(*parts), out_bar, lse_bar)

    q_bar, *rest = expected_gradients(
        whole, q[:, None], [1], sinks, options, out_bar[:, None], lse_bar[:, None]
    )
    actual = jax.jit(jax.grad(total, (0, 1, 2)))(q, whole.pools, sinks)
    assert_close(jax.tree.leaves(actual), [q_bar[:, 0], *rest])


def trained_layer(q, k, v, pools, layer, batch: Batch):
    """Write all tokens of sequences of equal lengths, then attend with all of them."""
    B, N = k.shape[:2]
    C = pools.k.shape[3]
    blocks = jnp.asarray(batch.block_tables)[:, np.arange(N) // C].reshape(-1)
    offsets = jnp.tile(jnp.arange(N) % C, B)
    k, v = (x.reshape(B * N, *x.shape[2:]) for x in (k, v))
    pools = OPS["write"](WriteArgs(pools, k, v, blocks, offsets, layer), backend="xla")
    out, _ = attend(
        XLA, q, pools, batch.block_tables, batch.context_lens, batch.context_lens, None,
        layer, PLAIN,
    )  # fmt: skip
    return out, pools


def dense_layer(q, k, v):
    """Compute causal attention of whole sequences without a cache."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    logits = jnp.einsum("bthd,bnhd->bhtn", q, k, precision="highest") * PLAIN.scale
    weights = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool)[None, None], logits, -jnp.inf))
    return jnp.einsum("bhtn,bnhd->bthd", weights, v, precision="highest")


@pytest.mark.slow
def test_gradients_through_paged_write_match_dense_attention() -> None:
    batch = lay_out([10, 10], shared_blocks=0)
    q, k, v = normal((2, 10, 4, 8), 1), normal((2, 10, 2, 8), 2), normal((2, 10, 2, 8), 3)
    out_bar = normal(q.shape, 4)

    def paged(q, k, v):
        return jnp.sum(out_bar * trained_layer(q, k, v, batch.pools, LAYER, batch)[0])

    no_lse_bar = np.zeros(q.shape[1:3])
    expected = [
        oracles.attention_gradients(*rows, no_lse_bar, scale=PLAIN.scale)[:3]
        for rows in zip(q, k, v, out_bar, strict=True)
    ]
    actual = jax.jit(jax.grad(paged, (0, 1, 2)))(q, k, v)
    assert_close(actual, [np.stack(x) for x in zip(*expected, strict=True)])


@pytest.mark.slow
def test_gradients_through_a_scan_over_rematerialised_layers() -> None:
    """Each layer of the model writes to the pools, which are the carry, and then reads them."""
    batch = lay_out([10, 10], shared_blocks=0)
    x = normal((2, 10, 4, 8), 1)
    k_weights, v_weights = (0.3 * normal((NUM_LAYERS, 4, 2), i) for i in (2, 3))

    def model(attend, carry, weights):
        def layer(carry, weights):
            x, *rest = carry
            k, v = (jnp.einsum("bthd,hk->btkd", x, w, precision="highest") for w in weights[:2])
            out, *rest = attend(x, k, v, *rest, weights[2])
            return (x + out, *rest), None

        return jax.lax.scan(jax.checkpoint(layer), carry, (*weights, jnp.arange(NUM_LAYERS)))[0][0]

    def paged(x, weights):
        def attend(x, k, v, pools, layer):
            return trained_layer(x, k, v, pools, layer, batch)

        return jnp.mean(model(attend, (x, batch.pools), weights) ** 2)

    def expected(x, weights):
        def attend(x, k, v, layer):
            del layer
            return (dense_layer(x, k, v),)

        return jnp.mean(model(attend, (x,), weights) ** 2)

    arguments = x, (k_weights, v_weights)
    actual, oracle = (
        jax.tree.leaves(jax.jit(jax.grad(f, (0, 1)))(*arguments)) for f in (paged, expected)
    )
    assert_close(actual, oracle)


@pytest.mark.slow
def test_gradients_under_vmap() -> None:
    batch, B = lay_out(DECODE_LENGTHS), len(DECODE_LENGTHS)
    q, out_bar, lse_bar = normal((3, B, 4, 8), 1), normal((B, 4, 8), 2), normal((B, 4), 3)

    def gradients(q):
        arrays = batch.pools, None, batch.block_tables, batch.context_lens, out_bar, lse_bar
        return pull_decode_back(q, *arrays, PLAIN)

    together = jax.jit(jax.vmap(gradients))(q)
    for i in range(3):
        alone = decode_gradients(batch, q[i], None, PLAIN, out_bar, lse_bar)
        assert_close([x[i] for x in together], alone, atol=1e-6)


@functools.cache
def memory(argnums, num_layers: int, num_blocks: int = 4096, width: int = 8):
    """Return the memory of the compiled gradient of a decode, and the bytes of a pool."""
    shape = (num_layers, num_blocks, 2, 4, 8)
    pools = Pools(*(jax.ShapeDtypeStruct(shape, jnp.float32),) * 2)

    def total(q, pools, tables, lens, layer):
        out, _ = attend(XLA, q, pools, tables, lens, None, None, layer, PLAIN)
        return out.sum()

    compiled = (
        jax.jit(jax.grad(total, argnums))
        .lower(
            jax.ShapeDtypeStruct((2, 4, 8), jnp.float32),
            pools,
            jax.ShapeDtypeStruct((2, width), jnp.int32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        .compile()
    )
    return compiled.memory_analysis(), 4 * np.prod(shape)


def test_gradients_in_queries_alone_allocate_no_pool() -> None:
    usage, pool_bytes = memory(0, num_layers=1, width=64)
    assert usage.temp_size_in_bytes + usage.output_size_in_bytes < 0.1 * pool_bytes


def test_gradients_in_pools_need_temporary_memory_for_one_layer() -> None:
    """Temporary memory has the gradients in K and V of a layer, and a copy of the layer."""
    usage, pool_bytes = memory((0, 1), num_layers=16)
    assert usage.temp_size_in_bytes < 4.1 * pool_bytes / 16
    assert usage.output_size_in_bytes < 2.1 * pool_bytes


def test_gradients_memory_does_not_depend_on_the_table() -> None:
    """With a table of 100 times the width, a loop step must not gather more."""
    narrow, wide = (memory(0, num_layers=1, width=width)[0] for width in (64, 6400))
    table_bytes = 2 * 6400 * 4
    assert wide.temp_size_in_bytes - narrow.temp_size_in_bytes <= 2 * table_bytes
