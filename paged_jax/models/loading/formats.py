"""Choice of the storage format of each matrix of a model that is loaded.

The choice depends on the formats of the tensors in the files, on the user's options, and on the
number of devices over which the model is divided. `models.matrix_formats` decides which matrices
the option `dtype` quantises. A matrix whose format cannot be divided is expanded to floats, with a
warning.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from paged_jax.kernels.platforms import weight_store
from paged_jax.kernels.weight_formats import WeightFormat, common_format, divide_groups
from paged_jax.kernels.weight_packing import PACKED_INPUTS
from paged_jax.models.codecs.dtype_formats import DTYPE_FORMATS, fits, name_of
from paged_jax.models.config import ModelConfig
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.loading.stored_tensors import StoredTensor
from paged_jax.models.matrices import Sharding
from paged_jax.models.matrix_formats import MatrixFormats, is_matrix
from paged_jax.models.tensor_mapping import TensorMapping
from paged_jax.models.tensor_parallel import divides_inputs

# Tensors of the files by name.
Stored = Mapping[str, StoredTensor]


def is_quantised(tensor: StoredTensor) -> bool:
    """Return whether the files store a tensor in a quantised format."""
    return tensor.format.is_quantised


def find_format(
    stored: Stored, mappings: list[TensorMapping], num_inputs: int
) -> WeightFormat | str:
    """Return a format that represents all tensors of a matrix exactly.

    At least one of the tensors in `mappings` must be quantised.

    Returns:
      The format. If there is none, the reason as a str.
    """
    tensors = [stored[name] for name in dict.fromkeys(mapping.tensor for mapping in mappings)]
    if not all(map(is_quantised, tensors)):
        return "only some of its tensors are quantised"
    formats = list(dict.fromkeys(tensor.format for tensor in tensors))
    format = common_format(formats, num_inputs)
    if format is None:
        codes = sorted({candidate.code for candidate in formats})
        return f"its tensors have different formats ({', '.join(codes)})"
    if format.has_order and not have_same_order(tensors):
        return "its tensors have different orders of inputs"
    return format


def fit_format(format: WeightFormat, num_inputs: int, num_parts: int) -> WeightFormat | str:
    """Adapt a format so that a matrix can be divided over devices along its inputs.

    Each of the `num_parts` devices must get whole groups and whole packed bytes.

    Returns:
      The format, with smaller groups or 8-bit values if necessary. If no format is possible, the
      reason as a str.
    """
    if format.has_order and num_parts > 1:
        return f"its reordered inputs cannot be divided over {num_parts} devices"
    if format.is_packed and num_inputs // num_parts % PACKED_INPUTS:
        int8 = WeightFormat("int8", None, "float32", None, format.has_order)
        if (widened := common_format([format, int8], num_inputs)) is None:
            return f"{num_inputs // num_parts} inputs are no multiple of {PACKED_INPUTS}"
        format = widened
    if format.group_size is not None:
        format = divide_groups(format, num_inputs, num_parts)
    return format


def find_devices(config: ModelConfig, sharding: Sharding) -> set[Any]:
    """Return the devices that a sharding places the embeddings on; the default device for None."""
    if callable(sharding):
        sharding = sharding("embed_tokens", (config.vocab_size, config.hidden_size))
    # Unlike `jnp.zeros`, this compiles nothing.
    placement = sharding or jax.device_put(np.zeros(())).sharding
    return placement.device_set


def have_same_order(tensors: Iterable[StoredTensor]) -> bool:
    """Return whether quantised tensors have their inputs in the same order."""
    first, *orders = (tensor.read_arrays(slice(0, 1)).order for tensor in tensors)
    return all(np.array_equal(first, order) for order in orders)


def choose_formats(
    spec: ModelSpec,
    dtype: DTypeLike,
    stored: Stored,
    mappings: Mapping[str, list[TensorMapping]],
    *,
    dequantise: bool,
    platform: str | None = None,
    num_devices: int | None = None,
) -> MatrixFormats:
    """Choose the storage format of each matrix of a model that is read from files.

    A quantised matrix keeps the format of the files if one format can represent all of its tensors,
    and if the matrix can be divided over the devices in this format. Otherwise it is converted to
    floats, with a warning.

    Args:
      spec: description of the model without quantised matrices, and its placement.
      dtype: value of the user's option. If it is in `DTYPE_FORMATS`, all large matrices are
        quantised again.
      stored: tensors of the files by name.
      mappings: for each parameter of the model with separate layers, its mappings to the tensors.
      dequantise: whether to convert all quantised matrices to floats.
      platform: platform of the devices; None to derive it and `num_devices` from the placement in
        `spec`.
      num_devices: number of devices over which the model is divided.
    """
    floats = WeightFormat(name_of(spec.dtype))
    config = replace(spec.config, dtype=floats.code)
    requested = MatrixFormats.of_dtype(dtype, config)
    is_kept = not dequantise and name_of(dtype) not in DTYPE_FORMATS
    if platform is None or num_devices is None:
        devices = find_devices(config, spec.sharding)
        store, count = weight_store(next(iter(devices)).platform), len(devices)
    else:
        store, count = weight_store(platform), num_devices
    formats: dict[str, WeightFormat] = {}
    expanded: dict[str, str] = {}
    for name, shape in spec.separate_shapes().items():
        if not is_matrix(name):
            continue
        format: WeightFormat | str = requested[name]
        if is_kept and any(is_quantised(stored[mapping.tensor]) for mapping in mappings[name]):
            format = find_format(stored, mappings[name], shape[-1])
        if isinstance(format, WeightFormat) and format.is_quantised:
            format = store.stored_format(format, count)
            if num_devices is None:
                num_parts = _num_parts(spec, name, shape)
            else:
                num_parts = num_devices if divides_inputs(config, name) else 1
            if not is_kept and not fits(format, shape[-1] // num_parts):
                format = DTYPE_FORMATS["int8"]
            format = fit_format(format, shape[-1], num_parts)
        if isinstance(format, str):
            expanded[name] = format
            format = floats
        formats[name] = format
    if expanded:
        name, reason = next(iter(expanded.items()))
        suffix = " and others" if len(expanded) > 1 else ""
        warnings.warn(
            f"load_weights: {name}{suffix} will be {floats.code}, not quantised: {reason}.",
            stacklevel=3,
        )
    return MatrixFormats.create(formats)


def _num_parts(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Return the number of devices over which the placement divides a matrix's inputs."""
    placement = spec.sharding_of(name, shape)
    return 1 if placement is None else shape[-1] // placement.shard_shape(shape)[-1]


def lay_out(
    formats: MatrixFormats, spec: ModelSpec, *, platform: str, backend: str | None
) -> MatrixFormats:
    """Add the layouts that the kernels of a backend read fastest to the formats of a model.

    Args:
      formats: plain formats of all matrices.
      spec: description of the model.
      platform: platform of the device.
      backend: name of the backend that multiplies by the matrices; None for the best one.
    """
    shapes = {name: shape for name, shape in spec.separate_shapes().items() if is_matrix(name)}
    # Each expert has a matrix.
    matrices = [
        (formats[name], shape[1:] if ".experts_" in name else shape)
        for name, shape in shapes.items()
    ]
    layouts = weight_store(platform, backend).layouts(matrices, spec.dtype)
    if not any(layouts):
        return formats
    plain = {name for name, parameter in spec.config.matrices() if parameter.is_read_as_floats}
    kinds = {name.rpartition(".")[2] for name in plain}
    chosen = {
        name: format if name.rpartition(".")[2] in kinds else replace(format, layout=layout)
        for name, (format, _), layout in zip(shapes, matrices, layouts, strict=True)
    }
    return MatrixFormats.create(chosen, formats.default)
