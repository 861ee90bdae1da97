"""Gated short convolution."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paged_jax.kernels.recurrent import causal_convolution
from paged_jax.models.layer_attention import Recurrence, States
from paged_jax.models.parts.mixer import Arrays, Mixed, Mixer, NamedPieces, float32
from paged_jax.models.parts.part import LayerCall, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvolution(Mixer):
    """Gated short convolution of LFM2: ``c * convolution(b * x)``.

    Attributes:
      num_channels: number of channels (F).
    """

    num_channels: int

    gguf_names = {
        "mixer_in_proj.*": "shortconv.in_proj.weight",
        "mixer_conv": "shortconv.conv.weight",
        "mixer_out_proj": "shortconv.out_proj.weight",
    }
    divided = ("num_channels",)
    part_name = "channels"

    def _shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        F = self.num_channels
        return {
            "mixer_in_proj": (F, 3, hidden_size),
            "mixer_out_proj": (hidden_size, F),
            "mixer_conv": (F, 1, 1, self.conv_width),
        }

    @property
    def _pieces(self) -> Mapping[str, NamedPieces]:
        return {"mixer_in_proj": (("b", 1), ("c", 1), ("x", 1))}

    def mix(self, x: jax.Array, call: LayerCall) -> Mixed:
        """Project the inputs, see `Mixer.mix`."""
        b, c, x = jnp.moveaxis(self.project_in(x, call), -1, 0)
        filters = float32(call, "mixer_conv").reshape(self.num_channels, self.conv_width)

        def advance(
            inputs: Arrays, states: States, num_tokens: jax.Array
        ) -> tuple[jax.Array, States]:
            [gated], [state] = inputs, states
            bias = self.convolution_bias(call)
            out, state = causal_convolution(gated, state, filters, bias, num_tokens)
            return out, (state,)

        return Mixed(
            Recurrence((b * x,), advance, self.states, takes_rows=True), lambda out: c * out
        )
