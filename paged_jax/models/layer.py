"""A decoder layer of the Llama family. Attention is a function that the caller passes in."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.kernels.linear import Matrix, linear
from paged_jax.kernels.norm_rope import add_bias, expand, rotate
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer_attention import (
    Attend,
    Carry,
    Heads,
    Projection,
    latent_heads,
    matrix_shapes,
    normed_heads,
    scale_queries,
    split_gate,
    values_of_heads,
)
from paged_jax.models.layer_groups import NOTHING, LatentSizes
from paged_jax.models.matrices import MatrixFormats, add_matrix, get_matrix, get_separate_matrix
from paged_jax.models.mixer_sizes import Mixer
from paged_jax.models.mixers import MixerWeights, initial_vector, mix
from paged_jax.models.mlp import ACTIVATIONS, ExpertWeights, RouterArrays, gated_mlp, routed_experts
from paged_jax.models.residual import (
    EXPERT_NORMS,
    Embed,
    add_low_rank,
    add_stream_weights,
    add_to_streams,
    apply_norm,
    correct_streams,
    effective_weight,
    initial_norm_weight,
    multiply,
    norm_names,
    predict_streams,
    stream_weights,
)
from paged_jax.models.tensor_parallel import DeviceShard


class Layer(nnx.Module):
    """A decoder layer: attention or a mixer, and an MLP or experts, with norms and residuals.

    A layer has the norms in `NORMS` for its config's `norm_placement`::

        normed = input_norm(x)
        x = x + attention_out_norm(attention(normed))
        x = x + mlp_out_norm(mlp(post_attention_norm(x)))

    or, in parallel, ``x + attention(normed) + mlp(normed)``.

    Weights are ``[out, in]``, where `out` may be several dimensions. Projections of the same input
    are fused into one matrix, so that multiplications are fewer and larger, and activations are
    read once. For tensor parallelism, each matrix can be divided along its heads, its features F,
    or its experts X. `dims` defines the letters::

        qkv_proj              [K, G + 2, D, E]   for each KV head its queries, key and value; with
                                                 output gates 2 G + 2: each query, and its gate
        o_proj                [E, H * D]         H = K * G, in the same order
        latent_proj, q_proj, kv_b_proj           instead of qkv_proj, see `layer_attention`
        gate_up_proj          [2, F, E]          gate, up; of the shared expert if there are experts
        down_proj             [E, F]
        router                [X, E]             router_bias           [X]
        router_correction_bias  [X]              router_expert_factor   [X]
        experts_gate_up_proj  [X, 2, F, E]       experts_gate_up_bias  [X, 2, F]; 1 without gates
        experts_down_proj     [X, E, F]          experts_down_bias     [X, E]
        shared_expert_gate    [1, E]
        per_layer_gate        [d, E]             d = hidden_size_per_layer_input
        per_layer_proj        [E, d]
        laurel_left           [r, E]             laurel_right          [E, r]

    In recurrent layers, the parameters of a mixer replace those of attention, see `mixer_sizes`.
    Hybrid layers have both, and add the outputs.

    Args:
      config: sizes and switches. With a shard, the config of a single device.
      dtype: dtype of the norms and biases, and of the model.
      formats: formats of the matrices by their names in the layer.
      shard: this device's share of a tensor-parallel model, or None.
      rngs: random keys for the initial weights.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike,
        formats: MatrixFormats,
        shard: DeviceShard | None = None,
        rngs: nnx.Rngs,
    ):
        E = config.hidden_size
        deviation = config.initializer_range
        # Projections into the residual stream start smaller, so that its variance does not grow
        # with depth (GPT-2, section 2.3).
        residual_deviation = deviation / (2 * config.num_hidden_layers) ** 0.5

        def add(name: str, *shape: int, deviation: float = deviation) -> None:
            initial = nnx.initializers.normal(deviation)(rngs.params(), shape, dtype)
            add_matrix(self, name, initial, formats[name])

        self.config = config
        self.formats = formats
        self.shard = shard
        for name in (*norm_names(config), *(EXPERT_NORMS if config.separate_expert_norms else ())):
            setattr(self, name, nnx.Param(initial_norm_weight(config, (E,), dtype)))
        if config.kv_shapes[0] is not None:
            self._add_attention(add, residual_deviation, dtype)
        if config.mixer is not None:
            vector = functools.partial(initial_vector, dtype=dtype, key=rngs.params())
            self._add_mixer(config.mixer, add, residual_deviation, vector)
        if F := config.dense_intermediate_size:
            add("gate_up_proj", 2 if config.gated_mlp else 1, F, E)
            add("down_proj", E, F, deviation=residual_deviation)
        if config.num_experts:
            self._add_experts(add, residual_deviation, dtype)
        if d := config.hidden_size_per_layer_input:
            add("per_layer_gate", d, E)
            add("per_layer_proj", E, d, deviation=residual_deviation)
            self.per_layer_out_norm = nnx.Param(initial_norm_weight(config, (E,), dtype))
        if rank := config.laurel_rank:
            add("laurel_left", rank, E)
            add("laurel_right", E, rank, deviation=residual_deviation)
            self.laurel_norm = nnx.Param(initial_norm_weight(config, (E,), dtype))
        if config.residual_streams is not None:
            add_stream_weights(self, config.residual_streams.count, rngs, dtype)
        if config.layer_scalar:
            self.layer_scalar = nnx.Param(jnp.ones(1, dtype))

    def _add_attention(
        self, add: Callable[..., None], residual_deviation: float, dtype: DTypeLike
    ) -> None:
        config = self.config
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        query_rows = H // K * (2 if config.attention_gate else 1)
        qkv_heads = (K, query_rows + config.num_kv_rows, D)
        if config.latent is None:
            add("qkv_proj", *qkv_heads, E)
        else:
            self._add_latent(config.latent, add, dtype)
        add("o_proj", E, config.value_features, deviation=residual_deviation)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(H, dtype))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(qkv_heads, dtype))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros(E, dtype))
        if config.qk_norm and config.qk_norm_weight:
            is_whole = config.qk_norm_scope == "projection"
            q_shape, k_shape = ((K, H // K, D), (K, D)) if is_whole else ((D,), (D,))
            self.q_norm = nnx.Param(initial_norm_weight(config, q_shape, dtype))
            if config.num_kv_rows:
                self.k_norm = nnx.Param(initial_norm_weight(config, k_shape, dtype))

    def _add_latent(self, latent: LatentSizes, add: Callable[..., None], dtype: DTypeLike) -> None:
        sizes = matrix_shapes(latent, self.config.num_attention_heads, self.config.hidden_size)
        for name, shape in sizes.items():
            add(name, *shape)
        if latent.q_lora_rank:
            self.q_a_norm = nnx.Param(jnp.ones(latent.q_lora_rank, dtype))
        self.kv_a_norm = nnx.Param(jnp.ones(latent.kv_lora_rank, dtype))

    def _add_mixer(
        self, mixer: Mixer, add: Callable[..., None], residual_deviation: float, vector: Any
    ) -> None:
        for name, shape in mixer.shapes(self.config.hidden_size).items():
            if name == "mixer_out_proj":
                add(name, *shape, deviation=residual_deviation)
            elif name.endswith("_proj"):
                add(name, *shape)
            else:
                setattr(self, name, nnx.Param(vector(name, shape)))

    def _add_experts(
        self, add: Callable[..., None], residual_deviation: float, dtype: DTypeLike
    ) -> None:
        config = self.config
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
        num_local = X if self.shard is None else X // self.shard.num_devices
        add("router", X, E)
        add("experts_gate_up_proj", num_local, 2 if config.gated_mlp else 1, F, E)
        add("experts_down_proj", num_local, E, F, deviation=residual_deviation)
        if config.shared_expert_intermediate_size and config.shared_expert_gate:
            add("shared_expert_gate", 1, E)
        if config.router.has_correction_bias:
            # Keep these biases in float32: in bfloat16, biases of almost equal size would be equal.
            self.router_correction_bias = nnx.Param(jnp.zeros(X, jnp.float32))
        if config.router.has_expert_scale:
            self.router_expert_factor = nnx.Param(jnp.ones(X, dtype))
        if config.expert_bias:
            self.router_bias = nnx.Param(jnp.zeros(X, dtype))
            self.experts_gate_up_bias = nnx.Param(jnp.zeros((num_local, 2, F), dtype))
            self.experts_down_bias = nnx.Param(jnp.zeros((num_local, E), dtype))

    def __call__(
        self,
        x: jax.Array,
        *,
        index: int | jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        is_token: jax.Array | None = None,
        query_scale: jax.Array | None = None,
        per_layer_input: jax.Array | None = None,
        stack: "Layer | None" = None,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Run the layer.

        Args:
          x: float32 ``[..., E]``, the residual stream, or ``[..., n, E]`` if there are several.
          index: number of the layer in the model; traced in a scan over layers.
          cos: float32 ``[..., D / 2]``, cosines of the rotation angles of each token.
          sin: float32 ``[..., D / 2]``, sines of the same angles.
          attend: attention of the layer, see `Attend`.
          carry: state that is passed to `attend`, such as the K and V pools.
          is_token: bool ``[...]``, False for padding rows, which use no expert; None for none.
          query_scale: float32 ``[...]``, factor of each token's queries, or None.
          per_layer_input: float32 ``[..., hidden_size_per_layer_input]``, embedding of each token
            for this layer, or None.
          stack: all layers in one module, stacked along the first dimension, if this layer is a
            slice of them; None otherwise. Some kernels read the stack, because slices are copies.
          backend: backend of the matrix multiplications, see `linear`.

        Returns:
          The new residual stream, of the shape of `x`, and the carry that `attend` returned.
        """
        streams = None
        if self.config.residual_streams is not None:
            streams = predict_streams(self.config, x, stream_weights(self))
            x = streams[..., self.config.residual_streams.active, :]

        weight = functools.partial(self._matrix, stack, index)
        make_embed = functools.partial(self._per_layer, per_layer_input, weight, backend)
        embed = None if per_layer_input is None else make_embed
        normed, out = self._norm("input_norm", x), None
        if self.config.mixer is not None:
            mixed = mix(self.config.mixer, self._mixer_weights(normed, weight, backend))
            out, carry = attend(index, mixed.recurrence, carry)
            out = linear(mixed.finish(out), weight("mixer_out_proj"), backend=backend)
        if self.config.kv_shapes[0] is not None:
            of_mixer = out
            heads, gate = self._project(normed, weight, (cos, sin, query_scale), backend)
            out, carry = attend(index, heads, carry)
            if self.config.latent is not None:
                out = values_of_heads(self.config.latent, out, weight("kv_b_proj"), backend)
            out = out if gate is None else out * jax.nn.sigmoid(gate)
            out = linear(out.reshape(*x.shape[:-1], -1), weight("o_proj"), backend=backend)
            out = multiply(out, self.config.multipliers.attention_out)
            out = out if of_mixer is None else out + of_mixer
        if self.config.norm_placement == "parallel":
            assert out is not None  # both outputs are added first, so one all-reduce is enough
            out = self._all_reduce(out + self._mlp(normed, weight, is_token, backend))
            return self._finish(x, self._with_bias(out), embed), carry
        if out is not None:
            out = self._with_bias(self._all_reduce(out))
            x = self._add(x, self._norm("attention_out_norm", out))
        x = add_low_rank(self.config, x, normed, weight, self._vector("laurel_norm"), backend)
        if NOTHING in self.config.mlp_layer_types:
            return x, carry
        normed = self._norm("post_attention_norm", x)
        if self.config.separate_expert_norms:
            out = self._sum_experts(x, normed, weight, is_token, backend)
        else:
            out = self._all_reduce(self._mlp(normed, weight, is_token, backend))
        out = self._norm("mlp_out_norm", out)
        if streams is not None:
            x = correct_streams(self.config, streams, self._add(x, out), stream_weights(self))
            return add_to_streams(self.config, x, stream_weights(self), embed), carry
        return self._finish(x, out, embed), carry

    def _per_layer(
        self,
        per_layer_input: jax.Array | None,
        weight: Callable[[str], Matrix],
        backend: str | None,
        x: jax.Array,
    ) -> jax.Array:
        """Return the embedding of the layer, times a gate that depends on ``x [..., E]``."""
        assert per_layer_input is not None
        gate = linear(x, weight("per_layer_gate"), backend=backend)
        out = ACTIVATIONS[self.config.hidden_act](gate) * per_layer_input
        out = linear(out, weight("per_layer_proj"), backend=backend)
        return self._norm("per_layer_out_norm", out)

    def _mixer_weights(
        self, normed: jax.Array, weight: Callable[[str], Matrix], backend: str | None
    ) -> MixerWeights:
        return MixerWeights(
            project=lambda name: linear(normed, weight(name), backend=backend),
            multiply=lambda x, name: linear(x, weight(name), backend=backend),
            vector=lambda name: getattr(self, name)[...].astype(jnp.float32),
        )

    def _matrix(self, stack: "Layer | None", index: int | jax.Array, name: str) -> Matrix:
        """Return a matrix of this layer, or the matrices of all layers if they are separate."""
        if not hasattr(self, name):
            return get_separate_matrix(self, name, self._float_dtype, index)
        return get_matrix(self, name, self.formats[name], self._float_dtype, stack, index)

    @property
    def _float_dtype(self) -> np.dtype:
        return getattr(self, norm_names(self.config)[0]).dtype

    def _with_bias(self, out: jax.Array) -> jax.Array:
        if not self.config.o_bias:
            return out
        return add_bias(out, multiply(self.o_bias[...], self.config.multipliers.attention_out))

    def _mlp(
        self,
        x: jax.Array,
        weight: Callable[[str], Matrix],
        is_token: jax.Array | None,
        backend: str | None,
    ) -> jax.Array:
        """Run the MLP or experts. With a shard, return this device's part of a sum over devices."""
        config = self.config
        if not config.num_experts:
            matrices = weight("gate_up_proj"), weight("down_proj")
            return gated_mlp(config, x, *matrices, backend, mean_over_devices=self._mean)
        out = self._experts(x, x, weight, is_token, backend)
        if not config.shared_expert_intermediate_size:
            return out
        shared = gated_mlp(config, x, weight("gate_up_proj"), weight("down_proj"), backend)
        if not config.shared_expert_gate:
            return out + shared
        gate = linear(x, weight("shared_expert_gate"), backend=backend)
        return out + shared * jax.nn.sigmoid(gate)

    def _experts(
        self,
        x: jax.Array,
        router_input: jax.Array,
        weight: Callable[[str], Matrix],
        is_token: jax.Array | None,
        backend: str | None,
    ) -> jax.Array:
        """Run the router, and the experts that it chooses, see `_mlp`."""
        config = self.config
        logits = linear(router_input, weight("router"), backend=backend)
        biases = (None, None)
        if config.expert_bias:
            logits = add_bias(logits, self.router_bias[...])
            biases = self.experts_gate_up_bias[...], self.experts_down_bias[...]
        weights = ExpertWeights(
            weight("experts_gate_up_proj"), weight("experts_down_proj"), *biases
        )
        num_local = weights.down_proj.shape[0]
        return routed_experts(
            config,
            x,
            logits,
            weights,
            RouterArrays(*map(self._vector, ("router_correction_bias", "router_expert_factor"))),
            is_token=is_token,
            first_expert=None if self.shard is None else self.shard.index * num_local,
            backend=backend,
        )

    def _sum_experts(
        self,
        x: jax.Array,
        normed: jax.Array,
        weight: Callable[[str], Matrix],
        is_token: jax.Array | None,
        backend: str | None,
    ) -> jax.Array:
        """Return the sum of the normalised outputs of the experts and of the shared expert.

        With a shard, both outputs are first summed over the devices.

        The residual stream is ``x [..., E]``, the input of the shared expert ``normed [..., E]``.
        """
        config = self.config
        router_input = self._norm("router_norm", x) * config.hidden_size**-0.5
        expert_input = self._norm("expert_input_norm", x)
        out = jnp.concatenate(
            [
                self._experts(expert_input, router_input, weight, is_token, backend),
                gated_mlp(config, normed, weight("gate_up_proj"), weight("down_proj"), backend),
            ],
            axis=-1,
        )
        routed, shared = jnp.split(self._all_reduce(out), 2, axis=-1)
        return self._norm("expert_out_norm", routed) + self._norm("shared_out_norm", shared)

    def _vector(self, name: str) -> jax.Array | None:
        parameter = getattr(self, name, None)
        return None if parameter is None else parameter[...]

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        """Apply one of `NORMS`. Return `x` if the layer does not have it."""
        weight = self._vector(name)
        return x if weight is None else apply_norm(self.config, x, weight)

    def _add(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Add an output to the residual stream."""
        return x + multiply(out, self.config.residual_multiplier)

    def _finish(self, x: jax.Array, out: jax.Array, embed: Embed | None) -> jax.Array:
        """Add the last output of the layer and the embedding of the layer, and scale the sum."""
        x = self._add(x, out)
        x = x if embed is None else x + embed(x)
        if not self.config.layer_scalar:
            return x
        return x * expand(self.layer_scalar[...], x.ndim)

    def _all_reduce(self, out: jax.Array) -> jax.Array:
        return out if self.shard is None else self.shard.all_reduce_sum(out)

    @property
    def _mean(self) -> Callable[[jax.Array], jax.Array] | None:
        return None if self.shard is None else self.shard.all_reduce_mean

    def _project(
        self,
        x: jax.Array,
        weight: Callable[[str], Matrix],
        rotation: tuple[jax.Array, jax.Array, jax.Array | None],
        backend: str | None,
    ) -> tuple[Projection | Heads, jax.Array | None]:
        """Project the normalised input for attention, see `_attention_input`."""
        if self.config.latent is not None:
            norms = self._vector("q_a_norm"), self.kv_a_norm[...]
            scale = self.config.attention_multiplier
            heads = latent_heads(self.config.latent, x, weight, norms, rotation, scale, backend)
            return heads, None
        x = multiply(x, self.config.multipliers.attention_in)
        qkv = linear(x, weight("qkv_proj"), backend=backend)
        return self._attention_input(qkv, *rotation)

    def _attention_input(
        self, qkv: jax.Array, cos: jax.Array, sin: jax.Array, query_scale: jax.Array | None
    ) -> tuple[Projection | Heads, jax.Array | None]:
        """Return queries, keys and values in the form that `attend` takes, and gates of the output.

        Usually the form is a `Projection`: `attend` normalises and rotates it, because some kernels
        do this while they write into the cache. These kernels do not support norms over all heads
        of a token (`qk_norm_scope` is ``"projection"``), norms of values, values that are keys, and
        factors of normalised queries. In these cases everything is computed here, and the result is
        `Heads`.

        The projection ``qkv [..., K, rows, D]`` has no biases yet. Cosines and sines of the
        rotation angles are ``[..., D / 2]``, and factors of queries ``[...]`` or None; all are
        float32.

        Returns:
          The heads, and the gates ``[..., H, D]`` before the sigmoid, or None.
        """
        config, gate = self.config, None
        if config.qkv_bias:
            qkv = add_bias(qkv, self.qkv_bias[...])
        if config.attention_gate:
            qkv, gate = split_gate(qkv, config.num_kv_rows)
        sm_scale, soft_cap = config.attention_multiplier, config.attn_logit_softcapping
        if config.multipliers.key != 1:
            sm_scale = (sm_scale or config.head_dim**-0.5) * config.multipliers.key
        sinks = self.sinks[...] if config.attention_sinks else None
        norms = None
        if config.qk_norm and not config.qk_norm_weight:
            ones = jnp.ones(config.head_dim, jnp.float32)
            norms = ones, ones
        elif config.qk_norm:
            q_norm = self.q_norm[...]
            k_norm = self.k_norm[...] if config.num_kv_rows else q_norm
            norms = effective_weight(config, q_norm), effective_weight(config, k_norm)
        is_whole = norms is not None and config.qk_norm_scope == "projection"
        is_special = config.value_norm or config.attention_k_eq_v or not config.num_kv_rows
        if not (is_whole or is_special or norms is not None and query_scale is not None):
            if query_scale is not None:
                qkv = scale_queries(qkv, query_scale)
            eps = config.rms_norm_eps
            return Projection(qkv, cos, sin, norms, eps, sm_scale, soft_cap, sinks), gate
        q, k, v = normed_heads(config, qkv, norms, self._mean)
        q, k = rotate(q, cos, sin), None if k is None else rotate(k, cos, sin)
        q = q if query_scale is None else q * query_scale[..., None, None]
        return Heads(q, k, v, sm_scale, soft_cap, sinks), gate
