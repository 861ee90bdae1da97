"""The families of models that this library builds, and what each fixes in code."""

import dataclasses
from collections.abc import Mapping
from typing import Any


class UnsupportedConfigError(ValueError):
    """The config is valid, and asks for something that this library does not build."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family fixes in code rather than in its config.json.

    ``window`` says which layers slide: ``"none"``, ``"all"`` where `sliding_window` is set, or
    ``"switched"``, those from `max_window_layers` on where `use_sliding_window` is true.
    ``rope_layers`` says which layers rotate: ``"all"``, ``"listed"`` in `no_rope_layers`, or
    ``"sliding"``. With ``local_rope`` those with a window have a base of their own, or at least no
    scaling; with ``partial_rope`` a config may have only a part of each head rotate; with
    ``rope_interleaved`` the numbers of a pair lie side by side.
    ``defaults`` are those of transformers for keys that a config.json may leave out.
    """

    architecture: str
    window: str
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    has_attention_bias: bool = False
    rope_layers: str = "all"
    local_rope: bool = False
    partial_rope: bool = False
    rope_interleaved: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        window="none",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        has_attention_bias=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        window="all",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        window="switched",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        qkv_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        window="switched",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        qk_norm=True,
        has_attention_bias=True,
    ),
}
