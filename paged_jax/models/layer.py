"""A decoder layer of the Llama family.

The layer does not access a cache: the caller passes in a function `attend` that computes attention.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

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
from paged_jax.models.layer_groups import NOTHING
from paged_jax.models.matrices import LayerParameters, add_matrix, random_matrix
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.mixers import initial_vector, mix
from paged_jax.models.mlp import ACTIVATIONS, gated_mlp, project_out, routed_experts
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
)
from paged_jax.models.tensor_parallel import DeviceShard

# Projections into the residual stream.
_OUTPUTS = (
    "o_proj", "mixer_out_proj", "down_proj", "experts_down_proj", "moe_out_proj", "per_layer_proj",
    "laurel_right",
)  # fmt: skip


class Layer(nnx.Module):
    """A decoder layer: attention or a mixer, and an MLP or experts, with norms and residuals.

    `residual.NORMS` lists the norms that a layer has for each `norm_placement` of its config::

        normed = input_norm(x)
        x = x + attention_out_norm(attention(normed))
        x = x + mlp_out_norm(mlp(post_attention_norm(x)))

    With `norm_placement` ``"parallel"``, the output is ``x + attention(normed) + mlp(normed)``.

    Weights have the shape ``[out, in]``, where `out` may be several dimensions. Projections with
    the same input are fused into one matrix, so that there are fewer and larger multiplications,
    and activations are read once. For tensor parallelism, each matrix can be divided along its
    heads, its features F, or its experts X. `dims` defines the dimension letters::

        qkv_proj              [K, G + 2, D, E]   queries, key and value of each KV head; 2 G + 2 if
                                                 there are output gates, one after each query
        o_proj                [E, H * D]         H = K * G, in the same order
        latent_proj, q_proj, kv_b_proj           instead of qkv_proj, see `layer_attention`
        gate_up_proj          [2, F, E]          gate, up; of the shared expert if there are experts
        down_proj             [E, F]             biases: gate_up_bias [2, F], down_bias [E]
        router                [X, E]             router_bias           [X]
        router_correction_bias  [X]              router_expert_factor   [X]
        experts_gate_up_proj  [X, 2, F, E]       experts_gate_up_bias  [X, 2, F]; without gates 1
                                             instead of 2 in both
        experts_down_proj     [X, E, F]          experts_down_bias     [X, E]
        moe_in_proj           [r, E]             moe_out_proj          [E, r]; experts then have r
                                                 instead of E, see `moe_latent_size`; biases:
                                                 moe_in_bias [r], moe_out_bias [E]
        shared_expert_gate    [1, E]
        per_layer_gate        [d, E]             d = hidden_size_per_layer_input
        per_layer_proj        [E, d]
        laurel_left           [r, E]             laurel_right          [E, r]

    In recurrent layers, the parameters of a mixer replace the attention parameters, see
    `mixer_sizes`. Hybrid layers have both, and add the two outputs.

    Args:
      config: configuration in which all layers are like this one. With `shard`, the configuration
        of one device, see `tensor_parallel.shard_config`.
      dtype: floating-point dtype of the model. Norms and biases have this dtype.
      formats: storage format of each matrix, by the name of the matrix in this layer.
      shard: this device's share of a tensor-parallel model; None without tensor parallelism.
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
        # Initialise projections into the residual stream with a smaller deviation, so that the
        # variance of the residual stream does not grow with the number of layers (GPT-2, section
        # 2.3).
        residual_deviation = deviation / (2 * config.num_hidden_layers) ** 0.5

        def add(name: str, *shape: int) -> None:
            spread = residual_deviation if name in _OUTPUTS else deviation
            add_matrix(self, name, random_matrix(rngs, shape, dtype, spread), formats[name])

        def add_norm(name: str, *shape: int) -> None:
            setattr(self, name, nnx.Param(initial_norm_weight(config, shape, dtype)))

        self.config = config
        self.formats = formats
        self.shard = shard
        for name in (*norm_names(config), *(EXPERT_NORMS if config.separate_expert_norms else ())):
            add_norm(name, E)
        if config.kv_shapes[0] is not None:
            self._add_attention(add, add_norm, dtype)
        if config.mixer is not None:
            key = rngs.params()
            for name, shape in config.mixer.shapes(E).items():
                if name.endswith("_proj"):
                    add(name, *shape)
                else:
                    setattr(self, name, nnx.Param(initial_vector(name, shape, dtype, key)))
        if F := config.dense_intermediate_size:
            halves = 2 if config.gated_mlp else 1
            add("gate_up_proj", halves, F, E)
            add("down_proj", E, F)
            if config.mlp_bias:
                self.gate_up_bias = nnx.Param(jnp.zeros((halves, F), dtype))
                self.down_bias = nnx.Param(jnp.zeros(E, dtype))
        if config.num_experts:
            self._add_experts(add, dtype)
        if d := config.hidden_size_per_layer_input:
            add("per_layer_gate", d, E)
            add("per_layer_proj", E, d)
            add_norm("per_layer_out_norm", E)
        if rank := config.laurel_rank:
            add("laurel_left", rank, E)
            add("laurel_right", E, rank)
            add_norm("laurel_norm", E)
        if config.residual_streams is not None:
            add_stream_weights(self, config.residual_streams.count, rngs, dtype)
        if config.layer_scalar:
            self.layer_scalar = nnx.Param(jnp.ones(1, dtype))

    def _add_attention(
        self, add: Callable[..., None], add_norm: Callable[..., None], dtype: DTypeLike
    ) -> None:
        config = self.config
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        query_rows = H // K * (2 if config.attention_gate else 1)
        qkv_heads = (K, query_rows + config.num_kv_rows, D)
        if (latent := config.latent) is None:
            add("qkv_proj", *qkv_heads, E)
        else:
            shapes = matrix_shapes(latent, H, E)
            for name, shape in shapes.items():
                add(name, *shape)
            if config.qkv_bias:
                self.latent_bias = nnx.Param(jnp.zeros(shapes["latent_proj"][0], dtype))
            if latent.q_lora_rank:
                self.q_a_norm = nnx.Param(jnp.ones(latent.q_lora_rank, dtype))
            self.kv_a_norm = nnx.Param(jnp.ones(latent.kv_lora_rank, dtype))
        if config.qkv_bias and latent is None:
            self.qkv_bias = nnx.Param(jnp.zeros(qkv_heads, dtype))
        add("o_proj", E, config.value_features)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(H, dtype))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros(E, dtype))
        if config.qk_norm and config.qk_norm_weight:
            is_shared = config.qk_norm_scope == "head"
            add_norm("q_norm", *((D,) if is_shared else (K, H // K, D)))
            if config.num_kv_rows:
                add_norm("k_norm", *((D,) if is_shared else (K, D)))

    def _add_experts(self, add: Callable[..., None], dtype: DTypeLike) -> None:
        config = self.config
        E, F, X = config.expert_inputs, config.moe_intermediate_size, config.num_experts
        num_local = X if self.shard is None else X // self.shard.num_devices
        add("router", X, config.hidden_size)
        if config.moe_latent_size:
            add("moe_in_proj", E, config.hidden_size)
            add("moe_out_proj", config.hidden_size, E)
            if config.mlp_bias:
                self.moe_in_bias = nnx.Param(jnp.zeros(E, dtype))
                self.moe_out_bias = nnx.Param(jnp.zeros(config.hidden_size, dtype))
        add("experts_gate_up_proj", num_local, 2 if config.gated_mlp else 1, F, E)
        add("experts_down_proj", num_local, E, F)
        if config.shared_expert_intermediate_size and config.shared_expert_gate:
            add("shared_expert_gate", 1, config.hidden_size)
        if config.router.has_correction_bias:
            # Always store these biases in float32, because bfloat16 could not distinguish biases of
            # almost equal size.
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
          x: float32 ``[..., E]``, the residual stream, or ``[..., n, E]`` in models with n residual
            streams.
          index: index of the layer in the model. In a scan over layers, it is traced.
          cos: float32 ``[..., D / 2]``, cosines of the rotation angles of each token.
          sin: float32 ``[..., D / 2]``, sines of the same angles.
          attend: function that computes the attention of the layer, see `Attend`.
          carry: state that is passed to `attend` and returned by it, such as the K and V pools.
          is_token: bool ``[...]``, False for padding tokens, which use no expert; None if there is
            no padding.
          query_scale: float32 ``[...]``, factor of each token's queries; None for 1.
          per_layer_input: float32 ``[..., hidden_size_per_layer_input]``, this layer's embedding of
            each token; None in models without per-layer embeddings.
          stack: in a scan over layers, the module that holds the stacked parameters of all layers;
            None otherwise. Some kernels read a layer's weights from the stack, because a slice of
            the stack would be a copy.
          backend: backend of the matrix multiplications, see `linear`.

        Returns:
          The new residual stream, of the shape of `x`, and the carry that `attend` returned.
        """
        config = self.config
        weights = LayerParameters(self, stack, index, backend)
        embed, streams = None, None
        if per_layer_input is not None:
            embed = functools.partial(self._embed, weights, per_layer_input)
        if config.residual_streams is not None:
            streams = predict_streams(config, x, weights)
            x = streams[..., config.residual_streams.active, :]

        normed, out = self._norm("input_norm", x), None
        if config.mixer is not None:
            mixed = mix(config.mixer, normed, weights)
            out, carry = attend(index, mixed.recurrence, carry)
            out = project_out(mixed.finish(out), weights, "mixer_out")
            out = multiply(out, config.mixer.out_multiplier)
        if config.kv_shapes[0] is not None:
            of_mixer = out
            heads, gate = self._project(normed, weights, (cos, sin, query_scale))
            out, carry = attend(index, heads, carry)
            if config.latent is not None:
                out = values_of_heads(config.latent, out, weights)
            out = out if gate is None else out * jax.nn.sigmoid(gate)
            out = weights.linear(out.reshape(*x.shape[:-1], -1), "o_proj")
            out = multiply(out, config.multipliers.attention_out)
            out = out if of_mixer is None else out + of_mixer
        if config.norm_placement == "parallel":
            assert out is not None  # both outputs are added first, so one all-reduce is enough
            out = self._all_reduce(out + self._mlp(normed, weights, is_token))
            return self._finish(x, self._with_bias(out), embed), carry
        if out is not None:
            out = self._with_bias(self._all_reduce(out))
            x = self._add(x, self._norm("attention_out_norm", out))
        x = add_low_rank(config, x, normed, weights)
        if NOTHING in config.mlp_layer_types:
            return x, carry
        normed = self._norm("post_attention_norm", x)
        if config.separate_expert_norms:
            out = self._sum_experts(x, normed, weights, is_token)
        else:
            out = self._all_reduce(self._mlp(normed, weights, is_token))
        out = self._norm("mlp_out_norm", out)
        if streams is not None:
            x = correct_streams(config, streams, self._add(x, out), weights)
            return add_to_streams(config, x, weights, embed), carry
        return self._finish(x, out, embed), carry

    def _embed(
        self, weights: LayerParameters, per_layer_input: jax.Array, x: jax.Array
    ) -> jax.Array:
        """Return this layer's token embeddings, gated by ``x [..., E]`` and projected."""
        gate = weights.linear(x, "per_layer_gate")
        out = ACTIVATIONS[self.config.hidden_act](gate) * per_layer_input
        return self._norm("per_layer_out_norm", weights.linear(out, "per_layer_proj"))

    @property
    def float_dtype(self) -> np.dtype:
        """Dtype of the floating-point parameters."""
        return getattr(self, norm_names(self.config)[0]).dtype

    def _with_bias(self, out: jax.Array) -> jax.Array:
        if not self.config.o_bias:
            return out
        return add_bias(out, multiply(self.o_bias[...], self.config.multipliers.attention_out))

    def _mlp(self, x: jax.Array, weights: LayerParameters, is_token: jax.Array | None) -> jax.Array:
        """Run the MLP or the experts.

        With a shard, return only this device's partial result. The results of all devices must be
        added.
        """
        config = self.config
        if not config.num_experts:
            return gated_mlp(config, x, weights, self._mean)
        out = routed_experts(config, x, x, weights, is_token=is_token, shard=self.shard)
        if not config.shared_expert_intermediate_size:
            return out
        shared = gated_mlp(config, x, weights)
        if not config.shared_expert_gate:
            return out + shared
        return out + shared * jax.nn.sigmoid(weights.linear(x, "shared_expert_gate"))

    def _sum_experts(
        self,
        x: jax.Array,
        normed: jax.Array,
        weights: LayerParameters,
        is_token: jax.Array | None,
    ) -> jax.Array:
        """Normalise the outputs of the routed experts and of the shared expert, and add them.

        With a shard, both outputs are summed over all devices before they are normalised.

        ``x [..., E]`` is the residual stream. ``normed [..., E]`` is the input of the shared
        expert.
        """
        config = self.config
        router_input = self._norm("router_norm", x) * config.hidden_size**-0.5
        inputs = self._norm("expert_input_norm", x), router_input
        routed = routed_experts(config, *inputs, weights, is_token=is_token, shard=self.shard)
        out = jnp.concatenate([routed, gated_mlp(config, normed, weights)], axis=-1)
        routed, shared = jnp.split(self._all_reduce(out), 2, axis=-1)
        return self._norm("expert_out_norm", routed) + self._norm("shared_out_norm", shared)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        """Apply the norm with this name to `x`. Return `x` if the layer does not have the norm."""
        weight = getattr(self, name, None)
        return x if weight is None else apply_norm(self.config, x, weight[...])

    def _add(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Return ``x + out * residual_multiplier``. ``x`` is the residual stream."""
        return x + multiply(out, self.config.residual_multiplier)

    def _finish(self, x: jax.Array, out: jax.Array, embed: Embed | None) -> jax.Array:
        """Return the layer's output, given the output `out` of its last sublayer.

        `out` is added to the residual stream `x`. If `embed` is not None, it maps this sum to the
        layer's gated token embeddings, and these are added to the sum. Finally, the result is
        multiplied by `layer_scalar`, if the layer has this parameter.
        """
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
        weights: LayerParameters,
        rotation: tuple[jax.Array, jax.Array, jax.Array | None],
    ) -> tuple[Projection | Heads, jax.Array | None]:
        """Project the layer's input to queries, keys and values, and to gates of the output.

        The queries, keys and values are usually a `Projection`, which `attend` normalises and
        rotates, because some kernels can do this while they write into the cache. These kernels do
        not support a `qk_norm_scope` other than ``"head"``, normalised values, values that are
        equal to the keys, or factors of normalised queries. In these cases, everything is computed
        here, and the result is `Heads`.

        The input ``x [..., E]`` is already normalised. `rotation` holds the cosines and the sines
        of the rotation angles, both ``[..., D / 2]``, and factors of the queries, ``[...]`` or
        None. All of them are float32.

        Returns:
          The `Projection` or `Heads`, and the gates ``[..., H, D]`` before the sigmoid, or None if
          the layer has no output gates.
        """
        config, gate = self.config, None
        if config.latent is not None:
            scale = config.attention_multiplier
            return latent_heads(config.latent, x, weights, rotation, scale), None
        cos, sin, query_scale = rotation
        qkv = weights.linear(multiply(x, config.multipliers.attention_in), "qkv_proj")
        if config.qkv_bias:
            qkv = add_bias(qkv, weights.vector("qkv_bias"))
        if config.attention_gate:
            qkv, gate = split_gate(qkv, config.num_kv_rows)
        sm_scale, soft_cap = config.attention_multiplier, config.attn_logit_softcapping
        if config.multipliers.key != 1:
            sm_scale = (sm_scale or config.head_dim**-0.5) * config.multipliers.key
        sinks = weights.vector("sinks") if config.attention_sinks else None
        norms = None
        if config.qk_norm and not config.qk_norm_weight:
            ones = jnp.ones(config.head_dim, jnp.float32)
            norms = ones, ones
        elif config.qk_norm:
            q_norm = weights.vector("q_norm")
            k_norm = weights.vector("k_norm") if config.num_kv_rows else q_norm
            norms = effective_weight(config, q_norm), effective_weight(config, k_norm)
        is_own = norms is not None and config.qk_norm_scope != "head"
        is_special = config.value_norm or config.attention_k_eq_v or not config.num_kv_rows
        if not (is_own or is_special or norms is not None and query_scale is not None):
            if query_scale is not None:
                qkv = scale_queries(qkv, query_scale)
            eps = config.rms_norm_eps
            return Projection(qkv, cos, sin, norms, eps, sm_scale, soft_cap, sinks), gate
        q, k, v = normed_heads(config, qkv, norms, self._mean)
        q, k = rotate(q, cos, sin), None if k is None else rotate(k, cos, sin)
        q = q if query_scale is None else q * query_scale[..., None, None]
        return Heads(q, k, v, sm_scale, soft_cap, sinks), gate
