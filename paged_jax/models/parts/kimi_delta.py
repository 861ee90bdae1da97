"""Kimi Delta Attention: a recurrence with the delta rule, see `delta_net` for another one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kernels.norm_rope import add_bias
from paged_jax.kernels.recurrent import delta_rule
from paged_jax.models.parts.mixer import (
    Arrays,
    Mixed,
    Mixer,
    NamedPieces,
    float32,
    gated_norm,
    log_decay,
    normalise,
)
from paged_jax.models.parts.part import LayerCall, Shape


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
    part_name = "heads"

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
    def _pieces(self) -> Mapping[str, NamedPieces]:
        D = self.head_dim
        qkv = ("q", D), ("k", D), ("v", D)
        ranks = ("decay", D), ("gate", D)
        return {"mixer_in_proj": qkv, "mixer_rank_proj": ranks, "mixer_conv": qkv}

    def mix(self, x: jax.Array, call: LayerCall) -> Mixed:
        """Project the inputs, see `Mixer.mix`."""
        K, D = self.num_heads, self.head_dim
        qkv = self.project_in(x, call)
        beta = jax.nn.sigmoid(call.linear(x, "mixer_gates_proj"))
        low = call.linear(x, "mixer_rank_proj")[..., 0, :]
        steps = call.linear(low[..., :D], "mixer_decay_proj")
        decay = log_decay(call, add_bias(steps, float32(call, "mixer_time")))
        gate = jax.nn.sigmoid(call.linear(low[..., D:], "mixer_gate_proj"))

        def run(qkv: jax.Array, unconvolved: Arrays, state: Any, num_tokens: jax.Array) -> Any:
            B, T = qkv.shape[:2]
            q, k, v = jnp.moveaxis(qkv.reshape(B, T, K, 3, D), 3, 0)
            beta, decay = unconvolved
            return delta_rule(
                normalise(q, call.backend) * D**-0.5,
                normalise(k, call.backend),
                v[..., None, :],
                decay.reshape(B, T, K, 1, D),
                beta.reshape(B, T, K, 1),
                state,
                num_tokens,
            )

        recurrence = self.convolved(call, (qkv, beta, decay), run)
        return Mixed(recurrence, lambda out: gated_norm(out, gate, call, self.norm_eps))
