"""Gated DeltaNet: a recurrence with the delta rule, see `kimi_delta` for another one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

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

    gguf_names = {
        "mixer_in_proj.*": "attn_qkv.weight",
        "mixer_in_proj.z": "attn_gate.weight",
        "mixer_gates_proj.b": "ssm_beta.weight",
        "mixer_gates_proj.a": "ssm_alpha.weight",
        "mixer_conv.*": "ssm_conv1d.weight",
        "mixer_decay": "ssm_a",
        "mixer_time": "ssm_dt.bias",
        "mixer_norm": "ssm_norm.weight",
        "mixer_out_proj": "ssm_out.weight",
    }
    divided = ("num_key_heads", "num_value_heads")
    part_name = "heads of keys"

    def __post_init__(self) -> None:
        super().__post_init__()
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
    def _pieces(self) -> Mapping[str, NamedPieces]:
        _, G, D, U = self.heads
        qkv = ("q", D), ("k", D), ("v", G * U)
        return {
            "mixer_in_proj": (*qkv, ("z", G * U)),
            "mixer_gates_proj": (("b", G), ("a", G)),
            "mixer_conv": qkv,
        }

    def mix(self, x: jax.Array, call: LayerCall) -> Mixed:
        """Project the inputs, see `Mixer.mix`."""
        K, G, D, U = self.heads
        fused = self.project_in(x, call)
        qkv, z = fused[..., : 2 * D + G * U], fused[..., 2 * D + G * U :]
        gates = call.linear(x, "mixer_gates_proj")
        beta = jax.nn.sigmoid(gates[..., :G]) * (2 if self.has_negative_eigenvalues else 1)
        decay = log_decay(call, add_bias(gates[..., G:], float32(call, "mixer_time")))

        def run(qkv: jax.Array, unconvolved: Arrays, state: Any, num_tokens: jax.Array) -> Any:
            B, T = qkv.shape[:2]
            qkv, (beta, decay) = qkv.reshape(B, T, K, -1), unconvolved
            return delta_rule(
                normalise(qkv[..., :D], call.backend) * D**-0.5,
                normalise(qkv[..., D : 2 * D], call.backend),
                qkv[..., 2 * D :].reshape(B, T, K, G, U),
                decay.reshape(B, T, K, G),
                beta.reshape(B, T, K, G),
                state,
                num_tokens,
            )

        gate = jax.nn.silu(z.reshape(*z.shape[:-2], K * G, U))
        recurrence = self.convolved(call, (qkv, beta, decay), run)
        return Mixed(recurrence, lambda out: gated_norm(out, gate, call, self.norm_eps))
