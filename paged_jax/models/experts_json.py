"""Read and write the entries about experts of a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from paged_jax.arguments import check_positive, is_int, is_real
from paged_jax.models.family import Family, Router, UnsupportedConfigError
from paged_jax.models.layer_groups import DENSE, SPARSE
from paged_jax.models.model_folder import REQUIRED, read_entry, read_integer

# Keys that change the computation, with the value that has no effect. Any other value is rejected,
# unless the family reads the key.
_NEUTRAL: Mapping[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1,
    "clip_qkv": None,
    "qkv_bias": True,
}
# Keys that describe the layers with a dense MLP, by `Family.dense_layers`.
_DENSE_KEYS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "first": ("first_k_dense_replace",),
    "listed": ("decoder_sparse_step", "mlp_only_layers"),
    "others": ("interleave_moe_layer_step", "moe_layers"),
}
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# transformers uses any of these keys for the number of experts.
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields of experts that are not integers: a check of the value, and its type in words.
_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "norm_topk_prob": (lambda value: isinstance(value, bool), "true or false"),
    "swiglu_alpha": (is_real, "a number"),
    "swiglu_limit": (is_real, "a number"),
    "factor": (is_real, "a number"),
    "has_correction_bias": (lambda value: isinstance(value, bool), "true or false"),
}


def read_experts(config: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """Return the fields of a `LlamaConfig` that describe experts.

    Args:
      config: content of the file, with the family's defaults.
      family: family of the model.
      num_layers: number of layers (L).

    Raises:
      UnsupportedConfigError, ValueError: see `LlamaConfig.from_dict`.
    """
    if family.experts is None:
        return {}
    if family.experts_switch is not None and not config.get(family.experts_switch):
        return {"separate_expert_norms": False}
    read = {*_DENSE_KEYS[family.dense_layers], *family.router_keys.values(), *family.only}
    check_neutral(config, family, {k: v for k, v in _NEUTRAL.items() if k not in read})
    # `config` always has a value under the family's key, perhaps the family's default. So a value
    # under another key comes from the file, and is used instead.
    own = family.key("num_experts")
    others = [config[name] for name in _NUM_EXPERTS_KEYS if name in config and name != own]
    config = {**config, own: others[0]} if others else config
    fields = {name: _read(config, name, family.key(name)) for name in (*_SIZES, *family.experts)}
    if fields["num_experts"] == 0 and fields.get("shared_expert_intermediate_size"):
        # Without other experts, the shared expert is a dense MLP.
        return {"intermediate_size": fields["shared_expert_intermediate_size"]}
    if family.shared_experts is not None:
        count = read_integer(config, family.shared_experts, 0)
        fields["shared_expert_intermediate_size"] = count * fields["moe_intermediate_size"]
    options = {name: _read(config, name, key) for name, key in _router_keys(config, family)}
    return fields | {
        "router": dataclasses.replace(family.router, **options),
        "mlp_layer_types": _read_layer_types(config, family, num_layers),
    }


def write_experts(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that `read_experts` and transformers can read.

    Fields that the family cannot express are left out.

    Args:
      fields: all fields of a `LlamaConfig` by name.
      family: family of the model.
    """
    if family.experts is None:
        return {}
    switch = family.experts_switch
    if switch is not None and not fields["num_experts"]:
        return {switch: False}
    if not fields["num_experts"] and "shared_expert_intermediate_size" in family.experts:
        shared = family.key("shared_expert_intermediate_size")
        return {family.key("num_experts"): 0, shared: fields["intermediate_size"]}
    router: Router = fields["router"]
    written = {family.key(name): fields[name] for name in (*_SIZES, *family.experts)}
    written |= {key: getattr(router, name) for name, key in family.router_keys.items()}
    if family.groups_switch is not None:
        key, value = family.groups_switch
        written[key] = value if router.num_groups > 1 else "greedy"
    written |= {} if switch is None else {switch: True}
    if family.shared_experts is not None:
        size = fields["moe_intermediate_size"]
        written[family.shared_experts] = fields["shared_expert_intermediate_size"] // size
    kinds = fields["mlp_layer_types"] or (SPARSE,) * fields["num_hidden_layers"]
    if family.dense_layers == "first":
        written[family.key("first_k_dense_replace")] = [*kinds, SPARSE].index(SPARSE)
        written["mlp_layer_types"] = list(kinds)  # some classes of transformers read this only
    if family.dense_layers == "listed":
        written["decoder_sparse_step"] = 1
        written["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == DENSE]
    if family.dense_layers == "others":
        written["moe_layers"] = [i for i, kind in enumerate(kinds) if kind == SPARSE]
    return written


def _router_keys(config: Mapping[str, Any], family: Family) -> list[tuple[str, str]]:
    """Return the fields of the router to read, with their keys."""
    keys = list(family.router_keys.items())
    if family.groups_switch is None:
        return keys
    key, value = family.groups_switch
    method = config.get(key) or "greedy"
    if method not in ("greedy", value):
        raise UnsupportedConfigError(
            f"LlamaConfig: {key} = {method!r} is not supported for {family.architecture}, only "
            f"'greedy' and {value!r}."
        )
    return [pair for pair in keys if method == value or "groups" not in pair[0]]


def check_neutral(config: Mapping[str, Any], family: Family, neutral: Mapping[str, Any]) -> None:
    """Check that entries have values without an effect, unless the family reads them.

    Args:
      config: content of the file.
      family: family of the model.
      neutral: value without an effect of each key.

    Raises:
      UnsupportedConfigError: an entry has another value.
    """
    for key, value in neutral.items():
        if config.get(key) not in (None, value) and key not in family.reads:
            raise UnsupportedConfigError(
                f"LlamaConfig: {key} = {config[key]!r} is not supported for "
                f"{family.architecture}, only {value!r}."
            )


def _read(config: Mapping[str, Any], name: str, key: str) -> Any:
    is_valid, kind = _TYPES.get(name, (is_int, "an integer"))
    value = read_entry(config, key, REQUIRED)
    if not is_valid(value):
        raise ValueError(f"LlamaConfig: {key} must be {kind}, got {value!r}.")
    return value


def _read_layer_types(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> tuple[str, ...]:
    """Return whether each layer has a dense MLP or experts; empty if all have experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        is_dense = _find_dense(config, family, num_layers)
        return tuple(DENSE if dense else SPARSE for dense in is_dense)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"LlamaConfig: mlp_layer_types must be a list of names, got {kinds!r}.")
    if family.dense_layers == "none" and set(kinds) != {SPARSE}:
        raise UnsupportedConfigError(
            f"LlamaConfig: mlp_layer_types = {kinds!r} is not supported for "
            f"{family.architecture}, only {SPARSE!r}."
        )
    return tuple(kinds)


def _find_dense(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    if family.dense_layers == "first":
        num_dense = read_integer(config, family.key("first_k_dense_replace"), 0)
        return [layer < num_dense for layer in range(num_layers)]
    if family.dense_layers == "none":
        return [False] * num_layers
    step_key, list_key = _DENSE_KEYS[family.dense_layers]
    step = read_integer(config, step_key, 1)
    check_positive("LlamaConfig", **{step_key: step})
    listed = read_entry(config, list_key, [])
    if not isinstance(listed, list) or not all(map(is_int, listed)):
        raise ValueError(f"LlamaConfig: {list_key} must be a list of layers, got {listed!r}.")
    if family.dense_layers == "others" and listed:
        return [layer not in listed for layer in range(num_layers)]
    return [layer in listed or (layer + 1) % step > 0 for layer in range(num_layers)]
