"""The tensors of a folder of safetensors: which there are, and reading parts of them."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from paged_jax.models.config import LlamaConfig
from paged_jax.models.families import FAMILIES
from paged_jax.models.folder_kind import describe_folder
from paged_jax.models.json_file import read_json
from paged_jax.models.loading import mxfp4
from paged_jax.models.loading.parameters import WeightsError
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD, tensor_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Dtype of the model for each dtype of tensors. No model computes in float64.
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
_EXPONENT_BITS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
_MXFP4 = "MXFP4"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BLOCKS, _SCALES = "_blocks", "_scales"  # what follows the name of a tensor of it


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
      path: the file.
      name: what it is called there.
      shape: its shape.
      dtype: its type, by the name that safetensors has for it; or ``"MXFP4"``, floats which lie in
        blocks along the last but one axis.
      scales: None, or the scales of those blocks.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: "Stored | None" = None

    @property
    def is_floating(self) -> bool:
        """Whether it holds floats, whatever their type."""
        return self.dtype in (*_DTYPES, _MXFP4)

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read a part of it.

        Args:
          index: of its first axes; of MXFP4 only of those before the last two.
          dtype: the floating type that it is to have.

        Raises:
          WeightsError: the file cannot be read, or numbers are not finite.
        """
        with np.errstate(over="ignore"):
            values = self._read(index).astype(dtype, copy=False)
        if not _is_finite(values):
            raise WeightsError(f"load_weights: {self.name} is not finite as {dtype.name}.")
        return values

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        if self.scales is not None:
            blocks = dataclasses.replace(self, scales=None)
            return mxfp4.expand(blocks._read(index), self.scales._read(index)).swapaxes(-1, -2)
        try:
            # Opened for each read: what a file that stays open has mapped in counts as memory in
            # use, a second copy of the weights by the end.
            with safe_open(self.path, "numpy") as file:
                return file.get_slice(self.name)[index]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"load_weights: cannot read {self.name}: {error}.") from None


def find_tensors(folder: Path, config: LlamaConfig) -> dict[str, Stored]:
    """Return the tensors of a folder that belong to the model, by their names in `pieces`."""
    return name_tensors(list_tensors(folder), config)


def list_tensors(folder: Path) -> list[Stored]:
    """Return all tensors of a folder in the order of its files. Only headers are read.

    Raises:
      WeightsError: there are no safetensors, or a file is damaged.
    """
    stored: list[Stored] = []
    weight_map = _weight_map(folder)
    for path in sorted({SINGLE} if weight_map is None else set(weight_map.values())):
        try:
            with safe_open(folder / path, "numpy") as file:
                for name in file.keys():
                    view = file.get_slice(name)
                    shape = tuple(view.get_shape())
                    stored.append(Stored(folder / path, name, shape, view.get_dtype()))
        except (SafetensorError, OSError) as error:
            reason = _explain_damage(folder / path) or f"not a whole safetensors file ({error})"
            raise WeightsError(f"{folder / path}: {reason}. Fetch it again.") from None
    return stored


def find_dtype(tensors: Iterable[Stored]) -> str | None:
    """Return the dtype of the first floating-point tensor, as transformers does, or None."""
    return next((_DTYPES[x.dtype] for x in tensors if x.dtype in _DTYPES), None)


def name_tensors(tensors: Iterable[Stored], config: LlamaConfig) -> dict[str, Stored]:
    """Return the tensors that belong to the model, by their names in `pieces`.

    Raises:
      WeightsError: two tensors have the same name.
    """
    stored: dict[str, Stored] = {}
    for tensor in tensors:
        if (name := tensor_name(config, tensor.name)) is None:
            continue
        if name in stored:
            raise WeightsError(_explain_duplicate(name, stored[name], tensor))
        stored[name] = tensor
    if config.tie_word_embeddings and HEAD in stored and EMBEDDINGS not in stored:
        stored[EMBEDDINGS] = stored.pop(HEAD)
    family = FAMILIES.get(config.model_type)
    return _pair(stored) if family is not None and family.is_mxfp4 else stored


def _explain_duplicate(name: str, first: Stored, second: Stored) -> str:
    if first.path != second.path:
        return f"{second.path}: {name!r} is in another file too."
    return f"{second.path}: {first.name!r} and {second.name!r} must not both be {name!r}."


def _pair(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Blocks and scales of MXFP4, which are two tensors, as one."""
    paired = dict(stored)
    for name in stored:
        tensor = name.removesuffix(_BLOCKS)
        if tensor != name and tensor + _SCALES in stored:
            paired[tensor] = _mxfp4(paired.pop(name), paired.pop(tensor + _SCALES))
    return paired


def _mxfp4(blocks: Stored, scales: Stored) -> Stored:
    if blocks.shape != (*scales.shape, mxfp4.BLOCK_BYTES) or {blocks.dtype, scales.dtype} != {"U8"}:
        raise WeightsError(
            f"load_weights: {blocks.name} must be bytes {[*scales.shape, mxfp4.BLOCK_BYTES]}, as "
            f"{scales.name} has a scale for each block, got {blocks.dtype} {list(blocks.shape)}."
        )
    *experts, rows, num_blocks = scales.shape
    shape = (*experts, num_blocks * mxfp4.BLOCK, rows)
    return Stored(blocks.path, blocks.name, shape, _MXFP4, scales)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor to file name from the index of a folder in shards; None for a single file."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder.")
    if (folder / SINGLE).is_file():
        return None
    if not (folder / INDEX).is_file():
        raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX} there{_missing(folder)}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{folder / INDEX}: weight_map must map tensors to files.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(
                f"{folder / INDEX}: files must lie in the folder itself, got {file!r} for "
                f"{tensor!r}."
            )
        if not (folder / file).is_file():
            raise WeightsError(f"{folder}: {file}, which {INDEX} names, is missing.")
    return weight_map


def _explain_damage(path: Path) -> str:
    """Return a description of a file that is not safetensors; an empty string if unknown."""
    try:
        with path.open("rb") as file:
            head = file.read(64).lstrip()
    except OSError:
        return ""
    if head.startswith(b"version https://git-lfs"):
        return "only a pointer of Git LFS (run `git lfs pull`)"
    return "an HTML page" if head[:1] == b"<" else ""


def _missing(folder: Path) -> str:
    """Return the end of the error about missing weights, which describes the folder."""
    if text := describe_folder(folder):
        return f".{text}"
    pickled = sorted(path.name for path in folder.glob("*.*") if path.suffix in _PICKLED)
    if pickled:
        return f", only {pickled[0]}, which can run code when read. Convert it to safetensors."
    return ". Fetch the weights, too."


def _is_finite(values: np.ndarray) -> bool:
    # By the bits: numpy has no fast isfinite for bfloat16.
    bits = values.view(f"u{values.itemsize}")
    mask = bits.dtype.type(_EXPONENT_BITS[values.dtype.name])
    return not ((bits & mask) == mask).any()
