"""The Llama family as one Flax module: a plain forward, and what a paged cache needs of it."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.arguments import names_arguments
from paged_jax.kernels.linear import linear
from paged_jax.models.arguments import as_tokens
from paged_jax.models.config import LlamaConfig
from paged_jax.models.embedding import look_up, take_rows
from paged_jax.models.layer import Attend, Carry, Layer, causal_attention
from paged_jax.models.norms import initial_weight, norm
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.part import Part
from paged_jax.models.rope import all_rotations
from paged_jax.models.weight import (
    Weight,
    add_matrix,
    float_dtype,
    float_type,
    get_matrix,
    weight_dtype,
)


class Llama(PagedModel):
    """A decoder of one of the families in `families.FAMILIES`, with or without a paged KV cache.

    What goes through the cache, `prefill`, `score`, `decode`, `create_cache`, is `PagedModel`'s.

    Args:
      config: sizes and switches.
      dtype: type of the weights; of int8 are matrices only, each row with a scale, and the rest has
        ``config.dtype``. Activations and logits are float32.
      scan_layers: keep the layers, all alike, stacked along a leading dimension ``L`` and scan over
        them, which compiles soonest and suits TPUs, and CPUs whose kernels read weights there;
        otherwise one module a layer, and unroll: on GPUs XLA copies weights out of a stack.
      part: None, or what one of several devices computes of a model, within `jax.shard_map`:
        `config` is then that of one device, see `paged_jax.models.shards`.
      rngs: source of the initial weights.

    Raises:
      ValueError: the layers of the config differ, and are to be stacked.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> model(jnp.array([[1, 2, 3]])).shape
      (1, 3, 32)
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any = jnp.float32,
        scan_layers: bool = False,
        part: Part | None = None,
        rngs: nnx.Rngs,
    ):
        if scan_layers and not config.can_scan_layers:
            raise ValueError(
                "Llama: scan_layers must be False for layers that differ, as with and without "
                "a sliding window, or in how they rotate."
            )
        normal = nnx.initializers.normal(config.initializer_range)
        self.config = config
        self.scan_layers = scan_layers
        self.part = part
        table, floats = (config.vocab_size, config.hidden_size), float_type(dtype, config)
        # An embedding alone is not worth rounding: a step reads few rows of it.
        kind = dtype if config.tie_word_embeddings else floats
        add_matrix(self, "embed_tokens", normal(rngs.params(), table, floats), kind)
        layer = functools.partial(Layer, config, dtype=dtype, part=part)
        if scan_layers:

            @nnx.split_rngs(splits=config.num_hidden_layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Layer:
                return layer(rngs=rngs)

            self.layers = stack(rngs)
        else:
            self.layers = nnx.List(layer(rngs=rngs) for _ in range(config.num_hidden_layers))
        self.norm = nnx.Param(initial_weight(config, (config.hidden_size,), floats))
        if not config.tie_word_embeddings:
            add_matrix(self, "lm_head", normal(rngs.params(), table, floats), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Score whole sequences without a cache; differentiable in the weights.

        Args:
          token_ids: i32 ``[B, T]``. Right padding does not change the logits before it.

        Returns:
          float32 logits ``[B, T, V]``.

        Raises:
          ValueError: they are not that or, outside of `jit`, not in the vocabulary.
        """
        token_ids = as_tokens("Llama", self.config.vocab_size, token_ids)
        steps = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(steps, token_ids.shape)
        x, _ = self._run_layers(
            self._scaled(take_rows(_table(self, "embed_tokens"), token_ids)),
            positions,
            causal_attention(self.config.sliding_windows),
            (),
        )
        return self.logits(x)

    @classmethod
    @names_arguments
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        *,
        dtype: Any = "auto",
        scan_layers: bool | None = None,
        sharding: Any = None,
    ) -> "Llama":
        """Load a Hugging Face folder, or a checkpoint of `save_checkpoint`.

        Weights go from the files to their devices without a second copy of the model in memory.

        Args:
          folder: a folder with ``config.json`` and safetensors, or a checkpoint; by default the
            small model that comes with this library.
          dtype: type of the weights: float32, bfloat16, float16, int8, or ``"auto"``, as saved.
          scan_layers: see `Llama`; by default on TPUs, and on a CPU that has our kernels.
          sharding: one `jax.sharding.Sharding` for all parameters, or a function of a parameter's
            name (``"layers.0.qkv_proj"``, or ``"layers.qkv_proj"`` when stacked) and shape.

        Raises:
          FileNotFoundError: no such folder, or no ``config.json`` in it.
          UnsupportedConfigError: the config asks for what this library does not build.
          WeightsError: the files do not hold the weights that the config describes.

        Example:
          >>> model = Llama.from_pretrained()
          >>> model.config.num_hidden_layers, model.config.vocab_size
          (5, 1536)
        """
        # Imported here: a model without files needs neither orbax nor safetensors.
        from paged_jax.models.loading.pretrained import from_pretrained

        return from_pretrained(cls, folder, dtype=dtype, scan_layers=scan_layers, sharding=sharding)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and safetensors, which transformers loads too.

        Raises:
          ValueError: weights are int8, or `LlamaConfig.to_dict` has no family for them.
        """
        from paged_jax.models.loading.huggingface import save_weights

        save_weights(self, folder)

    def hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Run the layers, see `PagedModel`."""
        find = look_up if self.part is None else self.part.look_up
        x = self._scaled(find(_table(self, "embed_tokens"), token_ids))
        # Padding begins as zeros, and without biases remains so: see `kernels/cpu`.
        x = jnp.where(positions[..., None] < 0, 0, x)
        return self._run_layers(x, positions, attend, carry, backend)

    def logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        """Score what follows rows of the hidden states, see `PagedModel`."""
        head = _table(self, "embed_tokens" if self.config.tie_word_embeddings else "lm_head")
        logits = linear(norm(self.config, x, self.norm[...]), head, backend=backend)
        if self.part is not None:
            logits = self.part.gather(logits)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    @property
    def float_dtype(self) -> Any:
        """The type of all weights, or of what is left beside int8."""
        return float_dtype(self)

    @property
    def weight_dtype(self) -> Any:
        """The type of the matrices: that of the floats, or int8."""
        return weight_dtype(self)

    def _scaled(self, embeddings: jax.Array) -> jax.Array:
        """Rows of the embedding table as the first layer takes them."""
        factor = self.config.embedding_multiplier
        if factor == 1:
            return embeddings
        # Gemma was trained with its factor in bfloat16.
        return embeddings * jnp.asarray(factor, self.float_dtype).astype(jnp.float32)

    def _run_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        ropes = self.config.ropes
        angles = all_rotations(positions, ropes, self.config.head_dim)
        is_token = positions >= 0 if self.config.num_experts else None
        if isinstance(self.layers, nnx.List):
            for index, layer in enumerate(self.layers):
                cos, sin = angles[ropes[index]]
                x, carry = layer(
                    x,
                    index=index,
                    cos=cos,
                    sin=sin,
                    attend=attend,
                    carry=carry,
                    is_token=is_token,
                    backend=backend,
                )
            return x, carry
        cos, sin = angles[ropes[0]]
        stack = self.layers
        graphdef, stacked = nnx.split(stack)

        # The pools are the carry. As scanned input and output they would be copied.
        def body(
            state: tuple[jax.Array, Carry], layer_and_index: Any
        ) -> tuple[tuple[jax.Array, Carry], None]:
            (x, carry), (weights, index) = state, layer_and_index
            layer = nnx.merge(graphdef, weights)
            state = layer(
                x,
                index=index,
                cos=cos,
                sin=sin,
                attend=attend,
                carry=carry,
                is_token=is_token,
                stack=stack,
                backend=backend,
            )
            return state, None

        indices = jnp.arange(self.config.num_hidden_layers, dtype=jnp.int32)
        return lax.scan(body, (x, carry), (stacked, indices))[0]


def _table(model: Llama, name: str) -> Weight:
    return get_matrix(model, name, model.norm[...].dtype)
