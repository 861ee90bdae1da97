"""`update_params`: new weights from any definition of the model, written over the old weights."""

import dataclasses
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, Engine, Llama, SamplingParams
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.engine.weight_swap import WeightSwap
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.loading.tensor_map import map_parameter
from tests.support.random_model import random_llama
from tests.support.tiny_model import BOS, CONFIG, SIZES
from tests.support.workload import check_empty, complete, finish

L, E, D = CONFIG.num_hidden_layers, CONFIG.hidden_size, CONFIG.head_dim
QWEN = dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True, tie_word_embeddings=True)
PARAMS = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = {"prompt_token_ids": [BOS, *range(5, 22)]}  # 18 tokens: 4 full blocks and 2 tokens
PROMPT = {"prompt_token_ids": [BOS, *range(5, 15)]}
# Names of a trainer's arrays. Its matrices are [in, out], and heads are a separate axis.
MAPPING = {
    "embed.table": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "head.w": ("lm_head.weight", (1, 0)),
    "blocks.*.norm1.w": "model.layers.*.input_layernorm.weight",
    "blocks.*.norm2.w": "model.layers.*.post_attention_layernorm.weight",
    "blocks.*.attn.q": ("model.layers.*.self_attn.q_proj.weight", (1, 2, 0)),
    "blocks.*.attn.k": ("model.layers.*.self_attn.k_proj.weight", (1, 2, 0)),
    "blocks.*.attn.v": ("model.layers.*.self_attn.v_proj.weight", (1, 2, 0)),
    "blocks.*.attn.out": ("model.layers.*.self_attn.o_proj.weight", (2, 0, 1)),
    "blocks.*.mlp.gate": ("model.layers.*.mlp.gate_proj.weight", (1, 0)),
    "blocks.*.mlp.up": ("model.layers.*.mlp.up_proj.weight", (1, 0)),
    "blocks.*.mlp.down": ("model.layers.*.mlp.down_proj.weight", (1, 0)),
}


@pytest.fixture
def engine(tiny_model) -> Engine:
    return Engine(tiny_model, **SIZES)


def tensors_of(model: Llama) -> dict[str, np.ndarray]:
    """Return the tensors of a model by their Hugging Face names."""
    return {
        mapping.tensor: mapping.to_rows(np.asarray(array)[mapping.box])
        for name, array in named_arrays(model).items()
        for mapping in map_parameter(model.config, name)
    }


def layer_of(tensors: dict[str, np.ndarray], i: int) -> dict[str, Any]:
    """Return a layer in the layout of the trainer, with the names of `MAPPING`."""
    prefix = f"model.layers.{i}."
    heads = {x: tensors[f"{prefix}self_attn.{x}_proj.weight"].T.reshape(E, -1, D) for x in "qkv"}
    out = tensors[f"{prefix}self_attn.o_proj.weight"].T.reshape(-1, D, E)
    return {
        "attn": {**heads, "out": out},
        "mlp": {x: tensors[f"{prefix}mlp.{x}_proj.weight"].T for x in ("gate", "up", "down")},
        "norm1": {"w": tensors[f"{prefix}input_layernorm.weight"]},
        "norm2": {"w": tensors[f"{prefix}post_attention_layernorm.weight"]},
    }


def trainers_tree(model: Llama) -> dict[str, Any]:
    """Return the weights of a model in the layout of the trainer, on the device."""
    tensors = tensors_of(model)
    tree = {
        "embed": {"table": tensors["model.embed_tokens.weight"]},
        "final_norm": {"w": tensors["model.norm.weight"]},
        "head": {"w": tensors["lm_head.weight"].T},
        "blocks": [layer_of(tensors, i) for i in range(L)],
    }
    return jax.tree.map(jnp.asarray, tree)


def stacked(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trainer's tree with layers stacked on the second axis, and a mapping for it."""
    blocks = jax.tree.map(lambda *x: jnp.stack(x, min(1, x[0].ndim)), *tree["blocks"])
    mapping: dict[str, Any] = {}
    for name, target in MAPPING.items():
        if "*" in name:
            tensor, axes = (target, (0,)) if isinstance(target, str) else target
            target = tensor, (1, *(axis + (axis > 0) for axis in axes))
        mapping[name.replace(".*", "")] = target
    return {**tree, "blocks": blocks}, mapping


def as_module(tree: Any) -> Any:
    """Return the tree as a Flax module with the arrays as parameters."""
    if isinstance(tree, dict):
        return nnx.Dict({name: as_module(each) for name, each in tree.items()})
    if isinstance(tree, list):
        return nnx.List([as_module(each) for each in tree])
    return nnx.Param(tree)


def check_weights(engine: LLM, model: Llama) -> None:
    for ours, theirs in zip(engine.weights, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("scan_layers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_update_params_maps_other_definitions(scan_layers) -> None:
    engine = LLM(random_llama(CONFIG, scan_layers=scan_layers), **SIZES)
    other = random_llama(CONFIG, scale=0.5, scan_layers=scan_layers)
    tree, doubled = trainers_tree(other), jax.tree.map(lambda x: 2 * x, nnx.state(other))
    engine.update_params(tree, mapping=MAPPING)
    check_weights(engine, other)
    engine.update_params(doubled)
    by_layers, mapping = stacked(tree)
    engine.update_params(by_layers, mapping=mapping)
    check_weights(engine, other)
    engine.update_params(doubled)
    module = as_module(tree)
    for params in (module, nnx.state(module)):
        engine.update_params(params, mapping=MAPPING)
        check_weights(engine, other)


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_update_params_maps_hugging_face_names(scan_layers) -> None:
    """All kinds of parameters, from host memory, are cast to the engine's dtype."""
    engine = LLM(random_llama(QWEN, scan_layers=scan_layers), **SIZES)
    other = random_llama(QWEN, scale=0.5, scan_layers=scan_layers)
    tensors = {name: array.astype(np.float64) for name, array in tensors_of(other).items()}
    tensors["lm_head.weight"] = tensors[
        "model.embed_tokens.weight"
    ]  # tied, but trainers may keep it
    engine.update_params(tensors, mapping={})
    check_weights(engine, other)
    assert {x.dtype for x in engine.weights} == {np.dtype("float32")}
    before = [np.asarray(x) for x in engine.weights]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()
    engine.update_params(tensors, mapping={})
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(ValueError, match="lm_head.weight must equal the embeddings"):
        engine.update_params(tensors, mapping={})
    jax.tree.map(np.testing.assert_array_equal, engine.weights, before)
    with pytest.raises(ValueError, match="lm_head.weight must have shape"):
        engine.update_params(tensors | {"lm_head.weight": np.zeros((2, 3))}, mapping={})


@pytest.mark.slow
def test_update_params_quantises_to_int8() -> None:
    """No value is off by more than half a scale, as for weights from files."""
    engine, other = (
        LLM(random_llama(CONFIG, dtype="int8"), **SIZES),
        random_llama(CONFIG, scale=0.5),
    )
    engine.update_params(trainers_tree(other), mapping=MAPPING)
    ours, theirs = (named_arrays(model) for model in (engine.model, other))
    matrices = [name.removesuffix("_scale") for name in ours if name.endswith("_scale")]
    assert len(matrices) == 4 * L + 1
    for name in matrices:
        scales = np.asarray(ours[f"{name}_scale"])
        assert (np.abs(ours[name] * scales - theirs[name]) <= 0.501 * scales).all()


def test_update_params_writes_over_the_old_weights(tiny_model) -> None:
    """A call makes no transfer, no second copy and, after the first call, no compilation."""
    engine, other = LLM(tiny_model, **SIZES), random_llama(CONFIG, scale=0.5)
    tree = trainers_tree(other)
    expected = tokens_of(LLM(other, **SIZES))
    before = tokens_of(engine)
    engine.update_params(tree, mapping=MAPPING)
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(tiny_model)))
    assert tokens_of(engine) == expected != before, "no block of the old weights is found"

    old, compiled = engine.weights, []

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    changed = jax.tree.map(lambda x: 1.5 * x, tree)
    held = live_bytes()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with jax.transfer_guard("disallow_explicit"):
            engine.update_params(changed, mapping=MAPPING)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert all(x.is_deleted() for x in old) and live_bytes() <= held
    assert not any(x.is_deleted() for x in jax.tree.leaves(changed))
    assert tokens_of(engine) not in (expected, before)
    engine.update_params(engine.weights)  # its own arrays cannot be donated
    engine.sleep(2)
    engine.update_params(tree, mapping=MAPPING)
    engine.wake_up()
    assert tokens_of(engine) == expected


@pytest.mark.slow
@pytest.mark.optimised
def test_prepare_converts_without_temporary_memory(tiny_model) -> None:
    engine = LLM(tiny_model, **SIZES)
    new = WeightSwap(engine.core.executor, are_shared=True).prepare(
        trainers_tree(tiny_model), MAPPING
    )
    memory = new.convert.lower(new.arrays, engine.weights).compile().memory_analysis()
    sizes = [x.nbytes for x in engine.weights]
    assert memory.alias_size_in_bytes >= sum(sizes), "all of them in the memory of the old ones"
    assert memory.temp_size_in_bytes <= max(sizes)


def tokens_of(engine: LLM) -> list[int]:
    request_id = engine.add_request(PROMPT, PARAMS)
    return finish(engine)[request_id]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_engine_with_lost_weights_sleeps_until_update_params(tiny_model) -> None:
    """Ctrl-C arrives after the old weights are overwritten, before the new weights are stored."""
    engine, other = LLM(tiny_model, **SIZES), nnx.state(random_llama(CONFIG, scale=0.5))
    engine.update_params(other)
    request_id = engine.add_request(PROMPT, PARAMS)
    expected = finish(engine)[request_id]
    request_id = engine.add_request(PROMPT, PARAMS)
    engine.step()
    new = engine.core.weight_swap.prepare(other, None)

    def convert(arrays: Any, room: list[jax.Array]) -> Any:
        new.convert(arrays, room)
        raise KeyboardInterrupt

    engine.core.weight_swap.prepare = lambda *args: new._replace(convert=convert)
    with pytest.raises(KeyboardInterrupt):
        engine.update_params(other)
    del engine.core.weight_swap.prepare
    assert engine.is_sleeping and engine.has_unfinished
    with pytest.raises(EngineAsleepError):
        engine.step()
    engine.update_params(other)
    engine.wake_up()
    assert finish(engine)[request_id] == expected
    check_empty(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.*.mlp.up": "model.layers.*.mlp.up_proj.weight"},
         r"mlp\.up_proj\.weight must have shape \[48, 32\], got \[32, 48\] from blocks\.0\.ml"),
        ({"blocks.*.mlp.up": ("model.layers.*.mlp.up_proj.weight", (1, 1))},
         r"mapping must give a permutation of the 2 axes of blocks\.0\.mlp\.up, got \(1, 1\)"),
        ({"blocks.*.norm2.w": "model.layers.*.input_layernorm.weight"},
         r"one array to model\.layers\.0\.input_layernorm\.weight, got blocks\.0\.norm1\.w and "),
        ({"blocks.*.norm2.w": "model.layers.*.no.weight"},
         r"no array that is mapped to model\.layers\.0\.post_attention_layernorm\.weight and 1 "),
        ({"blocks.*.norm2.w": ("model.layers.*.post_attention_layernorm.weight", (0, 1))},
         r"mapping must give a permutation of the 1 axes of blocks\.0\.norm2\.w, got \(0, 1\)"),
    ],
)  # fmt: skip
def test_update_params_rejects_bad_mappings(tiny_model, changes, message) -> None:
    engine = LLM(tiny_model, **SIZES)
    tree, before = trainers_tree(tiny_model), engine.weights
    with pytest.raises(ValueError, match=f"update_params: .*{message}"):
        engine.update_params(tree, mapping=MAPPING | changes)
    with pytest.raises(ValueError, match=r"must only contain tensors of the model, got x \("):
        engine.update_params({**tree, "x": jnp.zeros(3)}, mapping=MAPPING)
    with pytest.raises(
        ValueError, match="must be a model.* another implementation of the model, also pass map"
    ):
        engine.update_params(tree)
    assert all(x is y for x, y in zip(before, engine.weights, strict=True))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_update_params_accepts_stacked_and_separate_layers(tiny_folder, scan_layers) -> None:
    """An engine with stacked or separate layers accepts weights in either layout."""
    given = Llama.from_pretrained(tiny_folder, scan_layers=scan_layers)
    for own in (False, True):
        engine = LLM(random_llama(CONFIG, scan_layers=own), **SIZES)
        engine.update_params(given)
        expected = jax.tree.leaves(nnx.state(Llama.from_pretrained(tiny_folder, scan_layers=own)))
        for array, want in zip(engine.weights, expected, strict=True):
            np.testing.assert_array_equal(array, want)


def noisy(model: Llama) -> Llama:
    other = nnx.clone(model)
    state = jax.tree.map(
        # Computed on the host, because each shape would compile programs on the device.
        lambda x: jnp.asarray(
            np.asarray(x)
            + np.float32(0.1) * np.sin(np.arange(x.size, dtype=x.dtype)).reshape(x.shape)
        ),
        nnx.state(other),
    )
    nnx.update(other, state)
    return other


def test_update_params_takes_effect_and_empties_the_cache(engine) -> None:
    old = complete(engine, LONG, GREEDY)
    other = noisy(engine.model)
    for params in (other, nnx.state(other)):
        engine.update_params(params)
        new = complete(engine, LONG, GREEDY)
        assert new.num_cached_tokens == 0
        assert new.outputs == complete(Engine(other, **SIZES), LONG, GREEDY).outputs
        assert new.outputs[0].token_ids != old.outputs[0].token_ids


def test_update_params_copies_the_arrays(engine) -> None:
    other = noisy(engine.model)
    engine.update_params(other)
    expected = complete(engine, LONG, GREEDY).outputs
    for x in jax.tree.leaves(nnx.state(other)):
        x.delete()
    assert complete(engine, LONG, GREEDY).outputs == expected


def test_update_params_keeps_tokens_of_unfinished_requests(engine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=24)
    request_id = engine.add_request(LONG, params)
    engine.step()
    [before] = engine.step()
    tokens = before.outputs[0].token_ids
    assert 0 < len(tokens) < 24
    other = noisy(engine.model)
    engine.update_params(other)
    after = finish(engine)[request_id]
    prompt = {"prompt_token_ids": [*LONG["prompt_token_ids"], *tokens]}
    rest = dataclasses.replace(params, max_tokens=24 - len(tokens))
    assert after == tokens + complete(Engine(other, **SIZES), prompt, rest).outputs[0].token_ids


def test_model_has_the_current_weights(engine) -> None:
    other = noisy(engine.model)
    engine.update_params(other)
    ours, theirs = (jax.tree.leaves(nnx.state(m)) for m in (engine.model, other))
    assert all((x == y).all() for x, y in zip(ours, theirs, strict=True))
    with pytest.raises(ValueError, match="a model, its nnx.state, or a list .* got dict"):
        engine.update_params({"embed_tokens": theirs[0]})


def test_update_params_rejects_other_shapes(engine) -> None:
    expected = complete(engine, LONG, GREEDY).outputs
    leaves = jax.tree.leaves(nnx.state(engine.model))
    with pytest.raises(ValueError, match=r"must be \d+ arrays .* got \d+ arrays\."):
        engine.update_params(leaves[:-1])
    with pytest.raises(ValueError, match=r"Expected shape \(.*, got \(3,\)\."):
        engine.update_params([*leaves[:-1], jnp.zeros(3)])
    assert complete(engine, LONG, GREEDY).outputs == expected
