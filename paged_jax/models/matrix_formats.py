"""Names and storage formats of the weight matrices of a model.

A quantised matrix consists of several parameters. For ``qkv_proj``, they are the values
``qkv_proj``, the scales ``qkv_proj_scale``, and in some formats ``qkv_proj_min`` and
``qkv_proj_order``, see `paged_jax.kernels.weight_formats`.

`MatrixFormats.of_dtype` decides which matrices an option such as ``dtype="int4"`` quantises: the
head of an int4 model is int8, and an embedding table that is not the head stays floating point.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from jax.typing import DTypeLike

from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.codecs.dtype_formats import DTYPE_FORMATS, fits, name_of


class MatrixLike(Protocol):
    """Description of a matrix, a `Parameter`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape; the last dimension is the inputs."""
        ...

    @property
    def stays_float(self) -> bool:
        """Whether the option `dtype` never quantises the matrix."""
        ...


class HasMatrices(Protocol):
    """Model, or a device's share of it, with descriptions of its matrices; a `ModelConfig`."""

    @property
    def dtype(self) -> str:
        """Dtype of matrices that are not quantised."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the embedding table is also the output head."""
        ...

    def matrices(self) -> Iterator[tuple[str, MatrixLike]]:
        """Yield the names and descriptions of the matrices. Layers are not numbered."""
        ...


# Suffixes in the names of parameters that hold the scales, minima and input order of a matrix.
SUFFIXES = SCALE, MIN, ORDER = "_scale", "_min", "_order"


def matrix_name(name: str) -> str:
    """Return the name of the matrix to which a parameter belongs, by removing the suffix.

    Example:
      >>> [matrix_name(name) for name in ("layers.0.o_proj", "layers.0.o_proj_scale", "norm")]
      ['layers.0.o_proj', 'layers.0.o_proj', 'norm']
    """
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def is_stacked(name: str) -> bool:
    """Return whether a name like ``"layers.o_proj"`` denotes a parameter stacked over layers."""
    scope, _, kind = name.partition(".")
    return scope == "layers" and "." not in kind


# Matrices with names that do not end with "_proj". Names with this ending are always matrices. Add
# none: new matrices have this ending.
_OTHER_MATRICES = (
    "embed_tokens", "embed_tokens_per_layer", "per_layer_gate", "laurel_left", "laurel_right",
    "lm_head", "router", "shared_expert_gate",
)  # fmt: skip


# Names of formats by `WeightFormat.code`. The name of any other format is its code.
_NAMES = {"float8_e4m3fn": "fp8", "uint4": "int4"}


_E2M1_NAMES = {32: "mxfp4", 16: "nvfp4"}  # by group size


_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class MatrixFormats:
    """Storage format of each matrix of a model. Hashable, so static in compiled programs.

    Attributes:
      default: format of all matrices that are not in `others`.
      others: pairs of the name of a matrix and its format. The name ``"layers.3.o_proj"`` stands
        for the matrix of a single layer, ``"layers.o_proj"`` for the matrices of all layers.

    Example:
      >>> floats, int8 = WeightFormat("float32"), WeightFormat("int8", None, "float32")
      >>> formats = MatrixFormats(int8, (("layers.router", floats), ("layers.0.o_proj", floats)))
      >>> [formats[name].code for name in ("layers.0.o_proj", "layers.1.o_proj", "layers.3.router")]
      ['float32', 'int8', 'float32']
    """

    default: WeightFormat
    others: tuple[tuple[str, WeightFormat], ...] = ()

    @classmethod
    def of_dtype(cls, dtype: DTypeLike, config: HasMatrices) -> "MatrixFormats":
        """Return the formats that the option `dtype` of `Decoder` and `from_pretrained` implies.

        With a dtype in `DTYPE_FORMATS`, some matrices stay floating point: matrices that are small
        or whose errors accumulate (see `Parameter.stays_float`), and an embedding table that is not
        the output head, of which steps read only a few rows.

        Args:
          dtype: a float dtype, or a key of `DTYPE_FORMATS`.
          config: configuration of the model, or of a single device. Its `dtype` is the dtype of
            matrices that are not quantised.
        """
        if (format := DTYPE_FORMATS.get(name_of(dtype))) is None:
            return cls(WeightFormat(name_of(dtype)))
        floats = WeightFormat(name_of(config.dtype))
        other_formats: dict[str, WeightFormat] = {}
        for name, parameter in config.matrices():
            if parameter.stays_float:
                other_formats[name] = floats
            elif not fits(format, parameter.shape[-1]):
                other_formats[name] = DTYPE_FORMATS["int8"]
        head = "embed_tokens"
        if not config.tie_word_embeddings:
            other_formats["embed_tokens"], head = floats, "lm_head"
        other_formats[head] = DTYPE_FORMATS["int8"]
        other_formats = {
            name: matrix_format
            for name, matrix_format in other_formats.items()
            if matrix_format != format
        }
        return cls(format, tuple(sorted(other_formats.items())))

    @classmethod
    def create(
        cls, formats: Mapping[str, WeightFormat], default: WeightFormat | None = None
    ) -> "MatrixFormats":
        """Create an instance from the format of each matrix, by matrix name.

        If `default` is None, the most frequent format becomes the default. Stacked and separate
        layers give equal results.
        """
        kinds: dict[str, set[WeightFormat]] = {}
        for name, format in formats.items():
            kinds.setdefault(_LAYER.sub("layers.", name), set()).add(format)
        short: dict[str, WeightFormat] = {}
        for name, format in formats.items():
            kind = _LAYER.sub("layers.", name)
            short[kind if len(kinds[kind]) == 1 else name] = format
        default = default or max(dict.fromkeys(short.values()), key=list(short.values()).count)
        other_formats = {name: format for name, format in short.items() if format != default}
        return cls(default, tuple(sorted(other_formats.items())))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "MatrixFormats":
        """Convert the result of `to_dict` back to formats.

        Raises:
          TypeError, KeyError: `content` has missing or unknown keys.
        """
        other_formats = {name: _read_format(entry) for name, entry in content["others"].items()}
        return cls(_read_format(content["default"]), tuple(sorted(other_formats.items())))

    def to_dict(self) -> dict[str, Any]:
        """Convert the formats, which must be plain, to a dict that can be written as JSON."""
        other_formats = {name: _write_format(format) for name, format in self.others}
        return {"default": _write_format(self.default), "others": other_formats}

    def __getitem__(self, name: str) -> WeightFormat:
        by_name = dict(self.others)
        return by_name.get(name) or by_name.get(_LAYER.sub("layers.", name)) or self.default

    @property
    def differing(self) -> tuple[str, ...]:
        """Names, such as ``"o_proj"``, of matrices with different formats in different layers."""
        kinds = {_LAYER.sub("", name) for name, _ in self.others if _LAYER.match(name)}
        return tuple(sorted(kinds))

    @property
    def all_formats(self) -> tuple[WeightFormat, ...]:
        """The default and the formats in `others`."""
        return self.default, *(format for _, format in self.others)

    @property
    def is_quantised(self) -> bool:
        """Whether any matrix may be quantised."""
        return any(format.is_quantised for format in self.all_formats)

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all formats, each listed once."""
        return tuple(dict.fromkeys(format.code for format in self.all_formats))

    def __str__(self) -> str:
        """Return the name of the first quantised format, or of the default if none is quantised."""
        quantised = [format for format in self.all_formats if format.is_quantised]
        format = quantised[0] if quantised else self.default
        code, size = format.code, format.group_size
        return _E2M1_NAMES.get(size or 0, code) if code == "e2m1" else _NAMES.get(code, code)

    def of_layer(self, index: int | None) -> "MatrixFormats":
        """Return the formats of a layer, with names such as ``"o_proj"`` for its matrices.

        Args:
          index: index of the layer; None for the stack of all layers. In the stack, a matrix has
            the format float32 if its formats differ by layer, see `separate_matrices`.
        """
        kinds = [name.rpartition(".")[2] for name, _ in self.others if name.startswith("layers.")]
        prefix = "layers." if index is None else f"layers.{index}."
        formats = {kind: self[prefix + kind] for kind in sorted(set(kinds))}
        if index is None:
            formats |= dict.fromkeys(self.differing, WeightFormat("float32"))
        other_formats = {kind: format for kind, format in formats.items() if format != self.default}
        return MatrixFormats(self.default, tuple(other_formats.items()))

    @property
    def plain(self) -> "MatrixFormats":
        """These formats in the plain layout."""
        default = self.default.plain
        other_formats = ((name, format.plain) for name, format in self.others)
        return MatrixFormats(default, tuple(item for item in other_formats if item[1] != default))

    def with_floats(self, dtype: DTypeLike) -> "MatrixFormats":
        """Return these formats, but with `dtype` for the matrices that are not quantised."""

        def change(format: WeightFormat) -> WeightFormat:
            return format if format.is_quantised else WeightFormat(name_of(dtype))

        other_formats = tuple((name, change(format)) for name, format in self.others)
        return MatrixFormats(change(self.default), other_formats)


def _read_format(entries: Mapping[str, Any]) -> WeightFormat:
    # Files of earlier versions have this entry, which is always false.
    return WeightFormat(**{name: x for name, x in entries.items() if name != "is_interleaved"})


def _write_format(format: WeightFormat) -> dict[str, Any]:
    assert format.layout is None, "saved matrices are plain"
    return {name: x for name, x in asdict(format).items() if name != "layout"}


def is_matrix(name: str) -> bool:
    """Return whether the name of a parameter, like ``"layers.0.o_proj"``, denotes a matrix."""
    kind = name.rpartition(".")[2]
    return kind.endswith("_proj") or kind in _OTHER_MATRICES
