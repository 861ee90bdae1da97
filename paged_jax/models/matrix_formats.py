"""Formats of the matrices of a model, by the names of its parameters."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.kernels.weight_formats import INT8, PACKED_INPUTS, WeightFormat
from paged_jax.models.config import LlamaConfig

# Format of matrices that are quantised while they are loaded, by the dtype that the user asks for.
# The output head is always int8, because errors in it matter most. Instead of int4, a matrix gets
# int8 if the inputs of a row do not fill whole groups on each device.
DTYPE_FORMATS = {
    "int8": INT8,
    "fp8": WeightFormat("float8_e4m3fn", None, "float32"),
    "int4": WeightFormat("uint4", 32, "float16", "float16"),
    "int4-symmetric": WeightFormat("int4", 32, "bfloat16"),
}

# Names of matrices in a model or in a layer. All other parameters are floats.
_MATRICES = (
    "embed_tokens",
    "embed_tokens_per_layer",
    "per_layer_model_proj",
    "per_layer_gate",
    "per_layer_proj",
    "stream_proj",
    "stream_out_proj",
    "laurel_left",
    "laurel_right",
    "lm_head",
    "qkv_proj",
    "latent_proj",
    "q_proj",
    "kv_b_proj",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "router",
    "shared_expert_gate",
    "experts_gate_up_proj",
    "experts_down_proj",
    "mixer_in_proj",
    "mixer_gates_proj",
    "mixer_rank_proj",
    "mixer_decay_proj",
    "mixer_gate_proj",
    "mixer_out_proj",
)
# Matrices of the embeddings per layer. They stay floating point, because a step reads few rows of
# the table, and the others are small.
_PER_LAYER = (
    "embed_tokens_per_layer",
    "per_layer_model_proj",
    "layers.per_layer_gate",
    "layers.per_layer_proj",
)
# Matrices of residual streams stay floating point, because errors in them affect all layers.
_OF_STREAMS = ("stream_proj", "stream_out_proj", "layers.laurel_left", "layers.laurel_right")
# Matrices of a layer that stay floating point in a quantised model, because they are small.
_SMALL = ("router", "shared_expert_gate")
# The same for layers with a mixer. Errors in gates add up in the state.
_SMALL_OF_MIXERS = ("mixer_gates_proj", "mixer_rank_proj", "mixer_decay_proj", "mixer_gate_proj")

# Names of formats that differ from the names of their codes.
_NAMES = {"float8_e4m3fn": "fp8", "uint4": "int4"}
_E2M1_NAMES = {32: "mxfp4", 16: "nvfp4"}  # by group size

_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class MatrixFormats:
    """Format of each matrix of a model. Instances are hashable, and static in a compiled program.

    Attributes:
      default: format of the matrices that `others` does not list.
      others: pairs of the name of a matrix and its format. ``"layers.3.o_proj"`` is a matrix of one
        layer, ``"layers.o_proj"`` is the matrix of all layers.

    Example:
      >>> floats, int8 = WeightFormat("float32"), WeightFormat("int8", None, "float32")
      >>> formats = MatrixFormats(int8, (("layers.router", floats), ("layers.0.o_proj", floats)))
      >>> [formats[name].code for name in ("layers.0.o_proj", "layers.1.o_proj", "layers.3.router")]
      ['float32', 'int8', 'float32']
    """

    default: WeightFormat
    others: tuple[tuple[str, WeightFormat], ...] = ()

    @classmethod
    def of_dtype(cls, dtype: DTypeLike, config: LlamaConfig) -> "MatrixFormats":
        """Return the formats of a model whose matrices have a dtype.

        With a dtype in `DTYPE_FORMATS`, small matrices and embeddings that are not also the output
        head stay floating point, because a step reads little of them.

        Args:
          dtype: a float dtype, or a dtype in `DTYPE_FORMATS`.
          config: configuration of the model, or of a device's shard, with the dtype of its floats.
        """
        if (format := DTYPE_FORMATS.get(name_of(dtype))) is None:
            return cls(WeightFormat(name_of(dtype)))
        floats = WeightFormat(name_of(config.dtype))
        others = {f"layers.{name}": floats for name in _SMALL} if config.num_experts else {}
        if config.hidden_size_per_layer_input:
            others |= dict.fromkeys(_PER_LAYER, floats)
        if config.residual_streams is not None or config.laurel_rank:
            others |= dict.fromkeys(_OF_STREAMS, floats)
        if config.mixer is not None:
            others |= {f"layers.{name}": floats for name in _SMALL_OF_MIXERS}
        if config.latent is not None:
            others["layers.kv_b_proj"] = floats
        for layer in set(config.layer_configs):
            for name, num_inputs in _num_inputs(layer).items():
                if not fits(format, num_inputs):
                    others[f"layers.{name}"] = INT8
        head = "embed_tokens"
        if not config.tie_word_embeddings:
            others["embed_tokens"], head = floats, "lm_head"
        others[head] = INT8
        others = {name: each for name, each in others.items() if each != format}
        return cls(format, tuple(sorted(others.items())))

    @classmethod
    def create(cls, formats: Mapping[str, WeightFormat]) -> "MatrixFormats":
        """Return `MatrixFormats` from the format of each matrix, with as few entries as possible.

        Models with the same formats get equal instances. An instance with `can_stack` also
        describes the model with stacked layers.
        """
        kinds: dict[str, set[WeightFormat]] = {}
        for name, format in formats.items():
            kinds.setdefault(_LAYER.sub("layers.", name), set()).add(format)
        short: dict[str, WeightFormat] = {}
        for name, format in formats.items():
            kind = _LAYER.sub("layers.", name)
            short[kind if len(kinds[kind]) == 1 else name] = format
        default = max(dict.fromkeys(short.values()), key=list(short.values()).count)
        others = {name: format for name, format in short.items() if format != default}
        return cls(default, tuple(sorted(others.items())))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "MatrixFormats":
        """Return the formats from the result of `to_dict`.

        Raises:
          TypeError, KeyError: the content has other keys.
        """
        others = {name: WeightFormat(**each) for name, each in content["others"].items()}
        return cls(WeightFormat(**content["default"]), tuple(sorted(others.items())))

    def to_dict(self) -> dict[str, Any]:
        """Return the formats as data for JSON."""
        others = {name: asdict(each) for name, each in self.others}
        return {"default": asdict(self.default), "others": others}

    def __getitem__(self, name: str) -> WeightFormat:
        others = dict(self.others)
        return others.get(name) or others.get(_LAYER.sub("layers.", name)) or self.default

    @property
    def can_stack(self) -> bool:
        """Whether each kind of matrix has the same format in all layers."""
        return not any(_LAYER.match(name) for name, _ in self.others)

    @property
    def is_quantised(self) -> bool:
        """Whether any matrix may be quantised."""
        return self.default.is_quantised or any(each.is_quantised for _, each in self.others)

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all formats, without repetition."""
        return tuple(dict.fromkeys([self.default.code, *(each.code for _, each in self.others)]))

    def __str__(self) -> str:
        """Name of the default format. If that is floating point, the name of a quantised format."""
        formats = [self.default, *(each for _, each in self.others)]
        quantised = [each for each in formats if each.is_quantised]
        format = quantised[0] if quantised else self.default
        code, size = format.code, format.group_size
        return _E2M1_NAMES.get(size or 0, code) if code == "e2m1" else _NAMES.get(code, code)

    def of_layer(self, index: int | None) -> "MatrixFormats":
        """Return the formats of a layer's matrices by their names in the layer, ``"o_proj"``.

        Args:
          index: number of the layer; None for all layers, which must not differ.
        """
        kinds = [name.rpartition(".")[2] for name, _ in self.others if name.startswith("layers.")]
        prefix = "layers." if index is None else f"layers.{index}."
        formats = {kind: self[prefix + kind] for kind in sorted(set(kinds))}
        others = {kind: each for kind, each in formats.items() if each != self.default}
        return MatrixFormats(self.default, tuple(others.items()))

    def with_floats(self, dtype: DTypeLike) -> "MatrixFormats":
        """Return the formats with another dtype of the matrices that are not quantised."""

        def change(format: WeightFormat) -> WeightFormat:
            return format if format.is_quantised else WeightFormat(name_of(dtype))

        others = tuple((name, change(each)) for name, each in self.others)
        return MatrixFormats(change(self.default), others)


def fits(format: WeightFormat, num_inputs: int) -> bool:
    """Return whether the inputs of a row fill whole groups and packed blocks of a format."""
    block = math.lcm(format.group_size or 1, PACKED_INPUTS if format.is_packed else 1)
    return num_inputs % block == 0


def _num_inputs(config: LlamaConfig) -> dict[str, int]:
    """Return the number of inputs of each matrix of a layer."""
    inputs = {
        "gate_up_proj": config.hidden_size,
        "down_proj": config.dense_intermediate_size,
    }
    if config.latent is not None:
        inputs["latent_proj"] = config.hidden_size
        inputs["q_proj"] = config.latent.q_lora_rank or config.hidden_size
        inputs["o_proj"] = config.value_features
    elif config.kv_shapes[0] is not None:
        inputs["qkv_proj"] = config.hidden_size
        inputs["o_proj"] = config.value_features
    if config.mixer is not None:
        shapes = config.mixer.shapes(config.hidden_size)
        inputs |= {name: shapes[name][-1] for name in ("mixer_in_proj", "mixer_out_proj")}
    if config.num_experts:
        inputs["experts_gate_up_proj"] = config.hidden_size
        inputs["experts_down_proj"] = config.moe_intermediate_size
    return inputs


def is_matrix(name: str) -> bool:
    """Return whether a parameter, such as ``"layers.0.o_proj"``, is a matrix."""
    return name.rpartition(".")[2] in _MATRICES


def name_of(dtype: DTypeLike) -> str:
    """Return the name of a dtype, which may be a name in `DTYPE_FORMATS`.

    Example:
      >>> name_of("int4"), name_of(jnp.float8_e4m3fn), name_of(jnp.bfloat16)
      ('int4', 'fp8', 'bfloat16')
    """
    if isinstance(dtype, str) and dtype in DTYPE_FORMATS:
        return dtype
    name = jnp.dtype(dtype).name
    return "fp8" if name == DTYPE_FORMATS["fp8"].code else name


def float_type(dtype: DTypeLike, config_dtype: DTypeLike) -> np.dtype:
    """Return the dtype of parameters that are never quantised, such as norms and biases.

    Args:
      dtype: dtype of the matrices.
      config_dtype: dtype of the config, used if the matrices are quantised.
    """
    return jnp.dtype(config_dtype if name_of(dtype) in DTYPE_FORMATS else dtype)
