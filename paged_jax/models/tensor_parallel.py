"""How a model is divided over the devices of a mesh: where its weights go, what each computes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama
from paged_jax.models.part import Part
from paged_jax.models.shards import shard_config, widen_config
from paged_jax.models.weight import weight_dtype

# The axis of the devices, in meshes of our own.
AXIS = "tp"

# Of each parameter the dimension that is divided, counted from the last one, so that it does not
# matter whether layers are stacked. All others are whole on each device, as are norms of single
# heads.
_DIVIDED = {
    "qkv_proj": 4,
    "qkv_proj_scale": 3,
    "qkv_bias": 3,
    "q_norm": 3,
    "k_norm": 2,
    "o_proj": 1,
    "gate_up_proj": 2,
    "gate_up_proj_scale": 1,
    "down_proj": 1,
    "experts_gate_up_proj": 4,
    "experts_gate_up_bias": 3,
    "experts_down_proj": 3,
    "experts_down_bias": 2,
    "sinks": 1,
    "embed_tokens": 2,
    "embed_tokens_scale": 1,
    "lm_head": 2,
    "lm_head_scale": 1,
}
# Of those that are divided by KV heads, how many rows each device with the head has, of the next
# dimension: the key and the value, or all (None). The others, its queries, are divided further.
_OF_HEADS = {"qkv_proj": 2, "qkv_proj_scale": 2, "qkv_bias": 2, "q_norm": 0, "k_norm": None}
_OF_VOCABULARY = ("embed_tokens", "embed_tokens_scale", "lm_head", "lm_head_scale")


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """A model of a configuration, divided over the devices of a mesh.

    Parameters lie in one of two ways. As the model has them, `placement` divides them, and so they
    are loaded. As programs read them, see `lay_out`: the same arrays, unless there are fewer KV
    heads than devices, whose keys and values are then repeated, or the vocabulary is no multiple of
    the devices, which is then padded. Such parameters lie in both ways while they are brought from
    one to the other, as when an engine is made or gets new weights.

    Attributes:
      mesh: the devices, along the one axis `AXIS`.
      config: the configuration of the whole model.
    """

    mesh: Mesh
    config: LlamaConfig

    @classmethod
    def over(cls, function: str, mesh: Mesh, config: LlamaConfig) -> "TensorParallel":
        """Divide a model over all devices of a mesh, whatever its axes.

        Args:
          function: the name that an error begins with.
          mesh: the devices.
          config: the configuration of the model.

        Raises:
          ValueError: the model cannot be divided by the number of devices.
        """
        devices = np.asarray(mesh.devices).reshape(-1)
        shard_config(function, config, devices.size)
        return cls(Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,)), config)

    @property
    def num_devices(self) -> int:
        """N, devices that compute the model together."""
        return self.mesh.size

    @functools.cached_property
    def shard(self) -> LlamaConfig:
        """The configuration of what one device computes."""
        return shard_config("TensorParallel", self.config, self.num_devices)

    @functools.cached_property
    def wide(self) -> LlamaConfig:
        """The configuration with as many KV heads as devices, at least."""
        return widen_config(self.config, self.num_devices)

    def model_of_part(self, model: Llama) -> Llama:
        """The model, without weights, that each device runs on its part of them."""
        return nnx.eval_shape(
            lambda: Llama(
                self.shard,
                dtype=weight_dtype(model),
                scan_layers=model.scan_layers,
                part=Part(AXIS, self.config.vocab_size, self.num_devices),
                rngs=nnx.Rngs(0),
            )
        )

    # Parameters as the model has them

    def placement(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where a parameter goes, as the model has it.

        Args:
          name: its name, such as ``"layers.0.qkv_proj"``, or ``"layers.qkv_proj"`` when stacked.
          shape: its shape.
        """
        kind, rank = _kind(name), len(shape)
        if self._is_copied(kind):
            spec = _divide(rank, rank - _DIVIDED[kind], "heads")
            return NamedSharding(self._mesh_of_heads, spec)
        if kind in _OF_VOCABULARY and self._num_padding:
            # No dimension but this one may be divided as it is, and that only for a while.
            if rank == 1 or shape[-1] % self.num_devices:
                return NamedSharding(self.mesh, PartitionSpec())
            return NamedSharding(self.mesh, _divide(rank, rank - 1, AXIS))
        return NamedSharding(self.mesh, self.spec(name, rank))

    # Parameters as programs read them

    def spec(self, name: str, rank: int) -> PartitionSpec:
        """Which dimension of a parameter is divided, as programs read it."""
        kind = _kind(name)
        if not self._is_divided(kind):
            return PartitionSpec()
        return _divide(rank, rank - _DIVIDED[kind], AXIS)

    def lay_out(self, name: str, x: jax.Array) -> jax.Array:
        """A parameter as programs read it, from one as the model has it, wherever that lies."""
        kind = _kind(name)
        place = self.placement(name, x.shape)
        if x.sharding != place:  # else it may be donated later, which another array of it is not
            x = jax.device_put(x, place)
        if self._is_copied(kind):
            axis = x.ndim - _DIVIDED[kind]
            wide = _widener(self._mesh_of_heads, axis, _OF_HEADS[kind])(x)
            return jax.device_put(wide, NamedSharding(self.mesh, self.spec(name, x.ndim)))
        if kind in _OF_VOCABULARY and self._num_padding:
            return _padder(self.mesh, self._num_padding)(x)
        return x

    def restore(self, name: str, x: jax.Array) -> jax.Array:
        """A parameter as the model has it, from one of `lay_out`."""
        kind = _kind(name)
        if self._is_copied(kind):
            axis = x.ndim - _DIVIDED[kind]
            return _narrower(self._mesh_of_heads, axis, _OF_HEADS[kind])(x)
        if kind in _OF_VOCABULARY and self._num_padding:
            shape = (self.config.vocab_size, *x.shape[1:])
            return _cutter(self.placement(name, shape), self.config.vocab_size)(x)
        return x

    def _is_divided(self, kind: str) -> bool:
        is_of_one_head = kind.endswith("_norm") and self.config.qk_norm_scope == "head"
        return kind in _DIVIDED and not is_of_one_head

    def _is_copied(self, kind: str) -> bool:
        return kind in _OF_HEADS and self._num_copies > 1 and self._is_divided(kind)

    @property
    def _num_copies(self) -> int:
        """Devices that have the same KV head."""
        return self.wide.num_key_value_heads // self.config.num_key_value_heads

    @property
    def _num_padding(self) -> int:
        """Rows that the vocabulary gets, so that it can be divided."""
        return -self.config.vocab_size % self.num_devices

    @property
    def _mesh_of_heads(self) -> Mesh:
        """The same devices: those with the same KV head lie along the second axis."""
        devices = np.asarray(self.mesh.devices).reshape(-1, self._num_copies)
        return Mesh(devices, ("heads", "copies"), axis_types=(AxisType.Auto,) * 2)


def parameter_names(state: Any) -> list[str]:
    """The names of the leaves of an ``nnx.state``, in their order, such as ``layers.0.o_proj``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return [
        ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        for path, _ in paths
    ]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _divide(rank: int, axis: int, name: str) -> PartitionSpec:
    return PartitionSpec(*(name if i == axis else None for i in range(rank)))


# Each of these is one program a shape.


@functools.lru_cache
def _widener(mesh: Mesh, axis: int, num_kept: int | None) -> Any:
    """From ``[K, G + kept, ...]`` to ``[N, G / copies + kept, ...]``: K and V to each copy.

    Nothing is sent: a device has its KV head with all queries of that, and keeps its own.
    """

    def widen(x: jax.Array) -> jax.Array:
        queries, rest = _split(x, axis + 1, num_kept)
        num_queries = queries.shape[axis + 1] // mesh.shape["copies"]
        start = lax.axis_index("copies") * num_queries
        queries = lax.dynamic_slice_in_dim(queries, start, num_queries, axis + 1)
        return jnp.concatenate([queries, rest], axis + 1)

    narrow_spec, wide_spec = _specs_of_heads(axis)
    return jax.jit(
        jax.shard_map(widen, mesh=mesh, in_specs=narrow_spec, out_specs=wide_spec, check_vma=False)
    )


@functools.lru_cache
def _narrower(mesh: Mesh, axis: int, num_kept: int | None) -> Any:
    """The inverse of `_widener`."""

    def narrow(x: jax.Array) -> jax.Array:
        if num_kept is None:
            return x
        queries, rest = _split(x, axis + 1, num_kept)
        queries = lax.all_gather(queries, "copies", axis=axis + 1, tiled=True)
        return jnp.concatenate([queries, rest], axis + 1)

    narrow_spec, wide_spec = _specs_of_heads(axis)
    return jax.jit(
        jax.shard_map(narrow, mesh=mesh, in_specs=wide_spec, out_specs=narrow_spec, check_vma=False)
    )


def _split(x: jax.Array, axis: int, num_kept: int | None) -> list[jax.Array]:
    """The queries of a head, and what each device with that head has."""
    num_queries = 0 if num_kept is None else x.shape[axis] - num_kept
    return jnp.split(x, [num_queries], axis)


def _specs_of_heads(axis: int) -> tuple[PartitionSpec, PartitionSpec]:
    before = [None] * axis
    return PartitionSpec(*before, "heads"), PartitionSpec(*before, ("heads", "copies"))


@functools.lru_cache
def _padder(mesh: Mesh, num_padding: int) -> Any:
    return jax.jit(
        lambda x: jnp.pad(x, ((0, num_padding), *[(0, 0)] * (x.ndim - 1))),
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )


@functools.lru_cache
def _cutter(placement: NamedSharding, vocab_size: int) -> Any:
    return jax.jit(lambda x: x[:vocab_size], out_shardings=placement)
