"""Weight matrices of a model: their formats and parameters, and embedding lookup.

A quantised matrix is several parameters: values, such as ``qkv_proj``, scales ``qkv_proj_scale``,
and possibly ``qkv_proj_min`` and ``qkv_proj_order``, see `paged_jax.kernels.weight_formats`. An
int8 matrix that was made by `quantise` has one float32 scale per row. The largest value of a row is
127, so the rounding error is at most half a scale. Only weights are quantised, activations are not.
"""

import contextlib
import contextvars
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from paged_jax.kernels.linear import LayerWeights, Matrix, Stack, Weight, linear
from paged_jax.kernels.weight_formats import (
    INT8,
    PACKED_INPUTS,
    WeightArrays,
    WeightFormat,
    as_bits,
    dequantise,
    from_bits,
)
from paged_jax.models.config import LlamaConfig
from paged_jax.models.quantise import quantise

# Suffixes of the parameters with the scales, minima and order of a matrix, see `WeightArrays`.
SUFFIXES = SCALE, MIN, ORDER = "_scale", "_min", "_order"

# Elements in a row of a TPU vector register.
_TPU_LANES = 128

# Whether models are created only for their shapes, see `only_shapes`.
_HAS_ONLY_SHAPES = contextvars.ContextVar("_HAS_ONLY_SHAPES", default=False)

# Placement of parameters: one sharding for all, or a function of the name ("layers.0.qkv_proj", or
# "layers.qkv_proj" if the layers are stacked) and the shape. None is the default device.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


def matrix_name(name: str) -> str:
    """Return the name of a parameter's matrix: the parameter's name without a suffix.

    Example:
      >>> [matrix_name(name) for name in ("layers.0.o_proj", "layers.0.o_proj_scale", "norm")]
      ['layers.0.o_proj', 'layers.0.o_proj', 'norm']
    """
    suffix = next((each for each in SUFFIXES if name.endswith(each)), "")
    return name.removesuffix(suffix)


def is_stacked(name: str) -> bool:
    """Return whether a parameter is a stack of all layers, ``"layers.o_proj"``."""
    scope, _, kind = name.partition(".")
    return scope == "layers" and "." not in kind


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Return a context for `jax.eval_shape` of a model. In it, `add_matrix` does not quantise.

    Tracing the conversion of all matrices takes longer than the rest of the model.
    """
    token = _HAS_ONLY_SHAPES.set(True)
    try:
        yield
    finally:
        _HAS_ONLY_SHAPES.reset(token)


def add_matrix(module: nnx.Module, name: str, w: jax.Array, format: WeightFormat) -> None:
    """Add a matrix to a module: the parameter `name`, and the other arrays of its format."""
    if not format.is_quantised:
        setattr(module, name, nnx.Param(w.astype(jnp.dtype(format.code))))
        return
    if _HAS_ONLY_SHAPES.get():
        shapes = format.shapes(w.shape)
        arrays = WeightArrays(**{each: jnp.zeros(*shapes[each]) for each in shapes})
    else:
        arrays = quantise(w.astype(jnp.float32), format)
    for suffix, array in zip(("", *SUFFIXES), arrays, strict=True):
        if array is not None:
            setattr(module, name + suffix, nnx.Param(array))


class SeparateMatrices(nnx.Module):
    """Matrices of one layer that are not stacked, because their formats differ between layers.

    They are an attribute of the stack of all layers. The attribute is named after the layer's
    number, so parameters have the same names as in separate layers: ``"layers.3.down_proj"``.

    Args:
      formats: formats of the matrices of the layer.
    """

    def __init__(self, formats: "MatrixFormats"):
        self.formats = formats


def separate_matrices(stack: nnx.Module, formats: "MatrixFormats", num_layers: int) -> None:
    """Replace stacked floats by separate matrices, where the formats of the layers differ.

    Args:
      stack: a stack of all layers.
      formats: formats of the matrices of the model.
      num_layers: number of layers.
    """
    if not (kinds := formats.differing):
        return
    for layer in range(num_layers):
        own = SeparateMatrices(formats.of_layer(layer))
        for kind in kinds:
            add_matrix(own, kind, getattr(stack, kind)[layer], own.formats[kind])
        setattr(stack, str(layer), own)
    for kind in kinds:
        delattr(stack, kind)


def get_matrix(
    module: nnx.Module,
    name: str,
    format: WeightFormat,
    dtype: DTypeLike,
    stack: nnx.Module | None = None,
    layer: jax.Array | int | None = None,
) -> Weight:
    """Return a matrix of a module, with the other arrays of its format.

    Args:
      module: the module.
      name: name of the parameter.
      format: format of the matrix.
      dtype: dtype of the floating-point parameters of the model.
      stack: stacked modules that contain `module` as a slice, or None.
      layer: index of `module` in the stack, i32 ``[]``.
    """
    whole = None
    if stack is not None and layer is not None:
        # Gradients flow through the slice only.
        whole = Stack(lax.stop_gradient(_parameters(stack, name)), layer)
    code = format.code if format.is_packed else None
    return Weight(*_parameters(module, name), stack=whole, code=code, dtype=jnp.dtype(dtype))


def _parameters(module: nnx.Module, name: str) -> WeightArrays:
    parameters = (getattr(module, name + suffix, None) for suffix in ("", *SUFFIXES))
    return WeightArrays(*(None if each is None else each[...] for each in parameters))


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of a layer in a forward pass, by name.

    Attributes:
      layer: the layer, which has `formats` of its matrices and a `float_dtype`.
      stack: all layers in one module if `layer` is a slice of them, or None.
      index: number of the layer; i32 ``[]`` in a scan over layers.
      backend: backend of the matrix multiplications, see `linear`.
    """

    layer: Any
    stack: nnx.Module | None
    index: jax.Array | int
    backend: str | None

    def vector(self, name: str) -> jax.Array:
        """Return a parameter that is no matrix."""
        return getattr(self.layer, name)[...]

    def optional(self, name: str) -> jax.Array | None:
        """Return a parameter that is no matrix, or None if the layer does not have it."""
        return self.vector(name) if hasattr(self.layer, name) else None

    def matrix(self, name: str) -> Matrix:
        """Return a matrix, or the matrices of all layers if `separate_matrices` made them."""
        layer, dtype = self.layer, self.layer.float_dtype
        if hasattr(layer, name):
            return get_matrix(layer, name, layer.formats[name], dtype, self.stack, self.index)
        numbers = sorted((key for key in vars(layer) if key.isdecimal()), key=int)
        own = (getattr(layer, key) for key in numbers)
        weights = (get_matrix(each, name, each.formats[name], dtype) for each in own)
        return LayerWeights(tuple(weights), self.index)

    def linear(self, x: jax.Array, name: str) -> jax.Array:
        """Multiply the last dimension of `x` by a matrix, see `linear`."""
        return linear(x, self.matrix(name), backend=self.backend)


def look_up(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Return the embeddings float32 ``[N, E]`` of token ids i32 ``[N]`` from a table ``[V, E]``.

    The compiled program does not copy the table, and converts only the rows that it looks up. A
    table may get no gradient, so training must use `look_up_differentiably`.
    """
    return _find_rows(table, lambda array: _look_up_rows(array, token_ids))


def look_up_differentiably(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Return embeddings like `look_up`, for token ids of any shape and with gradients."""
    return _find_rows(table, lambda array: array[token_ids])


def _find_rows(table: Weight, take: Callable[[jax.Array], jax.Array]) -> jax.Array:
    arrays = jax.tree.map(take, table.arrays._replace(order=None))
    return dequantise(arrays._replace(order=table.order), table.format.code)


def _look_up_rows(array: jax.Array, token_ids: jax.Array) -> jax.Array:
    dtype = array.dtype
    if dtype == jnp.bfloat16:
        forms = {"cpu": _take_bits, "tpu": _take_from_lanes, "default": _take}
        return lax.platform_dependent(array, token_ids, **forms)
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return lax.platform_dependent(array, token_ids, cpu=_take_bits, default=_take)
    return _take(array, token_ids)


def _take(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    return table[token_ids]


def _take_bits(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Take rows of a bfloat16, float16 or float8 table on CPU.

    For a plain gather, XLA's CPU backend converts the whole table to float32, and the output head
    of a tied model then reads that copy. A gather of integers avoids this, but has no gradient. On
    TPU, the integer gather would copy the table instead.
    """
    return from_bits(as_bits(table)[token_ids], table.dtype)


def _take_from_lanes(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Take rows of a bfloat16 table on TPU.

    If E is not a multiple of 128, XLA stores the table with V along the lanes, which needs less
    padding, and copies the whole table for a gather (gpt-oss 20B on 16 v5e chips: 74 MB, jax 0.10.2
    to 0.12.0). Instead, this reads for each token the 128 rows that share its registers, unless
    that is more than the whole table. A layout constraint on the slice prevents the copy. A
    constraint on the table does not.
    """
    (V, E), (N,) = table.shape, token_ids.shape
    if E % _TPU_LANES == 0 or N * _TPU_LANES > V:
        return _take(table, token_ids)

    def take(token_id: jax.Array) -> jax.Array:
        start = jnp.minimum(token_id // _TPU_LANES * _TPU_LANES, V - _TPU_LANES)
        rows = lax.dynamic_slice_in_dim(table, start, _TPU_LANES)
        rows = with_layout_constraint(rows, Layout(major_to_minor=(1, 0))).astype(jnp.float32)
        is_row = jnp.arange(_TPU_LANES, dtype=jnp.int32) == token_id - start
        return jnp.sum(jnp.where(is_row[:, None], rows, 0), axis=0).astype(table.dtype)

    return lax.map(take, token_ids)


# Format of matrices that are quantised while they are loaded, by the dtype that the user asks for.
# The output head is always int8, because errors in it matter most. Instead of int4, a matrix gets
# int8 if the inputs of a row do not fill whole groups on each device.
DTYPE_FORMATS = {
    "int8": INT8,
    "fp8": WeightFormat("float8_e4m3fn", None, "float32"),
    "int4": WeightFormat("uint4", 32, "float16", "float16"),
    "int4-symmetric": WeightFormat("int4", 32, "bfloat16"),
}

# Matrices whose names do not end with "_proj". All other parameters are floats.
_OTHER_MATRICES = (
    "embed_tokens",
    "embed_tokens_per_layer",
    "per_layer_gate",
    "laurel_left",
    "laurel_right",
    "lm_head",
    "router",
    "shared_expert_gate",
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
        """Return the formats of a model that is made or loaded with the option `dtype`.

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

        Models with the same formats get equal instances, whether their layers are stacked or not.
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
    def differing(self) -> tuple[str, ...]:
        """Names of the matrices (without the layer) that have different formats in some layers."""
        kinds = {_LAYER.sub("", name) for name, _ in self.others if _LAYER.match(name)}
        return tuple(sorted(kinds))

    @property
    def is_quantised(self) -> bool:
        """Whether any matrix may be quantised."""
        return self.default.is_quantised or any(each.is_quantised for _, each in self.others)

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all formats, without repetition."""
        return tuple(dict.fromkeys([self.default.code, *(each.code for _, each in self.others)]))

    def __str__(self) -> str:
        """Name of the first quantised format, or of the default format if there is none."""
        formats = [self.default, *(each for _, each in self.others)]
        quantised = [each for each in formats if each.is_quantised]
        format = quantised[0] if quantised else self.default
        code, size = format.code, format.group_size
        return _E2M1_NAMES.get(size or 0, code) if code == "e2m1" else _NAMES.get(code, code)

    def of_layer(self, index: int | None) -> "MatrixFormats":
        """Return the formats of a layer's matrices by their names in the layer, ``"o_proj"``.

        Args:
          index: number of the layer; None for the stack of all layers, in which matrices with
            different formats are float32.
        """
        kinds = [name.rpartition(".")[2] for name, _ in self.others if name.startswith("layers.")]
        prefix = "layers." if index is None else f"layers.{index}."
        formats = {kind: self[prefix + kind] for kind in sorted(set(kinds))}
        if index is None:
            formats |= dict.fromkeys(self.differing, WeightFormat("float32"))
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
    kind = name.rpartition(".")[2]
    return kind.endswith("_proj") or kind in _OTHER_MATRICES


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
    """Return `dtype` if it is a float dtype, otherwise `config_dtype`."""
    return jnp.dtype(config_dtype if name_of(dtype) in DTYPE_FORMATS else dtype)
