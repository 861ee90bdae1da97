"""What a Hugging Face ``config.json`` says of rotary embeddings, read and written."""

from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.checks import is_int, is_real
from paged_jax.models.family import Family, UnsupportedConfigError
from paged_jax.models.layer_types import FULL, LAYER_TYPES, SLIDING
from paged_jax.models.rope_scaling import RopeScaling


def read_rope(
    config: Mapping[str, Any], family: Family, num_layers: int, layer_types: Sequence[str]
) -> dict[str, Any]:
    """The fields of a `LlamaConfig` that `Rope` is made of, by name.

    transformers 4 writes ``rope_theta`` beside ``rope_scaling``, and Gemma 3's
    ``rope_local_base_freq``; transformers 5 writes all of it into ``rope_parameters``, once or for
    each type of layers.

    Args:
      config: the content of the file, with the family's defaults.
      family: the family.
      num_layers: L.
      layer_types: the type of each layer; empty where all are alike.

    Raises:
      UnsupportedConfigError, ValueError: see `LlamaConfig.from_dict`.
    """
    rope = _choose(config, family)
    local: Mapping[str, Any] | None = None
    if _is_nested(rope):
        rope, local = _by_layer_type(rope, family)
    both = {**config, **{key: value for key, value in rope.items() if value is not None}}
    theta, scaling = _number(both, "rope_theta", 10000.0), _scaling(rope, config)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": _local_theta(config, family, local, theta, scaling),
        "rope_layers": read_rope_layers(config, family, num_layers, layer_types),
        "partial_rotary_factor": _partial_factor(both, family),
        "rope_interleaved": _is_interleaved(config, family),
    }


def write_rope(config: Any, family: Family) -> dict[str, Any]:
    """The entries of a ``config.json`` that `read_rope` and transformers read.

    Args:
      config: a `LlamaConfig`, whose module imports this one.
      family: its family.

    Raises:
      ValueError: the family cannot have them.
    """
    scaling = None if config.rope_scaling is None else config.rope_scaling.to_dict()
    if scaling is None and "rope_parameters" in family.defaults:  # which null would stand for
        scaling = {"rope_type": "default"}
    written: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    _check_expressible(config, family)
    if family.partial_rope:
        written["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling is not None and "original_max_position_embeddings" in family.defaults:
        original = config.rope_scaling.original_max_position_embeddings
        written["original_max_position_embeddings"] = original
    if family.rope_layers == "listed":
        rotates = config.rope_layers or (True,) * config.num_hidden_layers
        written["no_rope_layers"] = list(map(int, rotates))
    if family.local_rope:
        local_theta = config.rope_local_base_freq or config.rope_theta
        local = None if config.rope_local_base_freq else scaling
        default = {"rope_type": "default"}
        written["rope_local_base_freq"] = local_theta
        # Transformers 5 reads this first, and 4 the others.
        written["rope_parameters"] = {
            FULL: {**(scaling or default), "rope_theta": config.rope_theta},
            SLIDING: {**(local or default), "rope_theta": local_theta},
        }
    return written


def _choose(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return `rope_scaling` or `rope_parameters`, after a check that they agree."""
    scaling = _object("rope_scaling", config.get("rope_scaling"))
    parameters = _object("rope_parameters", config.get("rope_parameters"))
    if not parameters or parameters == family.defaults.get("rope_parameters"):
        return scaling or parameters
    if family.local_rope and not _is_nested(parameters):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters must have an object for each of {FULL!r} and "
            f"{SLIDING!r} for {family.architecture}, got {dict(parameters)!r}."
        )
    if not scaling:
        return parameters
    given = parameters.get(FULL) or {} if _is_nested(parameters) else parameters
    if _is_nested(parameters):
        theta = given.get("rope_theta")
    else:
        theta = config.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type"))
    used = {"rope_theta": theta, **scaling, "rope_type": kind, "type": kind}
    if any(used.get(key) != value for key, value in given.items()):
        raise UnsupportedConfigError(
            "LlamaConfig: rope_scaling must be null or agree with rope_parameters, got "
            f"{dict(scaling)!r} and {dict(given)!r}. Remove one of them."
        )
    return parameters if _is_nested(parameters) else scaling


def _is_nested(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())


def _check_expressible(config: Any, family: Family) -> None:
    if config.rope_local_base_freq is not None and not family.local_rope:
        field, value, wanted = "rope_local_base_freq", config.rope_local_base_freq, "None"
    elif config.partial_rotary_factor != 1 and not family.partial_rope:
        field, value, wanted = "partial_rotary_factor", config.partial_rotary_factor, "1"
    elif config.rope_interleaved != family.rope_interleaved:
        field, value, wanted = "rope_interleaved", config.rope_interleaved, family.rope_interleaved
    elif config.rope_layers and family.rope_layers == "all":
        field, value, wanted = "rope_layers", config.rope_layers, "empty"
    else:
        return
    raise ValueError(
        f"LlamaConfig: {field} must be {wanted} for model_type {config.model_type!r}, got {value}."
    )


def _by_layer_type(
    rope: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The entries of layers without and with a window."""
    if not family.local_rope:
        raise UnsupportedConfigError(
            "LlamaConfig: rope_parameters that differ between layers are not supported for "
            f"{family.architecture}."
        )
    if others := set(rope) - set(LAYER_TYPES):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters of {min(others)!r} are not supported, only of "
            f"{' and '.join(map(repr, LAYER_TYPES))}."
        )
    full, sliding = (
        _object(f"rope_parameters of {kind!r}", rope.get(kind)) for kind in LAYER_TYPES
    )
    return full, sliding


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    original = config.get("original_max_position_embeddings")
    # Phi-3 names what has since become longrope as it was at first.
    if config.get("model_type") == "phi3" and rope.get("type", rope.get("rope_type")) in (
        "su",
        "yarn",
    ):
        rope = {**rope, "rope_type": "longrope"}
    return RopeScaling.from_dict(rope, config["max_position_embeddings"], original)


def _local_theta(
    config: Mapping[str, Any],
    family: Family,
    local: Mapping[str, Any] | None,
    theta: float,
    scaling: RopeScaling | None,
) -> float | None:
    if not family.local_rope:
        return None
    if local is None:
        local_theta = _number(config, "rope_local_base_freq", theta)
        local_scaling = None
    else:
        local_theta = _number(local, "rope_theta", config.get("rope_local_base_freq") or theta)
        local_scaling = _scaling(local, config)
    if (local_theta, local_scaling) == (theta, scaling):
        return None
    if local_scaling is not None:
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters of {SLIDING!r} must be of type 'default', or those of "
            f"{FULL!r}, got {local_scaling.rope_type!r}."
        )
    return local_theta


def read_rope_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, layer_types: Sequence[str]
) -> tuple[bool, ...]:
    """Whether each layer rotates, see `read_rope`; empty where all do."""
    if family.rope_layers == "sliding":
        one = FULL if config.get("sliding_window") is None else SLIDING
        return tuple(kind == SLIDING for kind in layer_types or (one,) * num_layers)
    if family.rope_layers == "all":
        return ()
    rotates = config.get("no_rope_layers")  # of which 1 stands for a layer that does rotate
    if rotates is None:
        interval = config.get("no_rope_layer_interval", 4)
        if not is_int(interval) or interval < 1:
            raise ValueError(
                f"LlamaConfig: no_rope_layer_interval must be a positive integer, got {interval!r}."
            )
        return tuple(bool((layer + 1) % interval) for layer in range(num_layers))
    if not isinstance(rotates, list) or len(rotates) < num_layers:
        raise ValueError(
            f"LlamaConfig: no_rope_layers must speak of {num_layers} layers, got {rotates!r}."
        )
    return tuple(map(bool, rotates[:num_layers]))


def _partial_factor(config: Mapping[str, Any], family: Family) -> float:
    factor = _number(config, "partial_rotary_factor", 1.0)
    if factor != 1 and not family.partial_rope:
        raise UnsupportedConfigError(
            f"LlamaConfig: partial_rotary_factor = {factor!r} is not supported for "
            f"{family.architecture}, only 1."
        )
    return factor


def _is_interleaved(config: Mapping[str, Any], family: Family) -> bool:
    given = config.get("rope_interleaved")
    if given is not None and given != family.rope_interleaved:
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_interleaved = {given!r} is not supported for "
            f"{family.architecture}, only {family.rope_interleaved!r}."
        )
    return family.rope_interleaved


def _object(key: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"LlamaConfig: {key} must be an object or null, got {value!r}.")
    return value or {}


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not is_real(value):
        raise ValueError(f"LlamaConfig: {key} must be a number, got {value!r}.")
    return float(value)
