"""Tests of `formatting`: a short `repr`, even if the values of arrays cannot be read."""

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paged_jax
from paged_jax import (
    AsyncEngine,
    CompletionOutput,
    Engine,
    LlamaConfig,
    Logprob,
    PagedCache,
    RequestMetrics,
    RequestOutput,
    Rollout,
    SamplingParams,
    StructuredOutputsParams,
    Tokenizer,
)  # fmt: skip
from paged_jax.cache import fork, reserve
from paged_jax.cache.drawing import BlockMap, BlockRow, draw_html, draw_text
from paged_jax.engine.config import EngineConfig
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.rope import RopeScaling
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.programs import BeamTokens, Scores
from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.sample import Draws
from paged_jax.sampling.state import SlotSampling
from paged_jax.server import Settings
from tests.support.tiny_model import SIZES

LOGPROBS = [{i: Logprob(-1.0, i, "a") for i in range(20)}] * 4000
COMPLETION = CompletionOutput(0, "word\n" * 4000, [*range(4000)], -1.5, LOGPROBS, "stop")


def small_cache(**options) -> PagedCache:
    return PagedCache.create(
        num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4, head_dim=16, num_slots=3,
        max_blocks_per_slot=4, **options,
    )  # fmt: skip


def check_short(value: object) -> str:
    text = repr(value)
    assert len(text) <= 200 and "\n" not in text and text.isprintable(), text
    return text


def test_repr_of_a_large_cache_is_short() -> None:
    """The pools have the sizes of an 8B model."""
    cache = PagedCache.create(
        num_layers=32, num_blocks=512, num_kv_heads=8, block_size=16, head_dim=4, num_slots=64,
        max_blocks_per_slot=64, dtype=jnp.bfloat16,
    )  # fmt: skip
    text = check_short(cache)
    for part in ("32 layers", "8 KV heads of 4", "bfloat16", "0 of 512 blocks of 16", "64 in all"):
        assert part in text
    for value in (cache.tables, cache.tables.pool, cache.pools):
        check_short(value)


def test_repr_of_a_cache_has_the_blocks_in_use_and_the_lengths() -> None:
    cache, _ = reserve(small_cache(window=8), jnp.array([10, 0, 3]), max_tokens=16)
    text = check_short(cache)
    assert "4 of 8 blocks of 4 tokens in use" in text and "lengths [10, 0, 3]" in text
    assert "window 8" in text
    both = check_short(PagedCache(cache.groups + small_cache().groups, layers=((0, 0), (1, 0))))
    assert "4 of 8 blocks" in both and "0 of 8 blocks" in both


def test_repr_of_a_cache_that_cannot_be_read_has_its_shapes() -> None:
    texts = []

    def note(cache: PagedCache) -> jax.Array:
        texts.append(repr(cache))
        texts.append(repr(cache.groups[0]))
        return cache.lengths

    cache = small_cache()
    jax.jit(note)(cache)
    jax.jit(lambda cache: cache.replace_pools(cache.pools), donate_argnums=0)(cache)
    assert cache.k.is_deleted()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), small_cache())
    shapes = jax.tree.map(jnp.shape, small_cache())
    nothing = jax.tree.map(lambda _: None, small_cache())
    for value in (cache, several, shapes, nothing, jax.eval_shape(small_cache)):
        texts.append(check_short(value))
    assert all(
        text.startswith(("PagedCache(", "CacheGroup(")) and len(text) <= 200 for text in texts
    )
    assert all("float32[2, 8, 1, 4, 16]" in text for text in (texts[0], texts[1], texts[-1]))


def test_repr_of_a_cache_does_not_read_the_pools(monkeypatch) -> None:
    cache, read = small_cache(), []
    array = np.asarray
    monkeypatch.setattr(np, "asarray", lambda x, *a, **k: read.append(x.shape) or array(x, *a, **k))
    repr(cache)
    assert max(map(len, read)) <= 1


@pytest.mark.parametrize(
    "value",
    [
        COMPLETION,
        RequestOutput("0", "word " * 4000, [*range(4000)], [COMPLETION] * 16, True,
                      RequestMetrics(0.0), 3, LOGPROBS),
        Rollout(*(jnp.zeros((8, 4000)) for _ in range(3))),
        SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0), stop=["a" * 99] * 99),
        StructuredOutputsParams(choice=["a" * 99] * 99),
        StructuredOutputsParams(json={"enum": ["a" * 99] * 99}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_repr_of_an_output_is_short(value) -> None:
    assert check_short(value).startswith(type(value).__name__)


def test_repr_omits_defaults() -> None:
    assert repr(SamplingParams(temperature=0.5, n=2)) == "SamplingParams(n=2, temperature=0.5)"
    assert repr(CompletionOutput(1, "a", [5], -0.5)) == (
        "CompletionOutput(index=1, text='a', token_ids=[5], cumulative_logprob=-0.5)"
    )


def test_repr_of_an_engine_has_its_state_and_compiles_nothing(tiny_folder) -> None:
    lines = []
    engine = Engine(tiny_folder, **SIZES, on_compile=lines.append)
    engine.add_request("ab")
    text = check_short(engine)
    assert text.startswith("Engine(llama, 0 of ") and "1 unfinished request" in text
    assert check_short(AsyncEngine(engine)) == f"AsyncEngine({text}, not running)"
    check_short(engine.get_request("0"))
    engine.abort("0")
    engine.sleep(1)
    assert "asleep" in check_short(engine) and not lines


def test_repr_of_settings_shows_no_key() -> None:
    text = repr(Settings(model_name="a", api_keys=("secret",), admin_key="secret"))
    assert "secret" not in text


def test_repr_of_a_configuration_is_complete() -> None:
    """A lowered program is stored by a digest of these texts, so they must show all values."""
    factors = tuple(i / 8 for i in range(99))
    scaling = RopeScaling(
        factor=2.0, rope_type="longrope", short_factor=factors, long_factor=factors
    )
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=99,
        num_attention_heads=1, num_key_value_heads=1, layer_types=("full_attention",) * 99,
    )  # fmt: skip
    for value in (scaling, config):
        for field in dataclasses.fields(value):
            if not field.init:  # derived from the other fields
                continue
            assert f"{field.name}={getattr(value, field.name)!r}" in repr(value)
    assert str(factors) in repr(scaling) and str(config.layer_types) in repr(config)
    assert f"layers={config.layers!r}" in repr(config.replace())


def test_repr_of_a_model_and_its_parts_is_short(tiny_model, tiny_folder) -> None:
    assert check_short(tiny_model).startswith("Decoder(llama, ")
    assert f"{sum(x.size for x in jax.tree.leaves(tiny_model)):,} parameters" in repr(tiny_model)
    check_short(nnx.eval_shape(lambda: tiny_model))
    assert "chat template" in check_short(Tokenizer.from_folder(tiny_folder))
    text = check_short(EngineConfig(max_num_seqs=4, swap_space=1.0))
    assert text == "EngineConfig(max_num_seqs=4, swap_space=1.0)"
    check_short(GenerationConfig.from_folder(bundled_folder()))
    text = str(tiny_model.config)
    assert len(text) <= 200 and text.startswith("ModelConfig(vocab_size=")
    assert text.endswith(", num_hidden_layers=2)")


def test_str_of_tables_draws_the_blocks_of_each_slot() -> None:
    cache, _ = reserve(small_cache(), jnp.array([10, 0, 3]), max_tokens=16)
    cache, _ = fork(cache, jnp.array([-1, 2, -1]))
    assert str(cache.tables) == "\n".join(
        [
            "BlockTables(4 of 8 blocks of 4 tokens in use, lengths [10, 3, 3])",
            "  slot  tokens  blocks",
            "     0      10  0 1 2",
            "     1       3  3",
            "     2       3  3",
            "  pool: . free, c free and cached, digits count the sequences of a block",
            "     0  1112....",
        ]
    )
    traced = []
    jax.jit(lambda cache: traced.append((str(cache.tables), cache._repr_html_())))(cache)
    assert traced[0][0].startswith("BlockTables(") and traced[0][1] == ""


def test_drawings_of_a_large_pool_are_limited() -> None:
    counts = np.ones(10_000, np.int32)
    rows = [BlockRow(str(i), 9_000, [*range(500)]) for i in range(100)]
    blocks = BlockMap("title", counts, counts == 0, rows)
    text, page = draw_text(blocks), draw_html(blocks)
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) < 90
    for part in ("0 1 2 3", "... 500 in all", "and 84 more", "more blocks"):
        assert part in text and part in page
    assert len(page) < 200_000


def test_html_of_a_block_map_is_escaped_and_has_a_cell_for_each_block() -> None:
    counts, is_cached = np.array([2, 1, 0, 0]), np.array([True, False, True, False])
    page = draw_html(BlockMap("<b>&", counts, is_cached, [BlockRow("<script>\"'", 3, [0])]))
    assert "<script>" not in page and "<b>&amp" not in page.replace("&lt;b&gt;&amp;", "")
    assert re.findall(r'<i class="(.)" title="block (\d)', page) == [
        ("s", "0"), ("u", "1"), ("c", "2"), ("f", "3"),
    ]  # fmt: skip
    cache, _ = reserve(small_cache(), jnp.array([10, 0, 3]), max_tokens=16)
    assert cache._repr_html_().count('title="block ') == 8
    assert "<td>2</td><td>3</td><td>3</td>" in cache.tables._repr_html_()


def public_classes() -> list[type]:
    """Return the classes in any `__all__`, and other classes with arrays that users see."""
    names = [module.name for module in pkgutil.walk_packages(paged_jax.__path__, "paged_jax.")]
    modules = [paged_jax, *(importlib.import_module(n) for n in names if "tunix" not in n)]
    found = [getattr(m, name) for m in modules for name in getattr(m, "__all__", ())]
    found += [DecodeState, StepTokens, BeamTokens, Scores, Constraints, Draws, SlotSampling]
    classes = {each for each in found if isinstance(each, type)}
    return sorted(classes, key=lambda each: each.__qualname__)


@pytest.mark.parametrize("each", public_classes(), ids=lambda each: each.__qualname__)
def test_no_class_shows_the_values_of_its_arrays(each) -> None:
    is_tuple = hasattr(each, "_fields")
    annotations = each.__annotations__ if is_tuple or dataclasses.is_dataclass(each) else {}
    if any("Array" in str(kind) or "ndarray" in str(kind) for kind in annotations.values()):
        path = Path(each.__repr__.__code__.co_filename)
        assert path.is_relative_to(Path(paged_jax.__file__).parent), "its `repr` is generated"
