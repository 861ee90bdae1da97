"""`Part`: the contract of everything that a decoder layer is made of.

A part is a frozen dataclass with its sizes and options. Its methods describe its parameters, their
tensors in checkpoints, its division over devices and what it keeps in the cache, and
``part(x, call, carry)`` runs it. All other code derives what it needs from these methods, so that a
new kind of part is a single file.

The parameters of all parts of a layer are attributes of one module, `layer.Layer`, under the names
that `Part.parameters` returns. A part reads them from the `LayerCall`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.norm_rope import add_bias
from paged_jax.models.layer_attention import Attend, Reach
from paged_jax.models.layer_groups import KVShape, StateShape
from paged_jax.models.matrices import LayerParameters
from paged_jax.models.rope import QueryScale, Rope, Rotation, RotationKind
from paged_jax.models.tensor_mapping import ExpertLayout, Mappings, find_name, map_tensor

if TYPE_CHECKING:
    from flax import nnx

Shape = tuple[int, ...]

# Function that returns the initial values of a parameter, given random keys, its shape and dtype.
Initial = Callable[["nnx.Rngs", Shape, DTypeLike], jax.Array]

# Pieces of a parameter along the dimension after its heads. The int is the number of rows of a
# piece; None for all rows that are in no other piece. The bool matters if several devices have the
# same head: if it is True, each of them has all rows of the piece; otherwise, they divide the rows.
Pieces = tuple[tuple[int | None, bool], ...]


def zeros(rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
    """Return zeros, see `Initial`."""
    del rngs
    return jnp.zeros(shape, dtype)


def ones(rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
    """Return ones, see `Initial`."""
    del rngs
    return jnp.ones(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution, see `Initial`.

    Attributes:
      deviation: standard deviation.
    """

    deviation: float

    def __call__(self, rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
        """Return the values."""
        return jax.nn.initializers.normal(self.deviation)(rngs.params(), shape, dtype)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Description of a parameter of a part. Create it with `matrix` or `vector`.

    Attributes:
      shape: its shape, of any rank. The last dimension of a matrix is its inputs.
      initial: its initial values; None for a matrix, whose values are drawn from a normal
        distribution.
      divided: dimension that tensor parallelism divides over the devices, counted from the end (1
        is the last dimension); None if each device has a copy.
      pieces: if there are fewer heads than devices, and several devices therefore have the same
        head, how they share its rows; None if the parameter is not divided by such heads.
      is_output: whether the matrix projects into the residual stream. Its initial values are
        smaller, so that the variance of the residual stream does not grow with the number of layers
        (GPT-2, section 2.3).
      stays_float: whether the option `dtype` never quantises the matrix.
      is_read_as_floats: whether the forward pass also reads the elements of the matrix, instead of
        only multiplying by it.
      dtype: dtype, if it is not that of the model.
      is_trained: whether the loss of a model depends on the parameter through its gradient.
    """

    shape: Shape
    initial: Initial | None = None
    divided: int | None = None
    pieces: Pieces | None = None
    is_output: bool = False
    stays_float: bool = False
    is_read_as_floats: bool = False
    dtype: str | None = None
    is_trained: bool = True

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a weight matrix, which may be quantised."""
        return self.initial is None


def matrix(
    *shape: int,
    divided: int | None = None,
    pieces: Pieces | None = None,
    is_output: bool = False,
    stays_float: bool = False,
    is_read_as_floats: bool = False,
) -> Parameter:
    """Describe a weight matrix ``[out, in]``, where `out` may be several dimensions.

    The name of a matrix ends with ``_proj``, see `matrix_formats.is_matrix`.
    """
    return Parameter(
        shape,
        None,
        divided,
        pieces,
        is_output=is_output,
        stays_float=stays_float,
        is_read_as_floats=is_read_as_floats,
    )


def vector(
    *shape: int,
    initial: Initial = zeros,
    divided: int | None = None,
    pieces: Pieces | None = None,
    dtype: str | None = None,
    is_trained: bool = True,
) -> Parameter:
    """Describe a parameter that is not a matrix: a bias, a norm's weight, a scalar."""
    return Parameter(shape, initial, divided, pieces, dtype=dtype, is_trained=is_trained)


@dataclasses.dataclass(frozen=True)
class LayerCall(LayerParameters):
    """A layer's parameters, and everything else that its parts read during a forward pass.

    `LayerParameters` has the methods `linear`, `matrix` and `vector`, and the index of the layer,
    which is traced in a scan.

    Attributes:
      attend: function that computes the attention or the recurrence of a layer with the cache, see
        `layer_attention.Attend`. Pass it the `index` of this layer.
      positions: i32 ``[...]``, position of each token in its sequence; -1 for padding.
      rotation: rotation of queries and keys; None in layers without attention.
      is_token: bool ``[...]``, False for padding tokens, which use no expert; None if there is no
        padding.
      per_layer_input: float32 ``[..., d]``, this layer's embedding of each token; None in models
        without per-layer embeddings.
    """

    attend: Attend[Any]
    positions: jax.Array
    rotation: Rotation | None
    is_token: jax.Array | None = None
    per_layer_input: jax.Array | None = None

    @property
    def shard(self) -> Any:
        """This device's share of a tensor-parallel model, a `DeviceShard`; None without."""
        return self.layer.shard

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sum the partial results of all devices."""
        return x if self.shard is None else self.shard.all_reduce_sum(x)

    @property
    def mean_over_devices(self) -> Callable[[jax.Array], jax.Array] | None:
        """Function that returns the mean of its argument over all devices; None for one device."""
        return None if self.shard is None else self.shard.all_reduce_mean

    def project_out(self, x: jax.Array, name: str) -> jax.Array:
        """Multiply `x` by the matrix ``{name}_proj``, and add ``{name}_bias`` if there is one.

        The results of all devices will be added. So each device adds only its share of the bias.
        """
        out, bias = self.linear(x, f"{name}_proj"), self.optional(f"{name}_bias")
        if bias is None:
            return out
        num_devices = 1 if self.shard is None else self.shard.num_devices
        return add_bias(out, bias.astype(jnp.float32) / num_devices)


class Part:
    """Base class of the parts of a layer. Subclasses are frozen dataclasses.

    Hidden states have E elements (`hidden_size`). A part has no size of its own for them.
    """

    # Tensor name of each parameter in most checkpoints, without the prefix of the layer. Some
    # parameters consist of several tensors with names of their own. A family may use other names.
    tensor_names: ClassVar[Mapping[str, str]] = {}
    # Tensor name in most GGUF files of each parameter or piece, without the prefix of the layer.
    gguf_names: ClassVar[Mapping[str, str]] = {}
    # Whether layers with this part can be stacked, so that a scan runs over them.
    can_stack: ClassVar[bool] = True

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the part.

        Args:
          x: float32 ``[..., E]``, normalised hidden states (or for the steps of a layer, see
            `LayerSpec`, the residual stream).
          call: parameters, and everything else that parts read.
          carry: state that is passed to ``call.attend`` and returned by it, such as the pools.

        Returns:
          float32 ``[..., E]``, and the new carry. With tensor parallelism, the output of a part
          that is not a step is only this device's partial result. The caller adds the results of
          all devices.
        """
        raise NotImplementedError

    def add_bias(self, out: jax.Array, call: LayerCall) -> jax.Array:
        """Add a bias to the sum of the devices' results; without such a bias, return the sum."""
        del call
        return out

    @property
    def inner(self) -> tuple["Part", ...]:
        """Parts inside of this part."""
        return ()

    def walk(self) -> Iterator["Part"]:
        """Yield the part itself and all parts inside of it."""
        yield self
        for part in self.inner:
            yield from part.walk()

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the part's parameters by name, without those of the parts inside of it."""
        del hidden_size
        return {}

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, by the name of the parameter.

        By default, each parameter is a tensor of the same shape. Parameters that are in no file may
        be included.

        Args:
          hidden_size: size of hidden states (E).
          names: tensor names: `tensor_names`, replaced by the names of the family.
          layout: how the files store experts.
        """
        del layout
        return self.map_others({}, hidden_size, names)

    def name_pieces(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Return the tensor name of each piece in `gguf_names` that checkpoints store separately.

        `names` are the names of the part and the family, as in `tensors`. A * in the result stands
        for the number of an expert.
        """
        return names

    def map_others(
        self, mappings: Mapping[str, Mappings], hidden_size: int, names: Mapping[str, str]
    ) -> dict[str, Mappings]:
        """Complete mappings: each other parameter is a tensor of the same shape.

        For the names of biases, see `find_name`.
        """
        unmapped = {
            name: (map_tensor(find_name(names, name), parameter.shape),)
            for name, parameter in self.parameters(hidden_size).items()
            if name not in mappings
        }
        return {**mappings, **unmapped}

    @property
    def kv(self) -> KVShape | None:
        """Shape of a token's keys and values, which the part writes to or reads from the cache."""
        return None

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays that the part keeps in the cache for each sequence."""
        return ()

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the part can be divided over `num_devices` devices.

        Raises:
          ValueError: it cannot. The message begins with `function`.
        """
        for part in self.inner:
            part.check_divides(function, num_devices)

    def widen(self, num_devices: int) -> Self:
        """Return the part with copies of heads, so that each device has at least one of each kind.

        It computes the same function.
        """
        return self.map_inner(lambda part: part.widen(num_devices))

    def divide(self, num_devices: int) -> Self:
        """Return one device's share of the part, which is the result of `widen`."""
        return self.map_inner(lambda part: part.divide(num_devices))

    def map_inner(self, function: Callable[["Part"], "Part"]) -> Self:
        """Replace each part inside of this part."""
        assert not self.inner, "parts that have other parts define this method"
        return self

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the number of values per token in each all-reduce sum of the part itself.

        The sum over the outputs is not included. `self` is the part of the whole model.
        """
        del hidden_size, num_devices
        return []

    def num_features(self, hidden_size: int) -> int:
        """Return the number of activations per token at the same time, to plan memory."""
        del hidden_size
        return 0


class AttentionPart(Part):
    """Base class of parts that pass queries, keys and values to ``call.attend``.

    The heads of the cache, `kv`, need not be those of the files: a part may pass wider or fewer
    heads. Attributes that are the same in all layers may be class attributes.

    Attributes:
      num_heads: number of query heads (H).
      rope: rotary embedding, which determines ``call.rotation``; None for no rotation.
      head_dim: number of elements that the rotation is for (D).
      query_scale: factor of queries that depends on their position; None for 1.
      source: index of an earlier layer whose keys and values this layer reads; None if it computes
        its own.
    """

    num_heads: int
    rope: Rope | None
    head_dim: int
    query_scale: QueryScale | None
    source: int | None

    @property
    def rotation(self) -> RotationKind:
        """Arguments of `rope.all_rotations` for this layer."""
        return self.rope, self.head_dim, self.query_scale

    @property
    def kv(self) -> KVShape:
        """Shape of a token's keys and values."""
        raise NotImplementedError

    @property
    def reach(self) -> Reach:
        """Limits on the tokens that a query attends to."""
        raise NotImplementedError

    @property
    def can_stack(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether layers can be stacked: a layer in a scan cannot read another layer's keys."""
        return self.source is None


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Return ``x * factor``, or `x` itself if the factor is 1."""
    return x if factor == 1 else x * factor


def check_factor(name: str, **factors: float | None) -> None:
    """Check that factors are positive and finite; None is allowed.

    Raises:
      ValueError: a factor is not. The message begins with `name`.
    """
    for key, factor in factors.items():
        if factor is not None and not (
            isinstance(factor, int | float) and math.isfinite(factor) and factor > 0
        ):
            raise ValueError(f"{name}: {key} must be positive, got {factor!r}.")


def check_divisible(function: str, num_devices: int, **sizes: int) -> None:
    """Check that sizes are multiples of the number of devices.

    Raises:
      ValueError: a size is not. The message begins with `function` and names the size.
    """
    for name, size in sizes.items():
        if size % num_devices:
            raise ValueError(
                f"{function}: tensor_parallel_size must divide the model's {name}, {size}, got "
                f"{num_devices}."
            )
