"""Models on the Hugging Face Hub: their names, and their folders in the local cache."""

import os
import re
from pathlib import Path

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
