"""Conversion of quantised matrices to tensors and config of compressed-tensors.

    format of the matrix            tensors, by the ends of their names
    int4, uint4, int8               pack-quantized: weight_packed i32 [out, in * bits / 32],
                                    weight_scale, weight_shape; if there are minima also
                                    weight_zero_point i32 [out * bits / 32, groups]
    fp8 per row or 128 x 128 block  float-quantized: weight, weight_scale
    e2m1 in groups of 32            mxfp4-pack-quantized: weight_packed u8 [out, in / 2],
                                    weight_scale u8, the exponents
    e2m1 in groups of 16            nvfp4-pack-quantized: weight_packed, weight_scale fp8, and
                                    weight_global_scale, by which it is divided

Values and scales are written unchanged, except that compact formats are widened first. Minima are
written as zero points, so each minimum must be an integer multiple of its scale. Formats that are
not in the table cannot be written. Embeddings and the output head are written as floats, because
vLLM cannot read them in a quantised format. The experts of gpt-oss are written as in the original
checkpoints of gpt-oss.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import (
    WeightArrays,
    WeightFormat,
    convert,
    dequantise,
)
from paged_jax.kernels.weight_packing import unpack
from paged_jax.models.matrix_formats import SUFFIXES, MatrixFormats
from paged_jax.models.tensor_mapping import TensorMapping

_EXPERTS = "mxfp4 experts"  # `QuantisedModule.kind` of the experts of gpt-oss
_BLOCK = 128  # number of rows, and of inputs, in a block of the fp8 format
_E8M0_BIAS = 127
_MAX_FP8 = 448.0
_ADVICE = (
    "Use save_checkpoint, or load the model with dtype='int8', 'fp8' or 'int4-symmetric' and save "
    "that, or with dequantise=True."
)


class SaveError(ValueError):
    """Error for a quantised matrix that compressed-tensors cannot represent."""


class QuantisedModule(NamedTuple):
    """Tensors and description of a quantised module that is written to a file.

    Attributes:
      tensors: tensors of the module, by their names without the name of the module.
      kind: name of the format in compressed-tensors; `_EXPERTS` for the experts of gpt-oss.
      weights: entry `weights` of the quantisation config.
    """

    tensors: dict[str, np.ndarray]
    kind: str
    weights: dict[str, Any]


def check_can_save(formats: MatrixFormats) -> None:
    """Check that compressed-tensors supports the formats of a model's matrices.

    Only the formats are checked. Some minima cannot be written: `quantised_module` raises an error
    for them.

    Raises:
      SaveError: a format is not supported. The message names it and says what to do.
    """
    for format in formats.all_formats:
        if not format.is_quantised:
            continue
        if format.has_order:
            raise SaveError(
                "save_weights: compressed-tensors does not support matrices with reordered inputs, "
                f"got such a matrix in the format {format.code}. {_ADVICE}"
            )
        if format.code in ("nf4", "fp4", "iq4"):
            raise SaveError(
                f"save_weights: compressed-tensors does not support the format {format.code}. "
                f"{_ADVICE}"
            )


def quantised_module(name: str, arrays: WeightArrays, format: WeightFormat) -> QuantisedModule:
    """Convert the arrays of a matrix ``[out, in]`` to the tensors of compressed-tensors.

    Raises:
      SaveError: compressed-tensors cannot represent the matrix.
    """
    for write in (_integers, _floats, _mxfp4, _nvfp4):
        if (module := write(name, arrays, format)) is not None:
            return module
    size = "" if format.group_size is None else f" in groups of {format.group_size}"
    raise SaveError(
        f"save_weights: compressed-tensors cannot represent {name}, which has the format "
        f"{format.code}{size}. {_ADVICE}"
    )


def quantisation_config(modules: Mapping[str, QuantisedModule], floats: Iterable[str]) -> Any:
    """Return the entry ``quantization_config`` of ``config.json``.

    Args:
      modules: quantised modules by name. Only their `kind` and `weights` are used.
      floats: names of the modules that are not quantised.
    """
    schemes: list[tuple[str, dict[str, Any], list[str]]] = []
    for name, module in modules.items():
        same = [each for each in schemes if each[:2] == (module.kind, module.weights)]
        if not same:
            same = [(module.kind, module.weights, [])]
            schemes += same
        same[0][2].append(name)
    kinds = {kind for kind, _, _ in schemes}
    groups = {
        f"group_{number}": {
            "format": kind,
            "input_activations": None,
            "output_activations": None,
            "targets": names if len(schemes) > 1 else ["Linear"],
            "weights": weights,
        }
        for number, (kind, weights, names) in enumerate(schemes)
    }
    return {
        "config_groups": groups,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "ignore": sorted({*floats, "lm_head"}),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _describe(bits: int, kind: str, strategy: str, group_size: int | None, **others: Any) -> Any:
    weights = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": group_size,
        "symmetric": True,
        "dynamic": False,
    }
    return weights | others


def _integers(name: str, arrays: WeightArrays, format: WeightFormat) -> QuantisedModule | None:
    if format.code not in ("int4", "uint4", "int8"):
        return None
    bits = 8 if format.code == "int8" else 4
    # The file contains unsigned values, which are the signed values plus 2 ** (bits - 1).
    unsigned = unpack(arrays.values) if bits == 4 else arrays.values.view(np.uint8) ^ 0x80
    tensors = {
        "weight_packed": _pack_words(unsigned, bits),
        "weight_scale": arrays.scales,
        "weight_shape": np.array(unsigned.shape, np.int64),
    }
    zeros = _zero_points(name, arrays, format, 1 << bits - 1)
    if zeros is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(_pack_words(zeros.T, bits).T)
    strategy = "channel" if format.group_size is None else "group"
    weights = _describe(bits, "int", strategy, format.group_size, symmetric=zeros is None)
    return QuantisedModule(tensors, "pack-quantized", weights)


def _zero_points(
    name: str, arrays: WeightArrays, format: WeightFormat, centre: int
) -> np.ndarray | None:
    """Return zero points uint8 ``[out, groups]``; None if all of them are `centre`."""
    scales = arrays.scales.astype(np.float32)
    mins = np.zeros_like(scales) if arrays.mins is None else arrays.mins.astype(np.float32)
    code_of_zero = 0 if format.code == "uint4" else centre
    safe = np.where(scales == 0, 1, scales)
    zeros = np.clip(np.rint(code_of_zero - mins / safe), 0, 2 * centre - 1)
    if not np.array_equal((code_of_zero - zeros) * scales, mins):
        raise SaveError(
            f"save_weights: the minima of {name} must be integer multiples of their scales, "
            f"because compressed-tensors stores minima as zero points. {_ADVICE}"
        )
    return None if (zeros == centre).all() else zeros.astype(np.uint8)


def _pack_words(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """Pack values uint8 ``[rows, n]`` into words int32 ``[rows, ceil(n * bits / 32)]``.

    The first value of a word is in its lowest bits.
    """
    unsigned = np.pad(unsigned, ((0, 0), (0, -unsigned.shape[1] % (32 // bits))))
    if bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return np.ascontiguousarray(unsigned).view("<i4")


def _floats(name: str, arrays: WeightArrays, format: WeightFormat) -> QuantisedModule | None:
    if format.code != "float8_e4m3fn" or format.min_dtype is not None:
        return None
    strategy, others, scales = "channel", {}, arrays.scales
    if format.group_size is not None:
        if (found := _find_blocks(arrays.scales, format.group_size)) is None:
            return None
        strategy, scales = "block", found[1]
        others = {"block_structure": [found[0], found[0]]}
    tensors = {"weight": arrays.values, "weight_scale": np.ascontiguousarray(scales)}
    weights = _describe(8, "float", strategy, None, **others)
    return QuantisedModule(tensors, "float-quantized", weights)


def _find_blocks(scales: np.ndarray, group_size: int) -> tuple[int, np.ndarray] | None:
    """Group scales by square blocks, if all scales of each block are equal.

    Returns:
      The size of a block, and the scale of each block; None if the scales do not form blocks.
    """
    num_rows, num_groups = scales.shape
    for size in (_BLOCK, group_size):
        step = max(1, size // group_size)
        blocks = scales[::size, ::step]
        repeated = blocks.repeat(size, axis=0)[:num_rows].repeat(step, axis=1)[:, :num_groups]
        if size % group_size == 0 and np.array_equal(repeated, scales):
            return size, blocks
    return None


def _mxfp4(name: str, arrays: WeightArrays, format: WeightFormat) -> QuantisedModule | None:
    if (format.code, format.group_size, format.min_dtype) != ("e2m1", 32, None):
        return None
    fractions, exponents = np.frexp(arrays.scales.astype(np.float32))
    if not (fractions == 0.5).all():
        return None
    stored = exponents - 1 + _E8M0_BIAS
    if stored.min() < 0 or stored.max() > 254:
        return None
    tensors = {
        "weight_packed": _pack_words(unpack(arrays.values), 4).view(np.uint8),
        "weight_scale": stored.astype(np.uint8),
    }
    weights = _describe(4, "float", "group", 32, scale_dtype="torch.uint8")
    return QuantisedModule(tensors, "mxfp4-pack-quantized", weights)


def _nvfp4(name: str, arrays: WeightArrays, format: WeightFormat) -> QuantisedModule | None:
    if (format.code, format.group_size, format.min_dtype) != ("e2m1", 16, None):
        return None
    found = _divide_scales(arrays.scales.astype(np.float32))
    if found is None:
        return None
    scales, factor = found
    tensors = {
        "weight_packed": _pack_words(unpack(arrays.values), 4).view(np.uint8),
        "weight_scale": scales,
        "weight_global_scale": np.array([factor], np.float32),
    }
    weights = _describe(4, "float", "tensor_group", 16, scale_dtype="torch.float8_e4m3fn")
    return QuantisedModule(tensors, "nvfp4-pack-quantized", weights)


def _divide_scales(scales: np.ndarray) -> tuple[np.ndarray, np.float32] | None:
    """Find fp8 scales and a factor with ``fp8_scales / factor == scales``; None if impossible.

    In most files, the largest scale of a matrix is stored as the largest fp8 number. But if several
    matrices share a factor, it may be stored as any fp8 number, so the function tries all of them.
    """
    largest = scales.max()
    if largest == 0:
        return scales.astype(jnp.float8_e4m3fn), np.float32(1)
    numbers = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    for number in numbers[::-1]:
        factor = number / largest
        for candidate in (factor, np.nextafter(factor, np.float32(0)),
                          np.nextafter(factor, np.float32(np.inf))):  # fmt: skip
            with np.errstate(over="ignore"):
                stored = np.minimum(scales * candidate, _MAX_FP8).astype(jnp.float8_e4m3fn)
            if np.array_equal(stored.astype(np.float32) / candidate, scales):
                return stored, candidate
    return None


class QuantisedWriter:
    """Converter of a model's quantised matrices to tensors and config entries of files.

    Args:
      formats: storage format of each matrix.
      parameters: all parameters of the model by name.

    Raises:
      SaveError: a matrix cannot be written. The message names it and says what to do.
    """

    def __init__(self, formats: MatrixFormats, parameters: Mapping[str, Any]):
        self._formats = formats
        self._parameters = parameters
        self._modules: dict[str, QuantisedModule] = {}
        self._floats: set[str] = set()
        check_can_save(formats)

    def tensors(
        self, name: str, mappings: list[TensorMapping], dtype: np.dtype
    ) -> dict[str, np.ndarray]:
        """Return the tensors to write for one Hugging Face tensor of a quantised matrix, by name.

        Args:
          name: name of the matrix.
          mappings: mappings of the matrix to the Hugging Face tensor.
          dtype: float dtype of the embeddings and the output head in the files.
        """
        format, tensor = self._formats[name], mappings[0].tensor
        given = (self._parameters.get(name + suffix) for suffix in ("", *SUFFIXES))
        whole = (None if each is None else np.asarray(each) for each in given)
        module = tensor.removesuffix(".weight")
        if mappings[0].axes is not None:
            arrays = WeightArrays(*(x if x is None else expert_rows(x, mappings) for x in whole))
            return self._experts(tensor, arrays, format)
        arrays = WeightArrays(*(x if x is None else rows_of(x, mappings) for x in whole))
        arrays, format = convert(arrays, format, format.widened), format.widened
        if name in ("embed_tokens", "lm_head"):
            self._floats.add(module)
            return {tensor: dequantise(arrays, format.code).astype(dtype)}
        written = quantised_module(module, arrays, format)
        self._modules[module] = written._replace(tensors={})
        return {f"{module}.{end}": array for end, array in written.tensors.items()}

    def _experts(
        self, tensor: str, arrays: WeightArrays, format: WeightFormat
    ) -> dict[str, np.ndarray]:
        """Return the tensors for blocks and scales of MXFP4 experts, as gpt-oss stores them."""
        *lead, _ = arrays.values.shape
        flat = WeightArrays(*(x if x is None else x.reshape(-1, x.shape[-1]) for x in arrays))
        written = _mxfp4(tensor, flat, format)
        if written is None:
            raise SaveError(
                f"save_weights: {tensor} must have the format mxfp4 or not be quantised, because "
                f"this family stores all experts in one tensor, got {format.code}. {_ADVICE}"
            )
        blocks, scales = written.tensors.values()
        groups = scales.reshape(*lead, -1)
        self._modules[tensor] = QuantisedModule({}, _EXPERTS, {})
        return {f"{tensor}_blocks": blocks.reshape(*groups.shape, -1), f"{tensor}_scales": groups}

    def config(self, floats: Iterable[str]) -> dict[str, Any]:
        """Return the entries of ``config.json`` for the tensors converted so far.

        Args:
          floats: names of the modules that are not quantised.
        """
        kinds = {module.kind for module in self._modules.values()}
        if not kinds:
            return {}
        ignored = {*floats, *self._floats}
        if kinds == {_EXPERTS}:
            entry = {"quant_method": "mxfp4", "modules_to_not_convert": sorted(ignored)}
        elif _EXPERTS in kinds:
            raise SaveError(
                "save_weights: if the experts have the format mxfp4, other matrices must not be "
                f"quantised, got {', '.join(sorted(kinds - {_EXPERTS}))}. {_ADVICE}"
            )
        else:
            entry = quantisation_config(self._modules, ignored)
        return {"quantization_config": entry}


def expert_rows(array: np.ndarray, mappings: list[TensorMapping]) -> np.ndarray:
    """Return the rows of a Hugging Face tensor that contains all X experts, ``[X, out, columns]``.

    The arguments are as in `rows_of`, but `mappings` contains a single mapping, and its field
    `axes` must not be None.
    """
    (mapping,) = mappings
    assert mapping.axes is not None
    split, (*row_axes, in_axis) = mapping.split_shape or mapping.shape, mapping.axes
    kept = [axis for axis in range(len(split)) if axis != in_axis]
    order = np.argsort([kept.index(axis) for axis in row_axes]).tolist()
    box = array[mapping.box[:-1]].reshape(*(split[axis] for axis in row_axes), array.shape[-1])
    box = box.transpose(*order, len(row_axes))
    return np.ascontiguousarray(box).reshape(split[0], -1, array.shape[-1])


def rows_of(array: np.ndarray, mappings: list[TensorMapping]) -> np.ndarray:
    """Select the rows of a parameter's array that belong to one Hugging Face tensor.

    Args:
      array: array of the parameter (values, scales or minima), with any number of columns.
      mappings: the parameter's mappings to this tensor. Their field `axes` must be None.
    """
    parts = []
    for mapping in sorted(mappings, key=lambda each: each.first_row):
        columns = array.shape[-1]
        narrow = dataclasses.replace(
            mapping,
            shape=(mapping.shape[0], columns),
            box_shape=(*mapping.box_shape[:-1], columns),
        )
        parts.append(narrow.to_rows(array[mapping.box[:-1]]))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
