"""Sizes, states and parameters of recurrent layers.

This module does not import JAX, because the scheduler uses it.

A mixer replaces attention in a layer, see `mixers`. Most of its weights have a first dimension of K
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
from collections.abc import Mapping
from typing import ClassVar, Self

from paged_jax.models.layer_groups import StateShape

Shape = tuple[int, ...]
Pieces = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer:
    """Base class for the sizes and options of a kind of recurrent layer.

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
    parts: ClassVar[str]
    # Names of the `pieces` that all heads of a group share. If these heads are divided over several
    # devices, each device has a copy of these pieces, see `widen`.
    shared_pieces: ClassVar[frozenset[str]] = frozenset()

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
    def pieces(self) -> Mapping[str, Pieces]:
        """Pieces of each fused parameter: the name of each piece, and its number of rows.

        Rows are counted for a single key head, group or channel, see `num_parts`. Files may store
        the pieces as separate tensors.
        """
        pieces = dict(self._pieces)
        biases = {"mixer_in_proj": "mixer_in_bias", "mixer_conv": "mixer_conv_bias"}
        return pieces | {biases[name]: each for name, each in pieces.items() if name in biases}

    @property
    def _pieces(self) -> Mapping[str, Pieces]:
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
                f"{function}: tensor_parallel_size must divide the {self.num_parts} {self.parts} "
                f"of recurrent layers, got {num_devices}."
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvolution(Mixer):
    """Gated short convolution of LFM2: ``c * convolution(b * x)``.

    Attributes:
      num_channels: number of channels (F).
    """

    num_channels: int

    divided = ("num_channels",)
    parts = "channels"

    def _shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        F = self.num_channels
        return {
            "mixer_in_proj": (F, 3, hidden_size),
            "mixer_out_proj": (hidden_size, F),
            "mixer_conv": (F, 1, 1, self.conv_width),
        }

    @property
    def _pieces(self) -> Mapping[str, Pieces]:
        return {"mixer_in_proj": (("b", 1), ("c", 1), ("x", 1))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Mixer):
    """Gated DeltaNet (Yang et al., arXiv 2412.06464) of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

    For each key head, the rows of ``mixer_in_proj`` are its query, its key, its G values and G
    output gates. The rows of ``mixer_gates_proj`` are G values of beta and G time steps, which
    determine the decay.

    Attributes:
      num_key_heads: number of heads of queries and keys (K).
      num_value_heads: number of heads of values, each with its own state.
      key_dim: elements of a key (D).
      value_dim: elements of a value (U).
      has_negative_eigenvalues: whether beta is in the range 0 to 2 instead of 0 to 1. The state's
        transition matrix may then have negative eigenvalues.
      norm_eps: constant added to the mean square in the norm of the output.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_negative_eigenvalues: bool = False
    norm_eps: float = 1e-6

    divided = ("num_key_heads", "num_value_heads")
    parts = "heads of keys"

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                "GatedDeltaNet: num_value_heads must be a multiple of num_key_heads, got "
                f"num_value_heads {self.num_value_heads} and num_key_heads {self.num_key_heads}."
            )

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Number of key heads (K), value heads per key head (G), and key and value dims (D, U)."""
        K = self.num_key_heads
        return K, self.num_value_heads // K, self.key_dim, self.value_dim

    @property
    def state_shape(self) -> Shape:
        """Shape of the state of a sequence: a matrix for each value head."""
        K, G, D, U = self.heads
        return K * G, D, U

    def _shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        K, G, D, U = self.heads
        return {
            "mixer_in_proj": (K, 2 * D + 2 * G * U, hidden_size),
            "mixer_gates_proj": (K, 2 * G, hidden_size),
            "mixer_out_proj": (hidden_size, K * G * U),
            "mixer_conv": (K, 2 * D + G * U, 1, self.conv_width),
            "mixer_decay": (K, G),
            "mixer_time": (K, G),
            "mixer_norm": (U,),
        }

    @property
    def _pieces(self) -> Mapping[str, Pieces]:
        _, G, D, U = self.heads
        qkv = ("q", D), ("k", D), ("v", G * U)
        return {
            "mixer_in_proj": (*qkv, ("z", G * U)),
            "mixer_gates_proj": (("b", G), ("a", G)),
            "mixer_conv": qkv,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDelta(Mixer):
    """Kimi Delta Attention (arXiv 2510.26692): a delta rule with a decay per key element.

    For each head, the rows of ``mixer_in_proj`` are its query, its key and its value.

    Attributes:
      num_heads: number of heads (K).
      head_dim: elements of queries, keys and values (D). It is also the rank of the low-rank
        projections of the decay and of the output gate.
      norm_eps: constant added to the mean square in the norm of the output.
    """

    num_heads: int
    head_dim: int
    norm_eps: float = 1e-5

    divided = ("num_heads",)
    parts = "heads"

    @property
    def state_shape(self) -> Shape:
        """Shape of the state of a sequence: a matrix for each head."""
        return self.num_heads, self.head_dim, self.head_dim

    def _shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        K, D = self.num_heads, self.head_dim
        return {
            "mixer_in_proj": (K, 3 * D, hidden_size),
            "mixer_gates_proj": (K, 1, hidden_size),
            "mixer_rank_proj": (1, 2 * D, hidden_size),
            "mixer_decay_proj": (K, D, D),
            "mixer_gate_proj": (K, D, D),
            "mixer_out_proj": (hidden_size, K * D),
            "mixer_conv": (K, 3 * D, 1, self.conv_width),
            "mixer_decay": (1, 1, K, 1),
            "mixer_time": (K, D),
            "mixer_norm": (D,),
        }

    @property
    def _pieces(self) -> Mapping[str, Pieces]:
        D = self.head_dim
        qkv = ("q", D), ("k", D), ("v", D)
        ranks = ("decay", D), ("gate", D)
        return {"mixer_in_proj": qkv, "mixer_rank_proj": ranks, "mixer_conv": qkv}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(Mixer):
    """Mamba-2 (Dao and Gu, arXiv 2405.21060) of Nemotron-H, Granite 4 and Falcon-H1.

    For each group of G heads, the rows of ``mixer_in_proj`` are ``G * U`` output gates, ``G * U``
    inputs, D elements of b, D elements of c, and G time steps. In the paper, b and c are called B
    and C.

    Attributes:
      num_heads: number of heads, each with its own state.
      num_groups: number of groups (K) of heads that share b and c.
      head_dim: elements of the input of a head (U).
      state_dim: elements of b and c (D).
      norm: whether the output is normalised ``"after gate"`` or ``"before gate"`` (after or before
        it is multiplied by the gate), or not at all (``"none"``). The norm is over all heads of a
        group together.
      norm_eps: constant added to the mean square in this norm.
      time_limits: range for clamping time steps.
      in_multiplier: factor of the mixer's input, as in muP.
      piece_multipliers: factors of the five parts of the projection: gates, inputs, b, c and time
        steps.
      num_copies: number of devices that share the heads of a group. Each has b and c of the group.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    norm: str = "after gate"
    norm_eps: float = 1e-5
    time_limits: tuple[float, float] = (0.0, math.inf)
    in_multiplier: float = 1.0
    piece_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    num_copies: int = 1

    divided = ("num_groups", "num_heads")
    parts = "groups"
    shared_pieces = frozenset({"b", "c"})

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(
                "Mamba2: num_heads must be a multiple of num_groups, got num_heads "
                f"{self.num_heads} and num_groups {self.num_groups}."
            )

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Number of groups (K), heads per group (G), elements of b and c (D), and of a head (U)."""
        K = self.num_groups
        return K, self.num_heads // K, self.state_dim, self.head_dim

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the heads can be divided evenly over the devices.

        In addition, a device must have whole groups, or a group must be divided evenly over
        several devices.
        """
        num_parts = max(self.num_groups, num_devices)
        if num_parts % num_devices or num_parts % self.num_groups or self.num_heads % num_parts:
            raise ValueError(
                f"{function}: tensor_parallel_size must divide the {self.num_heads} heads of "
                f"recurrent layers, and divide their {self.num_groups} groups or be a multiple of "
                f"them, got {num_devices}."
            )

    def widen(self, num_devices: int) -> Self:
        """Return sizes with copies of groups, so that each device has at least one group.

        The heads of a group are divided over the devices with copies of this group.
        """
        copies = max(num_devices // self.num_groups, 1)
        return dataclasses.replace(self, num_groups=self.num_groups * copies, num_copies=copies)

    @property
    def state_shape(self) -> Shape:
        """Shape of the state of a sequence: a matrix for each head."""
        K, G, D, U = self.heads
        return K * G, U, D

    def _shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        K, G, D, U = self.heads
        shapes = {
            "mixer_in_proj": (K, 2 * G * U + 2 * D + G, hidden_size),
            "mixer_out_proj": (hidden_size, K * G * U),
            "mixer_conv": (K, G * U + 2 * D, 1, self.conv_width),
            "mixer_decay": (K, G),
            "mixer_time": (K, G),
            "mixer_skip": (K, G),
        }
        if self.norm != "none":
            shapes["mixer_norm"] = (K, G * U)
        return shapes

    @property
    def _pieces(self) -> Mapping[str, Pieces]:
        _, G, D, U = self.heads
        xbc = ("x", G * U), ("b", D), ("c", D)
        return {
            "mixer_in_proj": (("z", G * U), *xbc, ("dt", G)),
            "mixer_conv": xbc,
        }
