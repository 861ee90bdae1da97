"""Dimension letters, and checks of shapes against them.

Shapes in comments and docstrings, names of arrays and einsums use only these letters.
``tests/test_dims.py`` checks it.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

DIMS: Mapping[str, str] = {
    "L": "layers",
    "P": "blocks in the pool",
    "K": "key/value heads",
    "H": "query heads",
    "G": "query heads in a group, H // K",
    "C": "tokens in a block (block_size)",
    "D": "head dimension",
    "U": "elements of a value, D in most models",
    "S": "slots: rows of the block table, running sequences",
    "M": "blocks in a row of the block table",
    "B": "sequences in a batch",
    "T": "query tokens of a sequence",
    "V": "vocabulary",
    "E": "hidden size",
    "F": "hidden size of the MLP",
    "N": "tokens or rows of any sequences; keys of a context or of a tile",
    "Q": "tiles of queries that cover the T tokens of a sequence",
    "R": "rows of a tile of queries: pairs of a token and a head of the group",
    "W": "columns of the block table that a step may change, at most M",
    "X": "experts; maximum number of stop tokens of a request",
}


def check_sizes(function: str, name: str, shape: Sequence[object]) -> None:
    """Check that the sizes of an array are integers, because kernels need static sizes.

    Args:
      function: the name that the error begins with.
      name: the name of the array.
      shape: the shape of the array.

    Raises:
      ValueError: a size is symbolic, see `jax.export.symbolic_shape`.
    """
    if not all(isinstance(size, Integral) for size in shape):
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{function}: {name} must have sizes that are integers, got symbolic sizes in "
            f"[{sizes}]. Export one module for each size."
        )


def _advice(name: str, shape: Sequence[object], letters: str) -> str:
    """Return how to pass an array that lacks its first axis: one sequence, or one layer."""
    is_short = 0 < len(shape) == len(letters) - 1
    return f" Add the first axis with {name}[None]." if is_short else ""


def bind(function: str, **arrays: tuple[Any, str]) -> dict[str, int]:
    """Return the size of each dimension letter, and check that all arrays agree.

    Args:
      function: the name that errors begin with.
      **arrays: each argument as a pair of the array and its letters, such as ``q=(q, "BHD")``.

    Returns:
      The size of each letter.

    Raises:
      ValueError: an array has a wrong number of dimensions, or arrays disagree on a letter.

    Example:
      >>> import numpy as np
      >>> bind("f", q=(np.zeros((2, 8, 64)), "BHD"), lengths=(np.zeros(2), "B"))
      {'B': 2, 'H': 8, 'D': 64}
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (array, letters) in arrays.items():
        shape = tuple(array.shape)
        if len(shape) != len(letters):
            raise ValueError(
                f"{function}: {name} must have shape [{', '.join(letters)}], got {list(shape)}."
                f"{_advice(name, shape, letters)}"
            )
        check_sizes(function, name, shape)
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{function}: {name} must have {letter} ({DIMS[letter]}) = {sizes[letter]} "
                    f"like {owner[letter]}, got shape {list(shape)} for [{', '.join(letters)}]."
                )
            owner.setdefault(letter, name)
    return sizes
