"""State-space recurrence of Mamba-2."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.exact import inverse_root, rounded, softplus
from paged_jax.kernels.norm_rope import add_bias, expand, mean_square
from paged_jax.kernels.recurrent import state_space
from paged_jax.models.parts.mixer import Arrays, Mixed, Mixer, NamedPieces, float32
from paged_jax.models.parts.part import LayerCall, Shape, multiply


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

    gguf_names = {
        "mixer_in_proj.*": "ssm_in.weight",
        "mixer_conv.*": "ssm_conv1d.weight",
        "mixer_decay": "ssm_a",
        "mixer_time": "ssm_dt.bias",
        "mixer_skip": "ssm_d",
        "mixer_norm": "ssm_norm.weight",
        "mixer_out_proj": "ssm_out.weight",
    }
    divided = ("num_groups", "num_heads")
    part_name = "groups"
    shared_pieces = frozenset({"b", "c"})

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the sizes of the all-reduces: the norm of a group on several devices."""
        del hidden_size
        return [1] if self.widen(num_devices).num_copies > 1 and self.norm != "none" else []

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
    def _pieces(self) -> Mapping[str, NamedPieces]:
        _, G, D, U = self.heads
        xbc = ("x", G * U), ("b", D), ("c", D)
        return {
            "mixer_in_proj": (("z", G * U), *xbc, ("dt", G)),
            "mixer_conv": xbc,
        }

    def mix(self, x: jax.Array, call: LayerCall) -> Mixed:
        """Project the inputs, see `Mixer.mix`."""
        K, G, D, U = self.heads
        fused = self.project_in(multiply(x, self.in_multiplier), call)
        if (factors := self._row_multipliers()) is not None:
            fused = rounded(fused * expand(factors, fused.ndim), call.backend)
        ends = [G * U, 2 * G * U + 2 * D]
        z, xbc, steps = jnp.split(fused, ends, axis=-1)
        steps = softplus(add_bias(steps, float32(call, "mixer_time")), call.backend)
        steps = jnp.clip(steps, *self.time_limits)

        def run(xbc: jax.Array, unconvolved: Arrays, state: Any, num_tokens: jax.Array) -> Any:
            B, T = xbc.shape[:2]
            xbc, steps = xbc.reshape(B, T, K, -1), unconvolved[0].reshape(B, T, K, G)
            x, b, c = jnp.split(xbc, [G * U, G * U + D], axis=-1)
            x = x.reshape(B, T, K, G, U)
            out, state = state_space(
                x * steps[..., None],
                b,
                c,
                -expand(jnp.exp(float32(call, "mixer_decay")), 4) * steps,
                state,
                num_tokens,
            )
            skip = expand(float32(call, "mixer_skip")[..., None], 5) * x
            return out + rounded(skip, call.backend), state

        def finish(out: jax.Array) -> jax.Array:
            return self._gate_and_norm(call, out, jax.nn.silu(z))

        return Mixed(self.convolved(call, (xbc, steps), run), finish)

    def _row_multipliers(self) -> jax.Array | None:
        """Return the multipliers (muP) of the rows of ``mixer_in_proj``, float32 ``[rows]``.

        They are the same for all groups of heads. The result is None if all multipliers are 1.
        """
        factors = self.piece_multipliers
        if all(factor == 1 for factor in factors):
            return None
        counts = [rows for _, rows in self.pieces["mixer_in_proj"]]
        return jnp.repeat(
            jnp.array(factors, jnp.float32), np.array(counts), total_repeat_length=sum(counts)
        )

    def _gate_and_norm(self, call: LayerCall, out: jax.Array, gate: jax.Array) -> jax.Array:
        """Multiply the output of the recurrence by a gate ``[..., K, G * U]``, and normalise it.

        ``self.norm`` determines whether the norm comes before or after the gate, or is omitted.
        """
        grouped = out.reshape(gate.shape)
        if self.norm == "none":
            return (grouped * gate).reshape(out.shape)
        if self.norm == "after gate":
            grouped = grouped * gate
        squares = mean_square(grouped, num_heads=self.num_groups, backend=call.backend)
        if self.num_copies > 1:
            squares = call.shard.all_reduce_mean(squares, self.num_copies)
        weight = expand(float32(call, "mixer_norm"), grouped.ndim)
        grouped = grouped * inverse_root(squares + self.norm_eps, call.backend) * weight
        if self.norm == "before gate":
            grouped = grouped * gate
        return grouped.reshape(out.shape)
