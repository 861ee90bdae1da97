# pyright: strict, reportUnknownMemberType=false
"""Interface of layers to their cache, attention without a cache, and latent attention.

A layer passes its inputs to a function of the type `Attend`. Attention layers pass queries, keys
and values, as `Projection` or `Heads`. The function decides to which tokens the queries attend.
Recurrent layers pass a `Recurrence`. The function reads the states from their storage, and writes
the new states back.

In latent attention (DeepSeek-V2, section 2.1), the keys and values of all heads are projections of
one latent vector c with R elements. In addition, keys contain a few rotated elements, which are the
same in all heads. Each head has a matrix A for keys and a matrix B for values::

    key of a head    [ A c | rotated ]          value of a head    B c

The keys and values of single heads are never computed. Instead, queries are multiplied by the
transpose of A, and the output of attention by B. All heads then attend to the same vectors
``[ c | rotated ]``, as in multi-query attention. The first R elements of such a vector are also its
value. With attention weights p::

    query . key   =  (A^T query) . c  +  rotated query . rotated
    sum of p B c  =  B (sum of p c)

A cache of DeepSeek V3 keeps 576 elements per token and layer, instead of 40,960.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from paged_jax.formatting import short_repr
from paged_jax.kernels.linear import LayerWeights, Matrix, grouped_linear
from paged_jax.kernels.norm_rope import (
    add_bias,
    expand,
    layer_norm,
    mean_square,
    rms_norm,
    rotate,
    scale_by,
    split_and_rotate,
)
from paged_jax.kernels.weight_formats import dequantise
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer_groups import LatentSizes, StateShape
from paged_jax.models.matrices import LayerParameters
from paged_jax.models.rope import head_order

# Constant added to the mean square in the norms of latent vectors. It is fixed, and may differ from
# the model's `rms_norm_eps`.
NORM_EPS = 1e-6


class Projection(NamedTuple):
    """Projected queries, keys and values, before they are normalised and rotated.

    Attributes:
      qkv: float32 ``[..., K, G + 2, D]``: for each KV head its G queries, its key and its value.
      cos: float32 ``[..., D / 2]``, cosines of the rotation angles.
      sin: float32 ``[..., D / 2]``, sines of the rotation angles.
      norms: weights of the RMS norms of queries and of keys, each ``[D]``; None if they are not
        normalised.
      norm_eps: constant added to the mean square of a head in these norms.
      sm_scale: factor of the attention scores; None for ``D ** -0.5``.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      sinks: floating point ``[H]``, one additional logit in the softmax of each head; None for no
        sinks.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    norms: tuple[jax.Array, jax.Array] | None
    norm_eps: float
    sm_scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None

    # None means that a value has as many elements as a key (D), see `Heads.value_dim`.
    value_dim = None

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalise and rotate; return queries ``[..., H, D]``, keys and values ``[..., K, D]``."""
        return split_and_rotate(self.qkv, self.cos, self.sin, self.norms, norm_eps=self.norm_eps)


@short_repr
class Heads(NamedTuple):
    """Queries, keys and values of a layer, already normalised and rotated.

    Attributes:
      q: ``[N, H, D]``, floating point.
      k: ``[N, K, D]``. Query heads ``g * H / K`` to ``(g + 1) * H / K - 1`` share KV head ``g``.
        `k` and `v` are None if the layer reads the keys and values of an earlier layer.
      v: ``[N, K, D]``. Only `v` is None if the values are the first `value_dim` elements of the
        keys. A cache then stores only the keys.
      sm_scale, soft_cap, sinks: see `Projection`.
      value_dim: if only `v` is None, number of elements of a value (U), which is also the output
        size of a head.
    """

    q: jax.Array
    k: jax.Array | None
    v: jax.Array | None
    sm_scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None
    value_dim: int | None = None

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries ``[..., H, D]``, keys ``[..., K, D]``, and values ``[..., K, U]``."""
        assert self.k is not None
        return self.q, self.k, self.k[..., : self.value_dim] if self.v is None else self.v


# States of a recurrent layer: an array ``[B, *shape]`` for each `StateShape`, where B is the number
# of sequences in the batch. If each sequence has one new token, they may instead be `StateRows`,
# which refer to rows of the pools.
States = tuple[Any, ...]


@short_repr
class Recurrence(NamedTuple):
    """Inputs of a recurrent layer, and the function that computes outputs and new states.

    The function `advance` is pure, so a caller may run it several times, for example with other
    states or with fewer tokens.

    Attributes:
      inputs: inputs of the recurrence, each float32 ``[N, features]``, or ``[B, T, features]``
        without a cache.
      advance: function that runs the recurrence. It takes the inputs ``[B, T, features]``, the
        states before the first token of each row, and the number of tokens in each row, i32
        ``[B]``. The tokens of a row come first. Padding after them changes no state, and its
        outputs are arbitrary. The function returns the outputs, float32 ``[B, T, features]``, and
        the states after the last token of each row, in the dtypes of the given states.
      arrays: shape and dtype of each state array. The state of a new sequence is zero.
      takes_rows: whether `advance` accepts `StateRows` instead of arrays if each row has one token.
        It then updates the states in their pools, and returns `StateRows` with the new pools.
    """

    inputs: tuple[jax.Array, ...]
    advance: Callable[[tuple[jax.Array, ...], States, jax.Array], tuple[jax.Array, States]]
    arrays: tuple[StateShape, ...]
    takes_rows: bool = False

    def run(self, states: States, num_tokens: jax.Array) -> tuple[jax.Array, States]:
        """Run the recurrence over the tokens of each row.

        Args:
          states: states before the first token of each row, ``[B, *shape]`` for each array, or
            `StateRows`.
          num_tokens: i32 ``[B]``, number of tokens in each row, at most T. The inputs have T
            positions per row, including padding. If they are ``[N, features]``, T is N / B.

        Returns:
          The outputs, float32 ``[N, features]`` or ``[B, T, features]`` like the inputs, and the
          new states.
        """
        B = num_tokens.shape[0]
        rows = tuple(x.reshape(B, -1, x.shape[-1]) for x in self.inputs)
        out, states = self.advance(rows, states, num_tokens)
        return out.reshape(*self.inputs[0].shape[:-1], -1), states

    def initial_states(self, batch_size: int, dtype: DTypeLike) -> States:
        """Return the states of new sequences, which are zero.

        Args:
          batch_size: number of sequences (B).
          dtype: dtype of the state arrays that have no dtype of their own, see `StateShape`.
        """
        return tuple(
            jnp.zeros((batch_size, *array.shape), array.dtype or dtype) for array in self.arrays
        )


# Inputs that a layer passes to its `attend` function.
LayerInputs = Projection | Heads | Recurrence

# Value that each layer passes on to the next: the pools of the cache, or an empty tuple without a
# cache.
Carry = TypeVar("Carry")

# Function that connects a layer to its cache. It takes the layer's index, the layer's inputs and
# the carry. It returns the output and the new carry. The output is floating point ``[..., H, U]``,
# or ``[..., features]`` for a `Recurrence`. The index is traced if the layers run in a scan.
Attend = Callable[[int | jax.Array, LayerInputs, Carry], tuple[jax.Array, Carry]]


class Reach(NamedTuple):
    """Limits on the tokens that a layer's queries attend to. None means no limit.

    Attributes:
      sliding_window: number of last tokens that the query attends to, including its own token.
      chunk: chunk size. A query attends only to tokens of its own chunk.
    """

    sliding_window: int | None
    chunk: int | None

    @classmethod
    def of_layer(cls, config: LlamaConfig, index: int | jax.Array) -> "Reach":
        """Return the limits of a layer. `index` may be traced if all windows are equal."""
        layer = index if isinstance(index, int) else 0
        assert isinstance(index, int) or len({*config.sliding_windows}) == 1
        return cls(config.sliding_windows[layer], config.attention_chunks[layer])


def causal_attention(config: LlamaConfig) -> Attend[Carry]:
    """Return an `Attend` function for whole sequences ``[B, T, ...]``, without a cache.

    Attention is causal, and the states of recurrent layers start at zero. Make a new function for
    each forward pass, because the function stores the keys and values that later layers read.
    """
    sources = config.kv_sources
    is_read = {source for layer, source in enumerate(sources) if source != layer}
    kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def attend(index: int | jax.Array, heads: LayerInputs, carry: Carry) -> tuple[jax.Array, Carry]:
        if isinstance(heads, Recurrence):
            B, T, _ = heads.inputs[0].shape
            states = heads.initial_states(B, jnp.float32)
            return heads.run(states, jnp.full(B, T, jnp.int32))[0], carry
        if isinstance(heads, Heads) and heads.k is None:
            assert isinstance(index, int)
            k, v = kept[sources[index]]
            heads = heads._replace(k=k, v=v)
        q, k, v = heads.split()
        if is_read and isinstance(index, int) and index in is_read:
            kept[index] = k, v
        reach = Reach.of_layer(config, index)
        is_usual = heads.soft_cap is None and heads.sinks is None and heads.value_dim is None
        if is_usual and reach.chunk is None:
            window = reach.sliding_window
            local = None if window is None else (window - 1, 0)
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=local, scale=heads.sm_scale
            )
        else:
            out = _masked_attention(q, k, v, heads, reach)
        return out, carry

    return attend


def _masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: Projection | Heads, reach: Reach
) -> jax.Array:
    """Compute attention with options that `jax.nn.dot_product_attention` does not support.

    These options are a soft cap, attention sinks, values that have fewer elements than keys, and
    chunked attention.
    """
    B, T, H, D = q.shape
    K = k.shape[2]
    scale = D**-0.5 if heads.sm_scale is None else heads.sm_scale
    q = q.reshape(B, T, K, H // K, D) * scale
    scores_BKGTN = jnp.einsum("btkgd,bnkd->bkgtn", q, k)
    if heads.soft_cap is not None:
        scores_BKGTN = heads.soft_cap * jnp.tanh(scores_BKGTN / heads.soft_cap)
    distance_TN = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen_TN = distance_TN >= 0
    if reach.sliding_window is not None:
        seen_TN &= distance_TN < reach.sliding_window
    if (chunk := reach.chunk) is not None:
        seen_TN &= (jnp.arange(T)[:, None] // chunk) == (jnp.arange(T)[None] // chunk)
    scores_BKGTN = jnp.where(seen_TN[None, None, None], scores_BKGTN, -jnp.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores_BKGTN.shape[:-1], 1))
        scores_BKGTN = jnp.concatenate([scores_BKGTN, sinks], axis=-1)
    weights_BKGTN = jax.nn.softmax(scores_BKGTN, axis=-1)[..., :T]
    return jnp.einsum("bkgtn,bnku->btkgu", weights_BKGTN, v).reshape(B, T, H, -1)


def normed_heads(
    config: LlamaConfig,
    qkv: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
    mean_over_devices: Callable[[jax.Array], jax.Array] | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Split a fused projection into queries, keys and values, and normalise them.

    The projection ``qkv [..., K, rows, D]`` contains no gates. `norms` holds the weights of the
    norms of queries and of keys; None if they are not normalised. For `mean_over_devices`, see
    `_norm_all_heads`.

    Returns:
      Queries ``[..., H, D]``, keys and values ``[..., K, D]``. Keys and values are None if the
      layer reads the keys and values of another layer.
    """
    eps = config.rms_norm_eps
    *rows, K, width, D = qkv.shape
    G = width - config.num_kv_rows
    if not config.num_kv_rows:
        q = qkv.reshape(*rows, K * G, D)
        return (q if norms is None else rms_norm(q, norms[0], eps, num_heads=K * G)), None, None
    q, k, v = qkv[..., :G, :], qkv[..., G, :], qkv[..., -1, :]
    if norms is not None and config.qk_norm_scope == "projection":
        q, k = q.reshape(*rows, -1), k.reshape(*rows, -1)
        q, k = _norm_all_heads(q, k, norms, eps, mean_over_devices)
    q, k = q.reshape(*rows, K * G, D), k.reshape(*rows, K, D)
    if norms is not None and config.qk_norm_scope == "head":
        q = rms_norm(q, norms[0], eps, num_heads=K * G)
        k = rms_norm(k, norms[1], eps, num_heads=K)
    if norms is not None and config.qk_norm_scope == "own":
        q, k = _norm_each_head(config, q, norms[0]), _norm_each_head(config, k, norms[1])
    if config.value_norm:
        v = v * lax.rsqrt(mean_square(v, num_heads=K) + eps)
    return q, k, v


def _norm_each_head(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Normalise each head of ``x [..., heads, D]``, and multiply it by the weight of this head.

    Elements of the weights ``[..., D]`` are in the order of the checkpoint, see `head_order`.
    """
    num_heads, D = x.shape[-2:]
    rope = config.ropes[0]
    order = rope and head_order(D, rope.paired_dim, interleaved=config.rope_interleaved)
    weight = weight if order is None else weight[..., np.array(order)]
    normalise = layer_norm if config.norm_type == "layer" else rms_norm
    normed = normalise(x, jnp.ones(D, jnp.float32), config.rms_norm_eps, num_heads=num_heads)
    return normed * expand(weight.reshape(num_heads, D), x.ndim)


def _norm_all_heads(
    q: jax.Array,
    k: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    eps: float,
    mean_over_devices: Callable[[jax.Array], jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """Apply RMS norms to queries and keys. The mean square is over all heads of a token.

    Queries are float32 ``[..., H * D]`` with weights ``[K, G, D]``, keys ``[..., K * D]`` with
    weights ``[K, D]``. If the heads are divided over devices, `mean_over_devices` returns the mean
    of its argument over these devices; otherwise it is None.
    """
    q_mean, k_mean = mean_square(q), mean_square(k)
    # Every device has the same number of heads, so the mean over all heads is the mean of the
    # devices' means.
    if mean_over_devices is not None:
        means = mean_over_devices(jnp.concatenate([q_mean, k_mean], axis=-1))
        q_mean, k_mean = means[..., :1], means[..., 1:]
    q = scale_by(q, q_mean, norms[0].reshape(-1), eps)
    return q, scale_by(k, k_mean, norms[1].reshape(-1), eps)


def split_gate(qkv: jax.Array, num_kv_rows: int) -> tuple[jax.Array, jax.Array]:
    """Separate a fused projection from the output gates in it.

    The projection is float32 ``[..., K, 2 G + num_kv_rows, D]``, in which each query is followed by
    its gate.

    Returns:
      The projection without gates ``[..., K, G + num_kv_rows, D]``, and gates ``[..., H, D]``.
    """
    *rows, K, width, D = qkv.shape
    pairs = qkv[..., : width - num_kv_rows, :].reshape(*rows, K, -1, 2, D)
    q, gate = pairs[..., 0, :], pairs[..., 1, :]
    kv = qkv[..., width - num_kv_rows :, :]
    return jnp.concatenate([q, kv], axis=-2), gate.reshape(*rows, -1, D)


def scale_queries(qkv: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply the queries of a projection ``[..., K, G + 2, D]`` by factors ``[...]``."""
    is_query = jnp.arange(qkv.shape[-2])[:, None] < qkv.shape[-2] - 2
    return qkv * jnp.where(is_query, scale[..., None, None, None], 1)


def matrix_shapes(
    latent: LatentSizes, num_heads: int, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of latent attention's matrices, except the output projection, by name.

    - ``latent_proj`` projects the hidden state to the latent vector of queries (if there is one),
      to the latent vector c of keys and values, and to the rotated part of keys.
    - ``q_proj`` projects the latent vector of queries, or the hidden state, to the queries of each
      head.
    - ``kv_b_proj`` consists of the matrices A and B of each head, which are applied to c.
    """
    return {
        "latent_proj": (latent.q_lora_rank + latent.kv_shape.head_dim, hidden_size),
        "q_proj": (num_heads, latent.query_dim, latent.q_lora_rank or hidden_size),
        "kv_b_proj": (
            num_heads,
            latent.qk_nope_head_dim + latent.v_head_dim,
            latent.kv_lora_rank,
        ),
    }


def latent_heads(
    latent: LatentSizes,
    x: jax.Array,
    weights: LayerParameters,
    rotation: tuple[jax.Array, jax.Array, jax.Array | None],
    sm_scale: float | None,
) -> Heads:
    """Project hidden states to the queries and cached vectors of latent attention.

    The returned queries are already multiplied by the transpose of A, see the module docstring.
    `rotation` holds cosines and sines, both ``[..., rotated / 2]``, and a factor of each token's
    queries, ``[...]`` or None. If `sm_scale` is None, it is ``latent.query_dim ** -0.5``.
    """
    cos, sin, query_scale = rotation
    q_rank, R, nope = latent.q_lora_rank, latent.kv_lora_rank, latent.qk_nope_head_dim
    projected, bias = weights.linear(x, "latent_proj"), weights.optional("latent_bias")
    projected = projected if bias is None else add_bias(projected, bias)
    of_queries, c, rotated = jnp.split(projected, [q_rank, q_rank + R], axis=-1)
    if q_rank:
        x = rms_norm(of_queries, weights.vector("q_a_norm"), NORM_EPS)
    q = weights.linear(x, "q_proj")
    q = q if query_scale is None else q * query_scale[..., None, None]
    c = rms_norm(c, weights.vector("kv_a_norm"), NORM_EPS)[..., None, :]
    folded = _fold_keys(q[..., :nope], weights.matrix("kv_b_proj"))
    return Heads(
        q=jnp.concatenate([folded, rotate(q[..., nope:], cos, sin)], axis=-1),
        k=jnp.concatenate([c, rotate(rotated[..., None, :], cos, sin)], axis=-1),
        v=None,
        sm_scale=sm_scale or latent.query_dim**-0.5,
        value_dim=R,
    )


def _fold_keys(q: jax.Array, w: Matrix) -> jax.Array:
    """Multiply each head's query by the transpose of its matrix A, see the module docstring.

    The queries ``[..., H, qk_nope_head_dim]`` become ``[..., H, R]``. `w` holds A and B of each
    head. The queries are padded with zeros and multiplied by A and B together, because a slice of
    `w` that holds only A would be a copy.
    """
    if isinstance(w, LayerWeights):
        return w.apply(_fold_keys, q)
    values = w.values
    if w.scales is not None:
        values = dequantise(lax.stop_gradient(w.arrays), w.format.code)
    padding = values.shape[1] - q.shape[-1]
    q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, padding)])

    def multiply(q: jax.Array, values: jax.Array) -> jax.Array:
        precision = "highest" if values.dtype == jnp.float32 else None
        return jnp.einsum(
            "...hd,hdr->...hr",
            q.astype(values.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def multiply_floats(q: jax.Array, values: jax.Array) -> jax.Array:
        return multiply(q, values.astype(jnp.float32))

    # Half precision is slow on CPUs.
    return cast(jax.Array, lax.platform_dependent(q, values, cpu=multiply_floats, default=multiply))


def values_of_heads(latent: LatentSizes, out: jax.Array, weights: LayerParameters) -> jax.Array:
    """Multiply each head's output of latent attention, ``[..., H, R]``, by its matrix B.

    Returns:
      float32 ``[..., H, v_head_dim]``.
    """
    *rows, H, R = out.shape
    by_head = jnp.moveaxis(out.reshape(-1, H, R), 1, 0)
    num_rows = by_head.shape[1]
    sizes = jnp.full(H, num_rows, jnp.int32)
    w = weights.matrix("kv_b_proj")
    projected = grouped_linear(by_head.reshape(-1, R), w, sizes, backend=weights.backend)
    projected = projected.reshape(H, num_rows, -1)[..., latent.qk_nope_head_dim :]
    return jnp.moveaxis(projected, 0, 1).reshape(*rows, H, -1)
