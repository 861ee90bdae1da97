"""The Llama module: plain forward, prefill and decode say the same, and the steps copy nothing."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.cache import paged_cache
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama, create_cache

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)
PREFILL = jax.jit(Llama.prefill, donate_argnames="cache", static_argnames="backend")
DECODE = jax.jit(Llama.decode, donate_argnames="cache", static_argnames="backend")


PLAIN = jax.jit(Llama.__call__)


def build(config=CONFIG, *, scan_layers=False, seed=0) -> Llama:
    """A model with random weights, norms and biases too: at one and zero they would hide."""
    abstract = nnx.eval_shape(lambda: Llama(config, scan_layers=scan_layers, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        offset = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(offset + 0.2 * rng.normal(size=leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(fill, state))


def new_cache(config=CONFIG, *, num_slots=3, num_blocks=24, block_size=4, **changes) -> PagedCache:
    return PagedCache.create(
        num_layers=config.num_hidden_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_key_value_heads,
        block_size=block_size,
        num_slots=num_slots,
        max_blocks_per_slot=num_blocks,
        **{"head_dim": config.head_dim, **changes},
    )


def test_create_cache_has_room_for_all_slots_at_full_length() -> None:
    model = Llama(CONFIG, rngs=nnx.Rngs(0))
    cache = model.create_cache(num_slots=3, max_length=9, block_size=4, dtype=jnp.bfloat16)
    K, D = CONFIG.num_key_value_heads, CONFIG.head_dim
    assert cache.k.shape == (CONFIG.num_hidden_layers, 9, K, 4, D)
    assert cache.k.dtype == jnp.bfloat16 and cache.block_tables.shape == (3, 3)
    on_tpu = create_cache(CONFIG, num_slots=3, max_length=9, num_blocks=5, platform="tpu")
    assert on_tpu.k.shape == (CONFIG.num_hidden_layers, 5, K, 16, 128)
    with pytest.raises(ValueError, match="create_cache: max_length must be a positive integer"):
        model.create_cache(num_slots=3, max_length=0)


def tokens(B, T, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (B, T), np.int32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def poison(cache: PagedCache) -> PagedCache:
    """NaN wherever no token has been written: reading it shows."""
    k, v = (jnp.asarray(np.full(cache.k.shape, np.nan, cache.k.dtype)) for _ in range(2))
    return PagedCache(k=k, v=v, tables=cache.tables)


VARIANTS = {
    "llama": {},
    "tied-window": {"tie_word_embeddings": True, "sliding_window": 5},
    "biases-qk-norm": {"qkv_bias": True, "o_bias": True, "qk_norm": True},
}
ALL = {name: value for changes in VARIANTS.values() for name, value in changes.items()}


@pytest.mark.parametrize(
    ("variant", "scan_layers"),
    [
        pytest.param(VARIANTS["llama"], False, id="llama"),
        pytest.param(VARIANTS["tied-window"], False, id="tied-window", marks=pytest.mark.slow),
        pytest.param(VARIANTS["biases-qk-norm"], False, id="biases-qk-norm"),
        pytest.param(ALL, True, id="all-scanned", marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_match_the_plain_forward(variant, scan_layers) -> None:
    config = dataclasses.replace(CONFIG, **variant)
    model = build(config, scan_layers=scan_layers)
    ids = tokens(1, 21)
    expected = np.asarray(PLAIN(model, ids))[0]
    cache = poison(new_cache(config))

    # Two chunks, the second over cached context; row 0 of the batch is left out.
    for start, chunk in ((0, ids[:, :7]), (7, ids[:, 7:17])):
        padded = np.zeros((2, 12), np.int32)
        padded[1, : chunk.shape[1]] = chunk[0]
        logits, cache, ok = PREFILL(model, cache, padded, i32(-1, 2), i32(5, chunk.shape[1]))
        assert ok
        np.testing.assert_allclose(logits[1], expected[start + chunk.shape[1] - 1], atol=2e-5)
    for t in range(17, 21):
        logits, cache, ok = DECODE(model, cache, i32(ids[0, t], 0), i32(2, -1))
        assert ok
        np.testing.assert_allclose(logits[0], expected[t], atol=2e-5)
    assert cache.lengths.tolist() == [0, 0, 21]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "atol", "scan_layers"),
    [
        ({"head_dim": 128}, 2e-5, False),
        ({"dtype": jnp.int8}, 0.1, True),
        ({"dtype": jnp.float8_e4m3fn, "head_dim": 128}, 0.3, False),
    ],
    ids=["padded", "int8-scanned", "fp8-padded"],
)
def test_any_cache_will_do(changes, atol, scan_layers) -> None:
    model = build(scan_layers=scan_layers)
    ids = tokens(1, 21)
    expected = np.asarray(PLAIN(model, ids))[0]
    slot = i32(1)
    logits, cache, ok = PREFILL(model, new_cache(**changes), ids[:, :17], slot, i32(17))
    np.testing.assert_allclose(logits[0], expected[16], atol=atol)
    for t in range(17, 21):
        logits, cache, ok = DECODE(model, cache, ids[:, t], slot)
        assert ok
        np.testing.assert_allclose(logits[0], expected[t], atol=atol)


def test_scanned_and_unrolled_layers_are_the_same_function() -> None:
    unrolled = build()
    scanned = build(scan_layers=True)
    stacked = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack(leaves)),
        *[nnx.state(layer) for layer in unrolled.layers],
    )
    nnx.update(scanned.layers, stacked)
    for name in ("embed_tokens", "norm", "lm_head"):
        getattr(scanned, name)[...] = getattr(unrolled, name)[...]
    ids = tokens(2, 9)
    np.testing.assert_allclose(PLAIN(scanned, ids), PLAIN(unrolled, ids), atol=1e-5)


def test_forward_is_causal_and_differentiable() -> None:
    model = build()
    ids = tokens(2, 8)
    changed = np.where(np.arange(8) < 5, ids, 0)
    np.testing.assert_array_equal(PLAIN(model, ids)[:, :5], PLAIN(model, changed)[:, :5])

    def loss(model):
        return jnp.mean(jax.nn.logsumexp(model(ids), axis=-1))

    gradients = jax.jit(jax.grad(loss))(model)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


def test_decode_out_of_blocks_changes_nothing() -> None:
    model = build()
    cache = new_cache(num_blocks=2)
    _, cache, ok = PREFILL(model, cache, tokens(1, 8), i32(0), i32(8))
    assert ok
    before = jax.tree.map(np.array, cache)
    _, cache, ok = DECODE(model, cache, i32(3), i32(0))
    assert not ok
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(old, new)


def test_decode_refuses_a_slot_that_does_not_exist() -> None:
    model = build()
    _, cache, ok = DECODE(model, new_cache(), i32(3, 4), i32(0, 3))
    assert not ok
    assert cache.lengths.tolist() == [0, 0, 0]


def test_decode_copies_on_write_after_a_fork() -> None:
    model = build()
    ids = tokens(1, 6)
    cache = new_cache()
    _, cache, _ = PREFILL(model, cache, ids, i32(0), i32(6))
    cache, ok = paged_cache.fork(cache, i32(-1, 0, -1))
    assert ok
    for a, b in ((11, 29), (5, 40)):
        _, cache, ok = DECODE(model, cache, i32(a, b), i32(0, 1))
        assert ok
    logits, cache, _ = DECODE(model, cache, i32(1, 1), i32(0, 1))
    for row, continuation in enumerate(([11, 5, 1], [29, 40, 1])):
        expected = PLAIN(model, np.concatenate([ids, [continuation]], axis=1, dtype=np.int32))[
            0, -1
        ]
        np.testing.assert_allclose(logits[row], expected, atol=2e-5)
    # Two sequences of 9 tokens: the full block of the prompt is shared, two others are not.
    assert int(cache.num_blocks - cache.tables.pool.num_free) == 1 + 2 * 2


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("step", ["decode", "cascade", "prefill"])
def test_step_copies_no_pool(step, scan_layers) -> None:
    """Temporary memory stays far below one pool, and both pools are updated in place."""
    model = build(scan_layers=scan_layers)
    cache = new_cache(num_blocks=4096, block_size=16)
    graphdef, state = nnx.split(model)

    def run(state, cache, ids, slots):
        model = nnx.merge(graphdef, state)
        if step != "prefill":
            return model.decode(cache, ids[:, 0], slots, cascade=step == "cascade")
        return model.prefill(cache, ids, slots, jnp.full_like(slots, 16))

    compiled = (
        jax.jit(run, donate_argnames="cache")
        .lower(state, cache, tokens(2, 16), jnp.array([0, 1], jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * cache.k.nbytes
    assert memory.alias_size_in_bytes >= cache.nbytes


def test_whole_rollout_is_one_program() -> None:
    """Allocation included, inside a while loop: what a training loop calls."""
    model = build()
    ids = tokens(1, 5)

    def rollout(model, cache):
        logits, cache, _ = model.prefill(cache, ids, jnp.array([0]), jnp.array([5]))

        def body(state):
            i, out, token, cache = state
            logits, cache, _ = model.decode(cache, token, jnp.array([0]))
            return i + 1, out.at[i].set(token[0]), jnp.argmax(logits, -1).astype(jnp.int32), cache

        first = jnp.argmax(logits, -1).astype(jnp.int32)
        state = (0, jnp.zeros(9, jnp.int32), first, cache)
        return jax.lax.while_loop(lambda s: s[0] < 9, body, state)[1]

    out = jax.jit(rollout)(model, new_cache())
    sequence = np.concatenate([ids, out[None]], axis=1)
    expected = np.argmax(PLAIN(model, sequence)[0], axis=-1)
    np.testing.assert_array_equal(out, expected[4:-1])


def test_call_refuses_a_wrong_rank() -> None:
    with pytest.raises(ValueError, match=r"token_ids must have shape \[B, T\], got \[3\]"):
        build()(jnp.zeros(3, jnp.int32))


@functools.cache
def stories(folder) -> tuple[Llama, list[dict], dict[str, np.ndarray]]:
    folder = folder / "models" / "stories260K"
    items = json.loads((folder / "reference.json").read_text())["items"]
    return Llama.from_pretrained(folder), items, dict(np.load(folder / "reference_logits.npz"))


def test_stories_logits_of_the_plain_forward(data_dir) -> None:
    model, items, reference = stories(data_dir)
    for i, item in enumerate(items):
        ids = item["prompt_ids"] + item["generated_ids"][:-1]
        padded = np.zeros((1, 288), np.int32)  # one length, one program
        padded[0, : len(ids)] = ids
        logits = np.asarray(PLAIN(model, padded))[0, : len(ids)]
        start = len(item["prompt_ids"])
        np.testing.assert_allclose(logits[:start], reference[f"prefill_logits_{i}"], atol=1e-4)
        np.testing.assert_allclose(logits[start - 1 :], reference[f"step_logits_{i}"], atol=1e-4)


@pytest.mark.parametrize("block_size", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_stories_logits_through_the_paged_path(data_dir, block_size) -> None:
    """Four prompts in one batch, decoded with transformers' tokens, logits within 1e-4."""
    model, items, reference = stories(data_dir)
    cache = poison(
        new_cache(model.config, num_slots=4, num_blocks=1024 // block_size, block_size=block_size)
    )
    slots = np.array([2, 0, 3, 1], np.int32)
    lengths = np.array([len(item["prompt_ids"]) for item in items], np.int32)
    prompts = np.zeros((4, 32), np.int32)
    for row, item in enumerate(items):
        prompts[row, : lengths[row]] = item["prompt_ids"]
    logits, cache, ok = PREFILL(model, cache, prompts, slots, lengths)
    for step in range(max(len(item["generated_ids"]) for item in items)):
        assert ok
        logits = np.asarray(logits)
        fed = np.zeros(4, np.int32)
        for row, item in enumerate(items):
            generated = item["generated_ids"]
            if step >= len(generated):
                slots[row] = -1
                continue
            expected = reference[f"step_logits_{row}"][step]
            np.testing.assert_allclose(logits[row], expected, atol=1e-4)
            assert int(np.argmax(logits[row])) == generated[step]
            fed[row] = generated[step]
        logits, cache, ok = DECODE(model, cache, fed, slots)
