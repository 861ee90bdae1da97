"""The letters that name array dimensions, and checks of array shapes against them.

Docstrings, comments, array names such as ``q_BHD``, and einsums use only the letters of `DIMS`.
``tests/test_dims.py`` checks this.
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
    """Check that all dimensions of an array are integers, because kernels need static shapes.

    Args:
      function: name of the function, for the error message.
      name: the name of the array.
      shape: the shape of the array.

    Raises:
      ValueError: a dimension is symbolic, see `jax.export.symbolic_shape`.
    """
    if not all(isinstance(size, Integral) for size in shape):
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{function}: {name} must have integer dimensions, got symbolic dimensions in shape "
            f"[{sizes}]. Export one module for each shape."
        )


def _advice(name: str, shape: Sequence[object], letters: str) -> str:
    """Return advice if an array lacks only its first dimension, such as the batch; else ""."""
    is_short = 0 < len(shape) == len(letters) - 1
    return f" Add the first axis with {name}[None]." if is_short else ""


def bind(function: str, **arrays: tuple[Any, str]) -> dict[str, int]:
    """Return the size of each dimension letter. Check that it is the same in all arrays.

    Args:
      function: name of the function, for error messages.
      **arrays: a pair of array and dimension letters for each argument, such as ``q=(q, "BHD")``.

    Returns:
      A dict from letters to sizes.

    Raises:
      ValueError: an array has a wrong number of dimensions, or a letter has two different sizes.

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
                    f"like {owner[letter]}, got shape {list(shape)} for dimensions "
                    f"[{', '.join(letters)}]."
                )
            owner.setdefault(letter, name)
    return sizes
