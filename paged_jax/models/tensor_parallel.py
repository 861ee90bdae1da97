"""Tensor parallelism: division of a model over the devices of a mesh.

Attention is divided by heads, an MLP by its intermediate features or its experts, and embeddings
and output head by tokens of the vocabulary (Megatron-LM, arXiv 1909.08053). `Parameter.divided` of
a part says which dimension of a parameter is divided. In `jax.shard_map`, each device runs a
smaller model with the config from `shard_config`. The hidden states are the same on all devices. If
there are fewer KV heads than devices, several devices hold the keys and values of the same head,
see `widen_config`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paged_jax.arguments import check_positive
from paged_jax.kernels.embedding import look_up
from paged_jax.kernels.linear import Weight
from paged_jax.kernels.weight_formats import count_inputs
from paged_jax.models.config import ModelConfig
from paged_jax.models.matrix_formats import MIN, ORDER, SCALE, MatrixFormats, is_matrix, matrix_name
from paged_jax.models.parts.part import Pieces

# Name of the mesh axis along which a model is divided over devices.
AXIS = "tp"

_OF_VOCABULARY = ("embed_tokens", "embed_tokens_per_layer", "lm_head")
Convert = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class DeviceShard:
    """Share of one device in a tensor-parallel model, with the necessary collectives.

    A layer needs two all-reduce sums, one after each projection into the residual stream, or only
    one if attention and MLP run in parallel. The embedding lookup needs another sum, and the logits
    are gathered. If norms are over all heads of a token, an all-reduce averages the mean squares of
    each token's queries and keys.

    Attributes:
      axis_name: mesh axis of the devices.
      vocab_size: vocabulary size (V) of the whole model.
      num_devices: number of devices on that axis.
    """

    axis_name: str
    vocab_size: int
    num_devices: int

    @property
    def index(self) -> jax.Array:
        """Index of this device on the mesh axis, i32 ``[]``."""
        return lax.axis_index(self.axis_name)

    def all_reduce_sum(self, x: jax.Array) -> jax.Array:
        """Return the sum of `x` over all devices."""
        return lax.psum(x, self.axis_name)

    def all_reduce_mean(self, x: jax.Array, group_size: int | None = None) -> jax.Array:
        """Return the mean over all devices, or over each group of `group_size` neighbours."""
        groups = np.arange(self.num_devices).reshape(-1, group_size or self.num_devices).tolist()
        return lax.pmean(x, self.axis_name, axis_index_groups=groups)

    def look_up(self, table: Weight, token_ids: jax.Array) -> jax.Array:
        """Look up embeddings in a table with rows divided over the devices.

        For the arguments, see `embedding.look_up`. `table` holds the rows of this device.
        """
        num_rows = table.shape[0]
        first = self.index * num_rows
        rows = jnp.clip(token_ids, 0, self.vocab_size - 1) - first
        is_here = (rows >= 0) & (rows < num_rows)
        embeddings = look_up(table, jnp.where(is_here, rows, 0))
        return self.all_reduce_sum(jnp.where(is_here[:, None], embeddings, 0))

    def gather_logits(self, logits: jax.Array) -> jax.Array:
        """Gather each device's part of the logits, and return all logits ``[..., V]``."""
        axis = logits.ndim - 1
        return lax.all_gather(logits, self.axis_name, axis=axis, tiled=True)[..., : self.vocab_size]


def widen_config(config: ModelConfig, num_devices: int) -> ModelConfig:
    """Return a config with repeated KV heads, so that each device has at least one head.

    The additional heads are copies, so the model computes the same function. With latent attention,
    each device keeps all latent vectors. Groups of heads of Mamba-2 are copied like KV heads.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2)
      >>> [widen_config(config, n).kv_shapes[0].num_kv_heads for n in (1, 2, 4, 8)]
      [2, 2, 4, 8]
    """
    return config.widen(num_devices)


def shard_config(function: str, config: ModelConfig, num_devices: int) -> ModelConfig:
    """Return the config of the model that each device runs.

    Args:
      function: function name for error messages.
      config: configuration of the whole model.
      num_devices: number of devices (N).

    Returns:
      The config with one device's number of heads, KV heads, intermediate features and vocabulary
      rows. The vocabulary is padded to a multiple of N. `num_experts` does not change, because the
      router on each device chooses among all experts.

    Raises:
      ValueError: the model cannot be divided by `num_devices`.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=510, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2)
      >>> shard = shard_config("plan", config, 4)
      >>> shard.layers[0].attention.num_heads, shard.kv_shapes[0].num_kv_heads
      (2, 1)
      >>> shard.vocab_size
      128
    """
    check_positive(function, tensor_parallel_size=num_devices)
    return config.divide(function, num_devices)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Placement of a model's parameters on the devices of a mesh.

    Parameters have two layouts. In the model layout, they have the shapes of the whole model, as
    they are loaded. In the program layout, they are passed to compiled programs. The layouts differ
    in two cases only. If there are fewer KV heads than devices, key and value rows are copied. If
    the vocabulary size is not a multiple of N, the vocabulary is padded. In these cases, both
    versions of a parameter are in memory while it is converted, for example when an engine starts
    or receives new weights.

    Attributes:
      mesh: mesh of the devices, with the single axis `AXIS`.
      config: configuration of the whole model.
    """

    mesh: Mesh
    config: ModelConfig

    @classmethod
    def create(cls, function: str, mesh: Mesh, config: ModelConfig) -> "TensorParallel":
        """Return the placement of a model that is divided over all devices of a mesh.

        `function` is the function name for error messages.

        Raises:
          ValueError: the model cannot be divided by the number of devices.
        """
        devices = np.asarray(mesh.devices).reshape(-1)
        shard_config(function, config, devices.size)
        return cls(Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,)), config)

    @property
    def num_devices(self) -> int:
        """Number of devices (N)."""
        return self.mesh.size

    @functools.cached_property
    def device_config(self) -> ModelConfig:
        """Configuration of the smaller model that each device runs."""
        return shard_config("TensorParallel", self.config, self.num_devices)

    @functools.cached_property
    def wide_config(self) -> ModelConfig:
        """Configuration of the whole model, with KV heads repeated as in `widen_config`."""
        return widen_config(self.config, self.num_devices)

    @property
    def shard(self) -> DeviceShard:
        """Argument `shard` of the model on each device. It is the same on all devices."""
        return DeviceShard(AXIS, self.config.vocab_size, self.num_devices)

    def model_sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a parameter in the model layout, given its name and shape."""
        kind, rank, divided = _kind(name), len(shape), self._divided(name)
        if (mesh := self._mesh_of_copies(name)) is not None:
            return NamedSharding(mesh, _divide(rank, rank - divided, "heads"))
        if kind in _OF_VOCABULARY and self._num_padding and not name.endswith(ORDER):
            # The vocabulary is not padded in the model layout, so it cannot be divided evenly.
            # Divide the last dimension instead, if its size is a multiple of the number of devices.
            if shape[-1] % self.num_devices:
                return NamedSharding(self.mesh, PartitionSpec())
            return NamedSharding(self.mesh, _divide(rank, rank - 1, AXIS))
        return NamedSharding(self.mesh, self.program_spec(name, shape))

    def program_spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the partition of a parameter in the program layout.

        The class docstring defines the two layouts. `shape` may be the shape in either of them.
        """
        rank, divided = len(shape), self._divided(name)
        if not divided or name.endswith(ORDER):
            return PartitionSpec()
        if name.endswith((SCALE, MIN)) and divided == 1 and shape[-1] == 1:
            return PartitionSpec()  # all devices need the single scale of a divided row
        return _divide(rank, rank - divided, AXIS)

    def check_formats(
        self, function: str, formats: MatrixFormats, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check that the formats allow the division of matrices along their inputs.

        Raises:
          ValueError: a device's part of a matrix would not consist of whole groups of inputs, or
            the inputs of a matrix are reordered.
        """
        for name, shape in shapes.items():
            format = formats[name]
            if self._divided(name) != 1 or not is_matrix(name):
                continue
            num_inputs = count_inputs(shape[-1], format.code)
            unit = format.unit
            if format.has_order or num_inputs // self.num_devices % unit:
                layout = "reordered" if format.has_order else f"stored in units of {unit}"
                raise ValueError(
                    f"{function}: tensor_parallel_size must divide the {num_inputs} inputs of "
                    f"{name}, which are {layout}, got {self.num_devices}. Load the model from its "
                    "files with this number of devices, or with dequantise=True."
                )

    def to_program_layout(self, name: str, x: jax.Array) -> jax.Array:
        """Convert a parameter with any sharding from the model layout to the program layout."""
        kind = _kind(name)
        sharding = self.model_sharding(name, x.shape)
        # If the sharding is equal already, device_put would return an alias of the same buffers, so
        # the parameter could not be donated later.
        if x.sharding != sharding:
            x = jax.device_put(x, sharding)
        if name.endswith(ORDER):
            return x
        if (mesh := self._mesh_of_copies(name)) is not None:
            widened = _widener(mesh, x.ndim - self._divided(name), self._pieces(name))(x)
            return jax.device_put(
                widened, NamedSharding(self.mesh, self.program_spec(name, x.shape))
            )
        if kind in _OF_VOCABULARY and self._num_padding:
            return _padder(self.mesh, self._num_padding)(x)
        return x

    def to_model_layout(self, name: str, x: jax.Array) -> jax.Array:
        """Convert a parameter from the program layout to the model layout."""
        kind = _kind(name)
        if name.endswith(ORDER):
            return x
        if (mesh := self._mesh_of_copies(name)) is not None:
            return _narrower(mesh, x.ndim - self._divided(name), self._pieces(name))(x)
        if kind in _OF_VOCABULARY and self._num_padding:
            shape = (self.config.vocab_size, *x.shape[1:])
            return _cutter(self.model_sharding(name, shape), self.config.vocab_size)(x)
        return x

    def _divided(self, name: str) -> int:
        """Return the dimension that is divided, counted from the end; 0 if there is none."""
        return self.config.parameter(name).divided or 0

    def _mesh_of_copies(self, name: str) -> Mesh | None:
        """Return a mesh with the axes "heads" and "copies" for a parameter with copied heads.

        The devices in a row of the mesh have copies of the same head.

        Returns:
          The mesh; None if every device has a different part of the parameter.
        """
        parameter, wide = self.config.parameter(name), self.wide_config.parameter(name)
        if parameter.pieces is None or parameter.divided is None:
            return None
        num_heads, num_copied = (variant.shape[-parameter.divided] for variant in (parameter, wide))
        if num_heads == num_copied:
            return None
        devices = np.asarray(self.mesh.devices).reshape(-1, num_copied // num_heads)
        return Mesh(devices, ("heads", "copies"), axis_types=(AxisType.Auto,) * 2)

    def _pieces(self, name: str) -> Pieces:
        """Return the pieces of a parameter with copied heads, along the dimension after the heads.

        Each copy of a head has all of some pieces (such as its keys), and a share of the others.
        """
        pieces = self.config.parameter(name).pieces
        assert pieces is not None
        return pieces

    @property
    def _num_padding(self) -> int:
        """Number of rows by which the vocabulary is padded to a multiple of `num_devices`."""
        return -self.config.vocab_size % self.num_devices


def divides_inputs(config: ModelConfig, name: str) -> bool:
    """Return whether a matrix of a model is divided along its inputs instead of its outputs."""
    return config.parameter(name).divided == 1


def _kind(name: str) -> str:
    """Return a parameter's name in its layer, without a suffix such as ``"_scale"``."""
    return matrix_name(name).rpartition(".")[2]


def _divide(rank: int, axis: int, name: str) -> PartitionSpec:
    return PartitionSpec(*(name if i == axis else None for i in range(rank)))


# The following functions return conversions, each compiled once per shape.


@functools.lru_cache
def _widener(mesh: Mesh, axis: int, pieces: Pieces) -> Convert:
    """Return a function that copies KV heads, or parts of recurrent layers, to several devices.

    It converts ``[K, rows, ...]`` to ``[N, fewer rows, ...]``: each copy has a share of the rows,
    see `TensorParallel._pieces`. No communication is necessary, because each device already holds
    the whole head.
    """

    def widen(x: jax.Array) -> jax.Array:
        arrays = _split(x, axis + 1, pieces, 1)
        for i, (_, is_kept) in enumerate(pieces):
            if not is_kept:
                num_rows = arrays[i].shape[axis + 1] // mesh.shape["copies"]
                start = lax.axis_index("copies") * num_rows
                arrays[i] = lax.dynamic_slice_in_dim(arrays[i], start, num_rows, axis + 1)
        return jnp.concatenate(arrays, axis + 1)

    narrow_spec, wide_spec = _specs_of_heads(axis)
    return jax.jit(
        jax.shard_map(widen, mesh=mesh, in_specs=narrow_spec, out_specs=wide_spec, check_vma=False)
    )


@functools.lru_cache
def _narrower(mesh: Mesh, axis: int, pieces: Pieces) -> Convert:
    """Return the inverse of the function that `_widener` returns for the same arguments."""

    def narrow(x: jax.Array) -> jax.Array:
        arrays = _split(x, axis + 1, pieces, mesh.shape["copies"])
        for i, (_, is_kept) in enumerate(pieces):
            if not is_kept:
                arrays[i] = lax.all_gather(arrays[i], "copies", axis=axis + 1, tiled=True)
        return jnp.concatenate(arrays, axis + 1)

    narrow_spec, wide_spec = _specs_of_heads(axis)
    return jax.jit(
        jax.shard_map(narrow, mesh=mesh, in_specs=wide_spec, out_specs=narrow_spec, check_vma=False)
    )


def _split(x: jax.Array, axis: int, pieces: Pieces, num_copies: int) -> list[jax.Array]:
    """Split a parameter, or one of its `num_copies` copies, into its pieces along `axis`."""
    counts = [rows and (rows if is_kept else rows // num_copies) for rows, is_kept in pieces]
    num_remaining = x.shape[axis] - sum(filter(None, counts))
    sizes = [num_remaining if count is None else count for count in counts]
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis)


def _specs_of_heads(axis: int) -> tuple[PartitionSpec, PartitionSpec]:
    before = [None] * axis
    return PartitionSpec(*before, "heads"), PartitionSpec(*before, ("heads", "copies"))


@functools.lru_cache
def _padder(mesh: Mesh, num_padding: int) -> Convert:
    return jax.jit(
        lambda x: jnp.pad(x, ((0, num_padding), *[(0, 0)] * (x.ndim - 1))),
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )


@functools.lru_cache
def _cutter(sharding: NamedSharding, vocab_size: int) -> Convert:
    return jax.jit(lambda x: x[:vocab_size], out_shardings=sharding)
