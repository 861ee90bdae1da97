"""Experts: routing, outputs, gradients and configs.

Weights of experts that no token chose, and padding rows, are NaN, and must not be read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax.cache import paged_cache
from paged_jax.kernels import grouped_linear
from paged_jax.kernels.linear import Weight
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts import experts
from paged_jax.models.parts.activation import clamped_swiglu
from paged_jax.models.parts.experts import (
    ExpertWeights,
    Router,
    RouterArrays,
    Routes,
    apply_experts,
    route,
)
from tests.support.compiler import needs_compiler
from tests.support.covering import all_pairs, once_in_core
from tests.support.random_model import random_llama

N, X, K, E, F = 11, 6, 2, 24, 17
UNUSED = 4  # expert that no token chooses
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=X,
    num_experts_per_tok=K,
    moe_intermediate_size=24,
)
GPT_OSS = {
    "expert_bias": True,
    "swiglu_limit": 0.3,
    "norm_topk_prob": True,
    "attention_sinks": True,
    "qkv_bias": True,
    "o_bias": True,
}


def silu_product(gate, up):
    return jax.nn.silu(gate) * up


def problem(dtype, with_biases):
    """Return tokens, logits that never choose `UNUSED`, and the weights of all experts."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, E)).astype(np.float32)
    logits = rng.normal(size=(N, X)).astype(np.float32)
    logits[:, UNUSED] = -9
    shapes = {"gate_up": (X, 2, F, E), "down": (X, E, F)}
    if with_biases:
        shapes |= {"gate_up_bias": (X, 2, F), "down_bias": (X, E)}
    arrays = {name: rng.normal(size=shape, scale=0.5) for name, shape in shapes.items()}
    arrays = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    return x, logits, arrays


@functools.partial(jax.jit, static_argnames=("renormalise", "activation", "backend"))
def run_in_one_program(x, logits, arrays, **options):
    return run(x, logits, arrays, **options)


def run(x, logits, arrays, *, renormalise, activation, backend=None, **options):
    weights = ExpertWeights(
        Weight(arrays["gate_up"]),
        Weight(arrays["down"]),
        arrays.get("gate_up_bias"),
        arrays.get("down_bias"),
    )
    routes = route(logits, K, renormalise=renormalise, **options)
    return apply_experts(x, routes, weights, activation=activation, backend=backend)


def all_experts(x, logits, arrays, *, renormalise, activation):
    """Compute all experts for all tokens, with weight 0 for experts that were not chosen."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    least_chosen = jnp.sort(logits, axis=-1)[:, -K, None]
    weights = jnp.where(logits >= least_chosen, probabilities, 0)
    if renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    hidden = jnp.einsum("ne,xgfe->nxgf", x, arrays["gate_up"])
    if "gate_up_bias" in arrays:
        hidden = hidden + arrays["gate_up_bias"][None]
    out = jnp.einsum("nxf,xef->nxe", activation(hidden[:, :, 0], hidden[:, :, 1]), arrays["down"])
    if "down_bias" in arrays:
        out = out + arrays["down_bias"][None]
    return jnp.einsum("nxe,nx->ne", out, weights)


KINDS = all_pairs(
    {
        "renormalise": [True, False],
        "with_biases": [True, False],
        "activation": ["silu", "clamped"],
        "dtype": ["float32", "bfloat16", "float16"],
        "backend": [None, "xla"],
    }
)
ACTIVATIONS = {
    "silu": silu_product,
    "clamped": functools.partial(clamped_swiglu, alpha=1.702, limit=0.7),
}


@pytest.mark.parametrize(
    "kind", once_in_core(KINDS), ids=lambda kind: "-".join(map(str, kind.values()))
)
def test_apply_experts_matches_all_experts_in_float64(kind) -> None:
    x, logits, arrays = problem(kind["dtype"], kind["with_biases"])
    switches = {
        "renormalise": kind["renormalise"],
        "activation": ACTIVATIONS[kind["activation"]],
    }
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(array, jnp.float64) for name, array in arrays.items()}
        want = np.asarray(
            all_experts(np.asarray(x, float), np.asarray(logits, float), exact, **switches)
        )
    poisoned = {name: array.at[UNUSED].set(jnp.nan) for name, array in arrays.items()}
    out = jax.jit(functools.partial(run, backend=kind["backend"], **switches))(x, logits, poisoned)
    tolerance = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.01}[kind["dtype"]]
    np.testing.assert_allclose(out, want, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("renormalise", [True, False])
def test_apply_experts_gradients_match_float64(renormalise) -> None:
    x, logits, arrays = problem("float32", True)
    switches = {"renormalise": renormalise, "activation": ACTIVATIONS["clamped"]}
    cotangent = np.random.default_rng(1).normal(size=(N, E))

    def gradients(function, dtype):
        def loss(x, logits, arrays):
            return jnp.sum(function(x, logits, arrays, **switches) * cotangent.astype(dtype))

        args = jax.tree.map(lambda a: jnp.asarray(a, dtype), (x, logits, arrays))
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)

    got = jax.tree.map(np.asarray, gradients(run, np.float32))
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, gradients(all_experts, np.float64))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


def test_apply_experts_ignores_padding_rows() -> None:
    x, logits, arrays = problem("float32", True)
    switches = {"renormalise": True, "activation": silu_product}
    want = run_in_one_program(x, logits, arrays, **switches)
    is_token = np.arange(N) % 3 > 0
    # Only the padding rows choose this expert.
    logits[~is_token, UNUSED] = 9
    x[~is_token] = np.nan
    poisoned = {name: array.at[UNUSED].set(jnp.nan) for name, array in arrays.items()}
    out = run_in_one_program(x, logits, poisoned, is_token=jnp.asarray(is_token), **switches)
    np.testing.assert_allclose(out[is_token], want[is_token], rtol=1e-5, atol=1e-6)
    assert not out[~is_token].any()


def test_apply_experts_on_several_devices_adds_up() -> None:
    x, logits, arrays = problem("float32", True)
    switches = {"renormalise": False, "activation": silu_product}
    want = run(x, logits, arrays, **switches)
    parts = [
        run(
            x,
            logits,
            {k: a[i : i + 2] for k, a in arrays.items()},
            local_experts=(i, 2),
            **switches,
        )
        for i in range(0, X, 2)
    ]
    np.testing.assert_allclose(sum(parts), want, rtol=1e-5, atol=1e-5)


def test_clamped_swiglu_matches_gpt_oss() -> None:
    gate, up = np.meshgrid(np.linspace(-9, 9, 37), np.linspace(-9, 9, 37))
    out = clamped_swiglu(
        jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32), alpha=1.702, limit=7.0
    )
    gate, up = np.where(gate > 7, 7, gate), np.where(np.abs(up) > 7, 7 * np.sign(up), up)
    np.testing.assert_allclose(out, (up + 1) * gate / (1 + np.exp(-1.702 * gate)), rtol=1e-5)


sorts = pytest.mark.parametrize("most_comparisons", [0, 1 << 20], ids=["sorted", "compared"])


@sorts
def test_route_chooses_the_largest_logits_and_breaks_ties(monkeypatch, most_comparisons) -> None:
    monkeypatch.setattr(experts, "_MAX_COMPARISONS", most_comparisons)
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0], [-jnp.inf, 0.0, -5.0, -jnp.inf], [3.0, 0, 1, 3]])
    routes = route(logits, 2, renormalise=True)
    assert isinstance(routes, Routes)
    assert routes.experts.tolist() == [[1, 2], [1, 2], [0, 3]]
    np.testing.assert_allclose(routes.weights[0], [0.5, 0.5])
    np.testing.assert_allclose(routes.weights.sum(-1), 1, rtol=1e-6)
    is_token = jnp.array([True, False, True])
    routes = route(logits, 2, renormalise=True, is_token=is_token, local_experts=(2, 2))
    # Experts 2 and 3 are on this device, and the second row is padding.
    assert routes.experts.tolist() == [[2, 0], [2, 2], [2, 1]]


@sorts
def test_route_chooses_by_keys_and_weighs_by_scores(monkeypatch, most_comparisons) -> None:
    """Each row tests one rule. Sigmoids of 0, 2 and -2 are 0.5, 0.88 and 0.12."""
    monkeypatch.setattr(experts, "_MAX_COMPARISONS", most_comparisons)
    logits = jnp.array([[0.0, 2, -2, 0, 2, 0], [0, 0, 0, 0, 0, 0], [2, 2, 0, 0, 0, -2]])
    bias = jnp.array([0.0, 0, 0.5, 0, -1, 0])
    router = Router("sigmoid", has_correction_bias=True, factor=2.0)
    routes = route(logits, 2, router, RouterArrays(bias), renormalise=False)
    # The bias moves expert 2 up and expert 4 down. Weights do not contain it. Ties: lower index.
    assert routes.experts.tolist() == [[1, 2], [2, 0], [2, 0]]
    expected = 2 * jax.nn.sigmoid(jnp.array([[2.0, -2], [0, 0], [0, 2]]))
    np.testing.assert_allclose(routes.weights, expected, rtol=1e-6)

    # Groups (0, 1), (2, 3), (4, 5): by both experts, and by the better expert only.
    groups = {"num_groups": 3, "num_chosen_groups": 1}
    logits = jnp.array([[0.0, 0, 2, -9, -9, 1]])
    for group_score, chosen in (("top2", [0, 1]), ("max", [2, 3])):
        router = Router("sigmoid", **groups, group_score=group_score)
        routes = route(logits, 2, router, renormalise=True)
        assert routes.experts.tolist() == [chosen]
        np.testing.assert_allclose(routes.weights.sum(), 1, rtol=1e-6)


@sorts
def test_sort_by_expert_is_stable(monkeypatch, most_comparisons) -> None:
    monkeypatch.setattr(experts, "_MAX_COMPARISONS", most_comparisons)
    chosen = np.random.default_rng(0).integers(0, 5, (13, 3)).astype(np.int32)
    order, places = experts.sort_by_expert(jnp.asarray(chosen))
    np.testing.assert_array_equal(order, np.argsort(chosen.ravel(), kind="stable"))
    np.testing.assert_array_equal(np.asarray(order)[places].ravel(), np.arange(chosen.size))


def switched(**switches) -> LlamaConfig:
    return dataclasses.replace(CONFIG, **switches)


@pytest.mark.parametrize(
    ("switches", "scan_layers"),
    [({}, True), ({"shared_expert_intermediate_size": 20}, False), (GPT_OSS, False)],
    ids=["plain", "shared", "gpt_oss"],
)
def test_paged_model_with_experts_matches_plain_forward(switches, scan_layers, monkeypatch) -> None:
    """Prefill has padding with random tokens, and decode has a row left out.

    Such rows use no expert.
    """
    rows = []  # total number of rows in each grouped matrix multiplication

    def counted(x, w, group_sizes, **options):
        jax.debug.callback(lambda sizes: rows.append(int(sizes.sum())), group_sizes)
        return grouped_linear(x, w, group_sizes, **options)

    monkeypatch.setattr(experts, "grouped_linear", counted)
    config = switched(**switches)
    model = random_llama(config, scan_layers=scan_layers)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12)).astype(np.int32)
    want = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    cache = model.create_cache(num_slots=2, max_length=16, block_size=4)
    slots = jnp.array([1, 0])
    score = jax.jit(type(model).score)
    logits, cache, ok = score(model, cache, tokens[:, :9], slots, jnp.array([9, 6]))
    assert ok
    np.testing.assert_allclose(logits[0], want[0, :9], atol=2e-5)
    np.testing.assert_allclose(logits[1, :6], want[1, :6], atol=2e-5)
    jax.effects_barrier()
    num_products = 2 * config.num_hidden_layers
    assert rows == [24 * K] * num_products + [(9 + 6) * K] * num_products
    decode = jax.jit(type(model).decode)
    logits, cache, ok = decode(model, cache, tokens[::-1, 6], jnp.array([0, -1]))
    assert ok
    np.testing.assert_allclose(logits[0], want[1, 6], atol=2e-5)
    jax.effects_barrier()
    assert rows[2 * num_products :] == [1 * K] * num_products


@needs_compiler
@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_with_experts_gives_equal_bits_in_any_batch(dtype) -> None:
    config = switched(shared_expert_intermediate_size=20, num_hidden_layers=1)
    model = random_llama(config, dtype=dtype)
    cache = model.create_cache(num_slots=8, max_length=16)
    cache, ok = paged_cache.reserve(cache, jnp.full(8, 3, jnp.int32), max_tokens=3)
    assert ok
    decode = jax.jit(type(model).decode)
    tokens, slots = np.arange(8, dtype=np.int32) * 5, np.arange(8, dtype=np.int32)
    together, *_ = decode(model, cache, tokens, slots)
    assert np.isfinite(together).all()
    alone, *_ = decode(model, cache, tokens[6:7], slots[6:7])
    np.testing.assert_array_equal(alone[0], np.asarray(together)[6])


def family_config(model_type, **changes) -> LlamaConfig:
    sizes = {"num_local_experts": X} if model_type == "mixtral" else {"num_experts": X}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads")  # fmt: skip
    config = {name: getattr(CONFIG, name) for name in names} | sizes
    config["num_experts_per_tok"] = K
    return LlamaConfig.from_dict({"model_type": model_type, **config, **changes})


@pytest.mark.parametrize(
    ("model_type", "gate", "halves", "down", "changes"),
    [
        ("mixtral", "block_sparse_moe.", ("w1", "w3"), "w2", {}),
        (
            "qwen2_moe",
            "mlp.",
            ("gate_proj", "up_proj"),
            "down_proj",
            {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
        ),
    ],
)
def test_from_pretrained_reads_fused_and_separate_experts(
    tmp_path, model_type, gate, halves, down, changes
) -> None:
    model = random_llama(family_config(model_type, **changes))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(CONFIG.num_hidden_layers):
        scope = f"model.layers.{layer}."

        def stacked(kind, scope=scope):
            names = (f"{scope}{gate}experts.{x}.{kind}.weight" for x in range(X))
            return np.stack([tensors.pop(name) for name in names])

        gate_up = np.concatenate([stacked(kind) for kind in halves], axis=1)
        tensors[f"{scope}mlp.experts.gate_up_proj"] = gate_up
        tensors[f"{scope}mlp.experts.down_proj"] = stacked(down)
        tensors[f"{scope}mlp.gate.weight"] = tensors.pop(f"{scope}{gate}gate.weight")
    (tmp_path / "fused").mkdir()
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text((tmp_path / "config.json").read_text())
    for folder in (tmp_path, tmp_path / "fused"):
        loaded = Decoder.from_pretrained(folder, scan_layers=False)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "olmoe",
            {"decoder_sparse_step": 2},
            "decoder_sparse_step must be 1 for OlmoeForCausalLM, got 2",
        ),
        ("mixtral", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("mixtral", {"n_group": 2}, "n_group"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers must be a list"),
        ("olmoe", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm4_moe", {"n_group": 7}, "num_experts must be a multiple of the router's num_groups"),
        ("glm4_moe", {"topk_group": 2}, "num_chosen_groups"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ("mixtral", {"num_experts_per_tok": 2.5}, "num_experts_per_tok must be an integer"),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            f"num_experts_per_tok must be at most num_local_experts, got .* 9 and .* {X}",
        ),
        ("qwen2_moe", {"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "mlp_layer_types must contain 'sparse'"),
        ("glm4_moe", {"mlp_layer_types": ["none", "sparse"]}, "mlp_layer_types .* got 'none'"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts must be 0 or more, got -1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be 'greedy' or"),
    ],
)
def test_from_dict_names_unsupported_experts(model_type, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        family_config(model_type, **changes)


def test_from_dict_reads_both_names_of_num_experts() -> None:
    assert family_config("qwen3_moe").num_experts == X
    assert family_config("qwen3_moe", num_local_experts=5).num_experts == 5  # transformers 5
    assert family_config("mixtral", num_experts=4).num_experts == 4


def test_decoder_with_experts_may_be_int8() -> None:
    model = random_llama(CONFIG, dtype="int8")
    assert model.layers[0].experts_down_proj.dtype == jnp.int8
    assert model.layers[0].experts_down_proj_scale.dtype == jnp.float32


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_chosen must be at most num_experts"),
        ({"moe_intermediate_size": 0}, "Experts: features must be"),
        ({"num_experts": 0}, "num_experts must be"),
        ({"swiglu_limit": -1.0}, "ClampedSwiGLU: limit must be positive"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size must be"),
    ],
)
def test_config_rejects_inconsistent_experts(switches, message) -> None:
    with pytest.raises(ValueError, match=message):
        switched(**switches)


def test_weights_of_sigmoid_scores_are_divided_by_their_sum_and_epsilon() -> None:
    """Without a correction bias. The formula in float64 has the two largest scores of a token."""
    logits = np.random.default_rng(0).normal(size=(5, 7))
    top = np.sort(1 / (1 + np.exp(-logits)), axis=1)[:, :-3:-1]
    routes = experts.route(
        jnp.asarray(logits, jnp.float32), 2, Router("sigmoid", epsilon=0.1), renormalise=True
    )
    want = top / (top.sum(axis=1, keepdims=True) + 0.1)
    np.testing.assert_allclose(routes.weights, want, rtol=1e-6)
