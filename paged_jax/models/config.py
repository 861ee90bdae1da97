"""What a Llama-family model looks like, read from a Hugging Face ``config.json``."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.checks import is_int

_REQUIRED: Any = object()  # the default of a key that has none
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a family fixes in code rather than in its config.json.

    ``window`` says which layers slide: ``"none"``, ``"all"`` where `sliding_window` is set, or
    ``"switched"``, those from `max_window_layers` on where `use_sliding_window` is true.
    ``defaults`` are those of transformers for keys that a config.json may leave out.
    """

    architecture: str
    window: str
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    has_attention_bias: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM",
        window="none",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        has_attention_bias=True,
    ),
    "mistral": _Family(
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
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        window="switched",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        qkv_bias=True,
    ),
    "qwen3": _Family(
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

# Keys that change what is computed, and the one value of each that this library computes.
_ONLY: Mapping[str, Any] = {
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}


class UnsupportedConfigError(ValueError):
    """The config is valid, and asks for something that this library does not build."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the training context.

    ``rope_type`` is ``"linear"`` (all frequencies divided by ``factor``) or ``"llama3"`` (only the
    slow ones, with a smooth passage between the two wavelengths; Llama 3.1 model card). The other
    fields are read by ``"llama3"`` alone.

    Raises:
      UnsupportedConfigError: another ``rope_type``.
      ValueError: a factor out of range.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _check_rope_type(self.rope_type)
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"LlamaConfig: rope factor must be positive, got {self.factor!r}.")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                "LlamaConfig: low_freq_factor must be positive and less than high_freq_factor, "
                f"got {self.low_freq_factor!r} and {self.high_freq_factor!r}."
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                "LlamaConfig: original_max_position_embeddings must be positive, "
                f"got {self.original_max_position_embeddings!r}."
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes and switches of one Llama-family decoder.

    Field names are those of Hugging Face's ``config.json`` where it has one. ``head_dim`` is in
    elements, ``max_position_embeddings`` and ``sliding_window`` in tokens. ``dtype`` is that of
    the weights in the files that the config lies beside.

    Raises:
      ValueError: sizes that do not fit together.

    Example:
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> config.head_dim
      8
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size // num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    "LlamaConfig: hidden_size must be a multiple of num_attention_heads when "
                    f"head_dim is not given, got {self.hidden_size} and {self.num_attention_heads}."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"LlamaConfig: {field} must be a positive integer, got {value!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "LlamaConfig: num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even, got {self.head_dim}.")
        for field in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"LlamaConfig: {field} must be positive, got {value!r}.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"LlamaConfig: sliding_window must be positive or null, got {self.sliding_window}."
            )
        if self.dtype not in _DTYPES:
            raise UnsupportedConfigError(
                f"LlamaConfig: dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}."
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read the content of a Hugging Face ``config.json``, of transformers 4 or 5.

        A missing optional key takes the value that transformers gives it in that family.

        Raises:
          UnsupportedConfigError: the config asks for something that this library does not build:
            it is named, never ignored.
          ValueError: a required key is missing, or a value is of the wrong type or out of range.

        Example:
          >>> LlamaConfig.from_dict({
          ...     "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
          ...     "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          ... }).num_key_value_heads
          2
        """
        model_type = _model_type(config)
        family = _FAMILIES[model_type]
        config = {**family.defaults, **config}
        _refuse_unsupported(config, family)
        heads = _integer(config, "num_attention_heads")
        attention_bias = _boolean(config, "attention_bias", False)
        max_position_embeddings = _integer(config, "max_position_embeddings")
        rope_theta, rope_scaling = _rope(config, max_position_embeddings)
        num_hidden_layers = _integer(config, "num_hidden_layers")
        kv_heads = _integer(config, "num_key_value_heads", None)
        return cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=_integer(config, "hidden_size"),
            intermediate_size=_integer(config, "intermediate_size"),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=_integer(config, "head_dim", None) or 0,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_boolean(config, "tie_word_embeddings", False),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias and family.has_attention_bias,
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(config, family, num_hidden_layers),
            initializer_range=_number(config, "initializer_range", 0.02),
            bos_token_id=_integer(config, "bos_token_id", None),
            eos_token_ids=_token_ids(config, "eos_token_id"),
            model_type=model_type,
            dtype=_dtype(config),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "LlamaConfig":
        """Read a ``config.json``, or the one in a folder.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is not a JSON object, or see `from_dict`.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_dict(read_json(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` that transformers and `from_dict` read.

        Raises:
          ValueError: no family of transformers computes this combination of switches.
        """
        family = _FAMILIES.get(self.model_type)
        if family is None:
            raise ValueError(
                f"LlamaConfig: model_type must be one of {', '.join(_FAMILIES)}, "
                f"got {self.model_type!r}."
            )
        self._check_expressible(family)
        config: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self._rope_scaling_dict(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _scalar_if_single(self.eos_token_ids),
            "torch_dtype": self.dtype,
        }
        if family.has_attention_bias:
            config["attention_bias"] = self.o_bias
        if family.window != "none":
            config["sliding_window"] = self.sliding_window
        if family.window == "switched":
            config["use_sliding_window"] = self.sliding_window is not None
            config["max_window_layers"] = 0 if self.sliding_window else self.num_hidden_layers
        return config

    def _rope_scaling_dict(self) -> dict[str, Any] | None:
        if self.rope_scaling is None:
            return None
        if self.rope_scaling.rope_type == "linear":
            return {"rope_type": "linear", "factor": self.rope_scaling.factor}
        return dataclasses.asdict(self.rope_scaling)

    def _check_expressible(self, family: _Family) -> None:
        if self.qk_norm != family.qk_norm:
            raise ValueError(
                f"LlamaConfig: qk_norm must be {family.qk_norm} for model_type "
                f"{self.model_type!r}, got {self.qk_norm}. Use 'qwen3' for q and k norms."
            )
        if (self.qkv_bias, self.o_bias) != (family.qkv_bias, False) and not (
            family.has_attention_bias and self.qkv_bias and self.o_bias
        ):
            raise ValueError(
                f"LlamaConfig: model_type {self.model_type!r} has no form with "
                f"qkv_bias={self.qkv_bias} and o_bias={self.o_bias}. Use 'llama' for both or "
                "none, 'qwen2' for qkv_bias alone."
            )
        if self.sliding_window is not None and family.window == "none":
            raise ValueError(
                f"LlamaConfig: sliding_window must be null for model_type {self.model_type!r}, "
                f"got {self.sliding_window}. Use 'mistral' for a sliding window."
            )

    @property
    def qkv_features(self) -> int:
        """Rows of the fused query, key and value projection, ``(H + 2 K) D``."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it does not hold a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}.") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON: nested too deeply.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(content).__name__}.")
    return content


def _model_type(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ValueError(
            f"LlamaConfig: architectures must be a list of names, got {architectures!r}."
        )
    by_architecture = {family.architecture: name for name, family in _FAMILIES.items()}
    for architecture in architectures:
        if architecture not in by_architecture:
            raise UnsupportedConfigError(
                f"LlamaConfig: architecture {architecture!r} is not supported, only "
                f"{', '.join(by_architecture)}."
            )
    model_type = config.get("model_type")
    if model_type is None and architectures:
        return by_architecture[architectures[0]]
    if model_type is None:
        raise ValueError("LlamaConfig: model_type is missing.")
    if not isinstance(model_type, str):
        raise ValueError(f"LlamaConfig: model_type must be a name, got {model_type!r}.")
    if model_type not in _FAMILIES:
        raise UnsupportedConfigError(
            f"LlamaConfig: model_type {model_type!r} is not supported, only {', '.join(_FAMILIES)}."
        )
    if any(by_architecture[architecture] != model_type for architecture in architectures):
        raise ValueError(
            f"LlamaConfig: architectures must fit model_type {model_type!r}, got {architectures}."
        )
    return model_type


def _refuse_unsupported(config: Mapping[str, Any], family: _Family) -> None:
    hidden_act = config.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise UnsupportedConfigError(
            f"LlamaConfig: hidden_act {hidden_act!r} is not supported, only 'silu'."
        )
    for key, value in _ONLY.items():
        if config.get(key) is not None and config[key] != value:
            raise UnsupportedConfigError(
                f"LlamaConfig: {key} = {config[key]!r} is not supported, only {value!r}."
            )
    if _boolean(config, "attention_bias", False) and not (
        family.has_attention_bias or family.qkv_bias
    ):
        raise UnsupportedConfigError(
            f"LlamaConfig: attention_bias is not supported for {family.architecture}."
        )


def _rope(
    config: Mapping[str, Any], max_position_embeddings: int
) -> tuple[float, RopeScaling | None]:
    # transformers 4: rope_theta beside rope_scaling; transformers 5: both in rope_parameters.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"LlamaConfig: rope_scaling must be an object or null, got {rope!r}.")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedConfigError(
            "LlamaConfig: rope_parameters that differ between layers are not supported."
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedConfigError(
            f"LlamaConfig: partial_rotary_factor = {rope['partial_rotary_factor']!r} is not "
            "supported, only 1."
        )
    theta = _number({**config, **rope}, "rope_theta", 10000.0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    _check_rope_type(rope_type)
    if rope_type == "linear":
        return theta, RopeScaling("linear", _number(rope, "factor"))
    return theta, RopeScaling(
        rope_type,
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position_embeddings=_integer(
            {**rope, **config}, "original_max_position_embeddings", max_position_embeddings
        ),
    )


def _check_rope_type(rope_type: Any) -> None:
    if rope_type not in ("linear", "llama3"):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_type {rope_type!r} is not supported, only 'default', 'linear' and "
            "'llama3'."
        )


def _sliding_window(
    config: Mapping[str, Any], family: _Family, num_hidden_layers: int
) -> int | None:
    window = _integer(config, "sliding_window", None)
    if family.window == "none" and window is not None:
        raise UnsupportedConfigError(
            f"LlamaConfig: sliding_window is not supported for {family.architecture}, got {window}."
        )
    if family.window == "switched" and not _boolean(config, "use_sliding_window", False):
        window = None
    num_full = _num_full_layers(config, family, window, num_hidden_layers)
    if 0 < num_full < num_hidden_layers:
        raise UnsupportedConfigError(
            "LlamaConfig: layers with and without a sliding window in one model are not "
            f"supported, got {num_full} of {num_hidden_layers} without."
        )
    if num_full < num_hidden_layers and window is None:
        raise ValueError(
            "LlamaConfig: sliding_window must be an integer where layer_types has "
            "'sliding_attention', got null."
        )
    if num_full and window is not None and family.window == "all":
        raise ValueError(
            "LlamaConfig: sliding_window must be null where layer_types has 'full_attention', "
            f"got {window}."
        )
    return None if num_full else window


def _num_full_layers(
    config: Mapping[str, Any], family: _Family, window: int | None, num_hidden_layers: int
) -> int:
    layer_types = config.get("layer_types")
    if layer_types is None:
        if window is None:
            return num_hidden_layers
        if family.window == "all":
            return 0
        # What transformers takes for a missing max_window_layers.
        return max(0, min(_integer(config, "max_window_layers", 28), num_hidden_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_hidden_layers:
        raise ValueError(
            f"LlamaConfig: layer_types must name {num_hidden_layers} layers, got {layer_types!r}."
        )
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedConfigError(
                f"LlamaConfig: layer type {layer_type!r} is not supported, only 'full_attention' "
                "and 'sliding_attention'."
            )
    return layer_types.count("full_attention")


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise ValueError(f"LlamaConfig: dtype must be a name, got {dtype!r}.")
    return dtype.removeprefix("torch.")


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(token) and token >= 0 for token in values):
        raise ValueError(f"LlamaConfig: {key} must be token ids, got {value!r}.")
    return tuple(values)


def _scalar_if_single(values: tuple[int, ...]) -> int | list[int] | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else list(values)


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    return default


def _integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    value = _get(config, key, default)
    if value is not None and not is_int(value):
        raise ValueError(f"LlamaConfig: {key} must be an integer, got {value!r}.")
    return value


def _number(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
    value = _get(config, key, default)
    if not is_int(value) and not isinstance(value, float):
        raise ValueError(f"LlamaConfig: {key} must be a number, got {value!r}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"LlamaConfig: {key} must be a number of float64's range.") from None


def _boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _get(config, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"LlamaConfig: {key} must be true or false, got {value!r}.")
    return value
