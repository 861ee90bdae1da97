"""The decoder module: forward, prefill and decode agree, and the steps copy no pool."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.cache import paged_cache
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.kernels import Pools
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.paged_model import create_cache
from tests.support.bundled_reference import COLUMNS, read_continuations
from tests.support.random_model import random_llama

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)
PREFILL = jax.jit(Decoder.prefill, donate_argnames="cache", static_argnames="backend")
TILES = jax.jit(Decoder.prefill_tiles, donate_argnames="cache")
DECODE = jax.jit(Decoder.decode, donate_argnames="cache", static_argnames=("backend", "cascade"))
PLAIN = jax.jit(Decoder.__call__)
# Tests share these shapes, and therefore their compiled programs.
LENGTH = 21  # tokens of a sequence
CHUNK = 12  # maximum tokens of a chunk, in a batch of two


def new_cache(config=CONFIG, **changes) -> PagedCache:
    """Return a cache with pools large enough to detect copies, and slots that enable cascades."""
    sizes = {"num_slots": 3, "num_blocks": 16384, "block_size": 4, "max_blocks_per_slot": 4096}
    return PagedCache.create(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        **{**sizes, "head_dim": config.head_dim, **changes},
    )


def test_create_cache_has_room_for_all_slots_at_full_length() -> None:
    model = random_llama(CONFIG)
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
    """Fill the pools with NaN, to detect reads of places that were never written."""
    k, v = (jnp.asarray(np.full(cache.k.shape, np.nan, cache.k.dtype)) for _ in range(2))
    return cache.replace_pools(Pools(k, v))


def read(model, cache: PagedCache, ids: np.ndarray, slot: int) -> tuple[jax.Array, PagedCache]:
    """Append up to CHUNK tokens to a slot. Row 0 of the batch is left out."""
    padded = np.zeros((2, CHUNK), np.int32)
    padded[1, : len(ids)] = ids
    logits, cache, ok = PREFILL(model, cache, padded, i32(-1, slot), i32(5, len(ids)))
    assert ok
    if not model.config.o_bias:  # without biases, rows left out stay zero
        np.testing.assert_array_equal(logits[0], 0)
    return logits[1], cache


def logits_through(model, cache: PagedCache, ids: np.ndarray) -> tuple[np.ndarray, PagedCache]:
    """Return the logits at positions PLACES, [6, V], from two chunks and four decode steps."""
    logits = []
    for chunk in (ids[:7], ids[7:17]):
        last, cache = read(model, cache, chunk, 2)
        logits.append(last)
    for token_id in ids[17:]:
        rows, cache, ok = DECODE(model, cache, i32(token_id, 0), i32(2, -1))
        assert ok
        logits.append(rows[0])
    return np.stack(logits), cache


PLACES = [6, 16, 17, 18, 19, 20]
ALL = {
    "tie_word_embeddings": True,
    "sliding_window": 5,
    "qkv_bias": True,
    "o_bias": True,
    "qk_norm": True,
}
SOME_WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
# Switches that no decoder has.
OTHERWISE = {
    "norm_placement": "parallel",
    "norm_type": "layer",
    "norm_offset": 1.0,
    "qk_norm": True,
    "qk_norm_scope": "projection",
    "hidden_act": "gelu",
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logit_scale": 0.7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "rope_layers": (True, False),
}


@pytest.mark.parametrize(
    ("variant", "scan_layers", "head_dim"),
    [
        pytest.param({}, False, 8, id="llama"),
        # Heads on TPUs: K and V are padded to whole registers.
        pytest.param(ALL, False, 128, id="all-padded", marks=pytest.mark.slow),
        pytest.param(SOME_WINDOWS, False, 8, id="some-windows"),
        pytest.param(OTHERWISE, False, 8, id="otherwise", marks=pytest.mark.slow),
        pytest.param(ALL, True, 8, id="all-scanned", marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_match_the_plain_forward(variant, scan_layers, head_dim) -> None:
    config = dataclasses.replace(CONFIG, **variant)
    model = random_llama(config, scan_layers=scan_layers)
    ids = tokens(1, LENGTH)
    expected = np.asarray(PLAIN(model, ids))[0]
    logits, cache = logits_through(model, poison(new_cache(config, head_dim=head_dim)), ids[0])
    np.testing.assert_allclose(logits, expected[PLACES], atol=2e-5)
    assert cache.lengths.tolist() == [0, 0, LENGTH]


def in_tiles(*chunks: tuple[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of `prefill_tiles` for chunks ``(slot, ids)``, in 8 rows of 4 tokens."""
    token_ids, slots, num_tokens = (
        np.zeros((8, 4), np.int32),
        np.full(8, -1, np.int32),
        i32(*[3] * 8),
    )
    parts = [(slot, ids[i : i + 4]) for slot, ids in chunks for i in range(0, len(ids), 4)]
    for row, (slot, ids) in enumerate(parts):
        token_ids[row, : len(ids)], slots[row], num_tokens[row] = ids, slot, len(ids)
    return token_ids, slots, num_tokens


@pytest.mark.parametrize(
    "variant", [pytest.param({}, id="llama", marks=pytest.mark.slow), pytest.param(ALL, id="all")]
)
def test_prefill_tiles_and_decode_match_the_plain_forward(variant) -> None:
    """Rows of the same slot follow each other, within a call and over several calls."""
    config = dataclasses.replace(CONFIG, **variant)
    model = random_llama(config)
    ids, cache = tokens(2, LENGTH), poison(new_cache(config))
    for chunks in (((2, ids[0, :9]), (0, ids[1, :15])), ((0, ids[1, 15:20]), (2, ids[0, 9:20]))):
        _, cache, ok = TILES(model, cache, *in_tiles(*chunks))
        assert ok
    assert cache.lengths.tolist() == [20, 0, 20]
    logits, cache, _ = DECODE(model, cache, ids[:, 20], i32(2, 0))
    np.testing.assert_allclose(logits, np.asarray(PLAIN(model, ids))[:, 20], atol=2e-5)


def test_prefill_tiles_appends_nothing_if_the_blocks_of_all_rows_do_not_suffice() -> None:
    model, cache = random_llama(CONFIG), poison(new_cache(num_blocks=4, max_blocks_per_slot=5))
    for num_tokens, is_enough in ((17, False), (16, True)):
        step = in_tiles((1, tokens(1, num_tokens)[0]))
        _, cache, ok = TILES(model, cache, *step)
        assert ok == is_enough
        assert cache.lengths.tolist() == [0, 16 * is_enough, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "atol"),
    [({"dtype": jnp.int8}, 0.1), ({"dtype": jnp.float8_e4m3fn, "head_dim": 128}, 0.3)],
    ids=["int8", "fp8-padded"],
)
def test_logits_do_not_depend_on_the_cache(changes, atol) -> None:
    model = random_llama(CONFIG, scan_layers=True)
    ids = tokens(1, LENGTH)
    expected = np.asarray(PLAIN(model, ids))[0]
    logits, _ = logits_through(model, new_cache(**changes), ids[0])
    np.testing.assert_allclose(logits, expected[PLACES], atol=atol)


def test_scanned_and_unrolled_layers_are_the_same_function() -> None:
    unrolled = random_llama(CONFIG)
    scanned = random_llama(CONFIG, scan_layers=True)
    stacked = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack(leaves)),
        *[nnx.state(layer) for layer in unrolled.layers],
    )
    nnx.update(scanned.layers, stacked)
    for name in ("embed_tokens", "norm", "lm_head"):
        getattr(scanned, name)[...] = getattr(unrolled, name)[...]
    ids = tokens(1, LENGTH)
    np.testing.assert_allclose(PLAIN(scanned, ids), PLAIN(unrolled, ids), atol=1e-5)


def test_decoder_rejects_stacking_different_layers() -> None:
    with pytest.raises(
        ValueError, match="scan_layers must be False for a config with different layers"
    ):
        Decoder(dataclasses.replace(CONFIG, **SOME_WINDOWS), scan_layers=True, rngs=nnx.Rngs(0))


def test_forward_is_causal_and_differentiable() -> None:
    model = random_llama(CONFIG)
    ids = tokens(1, LENGTH)
    changed = np.where(np.arange(LENGTH) < 5, ids, 0)
    np.testing.assert_array_equal(PLAIN(model, ids)[:, :5], PLAIN(model, changed)[:, :5])

    def loss(model):
        return jnp.mean(jax.nn.logsumexp(model(ids), axis=-1))

    gradients = jax.jit(jax.grad(loss))(model)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


def test_decode_without_free_blocks_changes_nothing() -> None:
    model = random_llama(CONFIG)
    _, cache = read(model, new_cache(), tokens(1, 8)[0], 0)
    # Mark all blocks as used by others.
    pool = dataclasses.replace(cache.tables.pool, num_free=jnp.int32(0))
    cache = cache.replace_tables([dataclasses.replace(cache.tables, pool=pool)])
    before = jax.tree.map(np.array, cache)
    _, cache, ok = DECODE(model, cache, i32(3, 0), i32(0, -1))
    assert not ok
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(old, new)


def test_decode_fails_for_a_slot_that_does_not_exist() -> None:
    model = random_llama(CONFIG)
    _, cache, ok = DECODE(model, new_cache(), i32(3, 4), i32(0, 3))
    assert not ok
    assert cache.lengths.tolist() == [0, 0, 0]


def test_decode_copies_on_write_after_a_fork() -> None:
    model = random_llama(CONFIG)
    ids = tokens(1, 6)[0]
    _, cache = read(model, new_cache(), ids, 0)
    cache, ok = paged_cache.fork(cache, i32(-1, 0, -1))
    assert ok
    for a, b in ((11, 29), (5, 40)):
        _, cache, ok = DECODE(model, cache, i32(a, b), i32(0, 1))
        assert ok
    logits, cache, _ = DECODE(model, cache, i32(1, 1), i32(0, 1))
    for row, continuation in enumerate(([11, 5, 1], [29, 40, 1])):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, :9] = [*ids, *continuation]
        np.testing.assert_allclose(logits[row], PLAIN(model, padded)[0, 8], atol=2e-5)
    # Two sequences of 9 tokens share the full block of the prompt, and have two more blocks each.
    assert int(cache.num_blocks - cache.tables.pool.num_free) == 1 + 2 * 2


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("step", ["decode", "cascade", "prefill"])
def test_steps_copy_no_pool(step, scan_layers) -> None:
    """Temporary memory stays far below a pool, and both pools are updated in place."""
    model = random_llama(CONFIG, scan_layers=scan_layers)
    cache, slots = new_cache(), i32(0, 1)
    if step == "prefill":
        lowered = PREFILL.lower(model, cache, tokens(2, CHUNK), slots, i32(5, CHUNK))
    else:
        lowered = DECODE.lower(model, cache, i32(3, 4), slots)
    if step == "cascade":
        attends = re.compile("dot_general|paged_jax_decode")
        num_products = len(attends.findall(lowered.as_text()))
        lowered = DECODE.lower(model, cache, i32(3, 4), slots, cascade=True)
        assert len(attends.findall(lowered.as_text())) > num_products, "there is no cascade in it"
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * cache.k.nbytes
    assert memory.alias_size_in_bytes >= cache.nbytes


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (jnp.zeros(3, jnp.int32), r"Decoder: token_ids must have shape \[B, T\], got \[3\]"),
        (jnp.zeros((1, 3)), "Decoder: token_ids must be an integer array, got float32"),
        (np.full((1, 3), CONFIG.vocab_size), "must be in 0..60, the vocabulary, got 61"),
    ],
)
def test_call_rejects_invalid_token_ids(token_ids, message) -> None:
    with pytest.raises(ValueError, match=message):
        random_llama(CONFIG)(token_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": i32(0, 0)}, "slots must be distinct, got slot 0 more than once"),
        ({"token_ids": [[3, 4], [5, 61]]}, "token_ids must be in 0..60, the vocabulary, got 61"),
        ({"token_ids": [[3, 4], [-5, 6]]}, "token_ids must be in 0..60, the vocabulary, got -5"),
        ({"token_ids": [[3.0, 4.0], [5.0, 6.0]]}, "token_ids must be an integer array"),
        ({"slots": i32(0)}, r"slots must have B .* = 2 like token_ids, got shape \[1\]"),
    ],
)
def test_steps_reject_invalid_arguments(changes, message) -> None:
    """Steps check values outside of `jit`, where they are known."""
    model, cache = random_llama(CONFIG), new_cache(num_blocks=8, max_blocks_per_slot=4)
    arguments = {"token_ids": [[3, 4], [5, 6]], "slots": i32(0, 1), **changes}
    token_ids = np.array(arguments["token_ids"])
    for step in (model.prefill, model.score):
        with pytest.raises(ValueError, match=f"Decoder.{step.__name__}: {message}"):
            step(cache, token_ids, arguments["slots"], i32(2, 2))
    column = 0 if "-5" in message else 1
    with pytest.raises(ValueError, match=f"Decoder.decode: {message}"):
        model.decode(cache, token_ids[:, column], arguments["slots"])


@functools.cache
def bundled(scan_layers: bool) -> Decoder:
    return Decoder.from_pretrained(bundled_folder(), dtype="float32", scan_layers=scan_layers)


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_forward_of_the_bundled_model_matches_transformers(scan_layers) -> None:
    for item in read_continuations():
        num_prompt, num_tokens = len(item.prompt_ids), len(item.token_ids)
        padded = np.zeros((1, 288), np.int32)  # equal lengths share a program
        padded[0, :num_tokens] = item.token_ids
        logits = np.asarray(PLAIN(bundled(scan_layers), padded))[0, :num_tokens]
        np.testing.assert_allclose(logits[:, COLUMNS], item.columns, rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits[num_prompt - 1], item.last, rtol=0, atol=1e-4)
        assert logits[num_prompt - 1 :].argmax(-1).tolist() == item.generated_ids


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "scan_layers"), [(16, False), (1, True)])
def test_paged_steps_of_the_bundled_model_match_transformers(block_size, scan_layers) -> None:
    """Four prompts in a batch are decoded with the tokens of transformers."""
    model, items = bundled(scan_layers), read_continuations()
    num_blocks = 1024 // block_size
    sizes = {"num_slots": 4, "num_blocks": num_blocks, "block_size": block_size}
    sizes["head_dim"] = model.config.head_dim
    cache = poison(new_cache(model.config, max_blocks_per_slot=num_blocks, **sizes))
    slots = np.array([2, 0, 3, 1], np.int32)
    lengths = np.array([len(item.prompt_ids) for item in items], np.int32)
    prompts = np.zeros((4, 80), np.int32)
    for row, item in enumerate(items):
        prompts[row, : lengths[row]] = item.prompt_ids
    logits, cache, ok = PREFILL(model, cache, prompts, slots, lengths)
    for step in range(max(len(item.generated_ids) for item in items)):
        assert ok
        logits = np.asarray(logits)
        fed = np.zeros(4, np.int32)
        for row, item in enumerate(items):
            if step >= len(item.generated_ids):
                slots[row] = -1
                continue
            expected = item.columns[lengths[row] - 1 + step]
            np.testing.assert_allclose(logits[row, COLUMNS], expected, rtol=0, atol=1e-4)
            fed[row] = item.generated_ids[step]
            assert int(np.argmax(logits[row])) == fed[row]
        logits, cache, ok = DECODE(model, cache, fed, slots)
