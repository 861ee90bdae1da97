"""Mapping from the tensors of a Hugging Face checkpoint to the parameters of a model.

A parameter may consist of several tensors. For example, ``layers.3.qkv_proj`` contains the query,
key and value projections. `map_parameter` lists the tensors of a parameter and their positions in
the parameter.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Literal, get_args

from paged_jax.models.config import LlamaConfig
from paged_jax.models.families import FAMILIES
from paged_jax.models.loading.mixer_tensors import latent_mappings, mixer_mappings
from paged_jax.models.loading.stored_tensors import Mappings, TensorMapping, map_tensor
from paged_jax.models.rope import head_order

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Names that follow the prefix ``model.`` in most checkpoints.
_INNER = (
    "layers.", "embed_tokens.", "norm.",
    "embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm.",
    "altup_projections.", "altup_unembed_projections.",
)  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
# Tensors that layers do not use if they read the keys and values of another layer. Some files
# contain these tensors anyway, so they are ignored.
_OF_KV = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")

# Default tensor name of each attention and MLP weight. A family may use other names.
_NAMES = {
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "norm": "model.norm.weight",
}
# Default tensor name of each one-dimensional parameter of a layer. A family may use other names.
_VECTORS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "o_bias": "self_attn.o_proj.bias",
    "shared_out_norm": "post_feedforward_layernorm_1.weight",
    "expert_input_norm": "pre_feedforward_layernorm_2.weight",
    "expert_out_norm": "post_feedforward_layernorm_2.weight",
    "router_norm": "router.scale",
    "per_layer_out_norm": "post_per_layer_input_norm.weight",
    "laurel_norm": "laurel.post_laurel_norm.weight",
    "stream_norm": "altup.router_norm.weight",
    "stream_factor": "altup.correct_output_scale",
}
# Default tensor name of each parameter of experts. A * stands for the number of an expert.
_EXPERTS = {
    "router": "mlp.gate.weight",
    "experts_gate_proj": "mlp.experts.*.gate_proj.weight",
    "experts_up_proj": "mlp.experts.*.up_proj.weight",
    "experts_down_proj": "mlp.experts.*.down_proj.weight",
    "router_correction_bias": "mlp.gate.e_score_correction_bias",
    "router_expert_factor": "mlp.router.per_expert_scale",
    "shared_expert": "mlp.shared_expert",
}

# Ways to store experts in files. "family": as in the published files of the family. "fused": one
# tensor for all experts, with the names in the models of transformers 5, see `Family.in_memory`.
# "separate": each expert has separate tensors for gate, up and down.
ExpertLayout = Literal["family", "fused", "separate"]


def map_parameter(
    config: LlamaConfig, name: str, *, experts: ExpertLayout = "family"
) -> Iterator[TensorMapping]:
    """Yield the mappings of a parameter to its tensors.

    The boxes of the mappings fill the parameter without overlap.

    Args:
      config: configuration of the model.
      name: name of the parameter, such as ``"layers.3.qkv_proj"``, or ``"layers.qkv_proj"`` if
        the layers are stacked.
      experts: how the files store experts, see `ExpertLayout`.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
      >>> for mapping in map_parameter(config, "layers.0.gate_up_proj"):
      ...     print(mapping.tensor, mapping.shape, mapping.box_shape, mapping.box_start)
      model.layers.0.mlp.gate_proj.weight (32, 16) (1, 32, 16) (0, 0, 0)
      model.layers.0.mlp.up_proj.weight (32, 16) (1, 32, 16) (1, 0, 0)
    """
    scope, _, rest = name.partition(".")
    if scope != "layers":
        yield from _model_mappings(config)[name]
        return
    *index, kind = rest.split(".")  # ["3", "qkv_proj"], or ["qkv_proj"] for all layers
    for layer in [int(index[0])] if index else range(config.num_hidden_layers):
        for mapping in _layer_mappings(config.layer_configs[layer], experts)[kind]:
            tensor = f"model.layers.{layer}.{mapping.tensor}"
            if index:
                yield dataclasses.replace(mapping, tensor=tensor)
            else:
                yield dataclasses.replace(
                    mapping,
                    tensor=tensor,
                    box_shape=(1, *mapping.box_shape),
                    box_start=(layer, *mapping.box_start),
                )


def map_to_available(
    config: LlamaConfig, name: str, tensors: Container[str]
) -> list[TensorMapping]:
    """Return the mappings of a parameter to the tensors that exist.

    The function tries each `ExpertLayout`, and returns the first mappings for which `tensors`
    contains all tensors. By default, it returns the mappings of the layout "family".
    """
    family: list[TensorMapping] = []
    for layout in get_args(ExpertLayout):
        mappings = list(map_parameter(config, name, experts=layout))
        if all(mapping.tensor in tensors for mapping in mappings):
            return mappings
        family = family or mappings
    return family


def standard_name(config: LlamaConfig, name_in_file: str) -> str | None:
    """Convert the name of a tensor in a file to its name in `map_parameter`.

    The result is None if the tensor is not part of the text model.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
      ...                      model_type="gemma3_text")
      >>> standard_name(config, "language_model.model.norm.weight")
      'model.norm.weight'
    """
    family = FAMILIES.get(config.model_type)
    name = _without_prefix({} if family is None else family.prefixes, name_in_file)
    for part, replacement in (family.renamed if family and name else {}).items():
        name = name and name.replace(part, replacement)
    if name is None or (found := _LAYER.fullmatch(name)) is None:
        return name
    layer, rest = int(found[1]), found[2]
    if layer >= config.num_hidden_layers:
        return None if family is not None and family.has_draft_layers else name
    return None if config.shares_kv[layer] and _OF_KV.match(rest) else name


def _without_prefix(prefixes: Mapping[str, str | None], name: str) -> str | None:
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement and replacement + name.removeprefix(prefix)
    # In checkpoints of a model without its output head, tensor names lack the prefix ``model.``.
    return f"model.{name}" if name.startswith(_INNER) else name


def _model_mappings(config: LlamaConfig) -> Mapping[str, Mappings]:
    table = config.vocab_size, config.hidden_size
    d = config.hidden_size_per_layer_input
    width = config.num_hidden_layers * d
    per_layer, projection = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
    num_rows, E = config.vocab_size_per_layer_input or config.vocab_size, config.hidden_size
    num_others = 0 if config.residual_streams is None else config.residual_streams.count - 1

    def of_streams(module: str) -> Mappings:
        names = [f"model.{module}.{stream}.weight" for stream in range(num_others)]
        return tuple(
            map_tensor(name, (E, E), (1, E, E), (stream, 0, 0)) for stream, name in enumerate(names)
        )

    return {
        "stream_proj": of_streams("altup_projections"),
        "stream_out_proj": of_streams("altup_unembed_projections"),
        "embed_tokens_per_layer": (map_tensor(f"{per_layer}.weight", (num_rows, width)),),
        "per_layer_model_proj": (map_tensor(f"{projection}.weight", (width, config.hidden_size)),),
        "per_layer_norm": (map_tensor("model.per_layer_projection_norm.weight", (d,)),),
        "embed_tokens": (map_tensor(EMBEDDINGS, table),),
        "norm": (map_tensor({**_NAMES, **_family_tensors(config)}["norm"], (config.hidden_size,)),),
        "lm_head": (map_tensor(HEAD, table),),
    }


@functools.lru_cache(maxsize=16)
def _layer_mappings(config: LlamaConfig, experts: ExpertLayout) -> Mapping[str, Mappings]:
    """Return the mappings of all parameters of a layer, by parameter name.

    `config` is the layer's config in `LlamaConfig.layer_configs`. Tensor names lack the prefix
    ``model.layers.{index}.``.
    """
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    H = config.num_attention_heads
    d, names = config.hidden_size_per_layer_input, {**_NAMES, **_family_tensors(config, experts)}
    # The rows of queries and keys, which rotate, must be reordered by `head_order`. Values do not
    # rotate.
    [rope, *_] = config.ropes
    paired_dim = D if rope is None else rope.paired_dim
    row_order = head_order(D, paired_dim, interleaved=config.rope_interleaved)
    norms = {**_VECTORS, **_family_tensors(config)}
    vectors = {name: (map_tensor(tensor, (E,)),) for name, tensor in norms.items()}
    mappings: dict[str, Mappings] = {
        **vectors,
        "qkv_proj": _qkv_mappings(config, names, row_order),
        "qkv_bias": _qkv_mappings(config, names, row_order, is_bias=True),
        **_norm_mappings(config, names, row_order),
        "o_proj": (map_tensor(names["o_proj"], (E, config.value_features)),),
        **_mlp_mappings(config, names, F),
        "sinks": (map_tensor("self_attn.sinks", (H,)),),
        "layer_scalar": (map_tensor("layer_scalar", (1,)),),
        "per_layer_gate": (map_tensor("per_layer_input_gate.weight", (d, E)),),
        "per_layer_proj": (map_tensor("per_layer_projection.weight", (E, d)),),
        "laurel_left": (map_tensor("laurel.linear_left.weight", (config.laurel_rank, E)),),
        "laurel_right": (map_tensor("laurel.linear_right.weight", (E, config.laurel_rank)),),
    }
    if config.residual_streams is not None:
        n = config.residual_streams.count
        mappings |= {
            "stream_router": (map_tensor("altup.modality_router.weight", (n, E)),),
            "stream_predict": (map_tensor("altup.prediction_coefs.weight", (n * n, n)),),
            "stream_correct": (map_tensor("altup.correction_coefs.weight", (n, n)),),
        }
    if config.mixer is not None:
        mappings |= mixer_mappings(config.mixer, E, names)
    if config.latent is not None:
        mappings |= latent_mappings(config, config.latent)
    if config.num_experts:
        mappings |= _expert_mappings(config, experts)
        if experts == "fused" or experts == "family" and "fused_gate_up_proj" in names:
            mappings |= _fused_expert_mappings(config, experts)
    return mappings


def _norm_mappings(
    config: LlamaConfig, names: Mapping[str, str], row_order: tuple[int, ...] | None
) -> dict[str, Mappings]:
    """Return the mappings of the weights of the query and key norms.

    `row_order` is the order of a head's rows, see `head_order`.
    """
    D, H, K = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    q_norm, k_norm = names["q_norm"], names["k_norm"]
    if config.qk_norm_scope == "own":
        # The weight in the file has a row for each head. The elements of a row are not reordered
        # here (`row_order`), because `normed_heads` reorders them when the model runs.
        return {
            "q_norm": (map_tensor(q_norm, (H, D), (K, H // K, D)),),
            "k_norm": (map_tensor(k_norm, (K, D)),),
        }
    shapes = ((D,), (D,)), ((D,), (D,))
    if config.qk_norm_scope == "projection":
        shapes = ((H * D,), (K, H // K, D)), ((K * D,), (K, D))
    return {
        "q_norm": (map_tensor(q_norm, *shapes[0], row_order=row_order),),
        "k_norm": (map_tensor(k_norm, *shapes[1], row_order=row_order),),
    }


def _mlp_mappings(config: LlamaConfig, names: Mapping[str, str], F: int) -> dict[str, Mappings]:
    """Return the mappings of the parameters of an MLP with F features, by parameter name."""
    E = config.hidden_size
    mappings: dict[str, Mappings] = {}
    parts = ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",)
    for kind, rest in ("proj", (E,)), ("bias", ()):
        if "gate_up_proj" in names:
            fused = _tensor_of(names["gate_up_proj"], kind)
            gate_up = (map_tensor(fused, (2 * F, *rest), (2, F, *rest)),)
        else:
            starts = [(half, 0, 0)[: 2 + len(rest)] for half in range(len(parts))]
            tensors = [_tensor_of(names[part], kind) for part in parts]
            gate_up = tuple(
                map_tensor(tensor, (F, *rest), (1, F, *rest), start)
                for tensor, start in zip(tensors, starts, strict=True)
            )
        mappings[f"gate_up_{kind}"] = gate_up
    mappings["down_proj"] = (map_tensor(names["down_proj"], (E, F)),)
    mappings["down_bias"] = (map_tensor(_tensor_of(names["down_proj"], "bias"), (E,)),)
    return mappings


def _tensor_of(weight: str, kind: str) -> str:
    """Return the name of a module's weight, or of its bias if `kind` is ``"bias"``."""
    return weight if kind == "proj" else weight.removesuffix("weight") + "bias"


def name_in_file(config: LlamaConfig, name: str) -> str:
    """Convert a tensor name of `map_parameter` to the name that transformers writes to files."""
    family = FAMILIES.get(config.model_type)
    for prefix, replacement in (family.written_prefixes if family else {}).items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _family_tensors(config: LlamaConfig, experts: ExpertLayout = "family") -> Mapping[str, str]:
    family = FAMILIES.get(config.model_type)
    if family is None:
        return {}
    if experts != "fused" or not family.in_memory:
        return family.tensors
    tensors = dict(family.tensors)
    for part, replacement in family.in_memory.items():
        tensors = {name: each.replace(part, replacement) for name, each in tensors.items()}
    return tensors


def _qkv_mappings(
    config: LlamaConfig,
    names: Mapping[str, str],
    row_order: tuple[int, ...] | None,
    *,
    is_bias: bool = False,
) -> Mappings:
    """Return the mappings of ``qkv_proj`` or ``qkv_bias`` to the tensors of the files.

    Q, K and V of the weights are one fused tensor or three tensors. Biases are always three
    tensors. `row_order` is the result of `head_order`.
    """
    D, H, K = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    fused_tensor = None if is_bias else names.get("qkv_proj")
    columns = () if is_bias else (config.hidden_size,)
    G, query_order = H // K, row_order
    if config.attention_gate:
        # In the tensor, the gate of a head follows its query. `row_order` reorders the rows of
        # queries for rotary embedding. Gates are not rotated, so their rows are not reordered.
        G, gate = 2 * G, tuple(range(D, 2 * D))
        query_order = None if row_order is None else row_order + gate
    parts = [("q_proj", G, 0, query_order), ("k_proj", 1, G, row_order), ("v_proj", 1, G + 1, None)]
    mappings, row = [], 0
    for name, heads, first_head, order in parts[: 1 + config.num_kv_rows]:
        num_rows = K * heads * D
        tensor = fused_tensor or names[name]
        mappings.append(
            map_tensor(
                _tensor_of(tensor, "bias" if is_bias else "proj"),
                (config.qkv_features if fused_tensor else num_rows, *columns),
                (K, heads, D, *columns),
                (0, first_head, 0, *[0] * len(columns)),
                first_row=row if fused_tensor else 0,
                row_order=order,
            )
        )
        row += num_rows
    return tuple(mappings)


def _expert_mappings(config: LlamaConfig, experts: ExpertLayout) -> dict[str, Mappings]:
    """Return the mappings of the parameters of router and experts, by parameter name."""
    E, F, X = config.expert_inputs, config.moe_intermediate_size, config.num_experts
    names = {**_EXPERTS, **_family_tensors(config, experts)}
    shared, hidden_size = config.shared_expert_intermediate_size, config.hidden_size
    for name in ("gate_proj", "up_proj", "down_proj"):
        if "gate_up_proj" not in names:
            names[name] = f"{names['shared_expert']}.{name}.weight"
    mappings: dict[str, Mappings] = {
        "router": (map_tensor(names["router"], (X, hidden_size)),),
        "router_correction_bias": (map_tensor(names["router_correction_bias"], (X,)),),
        "router_expert_factor": (map_tensor(names["router_expert_factor"], (X,)),),
        "shared_expert_gate": (map_tensor("mlp.shared_expert_gate.weight", (1, hidden_size)),),
        **_mlp_mappings(config, names, shared),
    }
    for name, shape in ("moe_in", (E, hidden_size)), ("moe_out", (hidden_size, E)):
        if weight := names.get(f"{name}_proj"):
            mappings[f"{name}_proj"] = (map_tensor(weight, shape),)
            mappings[f"{name}_bias"] = (map_tensor(_tensor_of(weight, "bias"), shape[:1]),)
    if "router_bias" in names:
        mappings["router_bias"] = (map_tensor(names["router_bias"], (X,)),)
    if "transposed_gate_up_proj" in names and experts != "separate":
        # In the file, matrices are [in, out]. The columns of all gates come first.
        first, last = names["transposed_gate_up_proj"], names["transposed_down_proj"]
        return mappings | {
            "experts_gate_up_proj": _all_experts(first, (X, E, 2, F), (0, 2, 3, 1), merged=2),
            "experts_down_proj": _all_experts(last, (X, F, E), (0, 2, 1)),
        }
    if "experts_gate_up_proj" in names and experts != "separate":
        # In the file, matrices are [in, out]. Columns of the gate and the up projection alternate.
        first, last = names["experts_gate_up_proj"], names["experts_down_proj"]
        bias = names["experts_gate_up_bias"]
        return mappings | {
            "experts_gate_up_proj": _all_experts(first, (X, E, F, 2), (0, 3, 2, 1), merged=2),
            "experts_gate_up_bias": _all_experts(bias, (X, F, 2), (0, 2, 1), merged=1),
            "experts_down_proj": _all_experts(last, (X, F, E), (0, 2, 1)),
            "experts_down_bias": (map_tensor(names["experts_down_bias"], (X, E)),),
        }
    names = _EXPERTS if "router_bias" in names else names
    gate, up, down = (names[f"experts_{kind}_proj"] for kind in ("gate", "up", "down"))
    halves = (gate, up) if config.gated_mlp else (up,)
    mappings |= {
        "experts_gate_up_proj": _each_expert(X, halves, (F, E)),
        "experts_down_proj": _each_expert(X, down, (E, F)),
    }
    if "router_bias" in mappings:
        gate, up, down = (name.replace("weight", "bias") for name in (gate, up, down))
        mappings |= {
            "experts_gate_up_bias": _each_expert(X, (gate, up), (F,)),
            "experts_down_bias": _each_expert(X, down, (E,)),
        }
    return mappings


def _all_experts(
    tensor: str, split: tuple[int, ...], axes: tuple[int, ...], merged: int | None = None
) -> Mappings:
    """Return the mapping of a parameter that is stored as one tensor for all experts.

    Args:
      tensor: name of the tensor.
      split: shape of the tensor. If it holds both the gate and the up projection, a dimension of
        size 2 separates them.
      axes: for each dimension of the parameter, the index of the dimension in `split`.
      merged: index of a dimension of `split` that the file merges with the next dimension; None if
        the file merges no dimensions.
    """
    shape, whole = tuple(split[axis] for axis in axes), None
    if merged is not None:
        split, whole = (
            (*split[:merged], math.prod(split[merged : merged + 2]), *split[merged + 2 :]),
            split,
        )
    return (TensorMapping(tensor, split, shape, (0,) * len(shape), axes=axes, split_shape=whole),)


def _each_expert(
    num_experts: int, tensors: str | tuple[str, ...], shape: tuple[int, ...]
) -> Mappings:
    """Return the mappings of a parameter that is stored as separate tensors for each expert.

    `tensors` is the name of an expert's tensor, or the names of several tensors to stack. A ``*``
    in a name stands for the index of the expert. `shape` is the shape of each tensor.
    """
    parts, lead = ((tensors,), (1,)) if isinstance(tensors, str) else (tensors, (1, 1))
    return tuple(
        map_tensor(
            tensor.replace("*", str(expert)),
            shape,
            (*lead, *shape),
            (*(expert, part)[: len(lead)], *[0] * len(shape)),
        )
        for expert in range(num_experts)
        for part, tensor in enumerate(parts)
    )


def _fused_expert_mappings(config: LlamaConfig, experts: ExpertLayout) -> dict[str, Mappings]:
    """Return the mappings of router and experts for files with one tensor for all experts."""
    E, F, X = config.expert_inputs, config.moe_intermediate_size, config.num_experts
    names = {**_EXPERTS, **_family_tensors(config, experts)}
    router, bias, up = (
        names[name] for name in ("router", "router_correction_bias", "experts_up_proj")
    )
    if "fused_gate_up_proj" not in names:
        router, bias, up = (
            name.replace("block_sparse_moe.", "mlp.") for name in (router, bias, up)
        )
    module = up.partition("*.")[0]  # such as "mlp.experts."
    halves, first = (2, "gate_up_proj") if config.gated_mlp else (1, "up_proj")
    gate_up = names.get("fused_gate_up_proj", f"{module}{first}")
    down = names.get("fused_down_proj", f"{module}down_proj")
    return {
        "router": (map_tensor(router, (X, config.hidden_size)),),
        "router_correction_bias": (map_tensor(bias, (X,)),),
        "experts_gate_up_proj": _all_experts(gate_up, (X, halves, F, E), (0, 1, 2, 3), merged=1),
        "experts_down_proj": _all_experts(down, (X, E, F), (0, 1, 2)),
    }
