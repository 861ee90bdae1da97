"""The paged cache: values are read back as written, and other slots do not change."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import contents
from paged_jax.cache import paged_cache as lib
from paged_jax.cache.blocks import check_invariants
from paged_jax.cache.groups import locate
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.kernels.bits import bits_of
from paged_jax.kernels.kv_dtypes import KV_DTYPES, QUANTISED, KVDtype, quantise
from paged_jax.kernels.writing import paged_write

L, P, K, C, D, S, M = 2, 10, 3, 4, 8, 3, 3
DTYPES = [kv.values for kv in KV_DTYPES.values()]
# A dtype that XLA copies as it is on CPU, one that it copies as integers, and one with scales.
KINDS = [jnp.float32, jnp.bfloat16, jnp.int8]

RESERVE = jax.jit(lib.reserve, static_argnames="max_tokens", donate_argnums=0)
FORK = jax.jit(lib.fork, donate_argnums=0)
RELEASE = jax.jit(lib.release, donate_argnums=0)
REORDER = jax.jit(lib.reorder, donate_argnums=0)
TRUNCATE = jax.jit(lib.truncate, static_argnames="max_tokens", donate_argnums=0)
ATTACH = jax.jit(lib.attach, donate_argnums=0)
PUBLISH = jax.jit(lib.publish, donate_argnums=0)
GATHER = jax.jit(contents.gather)
READ = jax.jit(contents.read_blocks, static_argnames="width")
WRITE = jax.jit(contents.write_blocks, donate_argnums=0)
QUANTISE = jax.jit(quantise, static_argnums=1)


def i32(values) -> jax.Array:
    return jnp.array(values, jnp.int32)


def write_layers(cache: PagedCache, k, v, slots, positions) -> PagedCache:
    """Write k and v [L, N, K, D] to the given slots and positions, in every layer."""
    blocks, offsets = locate(cache.tables, slots, positions)
    pools = cache.pools
    for layer in range(L):
        pools = paged_write(
            pools.k, pools.v, k[layer], v[layer], blocks, offsets, layer=layer,
            k_scale=pools.k_scale, v_scale=pools.v_scale,
        )  # fmt: skip
    return cache.replace_pools(pools)


WRITE_LAYERS = jax.jit(write_layers, donate_argnums=0)


def write_all(cache: PagedCache, k, v, slots, positions) -> PagedCache:
    """Call `write_layers` with padding to a fixed size."""
    padding = S * M * C - len(slots)
    k, v = (np.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (k, v))
    slots = np.pad(np.asarray(slots, np.int32), (0, padding), constant_values=-1)
    positions = np.pad(np.asarray(positions, np.int32), (0, padding))
    return WRITE_LAYERS(cache, k, v, slots, positions)


def make_cache(dtype=jnp.float32) -> PagedCache:
    """Return an empty cache of NaN that allocates its blocks in a shuffled order."""
    cache = PagedCache.create(
        num_layers=L, num_blocks=P, num_kv_heads=K, block_size=C, head_dim=D,
        num_slots=S, max_blocks_per_slot=M, dtype=dtype,
    )  # fmt: skip
    pool = replace(cache.tables.pool, free_queue=i32([7, 2, 9, 0, 5, 1, 8, 3, 6, 4]))
    cache = cache.replace_tables([replace(cache.tables, pool=pool)])
    return cache.replace_pools(jax.tree.map(poison, cache.pools))


def poison(array: jax.Array) -> jax.Array:
    return jnp.full_like(array, jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else 77)


def make_tokens(seed: int, num_tokens: int, dtype=jnp.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V of some tokens, [L, N, K, D] each."""
    k, v = np.random.default_rng(seed).normal(size=(2, L, num_tokens, K, D))
    dtype = jnp.float32 if KVDtype.of(dtype).has_scales else dtype
    return k.astype(dtype), v.astype(dtype)


def stored(tokens: np.ndarray, dtype) -> np.ndarray:
    """Return tokens after conversion to the dtype of a pool and back."""
    if not KVDtype.of(dtype).has_scales:
        return tokens
    values, scales = QUANTISE(tokens, dtype)
    return np.asarray(values.astype(jnp.float32) * scales[..., None])


def append(cache: PagedCache, slot: int, k: np.ndarray, v: np.ndarray) -> PagedCache:
    count, length = k.shape[1], int(cache.lengths[slot])
    cache, ok = RESERVE(cache, i32([count * (s == slot) for s in range(S)]), max_tokens=M * C)
    assert ok
    return write_all(cache, k, v, [slot] * count, length + np.arange(count))


def assert_holds(cache: PagedCache, slot: int, k: np.ndarray, v: np.ndarray) -> None:
    """Check that the slot holds exactly these tokens, then zeros."""
    count = k.shape[1]
    k, v = stored(k, cache.k.dtype), stored(v, cache.v.dtype)
    for layer in range(L):
        for got, expected in zip(GATHER(cache, slot, layer=layer), (k, v), strict=True):
            got = np.asarray(got)
            assert got.shape == (M * C, K, D)
            np.testing.assert_array_equal(got[:count], expected[layer])
            np.testing.assert_array_equal(got[count:], 0)


def join(*tokens: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [np.concatenate(parts, axis=1) for parts in zip(*tokens, strict=True)]


def test_create_has_the_given_sizes():
    cache = PagedCache.create(
        num_layers=2, num_blocks=10, num_kv_heads=3, block_size=4, head_dim=8,
        num_slots=5, max_blocks_per_slot=6, dtype=jnp.bfloat16,
    )  # fmt: skip
    assert cache.k.shape == cache.v.shape == (2, 10, 3, 4, 8)
    sizes = (cache.num_layers, cache.num_blocks, cache.num_kv_heads, cache.block_size)
    assert sizes == (2, 10, 3, 4) and cache.head_dim == 8 and cache.num_slots == 5
    assert cache.block_tables.shape == (5, 6) and cache.lengths.shape == (5,)
    assert cache.nbytes == 2 * (2 * 10 * 3 * 4 * 8) * 2
    assert cache.pools == (cache.k, cache.v, None, None)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_create_makes_scales_for_quantised_pools(dtype):
    cache = make_cache(dtype)
    assert cache.k.dtype == cache.v.dtype == dtype
    for scale in (cache.k_scale, cache.v_scale):
        assert scale.shape == (L, P, K, C) and scale.dtype == jnp.float32
    assert cache.nbytes == 2 * (L * P * K * C) * (D + 4)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "num_blocks"])
def test_create_rejects_sizes_that_are_not_positive(name):
    sizes = dict(num_layers=1, num_blocks=1, num_kv_heads=1, block_size=1, head_dim=1)
    sizes |= dict(num_slots=1, max_blocks_per_slot=1) | {name: 0}
    with pytest.raises(ValueError, match=f"create: {name} must be a positive integer, got 0"):
        PagedCache.create(**sizes)


@pytest.mark.parametrize("dtype", ["int4", "int32", "bool", "fp8"])
def test_create_rejects_unsupported_dtypes(dtype):
    with pytest.raises(ValueError, match=f"dtype must be floating point, int8 .* got '?{dtype}"):
        make_cache(dtype)


def test_reserve_accepts_a_list():
    cache, ok = lib.reserve(make_cache(), [2, 0, 1], max_tokens=2)
    assert ok and cache.lengths.tolist() == [2, 0, 1]


def test_create_rejects_more_rows_than_int32_can_count():
    sizes = dict(num_blocks=2**20, num_kv_heads=8, block_size=16, head_dim=1)
    create = partial(PagedCache.create, **sizes, num_slots=1, max_blocks_per_slot=1)
    assert jax.eval_shape(partial(create, num_layers=15)).k.shape[0] == 15
    with pytest.raises(ValueError, match="must have at most 2147483647 rows"):
        jax.eval_shape(partial(create, num_layers=16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_then_gather_returns_the_tokens_of_each_slot(dtype):
    cache = make_cache(dtype)
    lengths = [M * C, 0, C + 1]
    tokens = [make_tokens(slot, length, dtype) for slot, length in enumerate(lengths)]
    # Use the program for float32: tables do not depend on the dtype.
    reserved, ok = RESERVE(make_cache(), i32(lengths), max_tokens=M * C)
    cache = cache.replace_tables([reserved.tables])
    assert ok and cache.block_tables.tolist() == [[7, 2, 9], [P, P, P], [0, 5, P]]
    # Write all slots together, with tokens in random order and padding between them.
    slots = np.repeat(np.arange(S), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    order = np.random.default_rng(0).permutation(len(slots))
    k, v = (np.pad(x[:, order], ((0, 0), (0, 3), (0, 0), (0, 0))) for x in join(*tokens))
    slots = [*slots[order], -1, S, 2]
    positions = [*positions[order], 0, 0, C + 1]
    cache = write_all(cache, k, v, slots, positions)
    for slot in range(S):
        assert_holds(cache, slot, *tokens[slot])


def test_gather_rejects_slots_and_layers_that_do_not_exist():
    cache = make_cache()
    with pytest.raises(ValueError, match="gather: slot must be 0 to 2, got 3"):
        contents.gather(cache, 3, layer=0)
    with pytest.raises(ValueError, match="gather: layer must be 0 to 1, got 2"):
        contents.gather(cache, 0, layer=2)


def test_locate_returns_no_block_for_positions_without_a_token():
    cache, _ = RESERVE(make_cache(), i32([C + 1, 0, 2]), max_tokens=M * C)
    slots = i32([0, 0, 0, 0, 1, 2, 2, -1, S])
    positions = i32([0, C, C + 1, -1, 0, 1, 2, 0, 0])
    blocks, offsets = locate(cache.tables, slots, positions)
    table = cache.block_tables
    assert blocks.tolist() == [table[0, 0], table[0, 1], P, P, P, table[2, 0], P, P, P]
    assert offsets[:2].tolist() == [0, 0] and int(offsets[5]) == 1
    with pytest.raises(ValueError, match="locate: positions must have N"):
        locate(cache.tables, slots, positions[:2])


@pytest.mark.parametrize("dtype", KINDS)
def test_append_after_fork_copies_the_partial_block_in_all_layers(dtype):
    prompt, ours, theirs = (make_tokens(i, n, dtype) for i, n in enumerate((C + 2, 3, 1)))
    cache = append(make_cache(dtype), 0, *prompt)
    cache, ok = FORK(cache, i32([-1, 0, 0]))
    assert ok
    cache = append(cache, 1, *theirs)
    assert_holds(cache, 0, *prompt)
    assert_holds(cache, 1, *join(prompt, theirs))
    cache = append(cache, 0, *ours)
    assert_holds(cache, 0, *join(prompt, ours))
    assert_holds(cache, 1, *join(prompt, theirs))
    assert_holds(cache, 2, *prompt)
    assert len(set(cache.block_tables[:, 0].tolist())) == 1
    assert len(set(cache.block_tables[:, 1].tolist())) == 3
    check_invariants(cache.tables)
    cache = RELEASE(cache, jnp.array([True, False, True]))
    assert_holds(cache, 1, *join(prompt, theirs))
    check_invariants(cache.tables)


def test_reserve_copies_a_block_for_all_holders_except_one():
    prompt = make_tokens(0, 2)
    cache, _ = FORK(append(make_cache(), 0, *prompt), i32([-1, 0, 0]))
    cache, ok = RESERVE(cache, i32([1, 1, 1]), max_tokens=M * C)
    assert ok
    new = make_tokens(1, S)
    cache = write_all(cache, *new, range(S), [2] * S)
    for slot in range(S):
        assert_holds(cache, slot, *join(prompt, tuple(x[:, slot : slot + 1] for x in new)))
    check_invariants(cache.tables)


def test_reserve_passes_gradients_to_the_copied_block():
    """Expected: the prompt and the new token of each slot, concatenated."""
    (prompt, _), (new, _) = make_tokens(0, C + 2), make_tokens(1, S)
    factors = np.random.default_rng(2).normal(size=(S, L, C + 3, K, D)).astype(np.float32)
    empty, slots = make_cache(), jnp.arange(S, dtype=jnp.int32)

    def grown(prompt, new):
        cache, _ = lib.reserve(empty, i32([C + 2, 0, 0]), max_tokens=M * C)
        cache = write_layers(cache, prompt, prompt, i32([0] * (C + 2)), jnp.arange(C + 2))
        cache, _ = lib.fork(cache, i32([-1, 0, 0]))
        cache, _ = lib.reserve(cache, i32([1, 1, 1]), max_tokens=M * C)
        cache = write_layers(cache, new, new, slots, cache.lengths - 1)
        rows = [[contents.gather(cache, s, layer=i)[0] for i in range(L)] for s in range(S)]
        return jnp.stack([jnp.stack(row) for row in rows])[:, :, : C + 3]

    def plain(prompt, new):
        return jnp.stack([jnp.concatenate([prompt, new[:, s : s + 1]], axis=1) for s in range(S)])

    got, expected = (
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(factors * f(*x) ** 2), argnums=(0, 1)))(
            prompt, new
        )
        for f in (grown, plain)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_reserve_that_fails_changes_nothing():
    cache = append(make_cache(), 0, *make_tokens(0, C + 2))
    cache, _ = FORK(cache, i32([-1, 0, -1]))
    before = jax.tree.map(np.array, cache)
    cache, ok = RESERVE(cache, i32([1, 1, M * C + 1]), max_tokens=M * C)
    assert not ok
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, cache), before)


def test_reserve_runs_in_a_while_loop():
    prompt, new = make_tokens(0, 3), make_tokens(1, M * C)
    cache, _ = FORK(append(make_cache(), 0, *prompt), i32([-1, 0, -1]))
    slots = jnp.arange(S, dtype=jnp.int32)

    def body(carry):
        cache, step, _ = carry
        cache, ok = lib.reserve(cache, i32([1, 1, 0]))
        k, v = (jax.lax.dynamic_index_in_dim(jnp.asarray(x), step, axis=1) for x in new)
        # Slot 1 gets the negative of the values of slot 0.
        k, v = (jnp.concatenate([x, -x, jnp.full_like(x, jnp.nan)], axis=1) for x in (k, v))
        cache = write_layers(cache, k, v, jnp.where(ok, slots, -1), cache.lengths - 1)
        return cache, step + ok.astype(jnp.int32), ok

    start = (cache, jnp.int32(0), jnp.array(True))
    cache, num_steps, _ = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[2], body, c))(start)
    assert num_steps == M * C - 3
    new = tuple(x[:, : int(num_steps)] for x in new)
    assert_holds(cache, 0, *join(prompt, new))
    assert_holds(cache, 1, *join(prompt, tuple(-x for x in new)))
    check_invariants(cache.tables)


def abstract_cache(dtype, num_blocks: int = 4096) -> PagedCache:
    """Return the shapes of a larger cache, to compile for it without memory."""
    create = partial(
        PagedCache.create, num_layers=4, num_blocks=num_blocks, num_kv_heads=4, block_size=16,
        head_dim=64, num_slots=16, max_blocks_per_slot=64, dtype=dtype,
    )  # fmt: skip
    return jax.eval_shape(create)


def test_attach_finds_the_tokens_of_a_released_slot():
    tokens = make_tokens(0, 2 * C + 1)
    cache = append(make_cache(), 0, *tokens)
    digests = jnp.arange(2 * 8, dtype=jnp.uint32).reshape(2, 8)
    token_ids = jnp.arange(2 * C, dtype=jnp.int32).reshape(2, C)
    cache = PUBLISH(cache, i32([0, 0]), i32([0, 1]), digests, token_ids)
    cache = RELEASE(cache, jnp.array([True, False, False]))
    cache, num_found = ATTACH(cache, 1, digests, token_ids, 2)
    assert num_found == 2
    assert_holds(cache, 1, *(x[:, : 2 * C] for x in tokens))
    _, num_found = ATTACH(lib.forget(cache), 2, digests, token_ids, 2)
    assert num_found == 0


def test_append_after_truncate_continues_at_the_new_end():
    tokens, new = make_tokens(0, 2 * C + 1), make_tokens(1, 2)
    cache = TRUNCATE(append(make_cache(), 0, *tokens), i32([C + 1, 0, 0]), max_tokens=C)
    kept = tuple(x[:, : C + 1] for x in tokens)
    assert_holds(cache, 0, *kept)
    assert_holds(append(cache, 0, *new), 0, *join(kept, new))


def test_append_after_reorder_keeps_the_tokens_of_every_slot():
    tokens = [make_tokens(slot, length) for slot, length in enumerate((C + 2, 3))]
    cache = append(append(make_cache(), 0, *tokens[0]), 1, *tokens[1])
    cache, ok = REORDER(cache, i32([1, 0, 0]))
    assert ok
    new = make_tokens(2, 1)
    cache = append(cache, 1, *new)
    for slot, expected in enumerate((tokens[1], join(tokens[0], new), tokens[0])):
        assert_holds(cache, slot, *expected)


def bits(pools) -> list[np.ndarray]:
    """Return arrays as bytes, in which NaN equals itself."""
    return [np.asarray(array).view(np.uint8) for array in jax.tree.leaves(pools)]


@pytest.mark.parametrize("dtype", KINDS)
def test_write_blocks_restores_blocks_in_another_slot(dtype):
    tokens, others = make_tokens(0, 2 * C + 1, dtype), make_tokens(1, M * C, dtype)
    cache = append(make_cache(dtype), 0, *tokens)
    old_blocks = cache.block_tables[0].tolist()
    # In two calls. The second one reads past the end of the slot and of the table.
    saved = [jax.device_get(READ(cache, 0, first, width=2)) for first in (0, 2)]
    assert saved[0].k.shape == (L, 2, K, C, D) and saved[0].k.dtype == dtype
    cache = RELEASE(cache, jnp.array([True, False, False]))
    cache = append(cache, 2, *others)
    cache, ok = RESERVE(cache, i32([0, 2 * C + 1, 0]), max_tokens=M * C)
    assert ok and cache.block_tables[1].tolist() != old_blocks
    for first, values in zip((0, 2), saved, strict=True):
        cache = WRITE(cache, 1, first, values)
    assert_holds(cache, 1, *tokens)
    assert_holds(cache, 2, *others)
    check_invariants(cache.tables)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_read_blocks_returns_zeros_for_blocks_that_are_not_held(dtype):
    cache = append(make_cache(dtype), 0, *make_tokens(0, C + 1, dtype))
    for slot, first, num_held in (
        (0, 1, 1),
        (0, 2, 0),
        (0, -1, 1),
        (1, 0, 0),
        (-1, 0, 0),
        (S, 0, 0),
    ):
        for array in bits(READ(cache, slot, first, width=2)):
            is_zero = ~array.any(axis=tuple(i for i in range(array.ndim) if i != 1))
            assert is_zero.sum() == 2 - num_held, (slot, first)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_write_blocks_ignores_blocks_that_are_not_held(dtype):
    cache = append(make_cache(dtype), 0, *make_tokens(0, C + 1, dtype))
    before = bits(cache.pools)
    values = jax.tree.map(lambda x: np.ones_like(x), jax.device_get(READ(cache, 0, 0, width=2)))
    for slot, first in ((0, 2), (0, M), (0, -2), (1, 0), (-1, 0), (S, 0)):
        cache = WRITE(cache, slot, first, values)
        jax.tree.map(np.testing.assert_array_equal, bits(cache.pools), before)
    cache = WRITE(cache, 0, 1, values)
    block = int(cache.block_tables[0, 1])
    for after, expected in zip(bits(cache.pools), before, strict=True):
        assert not np.array_equal(after[:, block], expected[:, block])
        others = np.arange(P) != block
        np.testing.assert_array_equal(after[:, others], expected[:, others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v._replace(k_scale=None, v_scale=None),
            "values must have scales if the pools have scales",
        ),
        (lambda v: v._replace(k=v.k[:, :, :1]), r"values.k must be int8 \[2, 2, 3, 4, 8\], got"),
        (lambda v: v._replace(v=v.v[:, :1]), r"values.v must be int8 \[2, 2, 3, 4, 8\], got"),
        (lambda v: v._replace(k=v.k.astype(jnp.int32)), "values.k must be int8 .* got int32"),
        (lambda v: v._replace(v_scale=v.v_scale[0]), "values.v_scale must be float32"),
    ],
)
def test_write_blocks_rejects_values_of_other_pools(change, message):
    cache = make_cache(jnp.int8)
    values = change(READ(cache, 0, 0, width=2))
    with pytest.raises(ValueError, match=f"write_blocks: {message}"):
        contents.write_blocks(cache, 0, 0, values)


def test_read_blocks_rejects_a_width_that_is_not_a_positive_integer():
    with pytest.raises(ValueError, match="read_blocks: width must be a positive integer, got 0"):
        contents.read_blocks(make_cache(), 0, 0, width=0)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("dtype", KINDS)
def test_read_and_donated_write_blocks_need_little_memory(dtype):
    cache = abstract_cache(dtype)
    nbytes = cache.k.size * cache.k.dtype.itemsize
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = READ.lower(cache, scalar, scalar, width=8)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 0.01 * nbytes
    values = jax.eval_shape(partial(READ, width=8), cache, scalar, scalar)
    memory = WRITE.lower(cache, scalar, scalar, values).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * nbytes
    # On CPU, pools of these dtypes are cast to integers and back.
    limit = 2.01 if bits_of(cache.k.dtype) else 0.01
    assert memory.temp_size_in_bytes < limit * nbytes


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_donated_reserve_needs_little_memory(dtype):
    cache = abstract_cache(dtype)
    nbytes = cache.k.size * cache.k.dtype.itemsize
    num_tokens = jax.ShapeDtypeStruct((16,), jnp.int32)
    memory = RESERVE.lower(cache, num_tokens).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * nbytes
    assert memory.temp_size_in_bytes < 0.01 * nbytes


def use_all_operations(digests: jax.Array, token_ids: jax.Array) -> tuple:
    """Return the results of every operation of a cache."""
    cache = PagedCache.create(
        num_layers=L, num_blocks=P, num_kv_heads=K, block_size=C, head_dim=D,
        num_slots=S, max_blocks_per_slot=M, dtype=jnp.int8,
    )  # fmt: skip
    none = jnp.full(S, -1, jnp.int32)
    cache, is_reserved = lib.reserve(cache, i32([2 * C + 1, 0, 0]), max_tokens=M * C)
    cache = lib.publish(cache, i32([0, 0]), i32([0, 1]), digests, token_ids)
    cache, num_found = lib.attach(cache, 1, digests, token_ids, 2)
    cache, is_forked = lib.fork(cache, none.at[2].set(1))
    cache, is_appended = lib.reserve(cache, i32([1, 1, 1]))
    cache, is_reordered = lib.reorder(cache, none.at[2].set(0))
    cache = lib.truncate(cache, i32([C, C, C]), max_tokens=C)
    cache = lib.release(cache, jnp.array([False, True, True]))
    cache = contents.write_blocks(
        lib.forget(cache), 0, 0, contents.read_blocks(cache, 0, 0, width=2)
    )
    places = locate(cache.tables, i32([0, 1]), i32([0, 3]))
    values = contents.gather(cache, 0, layer=0)
    return cache, is_reserved, num_found, is_forked, is_appended, is_reordered, places, values


@pytest.mark.parametrize(
    "mode",
    [partial(jax.numpy_dtype_promotion, "strict"), partial(jax.enable_x64, True)],
    ids=["strict", "x64"],
)
def test_operations_keep_their_dtypes_in_every_jax_mode(mode):
    shapes = (
        jax.ShapeDtypeStruct((2, 8), jnp.uint32),
        jax.ShapeDtypeStruct((2, C), jnp.int32),
    )
    expected = jax.eval_shape(use_all_operations, *shapes)
    with mode():
        assert jax.eval_shape(use_all_operations, *shapes) == expected
