"""`Mixer`: base class of recurrent parts, which mix tokens by a state instead of attention.

A mixer projects the normalised hidden states, passes a `Recurrence` to `attend`, which runs it on
the states in the cache, and applies a gate to the output::

    x ---> projections ---> Recurrence: convolution, recurrence over a state ---> gate ---> out_proj
                |                                                                   ^
                +-------------------------------------------------------------------+

Most of its weights have a first dimension of K
key heads (or groups), so that weights and states can be divided over devices along K. In each of
them, G heads have their own state. Each kind of mixer has some of these parameters::

    mixer_in_proj     [K, rows, E]    inputs of the convolution and the gate of the output
    mixer_in_bias     [K, rows]       its bias
    mixer_gates_proj  [K, rows, E]    gates of each head
    mixer_rank_proj   [1, 2 * D, E]   first matrices of two low-rank projections, see the next two
    mixer_decay_proj  [K, D, D]       second matrix of the projection to the decay
    mixer_gate_proj   [K, D, D]       second matrix of the projection to the gate of the output
    mixer_out_proj    [E, values]                mixer_out_bias   [E]
    mixer_conv        [K, rows, 1, w]          mixer_conv_bias  [K, rows]
    mixer_decay       [K, G] or [1, 1, K, 1]   logarithm of the decay of each head
    mixer_time        [K, G] or [K, D]         bias of the time step
    mixer_skip        [K, G]                   factor of the input that is added to the output
    mixer_norm        [U] or [K, G * U]        norm of the output
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.exact import inverse_root, rounded, softplus
from paged_jax.kernels.linear import sum_rows
from paged_jax.kernels.norm_rope import ACTIVATIONS, add_bias, expand, rms_norm
from paged_jax.kernels.op import is_exact
from paged_jax.kernels.recurrent import causal_convolution
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.layer_attention import Recurrence, States
from paged_jax.models.layer_groups import StateShape
from paged_jax.models.parts.part import (
    LayerCall,
    Parameter,
    Part,
    Shape,
    matrix,
    multiply,
    ones,
    vector,
    zeros,
)
from paged_jax.models.tensor_mapping import ExpertLayout, Mappings, map_tensor

if TYPE_CHECKING:
    from flax import nnx

Arrays = tuple[jax.Array, ...]
# Names of the pieces of a fused parameter, and their numbers of rows.
NamedPieces = tuple[tuple[str, int], ...]

# Initial time step of ``mixer_time`` in a new model.
_TIME_STEP = 0.01
# Constant added to the sum of squares of queries and keys of the delta rule.
_L2_EPS = 1e-6
# Matrices that are not quantised, because they are small and their errors would accumulate in the
# state.
_FLOATS = ("mixer_gates_proj", "mixer_rank_proj", "mixer_decay_proj", "mixer_gate_proj")
# Dimension of each parameter that is divided over devices, counted from the end.
_DIVIDED = {
    "mixer_in_proj": 3,
    "mixer_gates_proj": 3,
    "mixer_decay_proj": 3,
    "mixer_gate_proj": 3,
    "mixer_out_proj": 1,
    "mixer_conv": 4,
    "mixer_in_bias": 2,
    "mixer_conv_bias": 2,
    "mixer_decay": 2,
    "mixer_time": 2,
    "mixer_skip": 2,
    "mixer_norm": 2,
}


def _initial_decay(rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
    """Return logarithms of decay rates between 1 and 16, as in Mamba-2."""
    return jnp.log(jax.random.uniform(rngs.params(), shape, minval=1.0, maxval=16.0)).astype(dtype)


def _initial_time(rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
    del rngs, dtype
    return jnp.full(shape, math.log(math.expm1(_TIME_STEP)))


def _initial_filters(rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape) * shape[-1] ** -0.5).astype(dtype)


# The parameters of the decay are always float32, because their errors accumulate in the state.
_VECTORS: Mapping[str, Callable[..., Parameter]] = {
    "mixer_decay": lambda *shape, **kwargs: vector(
        *shape, initial=_initial_decay, dtype="float32", **kwargs
    ),
    "mixer_time": lambda *shape, **kwargs: vector(
        *shape, initial=_initial_time, dtype="float32", **kwargs
    ),
    "mixer_conv": lambda *shape, **kwargs: vector(*shape, initial=_initial_filters, **kwargs),
}


class Mixed(NamedTuple):
    """Result of `Mixer.mix`: a recurrence, and the function to apply to its output.

    Attributes:
      recurrence: the recurrence, to be passed to `attend`.
      finish: function that converts the output of the recurrence to the input of
        ``mixer_out_proj``.
    """

    recurrence: Recurrence
    finish: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer(Part):
    """Base class of recurrent parts.

    Attributes:
      conv_width: width of the causal convolution in tokens (w).
      conv_bias: whether the convolution has a bias.
      conv_act: activation after the convolution.
      in_bias, out_bias: whether ``mixer_in_proj`` and ``mixer_out_proj`` have a bias.
      out_multiplier: factor of the output, as in muP.
    """

    conv_width: int
    conv_bias: bool = False
    conv_act: str = "silu"
    in_bias: bool = False
    out_bias: bool = False
    out_multiplier: float = 1.0

    # Fields that tensor parallelism divides by the number of devices. The first of them is K, see
    # `num_parts`.
    divided: ClassVar[tuple[str, ...]]
    # Noun in error messages for the parts that are divided over devices, such as "channels".
    part_name: ClassVar[str]
    # Names of the `pieces` that all heads of a group share. If these heads are divided over several
    # devices, each device has a copy of these pieces, see `widen`.
    shared_pieces: ClassVar[frozenset[str]] = frozenset()

    can_stack = False

    def __post_init__(self) -> None:
        if self.conv_act not in ACTIVATIONS:
            raise UnsupportedConfigError(
                "LlamaConfig: the activation of convolutions must be one of "
                f"{', '.join(ACTIVATIONS)}, got {self.conv_act!r}."
            )

    def mix(self, x: jax.Array, call: LayerCall) -> Mixed:
        """Project normalised inputs ``x [..., E]`` to the inputs of the recurrence.

        The recurrence is returned, but not run.
        """
        raise NotImplementedError

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the recurrence, see `Part.__call__`."""
        mixed = self.mix(x, call)
        out, carry = call.attend(call.index, mixed.recurrence, carry)
        out = call.project_out(mixed.finish(out), "mixer_out")
        return rounded(multiply(out, self.out_multiplier), call.backend), carry

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        return {
            name: self._parameter(name, shape) for name, shape in self.shapes(hidden_size).items()
        }

    def _parameter(self, name: str, shape: Shape) -> Parameter:
        divided = _DIVIDED.get(name, 0)
        options: dict[str, Any] = {"divided": divided if 0 < divided <= len(shape) else None}
        if options["divided"] and divided > 1:
            named = self.pieces.get(name, (("", None),))
            options["pieces"] = tuple((rows, piece in self.shared_pieces) for piece, rows in named)
        if name.endswith("_proj"):
            return matrix(
                *shape,
                is_output=name == "mixer_out_proj",
                stays_float=name in _FLOATS,
                **options,
            )
        initial = zeros if name.endswith("_bias") else ones
        make = _VECTORS.get(
            name, lambda *shape, **kwargs: vector(*shape, initial=initial, **kwargs)
        )
        return make(*shape, **options)

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, see `Part.tensors`.

        A parameter is stored as one tensor, or in several pieces. Each piece is a tensor, or
        consecutive rows of a tensor, see `Family.tensors`.
        """
        del layout
        mappings: dict[str, Mappings] = {}
        for name, shape in self.shapes(hidden_size).items():
            # Files flatten vectors that are not 4-D.
            inner_shape = shape[1:] if len(shape) == 4 else ()
            if name == "mixer_conv" or name.endswith("_proj"):
                inner_shape = shape[-1:] if name.endswith("_proj") else shape[-2:]
            if name in names:
                rows = math.prod(shape) // math.prod(inner_shape)
                mappings[name] = (map_tensor(names[name], (rows, *inner_shape), shape),)
                continue
            K, first, boxes = shape[0], 0, []
            of_all = names.get(f"{name}.*", "")
            pieces = [
                (names.get(f"{name}.{piece}", of_all.replace("*", piece)), rows)
                for piece, rows in self.pieces[name]
            ]
            for index, (tensor, rows) in enumerate(pieces):
                before, total = (
                    K * sum(num_rows for piece_tensor, num_rows in subset if piece_tensor == tensor)
                    for subset in (pieces[:index], pieces)
                )
                start = (0, first, *[0] * len(inner_shape))
                box = (K, rows, *inner_shape)
                boxes.append(
                    map_tensor(tensor, (total, *inner_shape), box, start, first_row=before)
                )
                first += rows
            mappings[name] = tuple(boxes)
        return mappings

    def shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shape of each parameter by name, for hidden states of size E."""
        shapes = dict(self._shapes(hidden_size))
        if self.in_bias:
            shapes["mixer_in_bias"] = shapes["mixer_in_proj"][:2]
        if self.conv_bias:
            shapes["mixer_conv_bias"] = shapes["mixer_conv"][:2]
        if self.out_bias:
            shapes["mixer_out_bias"] = (hidden_size,)
        return shapes

    def _shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shape of each parameter by name. Biases of the matrices are not included."""
        raise NotImplementedError

    @property
    def pieces(self) -> Mapping[str, NamedPieces]:
        """NamedPieces of each fused parameter: the name of each piece, and its number of rows.

        Rows are counted for a single key head, group or channel, see `num_parts`. Files may store
        the pieces as separate tensors.
        """
        pieces = dict(self._pieces)
        biases = {"mixer_in_proj": "mixer_in_bias", "mixer_conv": "mixer_conv_bias"}
        return pieces | {
            biases[name]: piece_rows for name, piece_rows in pieces.items() if name in biases
        }

    @property
    def _pieces(self) -> Mapping[str, NamedPieces]:
        """Like `pieces`, but without the entries for biases."""
        raise NotImplementedError

    @property
    def state_shape(self) -> Shape | None:
        """Shape of the float32 state of a sequence; None if the layer has only a convolution."""
        return None

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays that a layer keeps per sequence: last inputs of the convolution, and the state."""
        num_channels = math.prod(self.shapes(1)["mixer_conv"][:2])
        # A single dimension, because devices would pad a dimension of three tokens to eight.
        conv = StateShape("conv", ((self.conv_width - 1) * num_channels,), None)
        if self.state_shape is None:
            return (conv,)
        return conv, StateShape("state", self.state_shape, "float32")

    @property
    def num_parts(self) -> int:
        """Number of parts (K) into which a layer can be divided: key heads, groups or channels."""
        return getattr(self, self.divided[0])

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the parts (K) can be divided evenly over `num_devices` devices.

        Raises:
          ValueError: K is not a multiple of `num_devices`.
        """
        if self.num_parts % num_devices:
            raise ValueError(
                f"{function}: tensor_parallel_size must divide the {self.num_parts} "
                f"{self.part_name} of recurrent layers, got {num_devices}."
            )

    def widen(self, num_devices: int) -> Self:
        """Return sizes with copies of parts, so that each device has at least one part.

        If this kind of layer does not support copies of its parts, return the same sizes.
        """
        del num_devices
        return self

    def divide(self, num_devices: int) -> Self:
        """Return the sizes of the share of one device. `num_devices` must divide `num_parts`."""
        sizes = {name: getattr(self, name) // num_devices for name in self.divided}
        return dataclasses.replace(self, **sizes)

    def project_in(self, x: jax.Array, call: LayerCall) -> jax.Array:
        """Return ``[..., K, rows]``, the result of ``mixer_in_proj`` with its bias, if any."""
        projected, bias = call.linear(x, "mixer_in_proj"), call.optional("mixer_in_bias")
        return projected if bias is None else add_bias(projected, bias)

    def convolved(
        self,
        call: LayerCall,
        inputs: Arrays,
        run: Callable[[jax.Array, Arrays, Any, jax.Array], Any],
    ) -> Recurrence:
        """Return a recurrence that applies a convolution to its first input, and then calls `run`.

        `inputs` are arrays ``[..., heads, n]``. `run` takes four arguments: the first input, to
        which the convolution and its activation have been applied; a tuple of the other inputs; the
        state; and the number of tokens of each row. It gets inputs of the shape
        ``[B, T, heads * n]``. It returns the outputs ``[B, T, ...]`` and the new state.
        """

        def advance(
            inputs: Arrays, states: States, num_tokens: jax.Array
        ) -> tuple[jax.Array, States]:
            filters = float32(call, "mixer_conv").reshape(-1, self.conv_width)
            bias = self.convolution_bias(call)
            out, conv = causal_convolution(inputs[0], states[0], filters, bias, num_tokens)
            activated = ACTIVATIONS[self.conv_act](out)
            out, state = run(activated, inputs[1:], states[1], num_tokens)
            return out.reshape(*out.shape[:2], -1), (conv, state)

        flat = tuple(x.reshape(*x.shape[:-2], -1) for x in inputs)
        return Recurrence(flat, advance, self.states, takes_rows=True)

    def convolution_bias(self, call: LayerCall) -> jax.Array | None:
        """Return the bias of the convolution, float32 ``[channels]``; None without."""
        return float32(call, "mixer_conv_bias").reshape(-1) if self.conv_bias else None


def float32(call: LayerCall, name: str) -> jax.Array:
    """Return a parameter as float32."""
    return call.vector(name).astype(jnp.float32)


def normalise(x: jax.Array, backend: str | None) -> jax.Array:
    """Divide vectors ``[..., D]`` by their lengths."""
    squares = jnp.square(x)
    if is_exact(backend):
        total = sum_rows(squares, backend=backend)
    else:
        total = jnp.sum(squares, axis=-1, keepdims=True)
    return x * inverse_root(total + _L2_EPS, backend)


def log_decay(call: LayerCall, steps: jax.Array) -> jax.Array:
    """Return the logarithm of the decay for the projected time steps ``[..., K, n]``.

    The softplus of the time steps is applied here.
    """
    rates = jnp.exp(float32(call, "mixer_decay")).reshape(steps.shape[-2], -1)
    return -expand(rates, steps.ndim) * softplus(steps, call.backend)


def gated_norm(out: jax.Array, gate: jax.Array, call: LayerCall, eps: float) -> jax.Array:
    """Normalise each head of ``[..., heads * U]``, and multiply it by ``gate [..., heads, U]``."""
    heads = out.reshape(gate.shape)
    normed = rms_norm(
        heads,
        float32(call, "mixer_norm"),
        eps,
        num_heads=heads.shape[-2],
        backend=call.backend,
    )
    return (normed * gate).reshape(out.shape)
