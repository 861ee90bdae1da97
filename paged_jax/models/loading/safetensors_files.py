"""Safetensors files of a model folder: list their tensors, and explain errors in them.

Several tensors may form a quantised matrix, see `paged_jax.models.codecs`.
"""

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from paged_jax.models.codecs.module_names import Quantisation
from paged_jax.models.codecs.quantisation import (
    combine_quantised,
    is_quantised_name,
    read_quantisation,
)
from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.stored_tensors import JoinedTensor, StoredTensor
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD, map_parameter, standard_name
from paged_jax.models.model_folder import describe_folder, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Suffixes of files with pickled weights. They are never read, because unpickling can run code.
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Wrappers of PyTorch models, by the text that they add to the names of tensors.
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "pretrained_model.": "a TRL model with a value head",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning",
    "base_model.model.": "PEFT",
    "module.": "DistributedDataParallel or DeepSpeed",
}
_ADAPTERS = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|base_layer|lora_magnitude_vector)(\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED_EXPERTS = re.compile(
    r"\.(experts\.(gate_up|down)_proj|block_sparse_moe\.\w+_linear\.weight)$"
)

# Scales of an 8-bit KV cache. They are stored in attention modules or in their projections.
_KV_SCALES = re.compile(r"\.(q|k|v|kv)_(scale|zero_point)$|\.[kv]_proj\.output_scale$")


def find_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors in a folder that belong to the model, by their Hugging Face names."""
    return name_tensors(list_tensors(folder), config, find_quantisation(folder, config))


def find_quantisation(folder: Path, config: ModelConfig) -> Quantisation | None:
    """Read the quantisation config of a folder; None if weights are not quantised."""
    family = config.family
    has_mxfp4 = family is not None and family.is_mxfp4
    return read_quantisation(folder, has_mxfp4=has_mxfp4)


def list_tensors(folder: Path) -> list[StoredTensor]:
    """Return the tensors in the safetensors files of a folder, one file after the other.

    Only the headers of the files are read.

    Raises:
      WeightsError: the folder has no safetensors files, or a file is damaged.
    """
    tensors: list[StoredTensor] = []
    weight_map = _weight_map(folder)
    for path in sorted({SINGLE_FILE} if weight_map is None else set(weight_map.values())):
        try:
            with safe_open(folder / path, "numpy") as file:  # checks the whole header
                offsets = _offsets(folder / path)
                for name in file.keys():
                    view = file.get_slice(name)
                    shape, dtype = tuple(view.get_shape()), view.get_dtype()
                    tensors.append(
                        StoredTensor(folder / path, name, shape, dtype, offset=offsets[name])
                    )
        except (SafetensorError, OSError) as error:
            reason = _explain_damage(folder / path) or f"not a whole safetensors file ({error})"
            raise WeightsError(f"{folder / path}: {reason}. Download the file again.") from None
    return tensors


def name_tensors(
    tensors: Iterable[StoredTensor], config: ModelConfig, quantisation: Quantisation | None
) -> dict[str, StoredTensor]:
    """Return the tensors of the model by their names in `tensor_map`; drop other tensors.

    The tensors of a quantised matrix are combined into one.

    Raises:
      WeightsError: two tensors get the same name, or the tensors of a quantised matrix do not fit
        together.
    """
    named: dict[str, StoredTensor] = {}
    tensors = [tensor for tensor in tensors if standard_name(config, tensor.name) is not None]
    tensors = _without_kv_scales(tensors)
    if quantisation is not None:
        tensors = combine_quantised(tensors, quantisation)
    elif quantised := [tensor.name for tensor in tensors if is_quantised_name(tensor.name)]:
        raise WeightsError(
            f"load_weights: {quantised[0]} belongs to a quantised matrix, but config.json has no "
            "quantization_config. Use the config.json of the same checkpoint."
        )
    for tensor in tensors:
        name = standard_name(config, tensor.name)
        assert name is not None
        if name in named:
            raise WeightsError(_explain_duplicate(name, named[name], tensor))
        named[name] = tensor
    if config.tie_word_embeddings and HEAD in named and EMBEDDINGS not in named:
        named[EMBEDDINGS] = named.pop(HEAD)
    _join_convolutions(named, config)
    return named


def _join_convolutions(named: dict[str, StoredTensor], config: ModelConfig) -> None:
    """Join the tensors of a mixer's convolution if transformers has split it into equal parts.

    Other files have three tensors for queries, keys and values, which differ in size. But when
    transformers saves a model, it splits the fused convolution into three tensors of equal size.
    """
    for layer, spec in enumerate(config.layers):
        if "mixer_conv" not in spec.parameters(config.hidden_size):
            continue
        name = f"layers.{layer}.mixer_conv"
        separate, fused = (
            list(map_parameter(config, name, experts=layout)) for layout in ("family", "fused")
        )
        tensors = tuple(named[mapping.tensor] for mapping in separate if mapping.tensor in named)
        fused_names = {mapping.tensor for mapping in fused}
        is_joined = len(fused_names) == 1 and len(tensors) == len(separate)
        if len(separate) < 2 or separate == fused or not is_joined:
            continue
        if [tensor.shape for tensor in tensors] != [mapping.shape for mapping in separate]:
            joined = JoinedTensor.of_pieces(fused[0].tensor, tensors)
            if joined.shape == fused[0].shape:
                for mapping in separate:
                    del named[mapping.tensor]
                named[joined.name] = joined


def check_names(names: Iterable[str]) -> None:
    """Check that no tensor belongs to a wrapper around the model or to a LoRA adapter.

    Raises:
      WeightsError: a tensor belongs to a wrapper or adapter. The message names it and says what to
        do.
    """
    for name in names:
        if _ADAPTERS.search(name):
            raise WeightsError(
                f"load_weights: {name} belongs to a LoRA adapter, which cannot be loaded. Merge "
                "the adapter into its base model (peft: merge_and_unload), and save the result."
            )
        for part, wrapper in _WRAPPERS.items():
            if name.startswith(part) or f".{part}" in name and part.startswith("_"):
                raise WeightsError(
                    f"load_weights: {name} was saved from a model that is wrapped by {wrapper}. "
                    f"Save the inner model, or remove {part!r} from the names of all tensors."
                )


def check_counts(
    shapes: Mapping[str, tuple[int, ...]], num_layers: int, num_experts: int = 0
) -> None:
    """Check that the files contain all layers and experts of the config.

    This check is done before memory is allocated, because numbers in the config may be wrong.

    Raises:
      WeightsError: the config states more layers or experts than the files contain.
    """
    layers = [int(match[1]) + 1 for match in map(_LAYER.search, shapes) if match]
    if num_layers and not layers:
        names = ", ".join(sorted(shapes)[:3]) or "none"
        raise WeightsError(
            "load_weights: the weight files must have tensors with names such as "
            f"model.layers.0.input_layernorm.weight, got {names}. Convert the checkpoint with "
            "transformers, or use the Hugging Face folder of the same model."
        )
    _check_count("num_hidden_layers", num_layers, layers)
    experts = [int(match[1]) + 1 for match in map(_EXPERT.search, shapes) if match]
    experts += [shape[0] for name, shape in shapes.items() if _FUSED_EXPERTS.search(name)]
    if experts:  # otherwise they have names that only their part knows
        _check_count("num_experts", num_experts, experts)


def _check_count(key: str, count: int, counts: list[int]) -> None:
    if max(counts, default=0) < count:
        raise WeightsError(
            f"load_weights: {key} must be at most {max(counts, default=0)}, because the weight "
            f"files contain no more, got {count}. Download the missing files, or correct "
            "config.json (in a GGUF file: its metadata)."
        )


def _offsets(path: Path) -> dict[str, int]:
    """Return the byte position of each tensor in a valid safetensors file.

    The safetensors library does not return positions. They are needed because this package reads
    tensors itself: the library cannot read 8-bit floats as NumPy arrays.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Read the index of a folder, which maps each tensor to its file; None for a single file."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder.")
    if (folder / SINGLE_FILE).is_file():
        return None
    index = folder / INDEX_FILE
    if not index.is_file():
        raise WeightsError(
            f"{folder}: the folder contains neither {SINGLE_FILE} nor "
            f"{INDEX_FILE}{_explain_missing(folder)}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(
            f"{index}: weight_map must be an object that maps tensor names to file names."
        )
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(
                f"{index}: file names in weight_map must not contain a folder, got {file!r} for "
                f"{tensor!r}."
            )
        if not (folder / file).is_file():
            raise WeightsError(
                f"{folder}: the file {file} is missing, although {INDEX_FILE} lists it."
            )
    return weight_map


def _explain_duplicate(name: str, first: StoredTensor, second: StoredTensor) -> str:
    if first.path != second.path:
        return f"{second.path}: {name!r} is in another file too."
    return f"{second.path}: {first.name!r} and {second.name!r} must not both be {name!r}."


def _explain_damage(path: Path) -> str:
    """Describe a file that is not in safetensors format.

    If its content is not recognised, return an empty string.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64).lstrip()
    except OSError:
        return ""
    if head.startswith(b"version https://git-lfs"):
        return "only a pointer of Git LFS (run `git lfs pull`)"
    return "an HTML page" if head[:1] == b"<" else ""


def _explain_missing(folder: Path) -> str:
    """Describe a folder without weights, for the end of an error message."""
    if text := describe_folder(folder):
        return f".{text}"
    pickled = sorted(path.name for path in folder.glob("*.*") if path.suffix in _PICKLED)
    if pickled:
        return f", only {pickled[0]}, which can run code when read. Convert it to safetensors."
    return ". Fetch the weights, too."


def _without_kv_scales(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    used = [tensor for tensor in tensors if not _KV_SCALES.search(tensor.name)]
    if len(used) < len(tensors):
        scale = next(tensor for tensor in tensors if _KV_SCALES.search(tensor.name))
        warnings.warn(
            f"{scale.path}: the scales for a quantised KV cache, such as {scale.name}, are not "
            "used. Caches of 8 bits compute a scale for each token (kv_cache_dtype).",
            stacklevel=3,
        )
    return used
