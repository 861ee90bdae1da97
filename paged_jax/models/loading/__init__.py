"""Weights from files to a model of any class, and back: Hugging Face folders, Orbax checkpoints."""

from paged_jax.models.loading.conversion import NameMap, assemble, find_sources, named_arrays
from paged_jax.models.loading.huggingface import load_weights, save_weights
from paged_jax.models.loading.orbax import load_checkpoint, save_checkpoint
from paged_jax.models.loading.parameters import WeightsError, named_parameters
from paged_jax.models.loading.piece import Piece
from paged_jax.models.loading.pretrained import bundled_folder, from_pretrained
from paged_jax.models.loading.tensor_map import pieces

__all__ = [
    "NameMap",
    "Piece",
    "WeightsError",
    "assemble",
    "bundled_folder",
    "find_sources",
    "from_pretrained",
    "load_checkpoint",
    "load_weights",
    "named_arrays",
    "named_parameters",
    "pieces",
    "save_checkpoint",
    "save_weights",
]
