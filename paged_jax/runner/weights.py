"""The weights of a model where programs read them: on one device, or each device its part."""

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

from paged_jax.models.llama import Llama
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.tensor_parallel import AXIS, TensorParallel
from paged_jax.runner.decode_state import DecodeState

# Odd, so that a product with it loses no bit.
_FACTOR = np.uint32(0x9E3779B1)


class ReplicaError(RuntimeError):
    """Devices that must compute the same have not."""


def agree(tree: object, axis_name: str) -> jax.Array:
    """Whether a tree of arrays is the same, bit for bit, on all devices of an axis; bool ``[]``.

    Within `jax.shard_map`. A digest of 32 bits is compared: a single number that differs is found
    for certain, and of other differences all but one in 2^32.
    """
    digests = lax.all_gather(_digest(tree), axis_name)
    return jnp.all(digests == digests[0])


def _digest(tree: object) -> jax.Array:
    digest = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = _bits(jnp.asarray(leaf)).reshape(-1)
        places = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2) + jnp.uint32(1)
        digest = digest * _FACTOR + jnp.sum(bits * places, dtype=jnp.uint32)
    return digest


def _bits(x: jax.Array) -> jax.Array:
    """Each number as a uint32 of its own."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


# On each device all of it, or what belongs to its KV heads: of pools [L, P, K, C, D], of their
# scales [L, P, K, C], and of blocks in these shapes.
WHOLE = PartitionSpec()
OF_HEADS = PartitionSpec(None, None, AXIS)

Program = Callable[..., tuple[DecodeState, Any]]


class Division(NamedTuple):
    """How programs run on several devices; hashable.

    Attributes:
      mesh: the devices.
      weights: which part of each weight a device has, in the order of the model's flattened state.
      checks_replicas: whether programs compare what each device computes for itself.
    """

    mesh: Mesh
    weights: tuple[PartitionSpec, ...]
    checks_replicas: bool = False

    def divide(self, program: Program, *, last: PartitionSpec, result: PartitionSpec) -> Program:
        """A program ``(weights, state, *args) -> (state, result)`` of all devices from one of each.

        Args:
          program: what each device runs, on its parts.
          last: which part a device gets of the last of `args`; it gets all of the others.
          result: which part of the result a device has.

        Returns:
          The program. With `checks_replicas` its result is ``(result, ok)``: bool[], whether state,
          result and weights that are not divided are the same on all devices, where they should be.
        """
        results: Any = result
        if self.checks_replicas:
            has_parts = result != WHOLE
            program, results = _checked(program, self.weights, has_parts), (result, WHOLE)

        def divided(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
            places, parts = _parts(state), [WHOLE] * len(args)
            parts[-1:] = [last] * bool(args)
            return jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(list(self.weights), places, *parts),
                out_specs=(places, results),
                # JAX's check of what varies over the devices does not know our kernels.
                check_vma=False,
            )(weights, state, *args)

        return divided

    def shardings(self, state: DecodeState) -> DecodeState:
        """Where each array of a state goes."""
        return jax.tree.map(lambda part: NamedSharding(self.mesh, part), _parts(state))


def _checked(program: Program, parts: tuple[PartitionSpec, ...], has_parts: bool) -> Program:
    def checked(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
        state, result = program(weights, state, *args)
        no_pools = jax.tree.map(lambda _: None, state.cache.group_pools)
        same = dataclasses.replace(state, cache=state.cache.replace_group_pools(no_pools))
        # The few weights that are not divided, such as those of norms.
        shared = [w for w, part in zip(weights, parts, strict=True) if part == WHOLE]
        return state, (result, agree((same, shared, None if has_parts else result), AXIS))

    return checked


def _parts(state: DecodeState) -> Any:
    parts = jax.tree.map(lambda _: WHOLE, state)
    pools = jax.tree.map(lambda _: OF_HEADS, state.cache.group_pools)
    return dataclasses.replace(parts, cache=parts.cache.replace_group_pools(pools))


@dataclass(frozen=True, eq=False)
class Graph:
    """The structure of a module, a key of its programs though attributes of it have no hash.

    It equals itself alone, so that engines over such modules share no programs.

    Attributes:
      graphdef: the structure, as `nnx.split` gives it.
    """

    graphdef: Any

    @classmethod
    def key(cls, graphdef: Any) -> Any:
        """The structure itself if it has a hash, as our own modules have."""
        try:
            hash(graphdef)
        except TypeError:
            return cls(graphdef)
        return graphdef

    @staticmethod
    def merge(key: Any, state: Any) -> Any:
        """The module with some state, as `nnx.merge`."""
        return nnx.merge(key.graphdef if isinstance(key, Graph) else key, state)


class Weights:
    """The weights of a model, where programs read them.

    Args:
      model: the model.
      parallel: how it is divided over devices; None for one device.
      check_replicas: see `Engine`.

    Attributes:
      arrays: what programs read, in the order of the model's flattened state; empty while there
        are none.
      layout: shapes, types and places of the weights as the model has them, see `TensorParallel`.
      graphdef, treedef: the structure of the module that programs run, see `Graph.key`, and that
        of its weights.
      division: how programs run on several devices; None for one.
      config: the configuration of the model as programs see it, of all devices together.

    Raises:
      ValueError: the weights lie on several devices, and `parallel` is None.
    """

    def __init__(
        self,
        model: PagedModel,
        parallel: TensorParallel | None = None,
        *,
        check_replicas: bool = False,
    ):
        self._model_graphdef, state = nnx.split(model)
        arrays, self.treedef = jax.tree.flatten(state)
        self._parallel, self._names = parallel, list(named_arrays(state))
        if parallel is None:
            self.config, self.division = model.config, None
            self.graphdef = Graph.key(self._model_graphdef)
            places = [SingleDeviceSharding(_one_device(arrays))] * len(arrays)
            # Bound to where they are (nothing is copied), as everything that comes later will be: a
            # program is compiled once for arrays that are bound to a device and once for others.
            arrays = jax.device_put(arrays, places)
        else:
            assert isinstance(model, Llama), "other models are not divided"
            self.config = parallel.wide_config
            self.graphdef = nnx.graphdef(model.make_shard(parallel))
            named = list(zip(self._names, arrays, strict=True))
            specs = tuple(parallel.program_spec(name, x.ndim) for name, x in named)
            self.division = Division(parallel.mesh, specs, check_replicas)
            places = [parallel.model_sharding(name, x.shape) for name, x in named]
        self.layout = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(arrays, places, strict=True)
        ]
        self.replace(arrays)

    def replace(self, arrays: list[jax.Array]) -> None:
        """Take other weights, as the model has them; none where nothing is to run."""
        if not arrays:
            self.arrays = []
        elif self._parallel is None:
            self.arrays = list(arrays)
        else:
            named = zip(self._names, arrays, strict=True)
            self.arrays = [self._parallel.to_program_layout(name, x) for name, x in named]

    def update(self, function: Callable[[list[jax.Array]], list[jax.Array]]) -> None:
        """Take what a function makes of the weights as the model has them; it may donate them."""
        self.replace(function(self.originals))

    @property
    def originals(self) -> list[jax.Array]:
        """The arrays as the model has them."""
        if self._parallel is None or not self.arrays:
            return list(self.arrays)
        named = zip(self._names, self.arrays, strict=True)
        return [self._parallel.to_model_layout(name, x) for name, x in named]

    @property
    def model(self) -> PagedModel:
        """The model over its weights as they are now."""
        return self._over(self.originals)

    @property
    def layout_model(self) -> PagedModel:
        """The model over the `layout`, which has no weights."""
        return self._over(self.layout)

    @property
    def device(self) -> Any:
        """The `jax.Device` that has them, or one of those."""
        return next(iter(self.layout[0].sharding.addressable_devices))

    def bytes_on(self, device: Any) -> int:
        """Bytes that a device has of them."""
        shards = [shard for array in self.arrays for shard in array.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    def _over(self, leaves: list[Any]) -> PagedModel:
        return nnx.merge(self._model_graphdef, jax.tree.unflatten(self.treedef, leaves))


def _one_device(arrays: list[jax.Array]) -> Any:
    device, *others = set().union(*(x.devices() for x in arrays))
    if others:
        raise ValueError(
            f"Engine: weights must lie on one device, got {1 + len(others)}. Pass mesh= to divide "
            "them, and the cache, over several."
        )
    return device
