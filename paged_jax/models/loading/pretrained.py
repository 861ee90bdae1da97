"""Loading of models from Hugging Face folders, Orbax checkpoints and GGUF files.

This module decides whether the layers of a model are stacked. Without a `dtype` in the config,
`stored_tensors.find_dtype` chooses the dtype of the weights. `formats` chooses the format of each
matrix.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from paged_jax.kernels.platforms import reads_stacked_weights
from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.codecs.dtype_formats import DTYPE_FORMATS, name_of
from paged_jax.models.codecs.module_matrix import ModuleFormat
from paged_jax.models.codecs.module_names import Quantisation
from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.families.multimodal import text_config
from paged_jax.models.gguf_config import read_gguf_config
from paged_jax.models.gguf_file import GgufFile, is_gguf
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.formats import find_devices, fit_format
from paged_jax.models.loading.huggingface import (
    find_formats,
    load_weights,
    untie_if_different,
)
from paged_jax.models.loading.orbax import (
    find_saved_formats,
    is_checkpoint,
    load_checkpoint,
)
from paged_jax.models.loading.parameters import Model, ModelSpec, resolve_dtype
from paged_jax.models.loading.safetensors_files import (
    check_counts,
    check_names,
    find_quantisation,
    list_tensors,
    name_tensors,
)
from paged_jax.models.loading.stored_tensors import find_dtype
from paged_jax.models.loading.tensor_map import map_parameter
from paged_jax.models.matrices import Sharding
from paged_jax.models.matrix_formats import MatrixFormats, is_matrix
from paged_jax.models.model_folder import describe_folder, read_config_json
from paged_jax.models.tensor_parallel import divides_inputs


def from_pretrained(
    model_class: Callable[..., Model],
    folder: str | Path | None = None,
    *,
    dtype: DTypeLike = "auto",
    scan_layers: bool | None = None,
    sharding: Sharding = None,
    dequantise: bool = False,
    formats: MatrixFormats | None = None,
    backend: str | None = "xla",
    show_progress: bool | None = None,
) -> Model:
    """Load a model of the class `model_class`.

    For the arguments, see `Decoder.from_pretrained`. For `formats` and `backend`, see
    `load_weights`. Orbax checkpoints are always loaded in the plain layout.
    """
    folder = bundled_folder() if folder is None else Path(folder).expanduser()
    if not folder.exists():
        raise FileNotFoundError(
            f"from_pretrained: folder must exist, got {folder}. Models are not downloaded. "
            "Download the model first, for example with `hf download ORG/NAME --local-dir DIR`."
        )
    if not folder.is_dir() and not is_gguf(folder):
        raise NotADirectoryError(
            "from_pretrained: folder must be a folder or a GGUF file, got the file "
            f"{folder}.{describe_folder(folder)}"
        )
    config = read_config(folder)
    if scan_layers is None:
        scan_layers = config.can_scan_layers and _is_scanning_faster(config, sharding)
        if scan_layers and _device(config, sharding).platform == "tpu":
            # On TPUs, XLA would copy quantised matrices out of the stack of layers in every step.
            options: Any = {"dtype": dtype, "dequantise": dequantise}
            planned_formats = formats or read_formats(model_class, folder, config, **options)
            scan_layers = planned_formats is None or not planned_formats.is_quantised
    load: Callable[..., Model] = load_checkpoint
    if not is_checkpoint(folder):
        load = functools.partial(load_weights, backend=backend)
    return load(
        model_class,
        folder,
        config,
        dtype=dtype,
        scan_layers=scan_layers,
        sharding=sharding,
        dequantise=dequantise,
        formats=formats,
        show_progress=show_progress,
    )


def read_config(folder: str | Path) -> ModelConfig:
    """Return the configuration of a model in a folder or GGUF file.

    The configuration is read from ``config.json`` and corrected by the weights. If `dtype` is
    missing, it is the dtype of the weights. If the weights contain an output head that differs from
    the embeddings, the head is not tied. Without weights in the folder, only ``config.json`` is
    used.

    `folder` is a Hugging Face folder, a checkpoint written by `save_checkpoint`, or a GGUF file.

    Raises:
      FileNotFoundError, UnsupportedConfigError, ValueError: see `LlamaConfig.from_file`.
      WeightsError: the weights contain fewer layers than ``config.json`` states.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return read_gguf_config(GgufFile.open(folder))
    content = read_config_json(folder)
    try:
        tensors = list_tensors(folder)
    except WeightsError:  # planning needs no weights, and `load_weights` reports the error later
        return LlamaConfig.from_dict(content)
    part = text_config(content)
    check_names(tensor.name for tensor in tensors)
    num_layers = part.get("num_hidden_layers")
    if isinstance(num_layers, int):
        check_counts({tensor.name: tensor.shape for tensor in tensors}, num_layers)
    config = LlamaConfig.from_dict(content)
    stored = name_tensors(tensors, config, find_quantisation(folder, config))
    if not (part.get("dtype") or part.get("torch_dtype")):
        dtype = find_dtype(stored.values())
        config = dataclasses.replace(config, dtype=dtype or config.dtype)
    return untie_if_different(config, stored)


def read_formats(
    model_class: Callable[..., Model],
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike = "auto",
    dequantise: bool = False,
    num_devices: int = 1,
    platform: str | None = None,
) -> MatrixFormats | None:
    """Return the formats that the matrices of a model will have when it is loaded.

    The function reads the headers of the files. In formats that reorder the inputs of a matrix, it
    also reads their order.

    `config` is the result of `read_config`. `num_devices` is the number of devices over which the
    model will be divided, and `platform` is their platform, by default that of this machine. For
    the other arguments, see `Decoder.from_pretrained`.

    Returns:
      The formats; None if the folder has no weights, and no quantisation config applies (there is
      none, or `dtype` or `dequantise` overrides it). In this case, the formats depend only on
      `dtype`.
    """
    options: Any = {
        "dtype": dtype,
        "dequantise": dequantise,
        "platform": platform or _device(config, None).platform,
        "num_devices": num_devices,
    }
    if is_checkpoint(folder):
        return find_saved_formats(folder, config, **options)
    if not is_gguf(folder) and not any(Path(folder).glob("*.safetensors")):
        quantisation = find_quantisation(Path(folder), config)
        resolved = resolve_dtype("plan", dtype, config)
        if quantisation is None or dequantise or resolved in DTYPE_FORMATS:
            return None
        spec = ModelSpec(model_class, config, resolved, config.can_scan_layers)
        return _plan_formats(spec, quantisation, num_devices=num_devices)
    return find_formats(model_class, folder, config, **options)


def _plan_formats(
    spec: ModelSpec, quantisation: Quantisation, *, num_devices: int = 1
) -> MatrixFormats:
    """Estimate the formats of a model's matrices from its quantisation config alone."""
    floats = WeightFormat(name_of(spec.dtype))
    formats = {}
    for name, shape in spec.separate_shapes().items():
        if not is_matrix(name):
            continue
        stored = [
            planned_format(quantisation, mapping.tensor.removesuffix(".weight"))
            for mapping in map_parameter(spec.config, name)
        ]
        format: WeightFormat | str = floats
        # A matrix may consist of several tensors. If only some of them are quantised, the matrix is
        # loaded as floats.
        if stored[0] is not None and all(tensor_format == stored[0] for tensor_format in stored):
            num_parts = num_devices if divides_inputs(spec.config, name) else 1
            format = stored[0].planned
            if math.gcd(format.group_size or shape[-1], shape[-1]) == shape[-1]:
                format = dataclasses.replace(format, group_size=None)
            format = fit_format(format, shape[-1], num_parts)
        formats[name] = floats if isinstance(format, str) else format
    return MatrixFormats.create(formats)


def planned_format(quantisation: Quantisation, module: str) -> ModuleFormat | None:
    """Return the format of a module if there are no files; None if it is not quantised."""
    format = quantisation.format_of(module)
    if format is None or quantisation.names(module):
        return format
    return format if format.selects(module) else None


def bundled_folder() -> Path:
    """Return the folder of the small model that is part of this library."""
    return Path(str(resources.files("paged_jax.models") / "bundled"))


def _is_scanning_faster(config: ModelConfig, sharding: Sharding) -> bool:
    """Return whether a model is faster with stacked than with separate layers.

    On CPUs and GPUs, XLA copies each layer's weights out of the stack, so separate layers are
    faster. CPUs with this library's kernels are an exception, because these kernels read weights
    directly from the stack.
    """
    device = _device(config, sharding)
    if device.platform == "tpu":
        # Stacked layers are slower in two cases. The weights of experts are inputs of a kernel, so
        # XLA would copy them out of the stack. On TPU 7x, XLA would change the layout of all
        # stacked weights in each step.
        return not config.num_experts and "7x" not in device.device_kind
    # The CPU kernels read weights from the stack, but not in programs that run on several devices.
    return sharding is None and reads_stacked_weights(device.platform)


def _device(config: ModelConfig, sharding: Sharding) -> Any:
    return next(iter(find_devices(config, sharding)))
