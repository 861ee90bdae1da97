"""Tests that all shapes in the package use the letters of `paged_jax.dims`."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paged_jax.dims import DIMS, bind
from tests.support import ROOT

FILES = sorted((ROOT / "paged_jax").rglob("*.py"))

# Arrays with their shape in the name, such as `scores_KGN`. Digits are sizes.
_NAME = re.compile(r"\b[a-z]\w*_([A-Z][A-Z1]*)\b")
# Shapes in comments and docstrings, such as ``i32 [B, M]`` or ``[..., D]``.
_SHAPE = re.compile(r"(?:``|# |\b[bfiu](?:ool|8|16|32|64) ?|\bfloat(?:32|64) ?)\[([^\]\n]*)\]")
_EINSUM = re.compile(r'"([.a-z,]+->[.a-z]+)"')
_BIND = re.compile(r'[=:] ?\(.*, "([A-Z]{1,5})"\)|"[a-z_]+": "([A-Z]{1,5})"')


def find_letters(text: str) -> Iterator[tuple[str, str]]:
    """Yield the shapes in a source text, with their letters."""
    for pattern in (_NAME, _BIND):
        for match in pattern.finditer(text):
            yield match[0], "".join(filter(None, match.groups())).replace("1", "")
    for match in _EINSUM.finditer(text):
        yield match[0], re.sub("[^A-Z]", "", match[0].upper())
    for match in _SHAPE.finditer(text):
        yield match[0], "".join(re.findall(r"\b[A-Z]\b", match[1]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(Path(path).relative_to(ROOT)))
def test_shapes_use_the_letters_of_dims(path: Path) -> None:
    unknown = [place for place, letters in find_letters(path.read_text()) if set(letters) - {*DIMS}]
    assert not unknown


def test_find_letters_finds_shapes() -> None:
    text = 'x_SW = f("bij,b->bi", a) # i32 [B, Y] and ``[Z, 2]``; bind(q=(q, "BHU"))'
    assert {letter for _, letters in find_letters(text) for letter in letters} == set("SWBIJYZHU")


def test_bind_says_how_to_add_a_missing_axis() -> None:
    with pytest.raises(ValueError, match=r"got \[4, 16\]. Add the first axis with q\[None\].$"):
        bind("f", q=(np.zeros((4, 16)), "BHD"))
    with pytest.raises(ValueError, match=r"got \[1, 1, 4, 16\].$"):
        bind("f", q=(np.zeros((1, 1, 4, 16)), "BHD"))
