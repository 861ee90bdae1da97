"""Models of `tests.support.families` without torch: their files, and what transformers computes.

In `tests/data/families`, `models.json` has the ``config.json`` of each model as transformers writes
it, and the names and shapes of its tensors. The tensors themselves are drawn from their names.
`logits.npz` has the logits of transformers. `tests.support.family_references` writes both files.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[1] / "data" / "families"
JSON_NAME, NPZ_NAME = "models.json", "logits.npz"
VOCAB_SIZE = 96
LENGTH, MAX_TOKENS = 512, 64


def _raw(seed: str, count: int) -> np.ndarray:
    """Return random 64-bit integers, which are the same with every version of NumPy."""
    digest = hashlib.sha256(seed.encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(count)


TOKENS = (_raw("tokens", LENGTH) % (VOCAB_SIZE - 2) + 2).astype(np.int32)
# Positions of `TOKENS` with stored logits: around ends of windows, blocks and chunks, and late.
POSITIONS = (
    0, 1, 2, 7, 8, 15, 22, 23, 24, 25, 31, 33, 46, 47, 48, 49, 63, 64, 65, 70, 96, 127, 128, 129,
    191, 255, 256, 257, 341, 384, 447, 511,
)  # fmt: skip
# The same of a greedy answer, where 0 is the position that determines its first token.
ANSWER_POSITIONS = (0, 1, 7, 14, 31, 49, 62, 63)
NUM_COLUMNS = 24

# Prompts with stored greedy answers. Two prompts begin like the first, with or without recurrent
# layers, which keep snapshots of their states at multiples of 64 tokens.
PROMPTS = {
    "long": TOKENS[: LENGTH - MAX_TOKENS],
    "short": TOKENS[:40],
    "same beginning": np.concatenate([TOKENS[:70], TOKENS[80:89]]),
    "same beginning again": np.concatenate([TOKENS[:70], TOKENS[90:99]]),
}


def columns(position: int) -> np.ndarray:
    """Return the tokens of which the logits at a position are stored: a quarter of all."""
    return np.arange(position % 4, VOCAB_SIZE, VOCAB_SIZE // NUM_COLUMNS)


def digest(logits: np.ndarray, positions: Iterable[int]) -> np.ndarray:
    """Return a quarter of the logits at each position, and the logarithm of their normaliser.

    Args:
      logits: of all positions, ``[T, V]``.
      positions: positions of `logits`.

    Returns:
      float64 ``[len(positions), NUM_COLUMNS + 1]``.
    """
    rows = []
    for position in positions:
        row = logits[position].astype(np.float64)
        rows.append([*row[columns(position)], np.logaddexp.reduce(row)])
    return np.array(rows)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its shape, its dtype in safetensors, and the mean of its elements."""

    shape: tuple[int, ...]
    dtype: str = "F32"
    offset: float = 0.0

    def draw(self, name: str) -> np.ndarray:
        """Return its elements, which depend on its name and are about normally distributed.

        Small embeddings keep a tied model from repeating its last token.
        """
        std = 0.3 if len(self.shape) <= 1 else 0.05 if "embed" in name else 0.2
        # The sum of four integers needs no function that differs between processors.
        total = _raw(name, math.prod(self.shape)).view(np.uint16).reshape(-1, 4).sum(1, np.int64)
        standard = (total - 2 * 65535) * (math.sqrt(3) / 65536)
        return (self.offset + std * standard).astype(np.float32).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model, and what transformers computes with it.

    Attributes:
      config: its ``config.json``.
      tensors: the tensors of its file, by their names.
      logits: `digest` of `TOKENS` at `POSITIONS`.
      answers: greedy tokens after each prompt of `PROMPTS`; empty if they are not stored.
      answer_logits: `digest` at `ANSWER_POSITIONS` of each answer.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    logits: np.ndarray
    answers: Mapping[str, list[int]]
    answer_logits: Mapping[str, np.ndarray]


def draw(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the elements of all tensors."""
    return {name: tensor.draw(name) for name, tensor in tensors.items()}


@functools.cache
def _stored() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(FOLDER / NPZ_NAME) as arrays:
        return json.loads((FOLDER / JSON_NAME).read_text()), dict(arrays)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that computed the stored values."""
    return {name: _stored()[0][name] for name in ("transformers", "torch")}


def names() -> list[str]:
    """Return the names of all stored models."""
    return list(_stored()[0]["models"])


def array(key: str) -> np.ndarray:
    """Return an array of the stored file."""
    return _stored()[1][key]


def stored(name: str) -> Reference:
    """Return the stored model of a name."""
    fields, arrays = _stored()
    if name not in fields["models"]:
        raise KeyError(
            f"{name} has no stored values: run python -m tests.support.write_references families"
        )
    model = fields["models"][name]
    answers = arrays.get(f"{name}: answers", ())
    return Reference(
        config=model["config"],
        tensors=expand(model["tensors"]),
        logits=arrays[name],
        answers={prompt: each.tolist() for prompt, each in zip(PROMPTS, answers, strict=False)},
        answer_logits=dict(zip(PROMPTS, arrays.get(f"{name}: answer logits", ()), strict=False)),
    )


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], num_files: int = 1
) -> None:
    """Write a folder as transformers does, with its weights in several files if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_reference(name: str, folder: Path, num_files: int = 1) -> Reference:
    """Write the folder of a stored model, and return the model."""
    reference = stored(name)
    write_model(folder, reference.config, draw(reference.tensors), num_files)
    return reference


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NUMBERS = re.compile(r"\{([\d,]+)\}")


def compact(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Join tensors whose names differ in the number of a layer or an expert.

    Example:
      >>> compact({f"layers.{n}.bias": Tensor((4,)) for n in range(3)})
      {'layers.{0,1,2}.bias': [[4], 'F32', 0.0]}
    """
    # For each name without numbers, and for each layer, the numbers of the experts.
    groups: dict[Any, dict[str, list[str]]] = {}
    for name, tensor in tensors.items():
        layer, *expert = _NUMBER.findall(name) or [""]
        assert len(expert) <= 1, name
        key = _NUMBER.sub("{}", name), tensor
        groups.setdefault(key, {}).setdefault(layer, []).extend(expert)
    joined = {}
    for (template, tensor), experts in groups.items():
        by_experts: dict[tuple[str, ...], list[str]] = {}
        for layer, numbers in experts.items():
            by_experts.setdefault(tuple(numbers), []).append(layer)
        for numbers, layers in by_experts.items():
            sets = iter((layers, numbers))
            name = re.sub(r"\{\}", lambda _, sets=sets: f"{{{','.join(next(sets))}}}", template)
            joined[name] = [list(tensor.shape), tensor.dtype, tensor.offset]
    return joined


def expand(joined: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """Return the tensors that `compact` joined.

    Example:
      >>> list(expand({"layers.{0,1}.bias": [[4], "F32", 0.0]}))
      ['layers.0.bias', 'layers.1.bias']
    """
    tensors = {}
    for name, (shape, dtype, offset) in joined.items():
        parts = _NUMBERS.split(name)
        choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
        for chosen in itertools.product(*choices):
            tensors["".join(chosen)] = Tensor(tuple(shape), dtype, offset)
    return tensors
