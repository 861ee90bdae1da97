"""Configuration of a model from the metadata of a GGUF file.

The metadata is converted to the content of a ``config.json``, which `LlamaConfig.from_dict` reads
and checks. Missing entries get the default values of llama.cpp. If the architecture has an entry
that this module neither reads nor knows to be harmless, an error names this entry. Unknown entries
without the name of the architecture are a warning.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paged_jax.arguments import is_int, is_real
from paged_jax.models.config import ModelConfig, check_num_layers
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.gguf_file import GgufError, GgufFile, TensorEntry, warn_of_unknown
from paged_jax.models.layer_groups import FULL, SLIDING
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.part import Part

_REQUIRED: Any = object()
# Tensors with divisors of the rotary frequencies, float32 ``[rotary_dim / 2]``.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Metadata entries that do not change the results. Files write the name of the architecture before
# these names, as in "llama.vocab_size".
_IGNORED = frozenset(
    (
        "vocab_size", "tensor_data_layout", "rope.scaling.finetuned",
        "attention.layer_norm_epsilon", "decoder_start_token_id", "use_parallel_residual",
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
    "nextn_predict_layers": (0,),
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
    metadata = _Metadata(file)
    config, tensors = metadata.read(), file.tensors
    if "blk.0.attn_q_norm.weight" in tensors and config.layers[0].get(Attention).norm is None:
        raise metadata.unsupported("tensor blk.0.attn_q_norm.weight")
    biases = {
        "qkv_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
    }

    def set_biases(part: Part) -> Part:
        if isinstance(part, Attention):
            return dataclasses.replace(part, **biases)
        return part.map_inner(set_biases)

    return config.replace(layers=config.map_layers(lambda spec: spec.map(set_biases)))


class _Metadata:
    """Reader of the metadata entries that begin with a file's architecture, like "llama.".

    It records which entries were read, so that unread entries can be rejected.

    Args:
      file: the GGUF file.
    """

    def __init__(self, file: GgufFile):
        self._file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise GgufError(
                f"{file.path}: general.architecture must be a string with the name of an "
                "architecture."
            )
        kind = file.metadata.get("general.type", "model")
        if kind != "model":
            raise UnsupportedConfigError(
                f"{file.path}: general.type must be 'model', got {kind!r}. Pass the file of the "
                "language model."
            )
        self.architecture = architecture
        self._read: set[str] = set()

    def read(self) -> ModelConfig:
        """Return the configuration without attention biases, which `read_gguf_config` sets."""
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedConfigError(
                f"{self._file.path}: general.architecture must be one of "
                f"{', '.join(_ARCHITECTURES)}, got {self.architecture!r}."
            )
        config = self._common()
        config |= _ARCHITECTURES[self.architecture](self, config)
        self._check_unread()
        try:
            return LlamaConfig.from_dict(config)
        except UnsupportedConfigError as error:
            raise UnsupportedConfigError(f"{self._file.path}: {error}") from None
        except ValueError as error:
            raise GgufError(f"{self._file.path}: {error}") from None

    def _common(self) -> dict[str, Any]:
        tensors, heads = self._file.tensors, self.integer("attention.head_count")
        embeddings = tensors.get("token_embd.weight")
        if embeddings is None or len(embeddings.shape) != 2:
            raise GgufError(
                f"{self._file.path}: tensor token_embd.weight is missing or does not have two "
                "dimensions."
            )
        hidden_size = self.integer("embedding_length")
        head_dim = self.integer("attention.key_length", hidden_size // max(heads, 1))
        if not head_dim:
            raise self._wrong("attention.key_length", "positive", head_dim)
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise self.unsupported("attention.value_length", f"other than {head_dim}")
        for key in ("attention.key_length_swa", "attention.value_length_swa"):
            if self.integer(key, head_dim) != head_dim:
                raise self.unsupported(key, f"other than {head_dim}")
        num_layers = self.integer("block_count")
        check_num_layers(num_layers)
        tokens = self._file.metadata
        ends = [tokens.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        length = self.integer("context_length")
        experts = self.integer("expert_count", 0)
        expert_size = self.integer("expert_feed_forward_length", 0)
        config = {
            "vocab_size": embeddings.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("feed_forward_length", expert_size or _REQUIRED),
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": length,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": None,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": False,
            "bos_token_id": tokens.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [token for token in dict.fromkeys(ends) if token is not None],
            "torch_dtype": find_float_dtype(tensors),
        }
        if experts:
            config["num_experts"] = experts
            config["num_experts_per_tok"] = self.integer("expert_used_count")
            config["moe_intermediate_size"] = expert_size or config["intermediate_size"]
        return config | self._rotation(config)

    def _rotation(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a ``config.json`` about rotary embeddings."""
        head_dim, length = config["head_dim"], config["max_position_embeddings"]
        rotary_dim = self.integer("rope.dimension_count", head_dim)
        if self.integer("rope.dimension_count_swa", rotary_dim) != rotary_dim:
            raise self.unsupported("rope.dimension_count_swa", f"other than {rotary_dim}")
        rotation = (
            {} if rotary_dim == head_dim else {"partial_rotary_factor": rotary_dim / head_dim}
        )
        kind = self.text("rope.scaling.type", "linear")
        factor = self.number("rope.scale_linear", 0.0)
        factor = self.number("rope.scaling.factor", factor) or 1.0
        original = self.integer("rope.scaling.original_context_length", length)
        attention_factor = self.number("rope.scaling.attn_factor", 1.0)
        scaling: dict[str, Any] | None = None
        freqs, long, short = (self._rope_factors(name, rotary_dim // 2) for name in ROPE_TENSORS)
        if long is not None and short is not None and kind in ("linear", "longrope", "none"):
            scaling = {"rope_type": "longrope", "factor": factor, "short_factor": short,
                       "long_factor": long, "attention_factor": attention_factor}  # fmt: skip
        elif kind == "yarn" and freqs is None:
            scaling = {"rope_type": "yarn", "factor": factor}
            scaling["attention_factor"] = attention_factor * (1 + 0.1 * math.log(max(factor, 1)))
            for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                scaling[name] = self.number(f"rope.scaling.yarn_{name}", default)
        elif kind not in ("linear", "none"):
            raise self.unsupported("rope.scaling.type", f"{kind!r}")
        elif attention_factor != 1:
            raise self.unsupported("rope.scaling.attn_factor", f"with {kind!r}")
        elif freqs is not None:
            divisors = [each * (1.0 if kind == "none" else factor) for each in freqs]
            scaling = {"rope_type": "longrope", "factor": 1.0, "short_factor": divisors,
                       "long_factor": divisors, "attention_factor": 1.0}  # fmt: skip
        elif factor != 1 and kind == "linear":
            scaling = {"rope_type": "linear", "factor": factor}
        if scaling is not None:
            scaling["original_max_position_embeddings"] = original
            rotation["rope_scaling"] = scaling
        return rotation

    def _rope_factors(self, name: str, count: int) -> list[float] | None:
        entry = self._file.tensors.get(name)
        if entry is None:
            return None
        if entry.type != "F32" or entry.shape != (count,):
            raise GgufError(
                f"{self._file.path}: tensor {name} must be F32 [{count}], got {entry.type} "
                f"{list(entry.shape)}."
            )
        return np.fromfile(entry.path, "<f4", count, offset=entry.offset).tolist()

    def windows(self, window: int, every: int) -> dict[str, Any]:
        """Return the entries of a ``config.json`` about sliding windows.

        Args:
          window: number of last tokens that layers with a window attend to; 0 if no layer has a
            window.
          every: if the file does not say which layers have a window, every n-th layer has none,
            where n is `every`.
        """
        layers = range(self.integer("block_count"))
        key = "attention.sliding_window_pattern"
        pattern = self._value(key)
        if isinstance(pattern, np.ndarray):
            if len(pattern) < len(layers):
                raise self._wrong(key, f"an array of {len(layers)}", len(pattern))
            is_sliding = [bool(each) for each in pattern[: len(layers)]]
        else:
            every = self.integer(key, every)
            is_sliding = [every == 0 or layer % every < every - 1 for layer in layers]
        kinds = [SLIDING if window and sliding else FULL for sliding in is_sliding]
        return {"sliding_window": window or None, "layer_types": kinds}

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """Return an integer entry. The file may also store it as an array of equal integers."""
        value = self._uniform(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_int(value) or not 0 <= value < 2**31:
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Return a number."""
        value = self._uniform(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_real(value):
            raise self._wrong(key, "a number", value)
        # Files store numbers as float32. The shortest decimal number that rounds to this float32 is
        # the number that the author wrote, such as 1e-6.
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._value(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return default if value is None else value

    def unsupported(self, name: str, what: str = "") -> UnsupportedConfigError:
        """Return the error for an unsupported metadata entry or tensor.

        `name` is the name of the entry or tensor, and `what` describes the unsupported value.
        """
        return UnsupportedConfigError(
            f"{self._file.path}: {name}{' ' * bool(what)}{what} is not supported for architecture "
            f"{self.architecture}."
        )

    def _value(self, key: str) -> Any:
        self._read.add(key)
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def _uniform(self, key: str) -> Any:
        value = self._value(key)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise self.unsupported(key, "that differs between layers")
            return value[0].item()
        return value

    def _wrong(self, key: str, kind: str, value: Any) -> GgufError:
        got = "nothing" if value is None else repr(value)[:100]
        return GgufError(f"{self._file.path}: {self.architecture}.{key} must be {kind}, got {got}.")

    def _check_unread(self) -> None:
        prefix = f"{self.architecture}."
        known = (prefix, *_OTHER_PREFIXES)
        others = [key for key in self._file.metadata if not key.startswith(known)]
        warn_of_unknown(self._file.path, others)
        for full_key, value in self._file.metadata.items():
            key = full_key.removeprefix(prefix)
            if key == full_key or key in self._read or key in _IGNORED:
                continue
            if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
                value = value[0].item()
            if isinstance(value, np.ndarray) or value not in _NEUTRAL.get(key, ()):
                raise self.unsupported(full_key, f"= {str(value)[:100]}")


def find_float_dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the dtype of most elements of a file; bfloat16 if most elements are quantised."""
    counts: Counter[str] = Counter()
    for entry in tensors.values():
        counts[entry.type] += math.prod(entry.shape)
    [(most, _)] = counts.most_common(1) or [("F32", 0)]
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _llama(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    if 0 < window < config["max_position_embeddings"]:
        raise metadata.unsupported("attention.sliding_window", f"= {window}")
    if "num_experts" not in config:
        return {"model_type": "llama"}
    experts = config["num_experts"]
    return {
        "model_type": "mixtral",
        "num_local_experts": experts,
        "intermediate_size": config["moe_intermediate_size"],
        "moe_intermediate_size": None,
    }


def _qwen(
    model_type: str, **entries: Any
) -> Callable[[_Metadata, Mapping[str, Any]], dict[str, Any]]:
    return lambda metadata, config: {"model_type": model_type, **entries}


def _gemma2(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise metadata.unsupported("rope.freq_base_swa")
    return {
        "model_type": "gemma2",
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scalar(config, num_layers_of_27b=46),
        **metadata.windows(metadata.integer("attention.sliding_window", 4096), 2),
    }


def _gemma3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    cap = metadata.number("final_logit_softcapping", 0.0)
    return {
        "model_type": "gemma3_text",
        "final_logit_softcapping": cap or None,
        "query_pre_attn_scalar": _gemma_scalar(config, num_layers_of_27b=62),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        **metadata.windows(metadata.integer("attention.sliding_window", 0), 6),
    }


def _gemma_scalar(config: Mapping[str, Any], num_layers_of_27b: int) -> int:
    # GGUF files do not contain the factor of attention scores, which is different in Gemma's 27B
    # models. As in llama.cpp, these models are recognised by their number of layers.
    if config["num_hidden_layers"] == num_layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _phi3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    original = metadata.integer(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    return {
        "model_type": "phi3",
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
    }


def _gpt_oss(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise metadata.unsupported("rope.freq_base_swa")
    scaling = config["rope_scaling"]
    return {
        "model_type": "gpt_oss",
        "num_local_experts": config.get("num_experts"),
        "intermediate_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "moe_intermediate_size": None,
        "attention_bias": True,
        # In gpt-oss, YaRN's bounds of the interpolated pairs are not rounded to integers.
        "rope_parameters": None if scaling is None else {**scaling, "truncate": False},
        "rope_scaling": None,
        **metadata.windows(metadata.integer("attention.sliding_window"), 2),
    }


_ARCHITECTURES: Mapping[str, Callable[[_Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen("qwen2"),
    "qwen3": _qwen("qwen3"),
    "qwen3moe": _qwen("qwen3_moe", norm_topk_prob=True),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}
