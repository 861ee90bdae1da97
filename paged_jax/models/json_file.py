"""JSON objects from files, with one clear line where there is none."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it does not hold a JSON object.
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
