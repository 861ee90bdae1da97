"""The quantised modules of a checkpoint: find the codec of its config, and combine its tensors.

Most checkpoints have a quantisation config in ``config.json``, others in a separate file. An entry
that changes the weights is either read, or rejected with an error that names it. Entries about
quantised activations are accepted, but have no effect: activations are not quantised.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paged_jax.models.codecs.awq import AwqCodec
from paged_jax.models.codecs.bitsandbytes import BitsandbytesCodec
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.compressed_tensors import CompressedTensorsCodec
from paged_jax.models.codecs.config_entries import Entries
from paged_jax.models.codecs.fp8 import Fp8Codec
from paged_jax.models.codecs.gptq import GptqCodec
from paged_jax.models.codecs.mlx import MlxCodec
from paged_jax.models.codecs.modelopt import ModelOptCodec
from paged_jax.models.codecs.module_matrix import ModuleFormat
from paged_jax.models.codecs.module_names import Quantisation
from paged_jax.models.codecs.mxfp4 import Mxfp4Codec
from paged_jax.models.errors import UnsupportedConfigError, WeightsError
from paged_jax.models.loading.stored_tensors import FLOAT_DTYPES, StoredTensor
from paged_jax.models.model_folder import read_config_json, read_json

_MXFP4 = Mxfp4Codec()
CODECS: tuple[Codec, ...] = (
    Fp8Codec(),
    CompressedTensorsCodec(),
    AwqCodec(),
    GptqCodec(),
    BitsandbytesCodec(),
    ModelOptCodec(),
    MlxCodec(),
    _MXFP4,
)
"""The formats of quantised checkpoints, one of which a config may have."""

# Keys of config.json that may hold a quantisation config.
QUANTISATION_KEYS = tuple(
    sorted({"quantization_config", *(codec.key for codec in CODECS if codec.key)})
)

_WEIGHT = ".weight"
_FORMATS = tuple(dict.fromkeys(format for codec in CODECS for format in codec.formats))
# Ends of the names of tensors that only quantised modules have, and of those that are ignored.
_ENDS = {end for format in _FORMATS for end in format.required + format.optional} - {_WEIGHT}
_UNUSED = {end for format in _FORMATS for end in format.unused}
_END = re.compile(
    "(" + "|".join(map(re.escape, sorted({*_ENDS, *_UNUSED, _WEIGHT}, key=len))) + ")$"
)


def find_quantisation(config: Mapping[str, Any], *, has_mxfp4: bool = False) -> Quantisation | None:
    """Return the quantisation of a ``config.json``; None if weights are not quantised.

    Args:
      config: content of the file.
      has_mxfp4: whether the family supports the method ``"mxfp4"``.

    Raises:
      UnsupportedConfigError: an entry is not supported. The message names it.
    """
    objects = {key: config[key] for key in QUANTISATION_KEYS if config.get(key)}
    if not objects:
        return None
    # MLX writes the same object under the keys "quantization" and "quantization_config".
    key = "quantization_config" if "quantization_config" in objects else next(iter(objects))
    if any(value != objects[key] for value in objects.values()):
        raise UnsupportedConfigError(
            f"LlamaConfig: {' and '.join(objects)} must be equal. Keep only the correct one."
        )
    defaults = [codec.methods[0] for codec in CODECS if codec.key in objects]
    entries = Entries(objects[key], f"LlamaConfig: {key}", next(iter(defaults), None))
    return _match(entries, has_mxfp4)


def read_quantisation(folder: Path, *, has_mxfp4: bool = False) -> Quantisation | None:
    """Return the quantisation of the model in a folder; None if weights are not quantised.

    Args:
      folder: the folder.
      has_mxfp4: whether the method ``"mxfp4"`` is supported for the family.

    Raises:
      UnsupportedConfigError: an entry is not supported. The message names it.
    """
    if (folder / "config.json").is_file():
        config = read_config_json(folder)
        text = config.get("text_config")
        for section in (config, text if isinstance(text, Mapping) else {}):
            if quantisation := find_quantisation(section, has_mxfp4=has_mxfp4):
                return quantisation
    for codec in CODECS:
        if codec.file is not None and (path := folder / codec.file).is_file():
            content = codec.content_of_file(read_json(path))
            entries = Entries(content, f"{path}: config", codec.methods[0])
            return _match(entries, has_mxfp4)
    return None


def _match(entries: Entries, has_mxfp4: bool) -> Quantisation:
    codecs = [codec for codec in CODECS if has_mxfp4 or codec is not _MXFP4]
    for codec in codecs:
        if (quantisation := codec.matches(entries)) is not None:
            return quantisation
    methods = [method for codec in codecs for method in codec.methods]
    raise UnsupportedConfigError(
        f"{entries.where}.quant_method {entries.method!r} is not supported for this family, which "
        f"supports {', '.join(methods)}. Use a version of the model that is quantised "
        "differently or not at all."
    )


def is_quantised_name(name: str) -> bool:
    """Return whether a tensor of this name always belongs to a quantised module."""
    match = _END.search(name)
    return match is not None and match[0] != _WEIGHT


def combine_quantised(
    tensors: Iterable[StoredTensor], quantisation: Quantisation
) -> list[StoredTensor]:
    """Combine the tensors of each quantised matrix into one, and keep all other tensors.

    Raises:
      WeightsError: the tensors of a matrix do not fit together, or contradict the quantisation
        config.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    combined: dict[str, StoredTensor] = {}
    for tensor in tensors:
        combined[tensor.name] = tensor
        if match := _END.search(tensor.name):
            modules.setdefault(tensor.name[: match.start()], {})[match[0]] = tensor
    count = 0
    for module, parts in modules.items():
        weight = parts.get(_WEIGHT)
        is_float = weight is None or weight.dtype in FLOAT_DTYPES
        if is_float and not any(end in _ENDS for end in parts):
            continue
        count += 1
        format = _format_of(module, parts, quantisation)
        for part in parts.values():
            del combined[part.name]
        matrix = format.open(module, {end: x for end, x in parts.items() if end not in _UNUSED})
        combined[matrix.name] = matrix
    if not count and quantisation.formats:
        raise WeightsError(
            f"load_weights: {quantisation.source} describes quantised weights, but no tensor in "
            "the files is quantised. Remove the entry to load the weights as floats."
        )
    return [*combined.values()]


def _format_of(
    module: str, parts: Mapping[str, StoredTensor], quantisation: Quantisation
) -> ModuleFormat:
    if (format := quantisation.format_of(module)) is not None:
        return format
    name = next(part.name for end, part in parts.items() if end != _WEIGHT or len(parts) == 1)
    if (entry := quantisation.excluding(module)) is not None:
        raise WeightsError(
            f"load_weights: {name} belongs to a quantised module, but the entry {entry!r} of "
            f"{quantisation.source} excludes {module} from quantisation."
        )
    raise WeightsError(
        f"load_weights: {name} belongs to a quantised module, but no entry of "
        f"{quantisation.source} applies to {module}."
    )
