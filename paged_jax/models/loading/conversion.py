"""Parameters of a model from those of another definition of it, by the names of Hugging Face.

    trainer                     Hugging Face                               here
    layers.3.attn.q_proj.w  ->  model.layers.3.self_attn.q_proj.weight \
    layers.3.attn.k_proj.w  ->  model.layers.3.self_attn.k_proj.weight  >  layers.3.qkv_proj
    layers.3.attn.v_proj.w  ->  model.layers.3.self_attn.v_proj.weight /

The first arrow is a caller's `NameMap`, the second `tensor_map.pieces`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.parameters import WeightsError
from paged_jax.models.loading.piece import Piece
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD, find_pieces

# From names of another definition, with a * for the number of a layer, to those of Hugging Face, or
# to such a name and the order of axes in which it has the tensor.
NameMap = Mapping[str, str | tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor of Hugging Face is in another definition.

    Attributes:
      name: the array that has it.
      axes: the order of its axes; None as they are.
      layer: its number in the first of them, so ordered; None if the array is the tensor.
    """

    name: str
    axes: tuple[int, ...] | None = None
    layer: int | None = None

    def take(self, arrays: Mapping[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """The tensor in the shape that it has with Hugging Face."""
        array = arrays[self.name]
        array = array if self.axes is None else array.transpose(self.axes)
        return (array if self.layer is None else array[self.layer]).reshape(shape)


def named_arrays(params: Any) -> dict[str, Any]:
    """The arrays of a tree by the dotted paths to them.

    Args:
      params: an `nnx.Module`, an `nnx.State`, or any tree of arrays, such as a dict by names.
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def find_sources(
    function: str,
    config: LlamaConfig,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    rules: NameMap,
) -> dict[str, Source]:
    """Find the tensors that make up some parameters.

    Args:
      function: the name that messages begin with.
      config: configuration of the model.
      names: names of the parameters.
      shapes: shapes of the arrays of the other definition, by their names.
      rules: which tensors they are. A name that no rule names is one of Hugging Face's.

    Returns:
      The source of each tensor, by the names of Hugging Face. For a tied model this includes the
      head if the other definition has one, so that it can be compared with the embeddings.

    Raises:
      WeightsError: a tensor is missing, left over, named twice, or of another shape.
    """
    sources: dict[str, Source] = {}
    for name in shapes:
        for tensor, source in _sources_of(name, rules, config.num_hidden_layers):
            if tensor in sources:
                raise WeightsError(
                    f"{function}: mapping must name {tensor} once, got {sources[tensor].name} and "
                    f"{name}."
                )
            sources[tensor] = source
    wanted = {piece.tensor: piece for name in names for piece in find_pieces(config, name, sources)}
    if missing := [tensor for tensor in wanted if tensor not in sources]:
        raise WeightsError(
            f"{function}: params must hold {_enumerate(missing)}, got no array that the mapping "
            "takes for it."
        )
    # Trainers may keep a tied head beside the embeddings.
    known = {*wanted, HEAD} if config.tie_word_embeddings else set(wanted)
    if left_over := [tensor for tensor in sources if tensor not in known]:
        name = sources[left_over[0]].name
        raise WeightsError(
            f"{function}: params must hold what the model has, got {_enumerate(left_over)} "
            f"({name}), for which it has no place."
        )
    if HEAD in sources and HEAD not in wanted and EMBEDDINGS in wanted:
        wanted[HEAD] = dataclasses.replace(wanted[EMBEDDINGS], tensor=HEAD)
    for tensor, piece in wanted.items():
        _check_shape(function, sources[tensor], shapes[sources[tensor].name], piece)
    return {tensor: sources[tensor] for tensor in wanted}


def assemble(
    config: LlamaConfig,
    name: str,
    arrays: Mapping[str, jax.Array],
    sources: Mapping[str, Source],
) -> jax.Array:
    """Make a parameter of the tensors that it consists of. For use in `jit`.

    Args:
      config: configuration of the model.
      name: name of the parameter.
      arrays: those of the other definition, by their names.
      sources: of `find_sources`.
    """
    return _join(
        [
            (piece, piece.to_parameter(sources[piece.tensor].take(arrays, piece.shape)))
            for piece in find_pieces(config, name, sources)
        ]
    )


def _join(parts: list[tuple[Piece, jax.Array]], axis: int = 0) -> jax.Array:
    """Boxes that fill a parameter, put together along this axis and those behind it."""
    if len(parts) == 1:
        return parts[0][1]
    rows: dict[int, list[tuple[Piece, jax.Array]]] = {}
    for piece, part in parts:
        rows.setdefault(piece.offset[axis], []).append((piece, part))
    joined = [_join(row, axis + 1) for _, row in sorted(rows.items())]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=axis)


def _sources_of(name: str, rules: NameMap, num_layers: int) -> Iterable[tuple[str, Source]]:
    """The tensors that an array is, one or one for each layer."""
    for pattern, target in rules.items():
        tensor, axes = (target, None) if isinstance(target, str) else target
        found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        if found is None:
            continue
        if found.groups():
            return [(tensor.replace("*", found[1]), Source(name, axes))]
        if "*" in tensor:
            layers = range(num_layers)
            return [(tensor.replace("*", str(i)), Source(name, axes, i)) for i in layers]
        return [(tensor, Source(name, axes))]
    return [(name, Source(name))]


def _check_shape(function: str, source: Source, shape: tuple[int, ...], piece: Piece) -> None:
    axes = tuple(range(len(shape))) if source.axes is None else source.axes
    if sorted(axes) != list(range(len(shape))):
        raise WeightsError(
            f"{function}: mapping must order the {len(shape)} axes of {source.name}, got {axes}."
        )
    ordered = [shape[axis] for axis in axes][0 if source.layer is None else 1 :]
    if not _divides(ordered, piece.shape):
        layer = "" if source.layer is None else ", without the axis of layers,"
        raise WeightsError(
            f"{function}: {piece.tensor} must have shape {list(piece.shape)}, got {ordered}{layer} "
            f"from {source.name}. Give the order of its axes in the mapping."
        )


def _divides(shape: list[int], whole: tuple[int, ...]) -> bool:
    """Whether each axis of `whole` is one of `shape`, or several that follow each other."""
    sizes = iter(shape)
    for size in whole:
        product = 1
        while product < size:
            product *= next(sizes, size + 1)
        if product != size:
            return False
    return all(size == 1 for size in sizes)


def _enumerate(tensors: list[str]) -> str:
    return tensors[0] + (f" and {len(tensors) - 1} others" if len(tensors) > 1 else "")
