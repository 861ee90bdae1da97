"""Files that contain a separate head although the config ties it to the embeddings."""

import dataclasses
import warnings
from collections.abc import Mapping

import numpy as np

from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.stored import Stored
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD

_READ_ROWS = 4096


def untie_if_different(config: LlamaConfig, stored: Mapping[str, Stored]) -> LlamaConfig:
    """Return the config, untied if the files contain a head that differs from the embeddings.

    transformers does the same: a tensor in the file is never dropped because of the config.

    Args:
      config: configuration of the model.
      stored: tensors of the files, see `find_tensors`.
    """
    if not config.tie_word_embeddings or HEAD not in stored or EMBEDDINGS not in stored:
        return config
    if _are_equal(stored[HEAD], stored[EMBEDDINGS]):
        return config
    warnings.warn(
        f"{stored[HEAD].path}: {HEAD} differs from the embeddings although config.json has "
        "tie_word_embeddings: true. The model is loaded untied. Set tie_word_embeddings to false.",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _are_equal(first: Stored, second: Stored) -> bool:
    if first.shape != second.shape or not (first.is_floating and second.is_floating):
        return False
    num_rows = first.shape[0]
    for start in range(0, num_rows, _READ_ROWS):
        rows = (slice(start, min(start + _READ_ROWS, num_rows)),)
        left, right = (x.read(rows, np.dtype(np.float32)) for x in (first, second))
        if not np.array_equal(left, right):
            return False
    return True
