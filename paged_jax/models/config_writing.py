"""A `LlamaConfig` as a Hugging Face ``config.json``."""

from typing import Any

from paged_jax.models.experts_json import write_experts
from paged_jax.models.families import FAMILIES
from paged_jax.models.family import Family
from paged_jax.models.layer_types import FULL, SLIDING
from paged_jax.models.rope_json import write_rope


def write_fields(config: Any) -> dict[str, Any]:
    """What `config_json.read_fields` and transformers read as this config, if they can.

    Args:
      config: a `LlamaConfig`.

    Raises:
      ValueError: its model type is no family.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"LlamaConfig: model_type must be one of {', '.join(FAMILIES)}, "
            f"got {config.model_type!r}."
        )
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        family.key("hidden_act"): config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        family.key("rms_norm_eps"): config.rms_norm_eps,
        **write_rope(config, family),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _scalar_if_single(config.eos_token_ids),
        # That of a family is for its own vocabulary.
        "pad_token_id": None,
        "torch_dtype": config.dtype,
    }
    if family.biases:
        written["attention_bias"] = all(getattr(config, field) for field in family.biases)
    written |= {cap: getattr(config, cap) for cap in family.caps}
    for scale in family.scales:
        if scale.key not in written:
            written[scale.key] = scale.write(_factor(config, scale.field))
    return written | _windows(config, family) | write_experts(config, family)


def _factor(config: Any, field: str) -> float:
    value = getattr(config, field)
    return config.head_dim**-0.5 if value is None else value  # of attention, by default


def _windows(config: Any, family: Family) -> dict[str, Any]:
    if family.window in ("none", "unused"):
        return {}
    written: dict[str, Any] = {"sliding_window": config.sliding_window}
    if family.window == "all":
        return written
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    if family.window == "switched":
        written["use_sliding_window"] = config.sliding_window is not None
        written["max_window_layers"] = [*kinds, SLIDING].index(SLIDING)
    return written | {"layer_types": kinds}


def _scalar_if_single(values: tuple[int, ...]) -> int | list[int] | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else list(values)
