"""Model folders: read their JSON files, and describe why a folder cannot be loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_jax.models.gguf_file import MAGIC

_SHARD = re.compile(r".+-(\d{5})-of-(\d{5})\.safetensors")
# Formats that this package cannot load: a pattern of file names, and a description.
_OTHER_FORMATS = {
    "*.ggml": "weights of llama.cpp (GGML)",
    "tf_model*.h5": "weights of TensorFlow",
    "flax_model*.msgpack": "weights of Flax",
    "*.onnx": "a model in ONNX format",
    "openvino_model.*": "a model of OpenVINO",
    "*.engine": "an engine of TensorRT",
    "*.nemo": "a checkpoint of NeMo",
    "*.distcp": "a sharded checkpoint of PyTorch",
    "zero_to_fp32.py": "a checkpoint of DeepSpeed",
    "model_index.json": "a pipeline of diffusers",
}
# Glob patterns that find a model folder inside another folder. Users often pass the outer folder by
# mistake, so error messages name the inner folder.
_NESTED = ("snapshots/*", "models--*/snapshots/*", "hub/models--*/snapshots/*", "*")


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a ``config.json``. `path` is the file, or the folder that contains it.

    Raises:
      FileNotFoundError: the file does not exist. The message says what the folder contains instead.
      ValueError: the file does not hold a JSON object.
    """
    if path.is_file() and path.suffix != ".json":
        raise ValueError(
            f"{path}: must be a folder, a GGUF file or a config.json.{describe_folder(path)}"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file.{describe_folder(file.parent)}")
    return read_json(file)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file does not hold a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}.") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON: nested too deeply.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(content).__name__}.")
    return content


def describe_folder(folder: Path) -> str:
    """Return a sentence that says why a folder cannot be loaded, and how to fix this.

    Args:
      folder: the folder, or a file that the user gave instead of a folder.

    Returns:
      The sentence with a leading space. An empty string if the reason is not known.
    """
    if folder.is_file():
        if folder.suffix == ".safetensors":
            return " Give the folder that contains it, with its config.json."
        with folder.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return " The content is in GGUF format. Give the file a name that ends with .gguf."
        return _other_formats(folder.parent, [folder.name])
    if not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir())
    kinds: tuple[Callable[[Path, list[str]], str], ...] = (
        _adapter,
        _nested,
        _broken_links,
        _original_format,
        _shards,
        _gguf,
        _other_formats,
        _other_safetensors,
    )
    return next((text for kind in kinds if (text := kind(folder, names))), "")


def _adapter(folder: Path, names: list[str]) -> str:
    if "adapter_config.json" not in names and not find_adapters(names):
        return ""
    base = None
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    of = f" for {base}" if isinstance(base, str) and base else ""
    return (
        f" The folder contains a LoRA adapter{of}, not a model. Merge it into its base model "
        "(peft: merge_and_unload, save_pretrained) and load the result."
    )


def find_adapters(names: list[str]) -> list[str]:
    """Select the names of files that contain a LoRA adapter of PEFT or MLX."""
    kind = re.compile(r"(adapter_model\.(safetensors|bin)|adapters\.(safetensors|npz))")
    return [name for name in names if kind.fullmatch(name)]


def _nested(folder: Path, names: list[str]) -> str:
    for pattern in _NESTED:
        folders = [path.parent for path in sorted(folder.glob(f"{pattern}/config.json"))]
        if not folders:
            continue
        kind = " is the root of a Hugging Face cache" if "snapshots" in pattern else ""
        kind = kind or " contains other folders with models"
        return (
            f" The folder{kind}. Give the model's own folder, such as {_choose_snapshot(folders)}."
        )
    if any(name.startswith("models--") for name in names) or {"blobs", "refs"} <= {*names}:
        return " The folder is the root of a Hugging Face cache without a whole model. Fetch it."
    return ""


def _choose_snapshot(snapshots: list[Path]) -> Path:
    """Return the snapshot of the branch "main" in a Hugging Face cache.

    If no snapshot belongs to "main", return the last one.
    """
    for snapshot in snapshots:
        main = snapshot.parent.parent / "refs" / "main"
        if main.is_file() and main.read_text(encoding="utf-8").strip() == snapshot.name:
            return snapshot
    return snapshots[-1]


def _broken_links(folder: Path, names: list[str]) -> str:
    for name in names:
        if (folder / name).is_symlink() and not (folder / name).exists():
            return f" {name} is a link to a file that is missing. Fetch it again."
    return ""


def _original_format(folder: Path, names: list[str]) -> str:
    if not (weight_files := [name for name in names if name.startswith("consolidated")]):
        return ""
    owner = "Meta" if weight_files[0].endswith(".pth") else "Mistral"
    return (
        f" The folder contains weights in {owner}'s own format ({weight_files[0]}"
        f"{', params.json' if 'params.json' in names else ''}). Fetch config.json and the "
        "model*.safetensors of the same model, or convert it with transformers."
    )


def _shards(folder: Path, names: list[str]) -> str:
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if not shards:
        return ""
    count, total = len(shards), int(shards[0][2])
    advice = "" if count >= total else " and the missing shards"
    return (
        f" The folder contains {count} of {total} shards ({shards[0][0]}) without their index. "
        f"Fetch model.safetensors.index.json{advice}."
    )


def _gguf(folder: Path, names: list[str]) -> str:
    files = [name for name in names if name.endswith(".gguf")]
    return f" The folder contains {files[0]}. Give this file itself." if files else ""


def _other_formats(folder: Path, names: list[str]) -> str:
    for pattern, kind in _OTHER_FORMATS.items():
        for name in names:
            if Path(name).match(pattern):
                return (
                    f" {name} is {kind}, which is not supported. Use the Hugging Face folder of "
                    "the same model, with safetensors."
                )
    return ""


def _other_safetensors(folder: Path, names: list[str]) -> str:
    files = [name for name in names if name.endswith(".safetensors")]
    if not files or "model.safetensors" in files:
        return ""
    return f" The folder contains {files[0]}. Rename it to model.safetensors if it is the model."
