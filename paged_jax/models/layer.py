"""One decoder layer of the Llama family, whatever its attention reads."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.kernels.linear import Weight, linear
from paged_jax.kernels.rope import mean_square, rotate, scale_by, split_and_rotate
from paged_jax.models.config import LlamaConfig
from paged_jax.models.experts import add_experts, experts
from paged_jax.models.mlp import add_mlp, mlp
from paged_jax.models.norms import NORMS, effective_weight, initial_weight, norm
from paged_jax.models.part import Part
from paged_jax.models.weight import add_matrix, float_type, get_matrix
from paged_jax.short_repr import short_repr


class Projection(NamedTuple):
    """Queries, keys and values of a layer as they leave their product, and what is left to do.

    Attributes:
      qkv: float32 ``[..., K, G + 2, D]``: for each KV head its G queries, its key, its value.
      cos: f32 ``[..., D / 2]``, of the angles by which queries and keys are rotated.
      sin: f32 ``[..., D / 2]``.
      norms: None, or the weights ``[D]`` of the RMS norms of queries and of keys.
      norm_eps: added to the mean square of a head.
      sm_scale: factor of the scores; None for ``D ** -0.5``.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
      sinks: None, or floating point ``[H]``, one more logit in the softmax of each head.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    norms: tuple[jax.Array, jax.Array] | None
    norm_eps: float
    sm_scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries ``[..., H, D]``, keys and values ``[..., K, D]``, normed, rotated, float32."""
        return split_and_rotate(self.qkv, self.cos, self.sin, self.norms, norm_eps=self.norm_eps)


@short_repr
class Heads(NamedTuple):
    """Queries, keys and values of a layer, ready to meet: normed and rotated as its model has it.

    Attributes:
      q: ``[N, H, D]``, floating point.
      k: ``[N, K, D]``; query heads ``g * H / K`` and following share KV head ``g``.
      v: ``[N, K, D]``.
      sm_scale, soft_cap, sinks: see `Projection`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sm_scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        return self.q, self.k, self.v


# State that the layers pass on: the K and V pools, or nothing. The caller chooses its type.
Carry = TypeVar("Carry")

# Attention of one layer: (layer index, projection or heads, carry) -> (output ``[..., H, D]``,
# floating point, new carry). The index is traced if the layers run in a scan.
Attend = Callable[[int | jax.Array, Projection | Heads, Carry], tuple[jax.Array, Carry]]


class Layer(nnx.Module):
    """One decoder layer: attention and a gated MLP, each with norms and a residual.

    A layer has the norms of `norms.NORMS` that its config places::

        normed = input_norm(x)
        x = x + attention_out_norm(attention(normed))
        x = x + mlp_out_norm(mlp(post_attention_norm(x)))

    or, in parallel, ``x + attention(normed) + mlp(normed)``.

    Weights are ``[out, in]``, where `out` may be several dimensions. Queries, keys and values are
    one matrix, and so are the gate and the up projection: fewer and larger products, one read of
    the activations. They lie so that each can be divided over devices along one dimension, K or F,
    whatever the number of devices::

        qkv_proj      [K, G + 2, D, E]    of each KV head its queries, its key, its value
        o_proj        [E, H * D]          H = K * G, in the same order
        gate_up_proj  [2, F, E]           gate, up
        down_proj     [E, F]

    Those of experts are in `experts.add_experts`.

    Args:
      config: sizes and switches.
      dtype: type of the weights.
      part: which part of a model this is, where several devices compute one: the config is then
        that of the part.
      rngs: source of the initial weights.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: Any, part: Part | None = None, rngs: nnx.Rngs
    ):
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        qkv_heads = (K, H // K + 2, D)
        float_dtype = float_type(dtype, config)
        normal = nnx.initializers.normal(config.initializer_range)
        # Projections into the residual stream start smaller, so that its variance does not grow
        # with depth (GPT-2, section 2.3).
        to_residual = nnx.initializers.normal(
            config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        )

        def matrix(name: str, *shape: int, init: Any = normal) -> None:
            add_matrix(self, name, init(rngs.params(), shape, float_dtype), dtype)

        self.config = config
        self.part = part
        for name in NORMS[config.norm_placement]:
            setattr(self, name, nnx.Param(initial_weight(config, (E,), float_dtype)))
        matrix("qkv_proj", *qkv_heads, E)
        matrix("o_proj", E, H * D, init=to_residual)
        if config.dense_intermediate_size:
            add_mlp(config, matrix, to_residual)
        if config.num_experts:
            add_experts(self, config, matrix, to_residual, part, dtype)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(H, float_dtype))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(qkv_heads, float_dtype))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros(E, float_dtype))
        if config.qk_norm:
            is_whole = config.qk_norm_scope == "projection"
            q_shape, k_shape = ((K, H // K, D), (K, D)) if is_whole else ((D,), (D,))
            self.q_norm = nnx.Param(initial_weight(config, q_shape, float_dtype))
            self.k_norm = nnx.Param(initial_weight(config, k_shape, float_dtype))

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
        stack: "Layer | None" = None,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Run the layer.

        Args:
          x: float32 ``[..., E]``, the residual stream.
          index: number of the layer in the model; traced in a scan over layers.
          cos: f32 ``[..., D / 2]``, cosines of the rotation angles of each token.
          sin: f32 ``[..., D / 2]``, sines of the same angles.
          attend: attention of the layer, see `Attend`.
          carry: argument of `attend`.
          is_token: bool ``[...]``, False for padding rows, which use no expert; None if all rows
            are tokens.
          stack: all layers in one module, stacked along the first dimension, if this layer is a
            slice of them; None otherwise. Some kernels read the weights there.
          backend: backend of the matrix multiplications, see `linear`.

        Returns:
          The new residual stream, float32 ``[..., E]``, and the carry that `attend` returned.
        """

        def weight(name: str) -> Weight:
            return get_matrix(self, name, self._float_dtype, stack, index)

        def apply(name: str, x: jax.Array) -> jax.Array:
            return linear(x, weight(name), backend=backend)

        normed = self._norm("input_norm", x)
        out, carry = attend(index, self._heads(apply("qkv_proj", normed), cos, sin), carry)
        out = apply("o_proj", out.reshape(*x.shape[:-1], -1))
        run_mlp = functools.partial(self._mlp, weight, is_token, backend)
        if self.config.norm_placement == "parallel":
            # The devices' parts of both are added up at once.
            out = self._add_up(out + run_mlp(normed))
            return x + self._scale(self._with_bias(out)), carry
        out = self._with_bias(self._add_up(out))
        x = x + self._scale(self._norm("attention_out_norm", out))
        out = self._add_up(run_mlp(self._norm("post_attention_norm", x)))
        return x + self._scale(self._norm("mlp_out_norm", out)), carry

    @property
    def _float_dtype(self) -> Any:
        return getattr(self, NORMS[self.config.norm_placement][0]).dtype

    def _with_bias(self, out: jax.Array) -> jax.Array:
        return _add_bias(out, self.o_bias[...]) if self.config.o_bias else out

    def _mlp(
        self,
        weight: Callable[[str], Weight],
        is_token: jax.Array | None,
        backend: str | None,
        x: jax.Array,
    ) -> jax.Array:
        """The MLP, the experts, or both: on one of several devices, its part of their sum."""

        def apply(name: str, x: jax.Array) -> jax.Array:
            return linear(x, weight(name), backend=backend)

        if not self.config.num_experts:
            return mlp(self.config, apply, x)
        out = experts(self, weight, x, is_token, backend)
        return out + mlp(self.config, apply, x) if self.config.dense_intermediate_size else out

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        """One of `NORMS`, or nothing where the layer has none there."""
        weight = getattr(self, name, None)
        return x if weight is None else norm(self.config, x, weight[...])

    def _scale(self, out: jax.Array) -> jax.Array:
        factor = self.config.residual_multiplier
        return out if factor == 1 else out * factor

    def _add_up(self, out: jax.Array) -> jax.Array:
        return out if self.part is None else self.part.add_up(out)

    def _heads(self, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> Projection | Heads:
        """What attention is given: the projection, unless heads are normed together."""
        config = self.config
        if config.qkv_bias:
            qkv = _add_bias(qkv, self.qkv_bias[...])
        sm_scale, soft_cap = config.attention_multiplier, config.attn_logit_softcapping
        sinks = self.sinks[...] if config.attention_sinks else None
        norms = None
        if config.qk_norm:
            q_norm, k_norm = self.q_norm[...], self.k_norm[...]
            norms = effective_weight(config, q_norm), effective_weight(config, k_norm)
            if config.qk_norm_scope == "projection":
                q, k, v = _norm_and_split(qkv, *norms, config.rms_norm_eps, self.part)
                return Heads(rotate(q, cos, sin), rotate(k, cos, sin), v, sm_scale, soft_cap, sinks)
        return Projection(qkv, cos, sin, norms, config.rms_norm_eps, sm_scale, soft_cap, sinks)


def causal_attention(windows: Sequence[int | None]) -> Attend[Carry]:
    """Attention of whole sequences ``[B, T, ...]`` to themselves, without a cache or a carry.

    Args:
      windows: that of each layer, see `LlamaConfig`.
    """

    def attend(
        index: int | jax.Array, heads: Projection | Heads, carry: Carry
    ) -> tuple[jax.Array, Carry]:
        q, k, v = heads.split()
        window = sliding_window_of(windows, index)
        if heads.soft_cap is None and heads.sinks is None:
            local = None if window is None else (window - 1, 0)
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=local, scale=heads.sm_scale
            )
        else:
            out = _masked_attention(q, k, v, heads, window)
        return out, carry

    return attend


def sliding_window_of(windows: Sequence[int | None], index: int | jax.Array) -> int | None:
    """The window of a layer, whose number is static unless all have the same."""
    if len(set(windows)) == 1:
        return windows[0]
    assert isinstance(index, int)
    return windows[index]


def _masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: Projection | Heads, window: int | None
) -> jax.Array:
    """What XLA's own attention has no switch for: scores that are capped, and sinks."""
    B, T, H, D = q.shape
    K = k.shape[2]
    scale = D**-0.5 if heads.sm_scale is None else heads.sm_scale
    q = q.reshape(B, T, K, H // K, D) * scale
    scores_BKGTN = jnp.einsum("btkgd,bnkd->bkgtn", q, k)
    if heads.soft_cap is not None:
        scores_BKGTN = heads.soft_cap * jnp.tanh(scores_BKGTN / heads.soft_cap)
    distance_TN = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen_TN = distance_TN >= 0
    if window is not None:
        seen_TN &= distance_TN < window
    scores_BKGTN = jnp.where(seen_TN[None, None, None], scores_BKGTN, -jnp.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores_BKGTN.shape[:-1], 1))
        scores_BKGTN = jnp.concatenate([scores_BKGTN, sinks], axis=-1)
    weights_BKGTN = jax.nn.softmax(scores_BKGTN, axis=-1)[..., :T]
    return jnp.einsum("bkgtn,bnkd->btkgd", weights_BKGTN, v).reshape(B, T, H, D)


def _norm_and_split(
    qkv: jax.Array, q_weight: jax.Array, k_weight: jax.Array, eps: float, part: Part | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries ``[..., H, D]`` and keys ``[..., K, D]``, all heads of a token normed as one row, and
    values, from ``[..., K, G + 2, D]`` with weights ``[K, G, D]`` and ``[K, D]``."""
    *rows, K, width, D = qkv.shape
    q = qkv[..., : width - 2, :].reshape(*rows, -1)
    k = qkv[..., width - 2, :].reshape(*rows, -1)
    q_mean, k_mean = mean_square(q), mean_square(k)
    if part is not None:  # each has equally many heads of the row
        means = part.mean(jnp.concatenate([q_mean, k_mean], axis=-1))
        q_mean, k_mean = means[..., :1], means[..., 1:]
    q = scale_by(q, q_mean, q_weight.reshape(-1), eps)
    k = scale_by(k, k_mean, k_weight.reshape(-1), eps)
    return q.reshape(*rows, -1, D), k.reshape(*rows, K, D), qkv[..., width - 1, :]


def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias.astype(jnp.float32).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
