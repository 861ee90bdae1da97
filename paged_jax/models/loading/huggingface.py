"""Loading of the weights of a Hugging Face folder with safetensors files, or of a GGUF file."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from paged_jax.models.codecs.dtype_formats import float_type
from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.gguf_file import GgufFile, is_gguf
from paged_jax.models.loading.formats import choose_formats, find_devices, lay_out
from paged_jax.models.loading.gguf_tensors import find_gguf_tensors
from paged_jax.models.loading.parameters import Model, ModelSpec, resolve_dtype
from paged_jax.models.loading.safetensors_files import check_counts, check_names, find_tensors
from paged_jax.models.loading.stored_matrices import MatrixReader, StoredMatrix, read_box
from paged_jax.models.loading.stored_tensors import CountedTensors, StoredTensor
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD, map_to_available
from paged_jax.models.matrices import Sharding
from paged_jax.models.matrix_formats import MatrixFormats, is_matrix
from paged_jax.models.model_folder import find_adapters
from paged_jax.models.tensor_mapping import TensorMapping
from paged_jax.monitoring import loading_bar

_COMPARED_ROWS = 4096
_ROTARY_BUFFERS = tuple(
    f"rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
)


def load_weights(
    model_class: Callable[..., Model],
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike = "auto",
    scan_layers: bool = False,
    sharding: Sharding = None,
    dequantise: bool = False,
    formats: MatrixFormats | None = None,
    backend: str | None = "xla",
    show_progress: bool | None = None,
) -> Model:
    """Load a model from a folder with safetensors files, or from a GGUF file.

    For each device, only its part of each parameter is read from the files. In addition to the
    loaded weights, the host needs memory for a single parameter.

    Args:
      model_class: class of the model, such as `Decoder`.
      folder: folder that contains the safetensors files, or path of a GGUF file.
      config: configuration of the model. If it ties the output head to the embeddings, but the
        files contain a different head, the model is loaded with an untied head, and a warning is
        issued.
      dtype: one of `DTYPES`, or ``"auto"`` for ``config.dtype``. With ``"auto"`` or a float dtype,
        matrices that the files store in a quantised format keep this format.
      scan_layers: whether to stack the layers, see `Decoder`.
      sharding: placement of the parameters: one sharding for all of them, or a function of a
        parameter's name and shape; None for the default device.
      dequantise: whether to convert matrices that the files store in a quantised format to floats.
      formats: storage format of each matrix of the model; None to derive it from `dtype` and the
        files.
      backend: name of the backend that multiplies by the matrices, or None for the best one. They
        get the layouts that it reads fastest, see `lay_out`. The default reads the plain layout.
      show_progress: whether to show a progress bar, see `loading_bar`.

    Raises:
      WeightsError: the folder has no safetensors, a file is damaged, or a tensor is missing,
        unexpected, of the wrong shape, not floating point, or not finite.
    """
    dtype = resolve_dtype("load_weights", dtype, config)
    wide, stored, mappings = _open(model_class, folder, config, dtype, sharding)
    if formats is None:
        formats = choose_formats(wide, dtype, stored, mappings, dequantise=dequantise)
    shapes = wide.separate_shapes()
    if sharding is None:
        [device] = find_devices(config, None)
        formats = lay_out(formats, wide, platform=device.platform, backend=backend)
    spec = dataclasses.replace(
        wide,
        scan_layers=scan_layers,
        formats=formats if formats.is_quantised else None,
    )
    used = {stored[mapping.tensor] for group in mappings.values() for mapping in group}
    total = sum(tensor.format.num_bytes(tensor.shape) for tensor in used)
    with loading_bar(total, is_shown=show_progress) as advance:
        return _build(spec, shapes, CountedTensors(stored, advance), mappings)


def _build(
    spec: ModelSpec[Model],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    mappings: Mapping[str, list[TensorMapping]],
) -> Model:
    """Read the parameters of a model from the tensors in its files, and build the model.

    `shapes` and `mappings` have an entry for each parameter of the same model with separate layers
    and without quantisation.
    """
    config, formats = spec.config, spec.formats
    matrices = {
        name: StoredMatrix(shape, formats[name], mappings[name], stored)
        for name, shape in shapes.items()
        if formats is not None and is_matrix(name) and formats[name].is_quantised
    }
    reader = MatrixReader(matrices)

    def make(name: str, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            if reader.has(name):
                return reader.read(name, index)
            mappings = _map_to_stored(config, name, stored)
            return read_box(stored, mappings, shape, index, dtype)

        placement = spec.sharding_of(name, shape)
        if placement is None:
            return jax.device_put(read((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, placement, read)

    return spec.build(make)


def find_formats(
    model_class: Callable[..., Model],
    folder: str | Path,
    config: ModelConfig,
    *,
    platform: str,
    num_devices: int,
    dtype: DTypeLike = "auto",
    dequantise: bool = False,
) -> MatrixFormats:
    """Return the formats that `load_weights` would choose for the matrices of a model.

    `num_devices` is the number of devices over which the model will be divided, and `platform` is
    their platform. The other arguments are as in `load_weights`.

    Raises:
      WeightsError: see `load_weights`.
    """
    dtype = resolve_dtype("load_weights", dtype, config)
    spec, stored, mappings = _open(model_class, folder, config, dtype)
    options: Any = {"dequantise": dequantise, "num_devices": num_devices}
    return choose_formats(spec, dtype, stored, mappings, platform=platform, **options)


def _open(
    model_class: Callable[..., Model],
    folder: str | Path,
    config: ModelConfig,
    dtype: str,
    sharding: Sharding = None,
) -> tuple[ModelSpec[Model], Mapping[str, StoredTensor], dict[str, list[TensorMapping]]]:
    """Find the tensors of a model in a folder or file, and check their names and shapes.

    Returns:
      A `ModelSpec` of the model without quantised matrices; the tensors by name; and for each
      parameter of the model with separate layers, its mappings to these tensors. The `ModelSpec`
      has an untied head if the files contain a head that differs from the embeddings.
    """
    if is_gguf(folder):
        stored: Mapping[str, StoredTensor] = find_gguf_tensors(GgufFile.open(folder), config)
    else:
        stored = find_tensors(Path(folder), config)
    if Path(folder).is_dir() and (adapters := find_adapters(os.listdir(folder))):
        warnings.warn(
            f"{folder}: {adapters[0]} is an adapter, which is not applied. Merge it into the model "
            "(peft: merge_and_unload), or remove it.",
            stacklevel=3,
        )
    check_names(stored)
    check_counts(
        {name: x.shape for name, x in stored.items()}, config.num_hidden_layers, config.num_experts
    )
    config = untie_if_different(config, stored)
    floats = float_type(dtype, config.dtype)
    spec = ModelSpec(model_class, config, floats, config.can_scan_layers, sharding)
    mappings = {name: _map_to_stored(config, name, stored) for name in spec.separate_shapes()}
    _check_tensors(stored, [mapping for group in mappings.values() for mapping in group], config)
    return spec, stored, mappings


def _map_to_stored(
    config: ModelConfig, name: str, stored: Mapping[str, StoredTensor]
) -> list[TensorMapping]:
    return map_to_available(config, name, stored, lambda tensor: stored[tensor].shape)


def untie_if_different(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """Return the config, with an untied head if the files contain a different head.

    The head is compared with the embeddings. transformers does the same: it never ignores a tensor
    in the files because of the config.
    """
    if not config.tie_word_embeddings or HEAD not in stored or EMBEDDINGS not in stored:
        return config
    if _are_equal(stored[HEAD], stored[EMBEDDINGS]):
        return config
    warnings.warn(
        f"{stored[HEAD].path}: {HEAD} differs from the embeddings although config.json has "
        "tie_word_embeddings: true. The model is loaded untied. Set tie_word_embeddings to false.",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape or not (first.is_floating and second.is_floating):
        return False
    num_rows = first.shape[0]
    for start in range(0, num_rows, _COMPARED_ROWS):
        rows = (slice(start, min(start + _COMPARED_ROWS, num_rows)),)
        left, right = (x.read(rows, np.dtype(np.float32)) for x in (first, second))
        if not np.array_equal(left, right):
            return False
    return True


def _check_tensors(
    stored: Mapping[str, StoredTensor], mappings: list[TensorMapping], config: ModelConfig
) -> None:
    expected = {mapping.tensor: mapping for mapping in mappings}
    missing = [tensor for tensor in expected if tensor not in stored]
    if missing:
        advice = (
            " The model was saved without its head: use the checkpoint that has it, or set "
            "tie_word_embeddings to true in config.json if the embeddings are the head."
        )
        hint = advice if missing == [HEAD] else ""
        raise WeightsError(f"load_weights: {_enumerate(missing)} missing.{hint}")
    left_over = [
        tensor
        for tensor in stored
        if tensor not in expected and not _is_redundant(tensor, stored[tensor], config)
    ]
    if left_over:
        raise WeightsError(
            f"load_weights: {_enumerate(left_over)} in the files, but not part of a model with "
            "this config."
        )
    for tensor, mapping in expected.items():
        if stored[tensor].shape != mapping.shape:
            raise WeightsError(
                f"load_weights: {tensor} must have shape {list(mapping.shape)}, "
                f"got {list(stored[tensor].shape)}."
            )
        if not stored[tensor].is_floating:
            raise WeightsError(
                f"load_weights: {tensor} must have a floating-point dtype, got "
                f"{stored[tensor].dtype}."
            )


def _is_redundant(name: str, tensor: StoredTensor, config: ModelConfig) -> bool:
    # These tensors can be ignored. Old versions of AutoGPTQ stored a bias of zeros for each matrix.
    # Old versions of transformers stored the rotary frequencies. Some tools store the output head
    # although it is tied. Such a head equals the embeddings here, because otherwise
    # `untie_if_different` would have untied it.
    if name.endswith(".bias") and tensor.is_floating:
        return not tensor.read((), np.dtype(np.float32)).any()
    return name.endswith(_ROTARY_BUFFERS) or (config.tie_word_embeddings and name == HEAD)


def _enumerate(tensors: list[str]) -> str:
    suffix = f" and {len(tensors) - 1} others are" if len(tensors) > 1 else " is"
    return tensors[0] + suffix
