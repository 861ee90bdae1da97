"""Weights of a model in the layout of the programs, on one device or on several devices.

With several devices, each device runs the whole program (`jax.shard_map`). It has a part of the
weights, the K and V of its heads, and a copy of everything else. So every device runs the
allocator, the prefix cache and the sampling, and all devices get the same results. The devices
communicate only inside the model.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from paged_jax.kernels.weight_formats import Layout
from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.matrix_formats import ORDER, MatrixFormats, is_matrix, matrix_name
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.tensor_parallel import AXIS, TensorParallel
from paged_jax.runner.decode_state import DecodeState

# Multiplier of `_digest`. It is odd, so that the multiplication is invertible modulo 2**32.
_FACTOR = np.uint32(0x9E3779B1)


class ReplicaError(RuntimeError):
    """Raised if devices that must compute the same results computed different results."""


def agree(tree: object, axis_name: str) -> jax.Array:
    """Return whether a tree of arrays has the same bits on all devices of a mesh axis, bool[].

    Call it inside `jax.shard_map`. The devices compare 32-bit digests of their arrays. If a single
    value differs, the digests differ. If several values differ, the digests are equal with a
    probability of 2^-32.
    """
    digests = lax.all_gather(_digest(tree), axis_name)
    return jnp.all(digests == digests[0])


def _digest(tree: object) -> jax.Array:
    digest = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = _bits(jnp.asarray(leaf)).reshape(-1)
        positions = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2) + jnp.uint32(1)
        digest = digest * _FACTOR + jnp.sum(bits * positions, dtype=jnp.uint32)
    return digest


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of each value of an array as uint32."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


# Partitions of the arguments and results of programs. With WHOLE, every device has a full copy.
# With OF_HEADS, the third dimension, which is KV heads (K), is divided over the devices. OF_HEADS
# is for pools [L, P, K, C, D], scales [L, P, K, C], and copies of blocks.
WHOLE = PartitionSpec()
OF_HEADS = PartitionSpec(None, None, AXIS)
# OF_HEADS is also for pools of recurrent states [L, P, ...] and copies of states [L, 1, ...]. Their
# third dimension, heads or channels, is divided.

_Function = Callable[..., tuple[DecodeState, Any]]


class Division(NamedTuple):
    """Description of how programs run on several devices; hashable.

    Attributes:
      mesh: the devices.
      weights: partition of each weight, in the order of the model's flattened state.
      checks_replicas: whether programs check that all devices compute the same results.
    """

    mesh: Mesh
    weights: tuple[PartitionSpec, ...]
    checks_replicas: bool = False

    def divide(
        self, program: _Function, *, last: PartitionSpec, result: PartitionSpec
    ) -> _Function:
        """Convert a program for a single device to a program that runs on all devices.

        Args:
          program: the function ``(weights, state, *args) -> (state, result)`` that each device
            runs.
          last: partition of the last argument in `args`; the other arguments are replicated.
          result: partition of the result.

        Returns:
          A program for all devices with the same arguments and results. With `checks_replicas`, its
          result is ``(result, ok)``. `ok`, bool[], is whether the replicated parts of the state, of
          the result and of the weights are the same on all devices.
        """
        results: Any = result
        if self.checks_replicas:
            has_parts = result != WHOLE
            program, results = _checked(program, self.weights, has_parts), (result, WHOLE)

        def divided(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
            state_specs, parts = _parts(state), [WHOLE] * len(args)
            parts[-1:] = [last] * bool(args)
            return jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(list(self.weights), state_specs, *parts),
                out_specs=(state_specs, results),
                # Disable JAX's check of values that vary over the mesh, because it does not support
                # the kernels of this package.
                check_vma=False,
            )(weights, state, *args)

        return divided

    def shardings(self, state: DecodeState) -> DecodeState:
        """Return a tree like `state` that contains the sharding of each array."""
        return jax.tree.map(lambda part: NamedSharding(self.mesh, part), _parts(state))


def _checked(program: _Function, parts: tuple[PartitionSpec, ...], has_parts: bool) -> _Function:
    def checked(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
        state, result = program(weights, state, *args)
        empty_pools = jax.tree.map(lambda _: None, state.cache.group_pools)
        checked_state = dataclasses.replace(
            state, cache=state.cache.replace_group_pools(empty_pools)
        )
        # Also compare the weights that each device has a full copy of, such as norms. This is
        # cheap, because they are small.
        shared = [w for w, part in zip(weights, parts, strict=True) if part == WHOLE]
        return state, (result, agree((checked_state, shared, None if has_parts else result), AXIS))

    return checked


def _parts(state: DecodeState) -> Any:
    parts = jax.tree.map(lambda _: WHOLE, state)
    pools = jax.tree.map(lambda _: OF_HEADS, state.cache.group_pools)
    return dataclasses.replace(parts, cache=parts.cache.replace_group_pools(pools))


@dataclass(frozen=True, eq=False)
class Graph:
    """Hashable wrapper for the structure of a module with unhashable attributes.

    It makes such a structure usable in a `ProgramKey`. Two instances are never equal, so engines
    with such modules share no compiled programs.

    Attributes:
      graphdef: the structure, from `nnx.split`.
    """

    graphdef: Any

    @classmethod
    def key(cls, graphdef: Any) -> Any:
        """Return `graphdef` itself if it is hashable, else a `Graph` that wraps it."""
        try:
            hash(graphdef)
        except TypeError:
            return cls(graphdef)
        return graphdef

    @staticmethod
    def merge(key: Any, state: Any) -> Any:
        """Return the module with the structure `key` (a result of `Graph.key`) and a state."""
        return nnx.merge(key.graphdef if isinstance(key, Graph) else key, state)


class Weights:
    """Weights of a model in the layout of the programs.

    Args:
      model: the model.
      parallel: division over devices; None for a single device.
      check_replicas: see `Engine`.

    Attributes:
      arrays: the weights that are passed to programs, in the order of the model's flattened state;
        empty while the weights are freed.
      names: names of the weights, in the same order.
      layout: shapes, dtypes and shardings of the weights in the model layout, see `TensorParallel`.
      graphdef: structure of the module that programs run, see `Graph.key`.
      treedef: tree structure of the module's state, whose leaves are the weights.
      division: how programs run on several devices; None for a single device.
      config: configuration of the whole model, before its division over devices.
      device_config: configuration of the part of the model on one device; None for a single device.

    Raises:
      ValueError: the weights are on several devices, and `parallel` is None.
    """

    def __init__(
        self,
        model: PagedModel,
        parallel: TensorParallel | None = None,
        *,
        check_replicas: bool = False,
    ):
        graphdef, state = nnx.split(model)
        arrays, self.treedef = jax.tree.flatten(state)
        self._parallel, self.names = parallel, list(named_arrays(state))
        self._layouts = _find_layouts(self.names, model.matrix_formats)
        self._model_graphdef = _plain_graph(graphdef, state) if self._layouts else graphdef
        if parallel is None:
            self.config, self.device_config, self.division = model.config, None, None
            self.graphdef = Graph.key(graphdef)
            shardings = [SingleDeviceSharding(_one_device(arrays))] * len(arrays)
            # Commit the arrays to their device, without a copy. Weights that replace them will be
            # committed, and JAX compiles programs separately for committed and uncommitted arrays.
            arrays = jax.device_put(arrays, shardings)
        else:
            assert isinstance(model, Decoder), "other models are not divided"
            self.config, self.device_config = parallel.wide_config, parallel.device_config
            named = list(zip(self.names, arrays, strict=True))
            parallel.check_formats("Engine", model.formats, {name: x.shape for name, x in named})
            self.graphdef = nnx.graphdef(model.make_shard(parallel))
            specs = tuple(parallel.program_spec(name, x.shape) for name, x in named)
            self.division = Division(parallel.mesh, specs, check_replicas)
            shardings = [parallel.model_sharding(name, x.shape) for name, x in named]
        self.layout = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(arrays, shardings, strict=True)
        ]
        # The matrices of a loaded model are already prepared.
        self.arrays = arrays if parallel is None else self._to_program_layout(arrays)

    def replace(self, arrays: list[jax.Array]) -> None:
        """Replace the weights by arrays in the model layout; an empty list frees them."""
        self.arrays = self._to_program_layout(arrays) if arrays else []

    @property
    def originals(self) -> list[jax.Array]:
        """The weights in the model layout. If programs use another layout, these are copies."""
        if not self.arrays:
            return []
        named_leaves = zip(self.names, self.arrays, strict=True)
        if self._parallel is not None:
            return [self._parallel.to_model_layout(name, x) for name, x in named_leaves]
        return [self._permute(lambda layout: layout.unprepare, name, x) for name, x in named_leaves]

    def _to_program_layout(self, arrays: list[jax.Array]) -> list[jax.Array]:
        named_leaves = zip(self.names, arrays, strict=True)
        if self._parallel is not None:
            return [self._parallel.to_program_layout(name, x) for name, x in named_leaves]
        return [self._permute(lambda layout: layout.prepare, name, x) for name, x in named_leaves]

    def _permute(
        self, method: Callable[[Layout], Callable[[Any], Any]], name: str, array: jax.Array
    ) -> jax.Array:
        """Call a method of the layout of a weight on the host; return plain weights unchanged."""
        if (layout := self._layouts.get(name)) is None:
            return array
        with jax.transfer_guard("allow"):
            return jax.device_put(method(layout)(np.asarray(array)), array.sharding)

    @property
    def model(self) -> PagedModel:
        """The model with its current weights."""
        return self._model_with(self.originals)

    @property
    def layout_model(self) -> PagedModel:
        """The model with `jax.ShapeDtypeStruct`s (from `layout`) instead of weights."""
        return self._model_with(self.layout)

    @property
    def device(self) -> Any:
        """The `jax.Device` that holds the weights; any of the devices if there are several."""
        return next(iter(self.layout[0].sharding.addressable_devices))

    def bytes_on(self, device: Any) -> int:
        """Return the number of bytes that the weights use on a device."""
        shards = [shard for array in self.arrays for shard in array.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    def _model_with(self, leaves: list[Any]) -> PagedModel:
        return nnx.merge(self._model_graphdef, jax.tree.unflatten(self.treedef, leaves))


def _find_layouts(names: list[str], formats: MatrixFormats) -> dict[str, Layout]:
    """Return the layouts of the parameters that are not plain, by name."""
    layouts: dict[str, Layout] = {}
    for name in names:
        matrix = matrix_name(name)
        layout = formats[matrix].layout if is_matrix(matrix) else None
        if layout is not None and not name.endswith(ORDER):
            layouts[name] = layout
    return layouts


def _plain_graph(graphdef: Any, state: Any) -> Any:
    """Return the structure that a model has if its matrices are in the plain layout."""
    copy = nnx.merge(graphdef, state)
    modules: list[Any] = [module for _, module in nnx.iter_modules(copy)]
    for module in modules:
        if isinstance(formats := getattr(module, "formats", None), MatrixFormats):
            module.formats = formats.plain
    return nnx.graphdef(copy)


def _one_device(arrays: list[jax.Array]) -> Any:
    device, *other_devices = set().union(*(x.devices() for x in arrays))
    if other_devices:
        raise ValueError(
            f"Engine: weights must be on one device, got weights on {1 + len(other_devices)} "
            "devices. Pass mesh= to divide weights and cache over several devices."
        )
    return device
