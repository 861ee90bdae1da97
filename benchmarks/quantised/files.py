"""GGUF files of one model in several formats."""

import ctypes
import functools
from pathlib import Path
from typing import Any

from benchmarks.common.process import import_peer
from examples import fetch_smollm2

# Number of each format in llama.cpp, `llama_ftype`.
FORMATS = {"BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
# Format of the file that is downloaded.
SOURCE = "Q4_1"


def source_file(path: Path | None = None) -> Path:
    """Return the path of the model in Q4_1.

    Args:
      path: the file; None for the download of `examples/fetch_smollm2.py`.

    Raises:
      FileNotFoundError: the model has not been downloaded.
    """
    path = path or fetch_smollm2.default_path()
    if not path.is_file():
        raise FileNotFoundError(
            f"benchmarks.quantised: there must be a model at {path}. Run `python "
            "examples/fetch_smollm2.py`, which downloads it."
        )
    return path


@functools.cache  # llama.cpp may call the function as long as the process exists
def _ignore_log(llama: Any) -> Any:
    """Return a function that ignores the messages of llama.cpp."""
    return llama.llama_log_callback(lambda level, text, data: None)


def gguf_file(name: str, source: Path, folder: Path) -> Path:
    """Return the file of the model in a format; write it if it is missing.

    Args:
      name: `SOURCE`, or a key of `FORMATS`. llama.cpp converts the weights.
      source: the model in Q4_1.
      folder: folder for the converted files.

    Raises:
      PeerUnavailable: llama-cpp-python is missing.
      RuntimeError: llama.cpp cannot convert the file.
    """
    if name == SOURCE:
        return source
    path = folder / f"{source.name.removesuffix('.gguf').removesuffix('.Q4_1')}.{name}.gguf"
    if path.is_file():
        return path
    llama: Any = import_peer("llama_cpp", "llama-cpp-python")
    llama.llama_log_set(_ignore_log(llama), ctypes.c_void_p())
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = FORMATS[name]
    parameters.allow_requantize = True
    folder.mkdir(parents=True, exist_ok=True)
    status = llama.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(parameters)
    )
    if status:
        path.unlink(missing_ok=True)
        raise RuntimeError(
            f"benchmarks.quantised: llama.cpp could not convert {source} to {name}, status "
            f"{status}. Check the free space in {folder}."
        )
    return path
