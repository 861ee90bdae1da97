"""Replacement of a running engine's weights by new weights of the same model."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from paged_jax.engine.transfers import allow_host_transfers
from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat, count_inputs
from paged_jax.models.codecs.dtype_formats import change_format
from paged_jax.models.config import ModelConfig, find_difference
from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.conversion import (
    NameMap,
    TensorSource,
    assemble,
    find_sources,
)
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.loading.pretrained import from_pretrained, read_config
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD
from paged_jax.models.matrix_formats import (
    SCALE,
    SUFFIXES,
    MatrixFormats,
    is_matrix,
    is_stacked,
    matrix_name,
)
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner.executor import Executor
from paged_jax.runner.weights import Weights

# Config fields that may have other values in the config of new weights, because they do not affect
# the logits of a model.
_IRRELEVANT = {
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_ids",
    "model_type",
    "dtype",
}


def load_weights_for(model: PagedModel, folder: str | Path) -> Decoder:
    """Load a model with the structure and formats of `model` into host memory.

    Args:
      model: the model with the wanted structure, dtypes and formats; its weights are not read.
      folder: a Hugging Face folder, an Orbax checkpoint or a GGUF file with the new weights.

    Raises:
      ValueError: `model` is not a `Decoder`, or the folder contains a model of another structure.
        The message names the difference.
      OSError: files are missing or cannot be read.
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"load_params: the engine's model must be a Decoder, got {type(model).__name__}. Load "
            "weights into a model of this class, and pass it to update_params."
        )
    if Path(folder).exists():  # If the folder is missing, `from_pretrained` raises an error below.
        _check_config(read_config(folder), model.config)
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    placement: Any = {"scan_layers": model.scan_layers, "sharding": host}
    kinds: Any = {"dtype": model.float_dtype, "formats": model.formats}
    return from_pretrained(Decoder, folder, show_progress=False, **placement, **kinds)


def _check_config(config: ModelConfig, engine_config: ModelConfig) -> None:
    ignored_fields = {name: getattr(engine_config, name) for name in _IRRELEVANT}
    if difference := find_difference(config.replace(**ignored_fields), engine_config.replace()):
        name, new, old = difference
        raise ValueError(
            f"load_params: the folder's {name} must be {old}, as in the engine's model, got {new}."
        )


class _Leaves(NamedTuple):
    """Description of the leaves of the model's state; hashable, so that programs can be cached."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    shardings: tuple[Any, ...]

    @classmethod
    def of(cls, weights: Weights) -> "_Leaves":
        shapes, dtypes, shardings = zip(
            *((x.shape, x.dtype, x.sharding) for x in weights.layout), strict=True
        )
        return cls(tuple(weights.names), shapes, dtypes, shardings)

    @property
    def floats(self) -> list[str]:
        """Names of all leaves except the scales, minima and input orders of quantised matrices."""
        return [name for name in self.names if not name.endswith(SUFFIXES)]


class NewWeights(NamedTuple):
    """New weights, checked by `WeightSwap.prepare` and ready to replace the old weights.

    Attributes:
      arrays: the new weights on the engine's devices, with the names and shapes of the caller.
      convert: compiled program that is called with `arrays` and `buffers`, and returns the leaves
        of the engine's model. `buffers` are arrays with the shapes of the leaves; they are donated,
        and the results are written to their memory.
    """

    arrays: Any
    convert: Callable[[Any, list[jax.Array]], list[jax.Array]]


class WeightSwap:
    """Replaces the weights of an engine with a compiled program.

    The program renames, transposes and fuses the new weights, and donates the old weights. It needs
    additional memory only if the old arrays must be kept, or for matrices in a layout of a backend.

    Args:
      executor: executor that holds the weights.
      are_shared: whether the current arrays belong to the caller, so that they must be kept.
    """

    def __init__(self, executor: Executor, *, are_shared: bool):
        self._executor = executor
        self._are_shared = are_shared

    def prepare(self, params: Any, mapping: NameMap | None) -> NewWeights:
        """Check new weights, and copy them to the engine's devices; the engine is unchanged.

        Args:
          params: see `Engine.update_params`.
          mapping: see `Engine.update_params`.

        Raises:
          ValueError: the names, the number, the shapes or the formats of the arrays do not match
            the engine's model.
        """
        weights = self._executor.weights
        model, leaves = weights.layout_model, _Leaves.of(weights)
        if mapping is not None:
            return self._prepare_other(model, leaves, params, mapping)
        formats = getattr(model, "formats", None)
        if isinstance(params, PagedModel):
            _check_same_formats(getattr(params, "formats", formats), formats)
            params = nnx.state(params)
        names = leaves.names
        if isinstance(params, nnx.State):
            params, names = _leaves_by_name(params, leaves)
        elif not isinstance(params, list | tuple):
            raise ValueError(
                "update_params: params must be a model, its nnx.state, or a list of its leaves, "
                f"got {type(params).__name__}. For params of another implementation of the "
                "model, also pass mapping, which maps their names to Hugging Face names."
            )
        new, layout = jax.tree.leaves(params), dict(zip(leaves.names, weights.layout, strict=True))
        if len(names) == len(leaves.names):
            # `params` has every array of the engine's model, including the scales if there are any.
            # So it already has the formats of that model.
            formats = None
        expected_names = leaves.names if formats is None else names
        _check_shapes(
            [jnp.shape(x) for x in new], [_shape(x, layout[x], formats) for x in expected_names]
        )
        if formats is None:
            _check_values([jnp.result_type(x) for x in new], leaves)
        pairs = zip(names, new, strict=True)
        arrays = {name: _to_devices(x, layout[name].sharding) for name, x in pairs}
        return NewWeights(arrays, _converting(leaves, formats))

    def _prepare_other(
        self, model: PagedModel, leaves: _Leaves, params: Any, mapping: NameMap
    ) -> NewWeights:
        if not isinstance(model, Decoder):
            raise ValueError(
                "update_params: mapping must be None unless the engine's model is a Decoder, got a "
                f"mapping for {type(model).__name__}. Pass weights with the names of that model."
            )
        arrays = named_arrays(params)
        shapes = {name: jnp.shape(array) for name, array in arrays.items()}
        sources = find_sources("update_params", model.config, leaves.floats, shapes, mapping)
        sharding = leaves.shardings[0]
        used_names = {source.name for source in sources.values()}
        local_arrays = {
            name: _to_devices(arrays[name], _divided_sharding(shapes[name], sharding))
            for name in sorted(used_names)
        }
        if model.config.tie_word_embeddings and HEAD in sources:
            _check_tied_head(model.config, local_arrays, sources)
        convert = _converting(leaves, model.formats, model.config, tuple(sources.items()))
        return NewWeights(local_arrays, convert)

    def replace(self, new: NewWeights) -> None:
        """Replace the engine's weights by `new`; delete the old arrays if the engine owns them."""
        owned_ids = {id(x) for x in self._executor.weights.arrays}
        has_owned = any(id(x) in owned_ids for x in jax.tree.leaves(new.arrays))
        if self._are_shared or has_owned or not owned_ids:
            buffers = _allocating(_Leaves.of(self._executor.weights))
            self._executor.update_weights(lambda old: new.convert(new.arrays, buffers()))
        else:
            self._executor.update_weights(lambda old: new.convert(new.arrays, old))
        self._are_shared = False


def _check_tied_head(
    config: ModelConfig, arrays: dict[str, jax.Array], sources: dict[str, TensorSource]
) -> None:
    """Raise ValueError unless the output head in `arrays` equals the embeddings."""
    pair = sources[HEAD], sources[EMBEDDINGS]
    pair_arrays = {source.name: arrays[source.name] for source in pair}
    with allow_host_transfers():
        is_same = bool(_is_same(pair_arrays, pair, (config.vocab_size, config.hidden_size)))
    if not is_same:
        raise ValueError(
            f"update_params: {HEAD} must equal the embeddings, because the engine's model ties "
            "the two, got different values. Create the engine with a model that does not tie them."
        )


def _to_devices(array: Any, sharding: Sharding) -> jax.Array:
    """Copy an array to the devices of `sharding`, unless it is already on them."""
    if not isinstance(array, jax.Array):
        with allow_host_transfers():
            return jax.device_put(array, sharding)
    if array.sharding.device_set == sharding.device_set:
        return array
    return jax.device_put(array, sharding)


def _divided_sharding(shape: tuple[int, ...], sharding: Sharding) -> Sharding:
    """Return a sharding that divides an array over the devices of `sharding`.

    It divides the first dimension whose size is a multiple of the number of devices, if any.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [None] * len(shape)
    for axis, size in enumerate(shape):
        if size % sharding.mesh.size == 0:
            return NamedSharding(
                sharding.mesh, PartitionSpec(*axes[:axis], sharding.mesh.axis_names)
            )
    return NamedSharding(sharding.mesh, PartitionSpec())


# The functions below return jitted programs. The functions are cached, so that engines with the
# same model structure share the programs. Programs replace `jax.device_put` here, because they make
# no transfer if their arguments are already on the right devices.


@functools.lru_cache(maxsize=16)
def _converting(
    leaves: _Leaves,
    formats: MatrixFormats | None,
    config: ModelConfig | None = None,
    sources: tuple[tuple[str, TensorSource], ...] = (),
) -> Callable[..., list[jax.Array]]:
    """Return the program that converts a dict of new weights, see `NewWeights.convert`.

    Args:
      leaves: the leaves of the engine's model.
      formats: formats to quantise the new weights to; None if the weights already have the formats
        of `leaves`.
      config: config of the model if the new weights are from another implementation; else None.
      sources: if `config` is not None, maps each leaf to the arrays that make it up.
    """

    def convert(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if formats is None:
            return arrays
        new: dict[str, jax.Array] = {}
        for name in leaves.floats:
            array = (
                arrays[name] if config is None else assemble(config, name, arrays, dict(sources))
            )
            new |= _in_format(name, array, formats)
        return new

    def write(arrays: dict[str, jax.Array], buffers: list[jax.Array]) -> list[jax.Array]:
        new, pairs = convert(arrays), zip(leaves.names, leaves.dtypes, strict=True)
        return [jnp.copy(new[name]).astype(dtype) for name, dtype in pairs]

    # The program does not read the values of `buffers`. They are donated only so that the results
    # of the program use their memory.
    return jax.jit(write, donate_argnums=1, keep_unused=True, out_shardings=list(leaves.shardings))


def _in_format(name: str, array: jax.Array, formats: MatrixFormats) -> dict[str, jax.Array]:
    """Return the arrays that store the parameter `name`, as a dict from names to arrays.

    This is `array` itself, or its quantised values and their scales if `formats` quantises it.
    """
    format = formats[name]
    if not is_matrix(name) or not format.is_quantised:
        return {name: array}
    floats = WeightFormat(array.dtype.name)
    arrays = change_format(WeightArrays(array), floats, format, is_stacked=is_stacked(name))
    pairs = zip(("", *SUFFIXES), arrays, strict=True)
    return {name + suffix: array for suffix, array in pairs if array is not None}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _is_same(
    arrays: dict[str, jax.Array], pair: tuple[TensorSource, TensorSource], shape: tuple[int, ...]
) -> jax.Array:
    head, embeddings = (source.take(arrays, shape) for source in pair)
    return jnp.array_equal(head, embeddings)


@functools.lru_cache(maxsize=16)
def _allocating(leaves: _Leaves) -> Callable[[], list[jax.Array]]:
    def allocate() -> list[jax.Array]:
        pairs = zip(leaves.shapes, leaves.dtypes, strict=True)
        return [jnp.zeros(shape, dtype) for shape, dtype in pairs]

    return jax.jit(allocate, out_shardings=list(leaves.shardings))


def _leaves_by_name(params: nnx.State, leaves: _Leaves) -> tuple[list[jax.Array], Sequence[str]]:
    """Return the arrays of `params` in the order of the engine's leaves, and their names.

    Layers are stacked or unstacked, to match the engine's model. The names are `leaves.floats` if
    the engine's model is quantised but `params` are not. Otherwise they are `leaves.names`.
    """
    leaf_names = leaves.names
    arrays = named_arrays(params)
    for kind in {name.split(".")[-1] for name in leaf_names if name.startswith("layers.")}:
        stack = f"layers.{kind}"
        layers = [f"layers.{i}.{kind}" for i in range(len(arrays))]
        layer_names = [name for name in layers if name in arrays]
        if stack in leaf_names and layer_names:
            arrays[stack] = jnp.stack([arrays.pop(name) for name in layer_names])
        elif stack not in leaf_names and stack in arrays:
            arrays |= dict(zip(layers, arrays.pop(stack), strict=False))
    floats = leaves.floats
    names = floats if sorted(arrays) == sorted(floats) else leaf_names
    _check_names(sorted(arrays), sorted(names))
    return [arrays[name] for name in names], names


def _check_same_formats(
    formats: MatrixFormats | None, engine_formats: MatrixFormats | None
) -> None:
    """Raise ValueError if quantised new weights have other formats than the engine."""
    if formats is None or engine_formats is None or not formats.is_quantised:
        return
    for name in sorted({*dict(formats.others), *dict(engine_formats.others), "default"}):
        new_format, engine_format = formats[name], engine_formats[name]
        if new_format != engine_format and (new_format.is_quantised or engine_format.is_quantised):
            raise ValueError(
                "update_params: params must be quantised like the engine's model, or not "
                f"quantised. Expected {_describe(engine_format)} for {name}, got "
                f"{_describe(new_format)}. Load them with dequantise=True."
            )


def _describe(format: WeightFormat) -> str:
    levels = " with scales of two levels" if format.has_sections else ""
    return format.code + (f" in groups of {format.group_size}{levels}" if format.group_size else "")


def _check_values(dtypes: list[Any], leaves: _Leaves) -> None:
    """Check that the new values of quantised matrices have the dtypes of the old values.

    Other parameters may have any float dtype.
    """
    scaled = {matrix_name(name) for name in leaves.names if name.endswith(SCALE)}
    for name, new_dtype, engine_dtype in zip(leaves.names, dtypes, leaves.dtypes, strict=False):
        if new_dtype != engine_dtype and name in scaled:
            raise ValueError(
                "update_params: params must be quantised like the engine's model, or be "
                f"floating-point arrays without scales. Expected {engine_dtype} for {name}, got "
                f"{new_dtype}."
            )


def _shape(name: str, leaf: jax.ShapeDtypeStruct, formats: MatrixFormats | None) -> tuple[int, ...]:
    """Return the shape that a new array must have to replace a leaf of the engine's model.

    If `formats` is not None, the leaf may store several quantised values in each element. The new
    array is not quantised, so its last dimension is then larger.
    """
    if formats is None or not is_matrix(name):
        return leaf.shape
    return (*leaf.shape[:-1], count_inputs(leaf.shape[-1], formats[name].code))


def _check_names(names: list[str], expected: list[str]) -> None:
    if names != expected:
        differences = sorted(set(names) ^ set(expected))[:3]
        raise ValueError(
            "update_params: params must have the parameter names of the engine's model, got "
            f"missing or unknown names: {', '.join(differences)}. For params of another "
            "implementation of the model, also pass mapping, which maps their names to Hugging "
            "Face names."
        )


def _check_shapes(shapes: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> None:
    if list(shapes) != list(expected):
        pairs = zip(shapes, expected, strict=False)
        mismatch = next(
            ((shape, expected_shape) for shape, expected_shape in pairs if shape != expected_shape),
            None,
        )
        raise ValueError(
            f"update_params: params must be {len(expected)} arrays of the model's shapes, got "
            f"{len(shapes)} arrays"
            + (f". Expected shape {mismatch[1]}, got {mismatch[0]}." if mismatch else ".")
        )
