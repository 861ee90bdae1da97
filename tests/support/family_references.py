"""Compute the values of transformers in `tests.support.references`, and write or compare them.

    python -m tests.support.family_references            write the files in tests/data/families
    python -m tests.support.family_references --check    compare them with transformers

Configs, names and shapes must be equal. Logits, which transformers computes in float64 where a
model permits it, may differ by `tolerance`, because processors round differently.
"""

import argparse
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support import families, references
from tests.support.attempts import compute_each
from tests.support.references import (
    ANSWER_POSITIONS,
    JSON_NAME,
    MAX_TOKENS,
    NPZ_NAME,
    POSITIONS,
    PROMPTS,
    TOKENS,
)

TOLERANCE = 1e-5
# transformers always computes the delta rule in float32: two processors differed by 2.3e-5.
DELTA_RULE_TOLERANCE = 5e-5
# A smaller difference of the two largest logits would let the answer depend on rounding.
MIN_MARGIN = 4e-5


class Record(NamedTuple):
    """What transformers writes and computes for a model, as in the two files."""

    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def record(name: str, answers: Mapping[str, list[int]] | None = None) -> Record:
    """Run the model of a name in `references`.

    Args:
      name: a key of `families.initial_models()`.
      answers: greedy answers to the prompts, which are checked; None to generate them.
    """
    model = families.initial_models()[name]()
    config, tensors = families.describe(model)
    theirs = exact(families.load_drawn(type(model), config, tensors))
    del config["transformers_version"]
    arrays = {name: references.digest(families.logits(theirs, TOKENS[None])[0], POSITIONS)}
    if _has_answers(name):
        all_tokens, digests = [], []
        for key, prompt in PROMPTS.items():
            tokens = (answers or {}).get(key)
            tokens, logits = answer(theirs, prompt.tolist(), tokens)
            all_tokens.append(tokens)
            digests.append(references.digest(logits, ANSWER_POSITIONS))
        arrays[f"{name}: answers"] = np.array(all_tokens, np.uint8)
        arrays[f"{name}: answer logits"] = np.array(digests)
    assert np.std(arrays[name][:, :-1]) > 0.2, f"{name}: any model would match"
    fields = {"config": config, "tensors": references.compact(tensors)}
    return Record(fields, {key: _narrow(x) for key, x in arrays.items()})


def _has_answers(name: str) -> bool:
    return name in families.CASES or name in families.WITH_ENGINES


def unchanged(name: str) -> Record | None:
    """Return the stored record of a model; None if the model is new or has changed."""
    if name not in references.names() or references.versions() != _versions():
        return None
    stored = references.stored(name)
    config, tensors = families.describe(families.initial_models()[name]())
    del config["transformers_version"]
    if (
        config != stored.config
        or tensors != stored.tensors
        or bool(stored.answers) != _has_answers(name)
    ):
        return None
    return stored_record(name)


def stored_record(name: str) -> Record | None:
    """Return the stored record of a model; None if it has none."""
    if name not in references.names():
        return None
    stored = references.stored(name)
    keys = [name, *([f"{name}: answers", f"{name}: answer logits"] if stored.answers else [])]
    fields = {"config": stored.config, "tensors": references.compact(stored.tensors)}
    return Record(fields, {key: references.array(key) for key in keys})


def _versions() -> dict[str, str]:
    return {
        "transformers": families.transformers().__version__,
        "torch": families.torch().__version__,
    }


def exact(model: Any) -> Any:
    """Return the model with weights in float64, or itself if it mixes dtypes."""
    wide = copy.deepcopy(model).double()
    try:
        families.logits(wide, TOKENS[None, :2])
    except RuntimeError:
        return model
    return wide


def answer(
    theirs: Any, prompt: list[int], tokens: list[int] | None
) -> tuple[list[int], np.ndarray]:
    """Return the greedy answer to a prompt, and the logits that determine its tokens."""
    if tokens is None:
        tokens = families.greedy_tokens(theirs, prompt, MAX_TOKENS)
    sequence = np.array([[*prompt, *tokens]])
    logits = families.logits(theirs, sequence)[0, len(prompt) - 1 : -1]
    assert np.argmax(logits, axis=-1).tolist() == tokens
    top = np.sort(logits, axis=-1)
    assert np.min(top[:, -1] - top[:, -2]) > MIN_MARGIN
    return tokens, logits


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def tolerance(config: Mapping[str, Any]) -> float:
    """Return how far logits of a model may differ between processors."""
    text = json.dumps(config)
    has_delta_rule = '"linear_attention"' in text or '"linear_attn_config"' in text
    return DELTA_RULE_TOLERANCE if has_delta_rule else TOLERANCE


def differences(name: str, found: Record) -> list[str]:
    """Return the differences from the stored values, one line each."""
    stored = references.stored(name)
    limit, lines = tolerance(stored.config), []
    if found.fields["config"] != stored.config:
        lines.append(f"{name}: config")
    if references.expand(found.fields["tensors"]) != stored.tensors:
        lines.append(f"{name}: names, shapes or dtypes of tensors")
    for key, array in found.arrays.items():
        expected = references.array(key)
        if expected.shape != array.shape:
            lines.append(f"{key}: shape {array.shape}, stored {expected.shape}")
        elif (error := np.abs(expected.astype(float) - array.astype(float)).max()) > limit:
            lines.append(f"{key}: differs by {error:.1e}")
    return lines


def write(folder: Path) -> list[str]:
    """Compute the values of models that have changed, and write both files.

    If a model fails, the files get the versions of the libraries that they have, so that the next
    call computes all values of other versions again.

    Returns:
      A line for each model that fails.
    """
    records, failures = compute_each(
        families.initial_models(), lambda name: unchanged(name) or record(name), stored_record
    )
    versions = references.versions() if failures else _versions()
    # Before the files with the stored values are replaced.
    arrays = {
        key: _stored_if_close(name, key, x)
        for name, each in records.items()
        for key, x in each.arrays.items()
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in versions.items()]
    # A line for each config, and one for the tensors.
    models = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(x)}" for key, x in each.fields.items())
        + "\n}"
        for name, each in records.items()
    ]
    text = "{\n" + "".join(lines) + '"models": {\n' + ",\n".join(models) + "\n}\n}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_NAME).write_text(text)
    np.savez_compressed(folder / NPZ_NAME, **arrays)
    return failures


def _stored_if_close(name: str, key: str, array: np.ndarray) -> np.ndarray:
    """Return the stored array if only its rounding differs, so that files change little."""
    if name not in references.names():
        return array
    stored, limit = references.array(key), tolerance(references.stored(name).config)
    is_close = stored.shape == array.shape and np.allclose(stored, array, rtol=0, atol=limit)
    return stored if is_close else array


def check() -> list[str]:
    """Return the differences of all models from the stored values."""
    lines, stored = [], set(references.names())
    for name in families.initial_models():
        if name in stored:
            lines += differences(name, record(name, references.stored(name).answers))
    different = sorted(stored ^ set(families.initial_models()))
    return [*lines, *(f"{name}: stored or in families, not both" for name in different)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="family_references")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        failures = write(references.FOLDER)
        print("\n".join(failures) or "all values are written")
        return bool(failures)
    lines = check()
    print("\n".join(lines) or "all values are equal")
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
