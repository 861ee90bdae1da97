"""Facts of real checkpoints from public documents, in tests/data/real_checkpoints.json.

One or two checkpoints of each family are recorded: the config.json, the names of the tensors and
the `total_size` in bytes. In names, ``{32}`` stands for each number below 32. "seen" tells how much
of the index was available: "all" names, a "part" of the layers, or only "totals" (bytes, and
sometimes the number of tensors). The other names are from transformers. For a complete index, its
length in characters is recorded, to check the names. "stored" is the dtype of the tensors if the
config is wrong.
"""

import json
from pathlib import Path
from typing import Any

from tests.support import DATA

REAL_CHECKPOINTS: dict[str, dict[str, Any]] = {
    checkpoint["model"]: checkpoint
    for checkpoint in json.loads((DATA / "real_checkpoints.json").read_text(encoding="utf-8"))
}


def save_real_config(model: str, folder: Path) -> Path:
    """Write the config.json of a recorded checkpoint to a folder, and return the folder."""
    text = json.dumps(REAL_CHECKPOINTS[model]["config"])
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
