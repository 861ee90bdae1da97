"""All switches of a config, compared with formulas in float64.

These tests find an error in a switch within seconds. `test_families.py` checks that each family has
the right switches. It takes minutes and needs transformers.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, expit, softmax

from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Router
from paged_jax.models.rope import QueryScale, Rope, RopeScaling, head_order
from tests.support.covering import all_pairs, once_in_core
from tests.support.random_model import random_llama

T, WINDOW, THETAS = 11, 4, (50.0, 9.0)
SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": THETAS[0],
    "dtype": "float32",
}
SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED = {"shared_expert_intermediate_size": 16}
GROUPS = {"num_groups": 3, "num_chosen_groups": 2}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "norms": {
        "pre": {},
        "sandwich, 1 + weight": {"norm_placement": "sandwich", "norm_offset": 1.0},
        "sandwich, separate for experts": {"norm_placement": "sandwich"}
        | {"separate_expert_norms": True, **SHARED},
        "post": {"norm_placement": "post"},
        "parallel, of layers": {"norm_placement": "parallel", "norm_type": "layer"},
    },
    "norms of q and k": {
        "none": {},
        "heads": {"qk_norm": True},
        "heads, 1 + weight": {"qk_norm": True, "norm_offset": 1.0},
        "heads with own weights": {"qk_norm": True, "qk_norm_scope": "own"},
        "projection": {"qk_norm": True, "qk_norm_scope": "projection"},
    },
    "mlp": {
        "silu": {},
        "gelu": {"hidden_act": "gelu"},
        "gelu by tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "gelu by sigmoid": {"hidden_act": "quick_gelu"},
        "relu": {"hidden_act": "relu"},
        "experts and a shared one": EXPERTS | SHARED,
        "sigmoid, bias and groups": EXPERTS
        | SHARED
        | {"shared_expert_gate": False, "norm_topk_prob": True}
        | {"router": Router("sigmoid", has_correction_bias=True, **GROUPS, epsilon=0.1)},
        "groups by their best expert": EXPERTS
        | {"router": Router(**GROUPS, group_score="max", factor=1.7)},
        "sigmoid of inputs": EXPERTS | {"router": Router("sigmoid", scales_inputs=True)},
        "scaled experts": EXPERTS | {"router": Router(has_expert_scale=True)},
        "experts of gpt-oss": EXPERTS
        | {"norm_topk_prob": True, "expert_bias": True, "swiglu_limit": 0.3},
        "experts after a dense layer": EXPERTS | {"mlp_layer_types": ("dense", "sparse")},
    },
    "values": {
        "plain": {},
        "normed": {"value_norm": True},
        "keys": {"value_norm": True, "attention_k_eq_v": True},
    },
    "queries": {
        "plain": {},
        "gated": {"attention_gate": True},
        "scaled": {"query_scale": QueryScale(beta=0.5, length=4)},
        "scaled without rotation": {"query_scale": QueryScale(0.7, 3, 1, only_without_rope=True)},
    },
    "scores": {
        "plain": {},
        "cap": {"attn_logit_softcapping": 0.8},
        "sinks": {"attention_sinks": True},
        "factor": {"attention_multiplier": 0.7},
    },
    "windows": {
        "none": {},
        "all": SLIDING,
        "some": SLIDING | {"layer_types": ("full_attention", "sliding_attention")},
        "some, with other heads": SLIDING
        | {"layer_types": ("sliding_attention", "full_attention")}
        | {"global_head_dim": 12, "num_global_key_value_heads": 1},
    },
    "ropes": {
        "all": {},
        "one": {"rope_layers": (False, True)},
        "half": {"partial_rotary_factor": 0.5},
        "half of proportional pairs": {"partial_rotary_factor": 0.5}
        | {"rope_scaling": RopeScaling("proportional", 2.0)},
        "local": {"rope_local_base_freq": THETAS[1]},
    },
    "biases": {
        "none": {},
        "of attention": {"qkv_bias": True, "o_bias": True},
        "of MLPs": {"mlp_bias": True},
    },
    "ends": {
        "plain": {},
        "tied": {"tie_word_embeddings": True, "embedding_multiplier": 3.0},
        "scaled": {"logit_scale": 0.4, "residual_multiplier": 0.6},
        "cap": {"final_logit_softcapping": 0.9, "layer_scalar": True},
    },
}
CASES = all_pairs({factor: [*kinds] for factor, kinds in KINDS.items()})


@pytest.mark.parametrize("case", once_in_core(CASES), ids=lambda case: ", ".join(case.values()))
def test_forward_matches_the_formulas_in_float64(case) -> None:
    switches: dict[str, Any] = {}
    for factor, kind in case.items():
        switches |= KINDS[factor][kind]
    model = random_llama(LlamaConfig(**SIZES | switches), scale=0.4)
    token_ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], T, np.int32)
    expected = forward(model, token_ids)
    assert np.std(expected) > 0.05
    logits = model(jnp.asarray(token_ids)[None])[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5 * np.abs(expected).max())


def forward(model: Decoder, token_ids: np.ndarray) -> np.ndarray:
    """Return the logits ``[T, V]``."""
    config = model.config
    table = _get(model, "embed_tokens")
    x = table[token_ids] * config.embedding_multiplier
    for index, layer in enumerate(model.layers):
        normed = _norm(config, x, _get(layer, "input_norm"))
        out = _attention(config, layer, index, normed)
        scalar = _get(layer, "layer_scalar") if config.layer_scalar else 1
        if config.norm_placement == "parallel":
            x = scalar * (x + config.residual_multiplier * (out + _mlp(config, layer, normed)))
            continue
        x = x + config.residual_multiplier * _norm(config, out, _get(layer, "attention_out_norm"))
        normed = _norm(config, x, _get(layer, "post_attention_norm"))
        residual = x if hasattr(layer, "router_norm") else None
        out = _mlp(config, layer, normed, residual)
        out = config.residual_multiplier * _norm(config, out, _get(layer, "mlp_out_norm"))
        x = scalar * (x + out)
    head = table if config.tie_word_embeddings else _get(model, "lm_head")
    logits = config.logit_scale * _norm(config, x, _get(model, "norm")) @ head.T
    return _capped(logits, config.final_logit_softcapping)


def _get(part: Any, name: str) -> Any:
    """Return a parameter in float64, or None if it does not exist."""
    return np.asarray(getattr(part, name)[...], np.float64) if hasattr(part, name) else None


def _norm(config: LlamaConfig, x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    if weight is None:
        return x
    if config.norm_type == "layer":
        x = x - x.mean(-1, keepdims=True)
    return _rms_norm(config, x, weight)


def _rms_norm(config: LlamaConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    mean_square = np.square(x).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + config.rms_norm_eps) * (config.norm_offset + weight)


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _attention(config: LlamaConfig, layer: Any, index: int, x: np.ndarray) -> np.ndarray:
    part = config.layers[index].find(Attention)
    qkv = np.einsum("te,kgde->tkgd", x, _get(layer, "qkv_proj"))
    if config.qkv_bias:
        qkv += _get(layer, "qkv_bias")
    G = part.num_heads // part.num_kv_heads
    q, gate, k, v = qkv[:, :, :G], None, qkv[:, :, -part.num_kv_rows], qkv[:, :, -1]
    if config.attention_gate:
        q, gate = qkv[:, :, : 2 * G : 2], qkv[:, :, 1 : 2 * G : 2]
    if config.value_norm:
        v = v / np.sqrt(np.square(v).mean(-1, keepdims=True) + config.rms_norm_eps)
    if config.qk_norm:
        q, k = (
            _norm_heads(config, part.rope, heads, weight)
            for heads, weight in ((q, _get(layer, "q_norm")), (k, _get(layer, "k_norm")))
        )
    window = config.sliding_windows[index]
    if not config.rope_layers or config.rope_layers[index]:
        is_local = window is not None and config.rope_local_base_freq is not None
        q, k = (_rotate(config, heads, THETAS[is_local], is_local) for heads in (q, k))
    rotates = not config.rope_layers or config.rope_layers[index]
    if (by_position := config.query_scale) and not (by_position.only_without_rope and rotates):
        turns = (np.arange(T) + by_position.offset) // by_position.length
        q = q * (1 + by_position.beta * np.log(1 + turns)).reshape(T, 1, 1, 1)
    scale = config.attention_multiplier or q.shape[-1] ** -0.5
    scores = _capped(scale * np.einsum("tkgd,nkd->kgtn", q, k), config.attn_logit_softcapping)
    for token in range(T):
        scores[:, :, token, token + 1 :] = -np.inf
        if window is not None:
            scores[:, :, token, : max(token + 1 - window, 0)] = -np.inf
    if config.attention_sinks:
        sinks = _get(layer, "sinks").reshape(*scores.shape[:2], 1, 1)
        scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
    out = np.einsum("kgtn,nkd->tkgd", softmax(scores, axis=-1)[..., :T], v)
    out = out if gate is None else out * expit(gate)
    out = out.reshape(T, -1) @ _get(layer, "o_proj").T
    return out + _get(layer, "o_bias") if config.o_bias else out


def _norm_heads(
    config: LlamaConfig, rope: Rope | None, heads: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Normalise queries or keys ``[T, ..., D]`` of a layer with this rotary embedding."""
    if config.qk_norm_scope == "projection":
        normed = _rms_norm(config, heads.reshape(T, -1), weight.reshape(-1))
        return normed.reshape(heads.shape)
    if config.qk_norm_scope == "head":
        return _rms_norm(config, heads, weight)
    order = rope and head_order(rope.head_dim, rope.paired_dim, interleaved=False)
    return _norm(config, heads, weight if order is None else weight[..., order])


def _rotate(config: LlamaConfig, heads: np.ndarray, theta: float, is_local: bool) -> np.ndarray:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` of heads ``[T, ..., D]``."""
    half = heads.shape[-1] // 2
    num_rotated = int(heads.shape[-1] * config.partial_rotary_factor)
    pairs = np.arange(half)
    frequencies = np.where(2 * pairs < num_rotated, theta ** (-2 * pairs / num_rotated), 0)
    if (scaling := config.rope_scaling) is not None:
        frequencies = theta ** (-pairs / half)
        if not is_local:
            frequencies = np.where(2 * pairs < num_rotated, frequencies / scaling.factor, 0)
    turns = np.exp(1j * np.arange(T)[:, None] * frequencies)
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turns.reshape(
        T, *(1,) * (heads.ndim - 2), half
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * expit(x),
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * expit(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
}


def _mlp(
    config: LlamaConfig, layer: Any, x: np.ndarray, residual: np.ndarray | None = None
) -> np.ndarray:
    """Compute the MLP. With `residual`, experts and router normalise it as their own input."""
    act = ACTIVATIONS[config.hidden_act]
    out = np.zeros_like(x)
    if hasattr(layer, "gate_up_proj"):
        hidden = np.einsum("te,gfe->tgf", x, _get(layer, "gate_up_proj"))
        if config.mlp_bias:
            hidden += _get(layer, "gate_up_bias")
        out = (act(hidden[:, 0]) * hidden[:, 1]) @ _get(layer, "down_proj").T
        out = out + _get(layer, "down_bias") if config.mlp_bias else out
    if not hasattr(layer, "router"):
        return out
    inputs = logits_of = x
    if residual is not None:
        out = _norm(config, out, _get(layer, "shared_out_norm"))
        inputs = _norm(config, residual, _get(layer, "expert_input_norm"))
        logits_of = _norm(config, residual, _get(layer, "router_norm")) * x.shape[-1] ** -0.5
    elif hasattr(layer, "shared_expert_gate"):
        out = out * expit(x @ _get(layer, "shared_expert_gate").T)
    rows = zip(inputs, logits_of, strict=True)
    routed = np.stack([_experts(config, layer, *pair) for pair in rows])
    if residual is not None:
        routed = _norm(config, routed, _get(layer, "expert_out_norm"))
    return out + routed


def _route(config: LlamaConfig, layer: Any, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen experts of a token and their weights."""
    router = config.router
    scores = expit(logits) if router.scores == "sigmoid" else softmax(logits)
    keys = scores + (_get(layer, "router_correction_bias") if router.has_correction_bias else 0)
    groups = keys.reshape(router.num_groups, -1)
    best = np.sort(groups, axis=1)[:, -1 if router.group_score == "max" else -2 :].sum(axis=1)
    chosen_groups = np.argsort(-best)[: router.num_chosen_groups]
    is_chosen = np.isin(np.arange(router.num_groups), chosen_groups)[:, None]
    keys = np.where(is_chosen, groups, -np.inf).reshape(-1)
    chosen = np.argsort(-keys)[: config.num_experts_per_tok]
    weights = scores[chosen]
    if config.norm_topk_prob:
        weights = weights / (weights.sum() + router.epsilon)
    if router.has_expert_scale:
        weights = weights * _get(layer, "router_expert_factor")[chosen]
    return chosen, weights * router.factor


def _experts(config: LlamaConfig, layer: Any, row: np.ndarray, logits_of: np.ndarray) -> np.ndarray:
    """Compute the chosen experts for a token ``[E]``."""
    logits = _get(layer, "router") @ logits_of
    if config.expert_bias:
        logits = logits + _get(layer, "router_bias")
    total = np.zeros_like(row)
    for expert, weight in zip(*_route(config, layer, logits), strict=True):
        inputs, weight = (row * weight, 1) if config.router.scales_inputs else (row, weight)
        gate, up = _get(layer, "experts_gate_up_proj")[expert] @ inputs
        if config.expert_bias:
            gate, up = np.stack([gate, up]) + _get(layer, "experts_gate_up_bias")[expert]
        if (limit := config.swiglu_limit) is None:
            hidden = ACTIVATIONS[config.hidden_act](gate) * up
        else:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            hidden = (up + 1) * gate * expit(config.swiglu_alpha * gate)
        out = _get(layer, "experts_down_proj")[expert] @ hidden
        total += weight * (
            out + _get(layer, "experts_down_bias")[expert] if config.expert_bias else out
        )
    return total
