"""Model folders: find a folder, read its JSON files, and describe why it cannot be loaded."""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paged_jax.arguments import is_int, is_real
from paged_jax.models.gguf_file import MAGIC

# Value of the argument `default` for entries that must not be missing.
REQUIRED: Any = object()
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


class ConfigEntries(Mapping[str, Any]):
    """Entries of a ``config.json`` that record which of them are read.

    Copies made by `replace` and `complete` share the record. Do not unpack the entries into a dict:
    this reads all of them.

    Args:
      values: the entries, by key.
      keys_read: the record, which is shared.
    """

    def __init__(self, values: Mapping[str, Any], keys_read: set[str] | None = None):
        self._values = dict(values)
        self._keys_read = set[str]() if keys_read is None else keys_read

    def __getitem__(self, key: str) -> Any:
        self._keys_read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replace(self, values: Mapping[str, Any]) -> "ConfigEntries":
        """Copy the entries, with other values for some keys."""
        return ConfigEntries(self._values | dict(values), self._keys_read)

    def complete(self, defaults: Mapping[str, Any]) -> "ConfigEntries":
        """Copy the entries, and add defaults for keys that are missing."""
        return ConfigEntries(dict(defaults) | self._values, self._keys_read)

    def find_unread(self) -> set[str]:
        """Find the keys that nobody has read, except entries that are null."""
        return {key for key, value in self._values.items() if value is not None} - self._keys_read


def warn_of_unknown(place: str, keys: Iterable[str], architecture: str) -> None:
    """Warn of entries that are not read; without keys, do nothing.

    Args:
      place: file or object that contains the entries.
      keys: keys of the entries.
      architecture: class of the model in transformers.
    """
    if names := ", ".join(sorted(keys)):
        warnings.warn(
            f"LlamaConfig: {place} must only contain known entries, got {names}. They are ignored: "
            f"check that {architecture} works without them.",
            stacklevel=3,
        )


def read_entry(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return an entry of a ``config.json``. If it is missing or null, return the default."""
    value = config.get(key)
    if value is not None:
        return value
    if default is REQUIRED:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    return default


def read_integer(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> Any:
    """Return an entry of a ``config.json`` that must be an integer; see `read_entry`."""
    value = read_entry(config, key, default)
    if value is not None and not is_int(value):
        raise ValueError(f"LlamaConfig: {key} must be an integer, got {value!r}.")
    return value


def as_json(value: Any) -> str:
    """Return an entry as it stands in the file, for error messages."""
    return json.dumps(value, default=repr)


def as_integer(value: Any) -> Any:
    """Convert a float with an integral value to int; return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_number(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> float:
    """Return an entry of a ``config.json`` that must be a finite number; see `read_entry`."""
    value = read_entry(config, key, default)
    if not is_real(value):
        raise ValueError(f"LlamaConfig: {key} must be a number, got {value!r}.")
    return float(value)


def read_boolean(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> bool:
    """Return an entry of a ``config.json`` that must be true or false; see `read_entry`."""
    value = read_entry(config, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"LlamaConfig: {key} must be true or false, got {value!r}.")
    return value


def read_token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return an entry of a ``config.json`` that is a token id, a list of them, or null."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(token) and token >= 0 for token in values):
        raise ValueError(
            f"LlamaConfig: {key} must be a token id or a list of token ids (integers of at least "
            f"0), got {value!r}."
        )
    return tuple(values)


def write_token_ids(token_ids: tuple[int, ...]) -> int | list[int] | None:
    """Return the entry for `read_token_ids`."""
    return token_ids[0] if len(token_ids) == 1 else [*token_ids] or None


def read_name(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return an entry of a ``config.json`` that must be a string; see `read_entry`."""
    value = read_entry(config, key, default)
    if not isinstance(value, str):
        raise ValueError(f"LlamaConfig: {key} must be a string, got {value!r}.")
    return value


def read_object(config: Mapping[Any, Any], key: Any, name: str | None = None) -> Mapping[str, Any]:
    """Return an entry that must be a JSON object; an empty dict if it is missing or null.

    `name` is the name of the object in error messages, by default the key.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"LlamaConfig: {name or key} must be an object or null, got {value!r}.")
    return value or {}


def read_names(config: Mapping[str, Any], key: str, count: int | None = None) -> list[str] | None:
    """Return an entry that must be a list of strings; None if it is missing or null.

    Args:
      config: content of the file.
      key: key of the list.
      count: required length of the list, which is the number of layers; None for any length.
    """
    names = config.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"LlamaConfig: {key} must be a list of strings, got {names!r}.")
    if count is not None and len(names) != count:
        raise ValueError(
            f"LlamaConfig: {key} must have one name for each of the {count} layers, got {names!r}."
        )
    return names


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
        found = [path.parent for path in sorted(folder.glob(f"{pattern}/config.json"))]
        if not found:
            continue
        kind = " is the root of a Hugging Face cache" if "snapshots" in pattern else ""
        kind = kind or " contains other folders with models"
        return f" The folder{kind}. Give the model's own folder, such as {_choose_snapshot(found)}."
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
    if not (found := [name for name in names if name.startswith("consolidated")]):
        return ""
    owner = "Meta" if found[0].endswith(".pth") else "Mistral"
    return (
        f" The folder contains weights in {owner}'s own format ({found[0]}"
        f"{', params.json' if 'params.json' in names else ''}). Fetch config.json and the "
        "model*.safetensors of the same model, or convert it with transformers."
    )


def _shards(folder: Path, names: list[str]) -> str:
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if not shards:
        return ""
    number, total = len(shards), int(shards[0][2])
    rest = "" if number >= total else " and the missing shards"
    return (
        f" The folder contains {number} of {total} shards ({shards[0][0]}) without their index. "
        f"Fetch model.safetensors.index.json{rest}."
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


# Name of a model on the Hub: ORG/NAME for a repository, or ORG/NAME/FILE.gguf for one file of it.
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf))?", re.ASCII)
# Patterns of the files to download, and of files to exclude. Weights in other formats, and second
# copies of the weights in folders such as "original", are not downloaded.
_FILES = ("*.json", "*.jinja", "*.safetensors")
_UNUSED = ("*/*", "consolidated*")


def is_model_name(model: str | Path) -> bool:
    """Return whether `model` is a name on the Hugging Face Hub instead of a path.

    Args:
      model: a path or a name. If the path exists, the result is False.

    Example:
      >>> is_model_name("HuggingFaceTB/SmolLM2-135M-Instruct"), is_model_name("./model")
      (True, False)
    """
    text = os.fspath(model)
    return _NAME.fullmatch(text) is not None and text[0] not in ".~" and not Path(text).exists()


def describe_missing_model(model: str | Path) -> str:
    """Return the error message for a model path that does not exist.

    The caller puts the name of the option in front of the message.

    Example:
      >>> describe_missing_model("gpt2")
      "must be a folder, a GGUF file or a name on the Hugging Face Hub, got 'gpt2'. There is no ..."
    """
    text = os.fspath(model)
    advice = f"There is no such file or folder in {Path.cwd()}."
    if "://" in text or text.startswith(("hf.co/", "huggingface.co/")):
        advice = "Give the name alone, such as Qwen/Qwen3-0.6B."
    elif text.startswith(("/", "~")):
        advice = "There is no such file or folder."
    elif re.fullmatch(r"[\w.:-]+", text) and not text.endswith(".gguf"):
        advice += " Names on the Hub have two parts, such as Qwen/Qwen3-0.6B."
    return (
        f"must be a folder, a GGUF file or a name on the Hugging Face Hub, got {text!r}. {advice}"
    )


def find_model(model: str | Path, *, revision: str | None = None, download: bool = False) -> Path:
    """Return the local path of a model, which is given as a path or as a name on the Hub.

    A name is looked up in the local Hugging Face cache. The environment variables HF_HOME and
    HF_HUB_CACHE set its location. The network is used only if `download` is True. HF_TOKEN then
    gives access to private models, and HF_HUB_OFFLINE turns the network off.

    Args:
      model: path of a folder or a file, ``ORG/NAME``, or ``ORG/NAME/FILE.gguf``. A path is returned
        even if it does not exist. ``~`` is replaced by the home folder.
      revision: branch, tag or commit of a model on the Hub; None for the branch "main".
      download: whether to download missing files, with a progress bar.

    Raises:
      OSError: the model is not in the cache, or cannot be downloaded.
      ValueError: `revision` is given for a path.
    """
    if not is_model_name(model):
        if revision is not None:
            raise ValueError(
                "revision must only be set for the name of a model on the Hugging Face Hub, got "
                f"the path {os.fspath(model)}."
            )
        return Path(model).expanduser()
    # Importing the library takes a quarter of a second.
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    match = _NAME.fullmatch(os.fspath(model))
    assert match is not None
    name, file = match.groups()
    options = {"revision": revision, "local_files_only": not download}
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(name, file, **options))
        patterns = {"allow_patterns": [*_FILES], "ignore_patterns": [*_UNUSED]}
        return Path(huggingface_hub.snapshot_download(name, **patterns, **options))
    except GatedRepoError:
        raise OSError(
            f"{name}: this model requires permission. Accept its terms on the model's page on the "
            "Hugging Face Hub, and set HF_TOKEN to your access token."
        ) from None
    except RepositoryNotFoundError:
        raise OSError(
            f"{name}: the Hugging Face Hub has no model of this name, or the model is private. "
            "Check the name, or set HF_TOKEN to your access token."
        ) from None
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision}"
        if download:
            raise OSError(f"{model}{at}: cannot be downloaded: {_first_line(error)}") from None
        raise FileNotFoundError(
            f"{model}{at}: there is no file or folder of this name, and the Hugging Face cache in "
            f"{constants.HF_HUB_CACHE} does not contain the model. To download it, add --download "
            "(in Python, download=True)."
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
