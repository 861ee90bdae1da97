"""Models by name, from the local Hugging Face cache or from the Hub."""

import os
import re
from pathlib import Path

# ORG/NAME, or ORG/NAME/FILE.gguf for a file of a repository.
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf))?", re.ASCII)
# Files of a model that are read. Weights in other formats, and a second copy of the weights in
# folders such as "original", are not downloaded.
_FILES = ("*.json", "*.jinja", "*.safetensors")
_UNUSED = ("*/*", "consolidated*")


def is_model_name(model: str | Path) -> bool:
    """Return whether a model is given by its name on the Hugging Face Hub, not by a path.

    Args:
      model: a path or a name. An existing path is always a path.

    Example:
      >>> is_model_name("HuggingFaceTB/SmolLM2-135M-Instruct"), is_model_name("./model")
      (True, False)
    """
    text = os.fspath(model)
    return _NAME.fullmatch(text) is not None and text[0] not in ".~" and not Path(text).exists()


def find_model(model: str | Path, *, revision: str | None = None, download: bool = False) -> Path:
    """Return the local path of a model that is given by a path or by its name on the Hub.

    A name is looked up in the Hugging Face cache, whose location HF_HOME and HF_HUB_CACHE set. The
    network is used only if `download` is set. Then HF_TOKEN gives access to private models, and
    HF_HUB_OFFLINE forbids the network.

    Args:
      model: path of a folder or a file, ``ORG/NAME``, or ``ORG/NAME/FILE.gguf``. A path is returned
        unchanged, whether it exists or not.
      revision: branch, tag or commit of a named model; None for the branch main.
      download: whether to download missing files, with a progress bar.

    Raises:
      OSError: the model is not in the cache, or cannot be downloaded.
      ValueError: `revision` is given for a path.
    """
    if not is_model_name(model):
        if revision is not None:
            raise ValueError(
                f"revision must be given with the name of a model on the Hugging Face Hub, got the "
                f"path {os.fspath(model)}."
            )
        return Path(model)
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
            f"{name}: access to this model must be granted. Accept its terms on its page on the "
            "Hugging Face Hub, and set HF_TOKEN to your access token."
        ) from None
    except RepositoryNotFoundError:
        raise OSError(
            f"{name}: the Hugging Face Hub has no such model, or it is private. Check the name, or "
            "set HF_TOKEN to your access token."
        ) from None
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision}"
        if download:
            raise OSError(f"{model}{at}: cannot be downloaded: {_first_line(error)}") from None
        raise FileNotFoundError(
            f"{model}{at}: there is no such file or folder, and no such model in the Hugging Face "
            f"cache, {constants.HF_HUB_CACHE}. To download it, add --download (in Python, "
            "download=True)."
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
