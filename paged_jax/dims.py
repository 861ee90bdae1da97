"""The dimension letters of paged_jax, and the one place where shapes are checked against them.

Shapes in comments and docstrings, arrays named for their dimensions and einsums use these letters
and no others, as ``tests/test_dims.py`` sees to.
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
    "S": "slots: rows of the block table, running sequences",
    "M": "blocks in a row of the block table",
    "B": "sequences in a batch",
    "T": "query tokens of a sequence",
    "V": "vocabulary",
    "E": "hidden size",
    "F": "hidden size of the MLP",
    "N": "tokens or rows, whatever sequence they belong to; keys in a context or in a tile",
    "Q": "tiles of queries that cover the T tokens of a sequence",
    "R": "rows of a tile of queries: a token and a head of the group each",
    "W": "columns of the block table that a step may touch, M at most",
    "X": "stop tokens of a request, at most",
}


def check_sizes(function: str, name: str, shape: Sequence[Any]) -> None:
    """Check that sizes are numbers. `jax.export.symbolic_shape` makes others.

    Raises:
      ValueError: a size is a symbol. Kernels are made for sizes that are known.
    """
    if not all(isinstance(size, Integral) for size in shape):
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{function}: {name} must have sizes that are integers, got symbolic sizes in "
            f"[{sizes}]. Export one module for each size."
        )


def bind(function: str, **arrays: tuple[Any, str]) -> dict[str, int]:
    """Read the size of every letter from arrays, refusing arrays that do not agree.

    Args:
      function: the name of the caller, for the message.
      **arrays: array and letters of each argument, such as ``q=(q, "BHD")``.

    Returns:
      The size of each letter.

    Raises:
      ValueError: an array has another rank than its letters, or two arrays disagree on a letter.

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
            )
        check_sizes(function, name, shape)
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{function}: {name} must have {letter} ({DIMS[letter]}) = {sizes[letter]} "
                    f"as {owner[letter]} has, got shape {list(shape)} for [{', '.join(letters)}]."
                )
            owner.setdefault(letter, name)
    return sizes
