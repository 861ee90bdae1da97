r"""Conversion of parameters from another definition of the same model, such as a trainer's.

    trainer                     Hugging Face                               paged_jax
    layers.3.attn.q_proj.w  ->  model.layers.3.self_attn.q_proj.weight \
    layers.3.attn.k_proj.w  ->  model.layers.3.self_attn.k_proj.weight  >  layers.3.qkv_proj
    layers.3.attn.v_proj.w  ->  model.layers.3.self_attn.v_proj.weight /

The caller's `NameMap` describes the first arrow, and `tensor_map.map_parameter` the second.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.tensor_map import (
    EMBEDDINGS,
    HEAD,
    map_to_available,
    standard_name,
)
from paged_jax.models.tensor_mapping import TensorMapping

# Maps the name of each array in another definition of the model (such as a trainer's) to the name
# of the Hugging Face tensor that the array holds. If the axes of the array must be permuted, the
# value is a pair: the name of the tensor, and the permutation. A * in an array's name and in a
# tensor's name stands for the index of a layer.
NameMap = Mapping[str, str | tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Description of how to get a Hugging Face tensor from the arrays of another definition.

    Attributes:
      name: name of the array that holds the tensor.
      axes: permutation of the array's axes that gives the order in the tensor; None for no change.
      layer: index of the layer, if the array stacks all layers along its first axis (after the
        permutation); None otherwise.
    """

    name: str
    axes: tuple[int, ...] | None = None
    layer: int | None = None

    def take(self, arrays: Mapping[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Take the Hugging Face tensor from `arrays` (by name), and reshape it to `shape`."""
        array = arrays[self.name]
        array = array if self.axes is None else array.transpose(self.axes)
        return (array if self.layer is None else array[self.layer]).reshape(shape)


def find_sources(
    function: str,
    config: ModelConfig,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    rules: NameMap,
) -> dict[str, TensorSource]:
    """Find the source of each parameter of this model in the arrays of another definition.

    Args:
      function: function name for error messages.
      config: configuration of the model.
      names: names of this model's parameters.
      shapes: shape of each array of the other definition, by name.
      rules: Hugging Face tensor names of these arrays, see `NameMap`. If there is no rule for an
        array, its name must be the Hugging Face name.

    Returns:
      The source of each Hugging Face tensor that the parameters consist of. If the embeddings are
      tied, but the other definition also has an output head, the result includes the head, so that
      the caller can compare it with the embeddings.

    Raises:
      WeightsError: a tensor is missing, not part of the model, in two arrays, or has the wrong
        shape.
    """
    sources: dict[str, TensorSource] = {}
    for name in shapes:
        for tensor, source in _sources_of(name, rules, config):
            if tensor in sources:
                raise WeightsError(
                    f"{function}: mapping must map only one array to {tensor}, got "
                    f"{sources[tensor].name} and {name}."
                )
            sources[tensor] = source
    expected = {
        mapping.tensor: mapping
        for name in names
        for mapping in map_to_available(config, name, sources)
    }
    if missing := [tensor for tensor in expected if tensor not in sources]:
        raise WeightsError(
            f"{function}: params must contain an array for each tensor of the model, got no array "
            f"that is mapped to {_enumerate(missing)}."
        )
    # Trainers may keep a tied head in addition to the embeddings.
    allowed = {*expected, HEAD} if config.tie_word_embeddings else set(expected)
    if left_over := [tensor for tensor in sources if tensor not in allowed]:
        name = sources[left_over[0]].name
        raise WeightsError(
            f"{function}: params must only contain tensors of the model, got "
            f"{_enumerate(left_over)} (from the array {name})."
        )
    if HEAD in sources and HEAD not in expected and EMBEDDINGS in expected:
        expected[HEAD] = dataclasses.replace(expected[EMBEDDINGS], tensor=HEAD)
    for tensor, mapping in expected.items():
        _check_shape(function, sources[tensor], shapes[sources[tensor].name], mapping)
    return {tensor: sources[tensor] for tensor in expected}


def assemble(
    config: ModelConfig,
    name: str,
    arrays: Mapping[str, jax.Array],
    sources: Mapping[str, TensorSource],
) -> jax.Array:
    """Assemble a parameter from the Hugging Face tensors that it consists of; traced by `jit`."""
    return _join(
        [
            (mapping, mapping.to_box(sources[mapping.tensor].take(arrays, mapping.shape)))
            for mapping in map_to_available(config, name, sources)
        ]
    )


def _join(boxes: list[tuple[TensorMapping, jax.Array]], axis: int = 0) -> jax.Array:
    """Concatenate boxes of a parameter along `axis` and all later axes.

    A box is a rectangular part of the parameter, see `TensorMapping`. Together, the boxes must fill
    the parameter or a rectangular part of it.
    """
    if len(boxes) == 1:
        return boxes[0][1]
    by_start: dict[int, list[tuple[TensorMapping, jax.Array]]] = {}
    for mapping, box in boxes:
        by_start.setdefault(mapping.box_start[axis], []).append((mapping, box))
    joined = [_join(row, axis + 1) for _, row in sorted(by_start.items())]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=axis)


def _sources_of(
    name: str, rules: NameMap, config: ModelConfig
) -> Iterable[tuple[str, TensorSource]]:
    """Return the Hugging Face tensors that the array `name` holds, with their sources.

    The array holds a single tensor, or stacks one tensor per layer.
    """
    for pattern, target in rules.items():
        tensor, axes = (target, None) if isinstance(target, str) else target
        match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        if match is None:
            continue
        if match.groups():
            return [(tensor.replace("*", match[1]), TensorSource(name, axes))]
        if "*" in tensor:
            layers = range(config.num_hidden_layers)
            return [(tensor.replace("*", str(i)), TensorSource(name, axes, i)) for i in layers]
        return [(tensor, TensorSource(name, axes))]
    return [(standard_name(config, name) or name, TensorSource(name))]


def _check_shape(
    function: str, source: TensorSource, shape: tuple[int, ...], mapping: TensorMapping
) -> None:
    axes = tuple(range(len(shape))) if source.axes is None else source.axes
    if sorted(axes) != list(range(len(shape))):
        raise WeightsError(
            f"{function}: mapping must give a permutation of the {len(shape)} axes of "
            f"{source.name}, got {axes}."
        )
    ordered = [shape[axis] for axis in axes][0 if source.layer is None else 1 :]
    if not _can_merge_axes(ordered, mapping.shape):
        layer = "" if source.layer is None else " (without the axis of layers)"
        raise WeightsError(
            f"{function}: {mapping.tensor} must have shape {list(mapping.shape)}, got "
            f"{ordered}{layer} from {source.name}. If the axes are in another order, give their "
            "permutation in the mapping."
        )


def _can_merge_axes(shape: list[int], target: tuple[int, ...]) -> bool:
    """Return whether merging consecutive axes of `shape` gives `target`."""
    sizes = iter(shape)
    for size in target:
        product = 1
        while product < size:
            product *= next(sizes, size + 1)
        if product != size:
            return False
    return all(size == 1 for size in sizes)


def _enumerate(tensors: list[str]) -> str:
    return tensors[0] + (f" and {len(tensors) - 1} others" if len(tensors) > 1 else "")
