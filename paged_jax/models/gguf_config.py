"""Configuration of a model from the metadata of a GGUF file.

The metadata is converted to the content of a ``config.json``, which `LlamaConfig.from_dict` reads
and checks. This module reads the entries that all architectures share, and `Family.read_gguf` the
others. Missing entries get the default values of llama.cpp. If the architecture has an entry that
is neither read nor known to be harmless, an error names this entry. Unknown entries without the
name of the architecture are a warning.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.models.config import Family, ModelConfig, check_num_layers
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.registry import FAMILIES
from paged_jax.models.gguf_file import GgufError, GgufFile, TensorEntry, warn_of_unknown
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.part import Part

# Tensors with divisors of the rotary frequencies, float32 ``[rotary_dim / 2]``.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Metadata entries that do not change the results. Files write the name of the architecture before
# these names, as in "llama.vocab_size".
_IGNORED = frozenset(
    (
        "vocab_size", "tensor_data_layout", "rope.scaling.finetuned",
        "attention.layer_norm_epsilon", "decoder_start_token_id", "use_parallel_residual",
        # The three positions of a token are equal in a text.
        "rope.dimension_sections",
    )
)  # fmt: skip
# Beginnings of other entries: `gguf_tokenizer` checks those of the tokenizer and of sampling. The
# others describe the model, or how its file was made.
_OTHER_PREFIXES = ("tokenizer.", "general.", "split.", "quantize.", "imatrix.", "mradermacher.")
# Entries of unsupported features, each with the values for which it has no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "pooling_type": (0, 3),  # none, last
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (0, 1),  # unset, softmax
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1, -1),
}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration of the model in a GGUF file.

    Raises:
      UnsupportedConfigError: the architecture or an entry is not supported. The message names it.
      ValueError: an entry is missing, or has the wrong type or range.
    """
    metadata = GgufMetadata(file)
    family = _find_family(metadata)
    assert family.gguf is not None
    entries = _read_common(metadata, family.gguf.own_keys)
    entries |= {"model_type": family.model_type, **family.read_gguf(metadata, entries)}
    _check_unread(metadata)
    try:
        config = LlamaConfig.from_dict(entries)
    except UnsupportedConfigError as error:
        raise UnsupportedConfigError(f"{file.path}: {error}") from None
    except ValueError as error:
        raise GgufError(f"{file.path}: {error}") from None
    biases = {
        "qkv_bias": metadata.has_tensor("attn_q.bias") or metadata.has_tensor("attn_qkv.bias"),
        "o_bias": metadata.has_tensor("attn_output.bias"),
    }

    def set_biases(part: Part) -> Part:
        if isinstance(part, Attention):
            return dataclasses.replace(part, **biases)
        return part.map_inner(set_biases)

    return config.replace(layers=config.map_layers(lambda spec: spec.map(set_biases)))


def _find_family(metadata: GgufMetadata) -> Family:
    """Return the family of an architecture, which may depend on whether the model has experts."""
    families = [family for family in FAMILIES.values() if family.gguf is not None]
    architectures = sorted({family.gguf.architecture for family in families if family.gguf})
    has_experts = metadata.integer("expert_count", 0) > 0
    for family in families:
        layout = family.gguf
        if layout and layout.architecture == metadata.architecture:
            if layout.has_experts in (None, has_experts):
                return family
    raise UnsupportedConfigError(
        f"{metadata.file.path}: general.architecture must be one of {', '.join(architectures)}, "
        f"got {metadata.architecture!r}."
    )


def _read_common(metadata: GgufMetadata, own_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that all architectures share.

    `own_keys` are keys of the metadata that the family reads.
    """
    file, tensors = metadata.file, metadata.file.tensors
    heads = metadata.integer("attention.head_count")
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise GgufError(
            f"{file.path}: tensor token_embd.weight is missing or does not have two dimensions."
        )
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden_size // max(heads, 1))
    if not head_dim:
        raise metadata.wrong("attention.key_length", "positive", head_dim)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.unsupported("attention.value_length", f"other than {head_dim}")
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        if key not in own_keys and metadata.integer(key, head_dim) != head_dim:
            raise metadata.unsupported(key, f"other than {head_dim}")
    if (num_layers := metadata.num_layers) < 1:
        raise metadata.wrong("block_count", "more than nextn_predict_layers", num_layers)
    check_num_layers(num_layers)
    tokens = file.metadata
    ends = [tokens.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    experts = metadata.integer("expert_count", 0)
    expert_size = metadata.integer("expert_feed_forward_length", 0)
    entries: dict[str, Any] = {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": False,
        "bos_token_id": tokens.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in dict.fromkeys(ends) if token is not None],
        "torch_dtype": find_float_dtype(tensors),
    }
    if (key := "feed_forward_length") not in own_keys:
        size = metadata.integer(key, expert_size) if expert_size else metadata.integer(key)
        entries["intermediate_size"] = size
    if (key := "attention.head_count_kv") not in own_keys:
        entries["num_key_value_heads"] = metadata.integer(key, heads)
    num_chosen = metadata.integer("expert_used_count", 0)
    if experts:
        entries["num_experts"] = experts
        entries["num_experts_per_tok"] = num_chosen
        entries["moe_intermediate_size"] = expert_size or entries.get("intermediate_size")
    return entries | _read_rotation(metadata, entries, own_keys)


def _read_rotation(
    metadata: GgufMetadata, entries: Mapping[str, Any], own_keys: tuple[str, ...]
) -> dict[str, Any]:
    """Return the entries of a ``config.json`` about rotary embeddings."""
    head_dim, length = entries["head_dim"], entries["max_position_embeddings"]
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    if (key := "rope.dimension_count_swa") not in own_keys:
        if metadata.integer(key, rotary_dim) != rotary_dim:
            raise metadata.unsupported(key, f"other than {rotary_dim}")
    rotation: dict[str, Any] = {"partial_rotary_factor": rotary_dim / head_dim}
    kind = metadata.text("rope.scaling.type", "linear")
    factor = metadata.number("rope.scale_linear", 0.0)
    factor = metadata.number("rope.scaling.factor", factor) or 1.0
    original = metadata.integer("rope.scaling.original_context_length", length)
    attention_factor = metadata.number("rope.scaling.attn_factor", 1.0)
    scaling: dict[str, Any] | None = None
    freqs, long, short = (metadata.rope_divisors(name, rotary_dim // 2) for name in ROPE_TENSORS)
    if long is not None and short is not None and kind in ("linear", "longrope", "none"):
        scaling = {"rope_type": "longrope", "factor": factor, "short_factor": short,
                   "long_factor": long, "attention_factor": attention_factor}  # fmt: skip
    elif kind == "yarn" and freqs is None:
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["attention_factor"] = attention_factor * (1 + 0.1 * math.log(max(factor, 1)))
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            scaling[name] = metadata.number(f"rope.scaling.yarn_{name}", default)
    elif kind not in ("linear", "none"):
        raise metadata.unsupported("rope.scaling.type", f"{kind!r}")
    elif attention_factor != 1:
        raise metadata.unsupported("rope.scaling.attn_factor", f"with {kind!r}")
    elif freqs is not None:
        divisors = [divisor * (1.0 if kind == "none" else factor) for divisor in freqs]
        scaling = {"rope_type": "longrope", "factor": 1.0, "short_factor": divisors,
                   "long_factor": divisors, "attention_factor": 1.0}  # fmt: skip
    elif factor != 1 and kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    if scaling is not None:
        scaling["original_max_position_embeddings"] = original
        rotation["rope_scaling"] = scaling
    return rotation


def _check_unread(metadata: GgufMetadata) -> None:
    """Reject entries of the architecture that nobody has read, and warn of unknown entries."""
    prefix = f"{metadata.architecture}."
    prefixes = (prefix, *_OTHER_PREFIXES)
    unknown_keys = [key for key in metadata.file.metadata if not key.startswith(prefixes)]
    warn_of_unknown(metadata.file.path, unknown_keys)
    for full_key, value in metadata.file.metadata.items():
        key = full_key.removeprefix(prefix)
        if key == full_key or key in metadata.keys_read or key in _IGNORED:
            continue
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray) or value not in _NEUTRAL.get(key, ()):
            raise metadata.unsupported(full_key, f"= {str(value)[:100]}")


def find_float_dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the dtype of most elements of a file; bfloat16 if most elements are quantised."""
    counts: Counter[str] = Counter()
    for entry in tensors.values():
        counts[entry.type] += math.prod(entry.shape)
    [(gguf_type, _)] = counts.most_common(1) or [("F32", 0)]
    return {"F32": "float32", "F16": "float16"}.get(gguf_type, "bfloat16")
