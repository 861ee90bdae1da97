"""Add model families that the library does not support: VaultGemma and Apertus.

    python examples/new_family.py ~/models/vaultgemma-1b "Why is the sky blue?"

A family reads its config.json into the parts of its layers, and writes it back. VaultGemma consists
of parts that the library has: it is Gemma 2 without norms after attention and the MLP. Apertus has
a new idea, an activation with parameters that are learned in each layer, so it brings a part of its
own. Loading, saving, the cache, the engine, quantisation and tensor parallelism need no changes.

`docs/new-models.md` explains the parts, and how to test a family.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import LLM, SamplingParams
from paged_jax.kernels.exact import rounded
from paged_jax.kernels.norm_rope import expand
from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import (
    ConfigEntries,
    read_boolean,
    read_integer,
    read_name,
    read_number,
)
from paged_jax.models.families.common import (
    pre_norm,
    read_activation,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.registry import FAMILIES
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation, Ungated, Up
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import LayerCall, Parameter, ones, vector, zeros


class VaultGemma(Family):
    """VaultGemma 1B: layers with and without windows, soft caps, norms of ``1 + weight``."""

    model_type = "vaultgemma"
    architecture = "VaultGemmaForCausalLM"
    # The defaults of `VaultGemmaConfig` in transformers.
    defaults = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    tensor_names = {"post_attention_norm": "pre_feedforward_layernorm.weight"}

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a config.json. Every second layer has no window."""
        norm = Norm(read_number(entries, "rms_norm_eps", 1e-6), offset=1.0)
        window, num_layers = read_integer(entries, "sliding_window"), read_num_layers(entries)
        layers = [
            self._layer(entries, norm, window if layer % 2 == 0 else None)
            for layer in range(num_layers)
        ]
        return read_model(
            self,
            entries,
            layers=tuple(layers),
            norm=norm,
            embedding_multiplier=read_integer(entries, "hidden_size") ** 0.5,
            final_logit_softcapping=read_number(entries, "final_logit_softcapping"),
        )

    def _layer(self, entries: ConfigEntries, norm: Norm, window: int | None) -> LayerSpec:
        heads, has_bias = read_heads(entries), read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            qkv_bias=has_bias,
            o_bias=has_bias,
            rope=read_rope(self, entries, heads["head_dim"]),
            window=window,
            scale=read_number(entries, "query_pre_attn_scalar") ** -0.5,
            soft_cap=read_number(entries, "attn_logit_softcapping"),
        )
        features = read_integer(entries, "intermediate_size")
        mlp = Dense(
            features=features,
            activation=Activation(read_activation(entries, "hidden_activation")),
        )
        entries.get("layer_types")  # transformers writes it, but the pattern is always the same
        return pre_norm(attention, mlp, norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a config.json."""
        attention, mlp = config.layers[0].get(Attention), config.layers[0].get(Dense)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias,
            "sliding_window": attention.window,
            "query_pre_attn_scalar": round((attention.scale or 1) ** -2),
            "attn_logit_softcapping": attention.soft_cap,
            "final_logit_softcapping": config.final_logit_softcapping,
            "intermediate_size": mlp.features,
            "hidden_activation": mlp.activation.name,
        }


@dataclasses.dataclass(frozen=True)
class XIELU(Ungated):
    """Activation of Apertus (arXiv 2411.13010), with two learned parameters in each layer.

    For ``x > 0``, it is ``a x^2 + beta x`` with ``a = softplus(alpha_p)``, otherwise
    ``c (expm1(min(x, eps)) - x) + beta x`` with ``c = beta + softplus(alpha_n)``.
    """

    name: str = "xielu"

    def __post_init__(self) -> None:
        """Do not look up the name in the table of other activations."""

    def parameters(self, features: int) -> dict[str, Parameter]:
        """Return the parameters. Files also contain the two constants."""
        return {
            "xielu_alpha_p": vector(1, initial=ones),
            "xielu_alpha_n": vector(1, initial=ones),
            "xielu_beta": vector(initial=ones, is_trained=False),
            "xielu_eps": vector(initial=zeros, is_trained=False),
        }

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """Names of the tensors in a layer."""
        names = ("alpha_p", "alpha_n", "beta", "eps")
        return {f"xielu_{name}": f"mlp.act_fn.{name}" for name in names}

    def __call__(self, gate: jax.Array, up: Up, call: LayerCall) -> jax.Array:
        """Apply the activation to float32 ``[..., F]``."""
        alpha_p, alpha_n, beta, eps = (
            expand(call.vector(name).astype(jnp.float32).reshape(1), gate.ndim)
            for name in self.parameters(1)
        )
        beta, eps = jax.lax.stop_gradient((beta, eps))
        linear = rounded(beta * gate, call.backend)
        square = rounded(
            jax.nn.softplus(alpha_p) * rounded(gate * gate, call.backend), call.backend
        )
        below = jnp.expm1(jnp.minimum(gate, eps)) - gate
        below = rounded(below * (beta + jax.nn.softplus(alpha_n)), call.backend)
        return jnp.where(gate > 0, rounded(square, call.backend), below) + linear


class Apertus(Family):
    """Apertus 8B and 70B: MLPs without a gate, and norms of queries and keys."""

    model_type = "apertus"
    architecture = "ApertusForCausalLM"
    # The defaults of `ApertusConfig` in transformers.
    defaults = {
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tensor_names = {
        "input_norm": "attention_layernorm.weight",
        "post_attention_norm": "feedforward_layernorm.weight",
    }
    # Files contain these keys, but transformers does not read them. Unknown keys are a warning.
    ignored = ("post_norm", "qk_norm")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a config.json. All layers are equal."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        if (name := read_name(entries, "hidden_act", "xielu")) != "xielu":
            raise ValueError(f"Apertus: hidden_act must be 'xielu', got {name!r}.")
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            norm=HeadNorm(norm),
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        mlp = Dense(features=read_integer(entries, "intermediate_size"), activation=XIELU())
        layers = (pre_norm(attention, mlp, norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a config.json."""
        attention, mlp = config.layers[0].get(Attention), config.layers[0].get(Dense)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias,
            "intermediate_size": mlp.features,
            "hidden_act": mlp.activation.name,
        }


def add_families() -> None:
    """Register the families, so that this process can load their checkpoints."""
    for family in (VaultGemma(), Apertus()):
        FAMILIES[family.model_type] = family


def main() -> None:
    """Generate text after a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="a Hugging Face folder of VaultGemma or Apertus")
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_families()
    (output,) = LLM(args.folder).generate([args.prompt], SamplingParams(max_tokens=64))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
