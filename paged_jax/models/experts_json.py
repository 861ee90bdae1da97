"""What a Hugging Face ``config.json`` says of experts, read and written."""

from collections.abc import Mapping
from typing import Any

from paged_jax.checks import is_int, is_real
from paged_jax.models.family import Family, UnsupportedConfigError

_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# transformers writes that of a family under either name.
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts")

# Keys of the families with experts that change what is computed, and the value that does not.
_ONLY: Mapping[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "clip_qkv": None,
    "qkv_bias": True,
}


def read_experts(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of a `LlamaConfig` that experts are made of, by name.

    Args:
      config: the content of the file, with the family's defaults.
      family: the family.

    Raises:
      UnsupportedConfigError, ValueError: see `LlamaConfig.from_dict`.
    """
    if family.experts is None:
        return {}
    for key, value in _ONLY.items():
        if config.get(key) not in (None, value):
            raise UnsupportedConfigError(
                f"LlamaConfig: {key} = {config[key]!r} is not supported for "
                f"{family.architecture}, only {value!r}."
            )
    own = family.key("num_experts")  # which has a default: the other name is there if it is used
    other = [config[name] for name in _NUMBERS_OF_EXPERTS if name in config and name != own]
    config = {**config, own: other[0]} if other else config
    fields = {name: _read(config, family.key(name), is_int, "an integer") for name in _SIZES}
    return fields | {name: _read(config, name, *_KINDS[name]) for name in family.experts}


def write_experts(config: Any, family: Family) -> dict[str, Any]:
    """The entries of a ``config.json`` that `read_experts` and transformers read.

    Args:
      config: a `LlamaConfig`, whose module imports that of families.
      family: its family.
    """
    if family.experts is None:
        return {}
    sizes = {family.key(name): getattr(config, name) for name in _SIZES}
    return sizes | {name: getattr(config, name) for name in family.experts}


# How values are recognised, and what a message calls them.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "norm_topk_prob": (lambda value: isinstance(value, bool), "true or false"),
    "shared_expert_intermediate_size": (is_int, "an integer"),
    "swiglu_alpha": (is_real, "a number"),
    "swiglu_limit": (is_real, "a number"),
}


def _read(config: Mapping[str, Any], key: str, is_valid: Any, kind: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    if not is_valid(value):
        raise ValueError(f"LlamaConfig: {key} must be {kind}, got {value!r}.")
    return value
