"""Entries of a ``config.json`` about experts, for families of several lineages.

A function ``read_...`` has a counterpart ``write_...`` that returns the entries for it. The errors
are those of `LlamaConfig.from_dict`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from paged_jax.arguments import check_positive
from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_integer, read_names, read_number
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import read_activation, read_layer_indices, read_num_layers
from paged_jax.models.layer_groups import DENSE, SPARSE
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.mlp import Dense

# Router of DeepSeek V3 and its relatives.
SIGMOID_ROUTER = Router("sigmoid", has_correction_bias=True, epsilon=1e-20)
# Keys under which a file may store the number of experts. transformers accepts all of them.
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class ExpertKeys(NamedTuple):
    """Keys of the sizes of experts, see `read_expert_sizes`.

    Attributes:
      num_experts: key of the number of experts (X).
      num_chosen: key of the number of experts that are chosen for each token (k).
      features: key of the features of each expert (F).
    """

    num_experts: str = "num_experts"
    num_chosen: str = "num_experts_per_tok"
    features: str = "moe_intermediate_size"


# Keys of most families.
_USUAL_KEYS = ExpertKeys()
# Keys of DeepSeek and its relatives.
ROUTED_KEYS = ExpertKeys(num_experts="n_routed_experts")


class ExpertSizes(TypedDict):
    """Fields of `Experts` with the number of experts and their features."""

    num_experts: int
    num_chosen: int
    features: int


def read_expert_sizes(
    family: Family, entries: ConfigEntries, keys: ExpertKeys = _USUAL_KEYS
) -> ExpertSizes:
    """Return the fields of `Experts` with the number of experts and their features."""
    num_experts = _read_num_experts(family, entries, keys.num_experts)
    num_chosen = read_integer(entries, keys.num_chosen)
    features = read_integer(entries, keys.features)
    sizes = {keys.num_experts: num_experts, keys.num_chosen: num_chosen, keys.features: features}
    check_positive("LlamaConfig", **sizes)
    if num_chosen > num_experts:
        raise ValueError(
            f"LlamaConfig: {keys.num_chosen} must be at most {keys.num_experts}, got "
            f"{keys.num_chosen} {num_chosen} and {keys.num_experts} {num_experts}."
        )
    return {"num_experts": num_experts, "num_chosen": num_chosen, "features": features}


def _read_num_experts(family: Family, entries: ConfigEntries, key: str) -> int:
    """Return the number of experts; `key` is the family's own key, which others precede."""
    keys = (*(name for name in _NUM_EXPERTS_KEYS if name != key), key)
    values = {name: entries[name] for name in keys if name in entries}
    # A default counts only if the file has no other key.
    config_entries = {name: value for name, value in values.items() if not entries.is_default(name)}
    config_entries = config_entries or values
    return read_integer(config_entries, next(iter(config_entries), key))


def write_expert_sizes(experts: Experts, keys: ExpertKeys = _USUAL_KEYS) -> dict[str, int]:
    """Return the entries for `read_expert_sizes`."""
    return {
        keys.num_experts: experts.num_experts,
        keys.num_chosen: experts.num_chosen,
        keys.features: experts.features,
    }


def read_router(entries: ConfigEntries, router: Router) -> Router:
    """Return a router with the groups of experts and the factor that DeepSeek's files contain."""
    return dataclasses.replace(
        router,
        num_groups=read_integer(entries, "n_group"),
        num_chosen_groups=read_integer(entries, "topk_group"),
        factor=read_number(entries, "routed_scaling_factor"),
    )


def write_router(router: Router) -> dict[str, Any]:
    """Return the entries for `read_router`."""
    return {
        "n_group": router.num_groups,
        "topk_group": router.num_chosen_groups,
        "routed_scaling_factor": router.factor,
    }


def read_shared_expert(
    entries: ConfigEntries, size: int, *, has_bias: bool = False
) -> Dense | None:
    """Return the shared expert.

    Args:
      entries: content of the ``config.json``.
      size: number of its features; 0 for none.
      has_bias: whether its projections have biases.
    """
    if not size:
        return None
    return Dense(
        features=size,
        activation=Activation(read_activation(entries)),
        has_bias=has_bias,
        size_name="shared_expert_intermediate_size",
    )


def read_shared_experts(
    entries: ConfigEntries, features: int, *, has_bias: bool = False
) -> Dense | None:
    """Return the ``n_shared_experts`` shared experts, which are computed as one.

    Args:
      entries: content of the ``config.json``.
      features: number of features of each of them.
      has_bias: whether their projections have biases.
    """
    count = read_integer(entries, "n_shared_experts", 0)
    if count < 0:
        raise ValueError(f"LlamaConfig: n_shared_experts must be 0 or more, got {count}.")
    return read_shared_expert(entries, count * features, has_bias=has_bias)


def write_shared_experts(experts: Experts) -> dict[str, int]:
    """Return the entry for `read_shared_experts`."""
    size = 0 if experts.shared is None else experts.shared.features
    return {"n_shared_experts": size // experts.features}


def read_experts(
    family: Family,
    entries: ConfigEntries,
    router: Router,
    *,
    renormalises: bool,
    has_bias: bool = False,
) -> Experts:
    """Return the experts of DeepSeek's files: routed in groups, with shared experts beside them.

    Args:
      family: family of the model.
      entries: content of the ``config.json``.
      router: the router, without its groups and its factor.
      renormalises: whether the weights of the chosen experts are divided by their sum.
      has_bias: whether the projections of the shared experts have biases.
    """
    sizes = read_expert_sizes(family, entries, ROUTED_KEYS)
    return Experts(
        **sizes,
        router=read_router(entries, router),
        renormalises=renormalises,
        activation=Activation(read_activation(entries)),
        shared=read_shared_experts(entries, sizes["features"], has_bias=has_bias),
    )


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_experts`, `read_dense` and `read_first_dense`."""
    experts = find_experts(config)
    return {
        **write_mlps(config),
        **write_first_dense(config),
        **write_expert_sizes(experts, ROUTED_KEYS),
        **write_router(experts.router),
        **write_shared_experts(experts),
    }


def read_dense_layers(entries: ConfigEntries, is_dense: Callable[[int], bool]) -> list[bool]:
    """Return whether each layer has a dense MLP instead of experts.

    Args:
      entries: content of the ``config.json``, with ``mlp_layer_types``.
      is_dense: function that tells whether the layer with an index has a dense MLP, if
        ``mlp_layer_types`` is missing.
    """
    num_layers = read_num_layers(entries)
    names = read_names(entries, "mlp_layer_types", num_layers)
    if names is None:
        names = [DENSE if is_dense(layer) else SPARSE for layer in range(num_layers)]
    if unsupported := {*names} - {DENSE, SPARSE}:
        raise ValueError(
            f"LlamaConfig: mlp_layer_types must have {DENSE!r} or {SPARSE!r} for each layer, got "
            f"{min(unsupported)!r}."
        )
    if SPARSE not in names:
        raise ValueError(
            f"LlamaConfig: mlp_layer_types must contain {SPARSE!r}, because the model has experts, "
            f"got {names!r}."
        )
    return [name == DENSE for name in names]


def check_no_dense_layers(family: Family, entries: ConfigEntries) -> None:
    """Check that all layers have experts, in a family without dense layers."""
    if any(read_dense_layers(entries, lambda layer: False)):
        raise UnsupportedConfigError(
            f"LlamaConfig: mlp_layer_types must only contain {SPARSE!r} for {family.architecture}, "
            f"got {entries['mlp_layer_types']!r}."
        )


def read_first_dense(entries: ConfigEntries, default: int = 0) -> list[bool]:
    """Return whether each layer is dense, if the first ``first_k_dense_replace`` layers are."""
    num_dense = read_integer(entries, "first_k_dense_replace", default)
    return read_dense_layers(entries, lambda layer: layer < num_dense)


def write_first_dense(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_first_dense`."""
    kinds = [DENSE if spec.experts is None else SPARSE for spec in config.layers]
    # Some classes of transformers read only the list.
    return {"first_k_dense_replace": kinds.index(SPARSE), "mlp_layer_types": kinds}


def read_listed_dense(entries: ConfigEntries) -> list[bool]:
    """Return whether each layer is dense, if the file lists dense layers.

    The layers in ``mlp_only_layers`` are dense, and all layers except every n-th, with n from
    ``decoder_sparse_step``.
    """
    step = read_integer(entries, "decoder_sparse_step", 1)
    check_positive("LlamaConfig", decoder_sparse_step=step)
    listed = read_layer_indices(entries, "mlp_only_layers") or ()
    return read_dense_layers(entries, lambda layer: layer in listed or (layer + 1) % step > 0)


def write_listed_dense(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_listed_dense`."""
    layers = enumerate(config.layers)
    dense = [layer for layer, spec in layers if spec.experts is None]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def find_experts(config: ModelConfig) -> Experts:
    """Return the experts of the first layer that has some.

    Raises:
      ValueError: no layer has experts.
    """
    experts = next((spec.experts for spec in config.layers if spec.experts is not None), None)
    if experts is None:
        raise ValueError(
            f"ModelConfig: layers must have experts for model_type {config.model_type!r}, got "
            "none with experts."
        )
    return experts


def write_mlps(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_dense`, of a model with experts in some or all layers.

    Without a dense layer, nothing depends on ``intermediate_size``, but files must contain it.
    """
    parts = [spec.experts or spec.get(Dense) for spec in config.layers]
    mlp = next((part for part in parts if isinstance(part, Dense)), parts[0])
    return {"intermediate_size": mlp.features, "hidden_act": mlp.activation.name}


def name_experts(module: str) -> dict[str, str]:
    """Return the tensor name for each parameter of experts, if files call them w1, w2 and w3.

    `module` is the name of the experts in their layer. A ``*`` in a tensor name stands for the
    number of an expert.
    """
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    return {f"experts_{kind}_proj": f"{module}.*.{name}.weight" for kind, name in names.items()}
