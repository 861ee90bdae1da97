"""Attention with a fused projection of queries, keys and values."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.arguments import check_positive
from paged_jax.kernels.exact import inverse_root, rounded
from paged_jax.kernels.norm_rope import (
    add_bias,
    expand,
    layer_norm,
    mean_square,
    rms_norm,
    rotate,
    scale_by,
)
from paged_jax.models.layer_attention import Heads, Projection, Reach
from paged_jax.models.layer_groups import KVShape
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import (
    AttentionPart,
    LayerCall,
    Parameter,
    check_divisible,
    check_factor,
    matrix,
    multiply,
    vector,
)
from paged_jax.models.rope import QueryScale, Rope, head_order
from paged_jax.models.tensor_mapping import ExpertLayout, Mappings, map_tensor, name_bias

# Limit far above any real model. It rejects a mistyped size before it exhausts the memory.
MAX_HEAD_DIM = 1 << 16


@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """Norms of queries and keys.

    Attributes:
      norm: kind of norm, with its constants.
      scope: ``"head"`` normalises each head separately, with the same weights for all heads;
        ``"own"`` with different weights; ``"projection"`` all heads of a token together.
      has_weight: whether the norms have weights.
    """

    norm: Norm
    scope: str = "head"
    has_weight: bool = True

    def __post_init__(self) -> None:
        if self.scope not in (scopes := ("head", "own", "projection")):
            raise ValueError(
                f"HeadNorm: scope must be one of {', '.join(scopes)}, got {self.scope!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(AttentionPart):
    """Attention of H query heads to K heads of keys and values.

    The queries, keys and values are usually passed to `attend` as a `Projection`, which it
    normalises and rotates, because some kernels can do this while they write into the cache. These
    kernels support neither a `HeadNorm.scope` other than ``"head"``, normalised values, values that
    are equal to the keys, nor factors of normalised queries. In these cases, everything is computed
    here and passed as `Heads`.

    Parameters::

        qkv_proj    [K, G + 2, D, E]   queries, key and value of each KV head; 2 G + 2 if there are
                                       output gates, one after each query
        o_proj      [E, H * D]         H = K * G, in the same order
        qkv_bias    [K, G + 2, D]      o_bias  [E]
        q_norm      [D] or [K, G, D]   k_norm  [D] or [K, D]
        sinks       [H]

    Attributes:
      num_heads, num_kv_heads: number of query heads (H) and of KV heads (K).
      head_dim: elements per head (D), even.
      rope: rotary embedding; None if queries and keys are not rotated.
      rope_interleaved: whether the elements of a rotated pair are neighbours in checkpoints.
        Otherwise their distance is half of the rotated part.
      window: number of last tokens that a query attends to; None for all tokens.
      chunk: number of consecutive tokens that attend only to each other; None without chunks.
      source: index of an earlier layer whose keys and values this layer reads; None if it computes
        its own.
      values_are_keys: whether there is no projection of values. Values are then the projected keys
        before normalisation and rotation.
      normalises_values: whether the values of each head are normalised, without a weight.
      norm: norms of queries and keys; None for none.
      eps: constant added to the mean square in the norm of values.
      has_gate: whether the output of each query head is multiplied by the sigmoid of a gate, which
        is computed by the same projection as the query.
      has_sinks: whether each head has a learned score that takes part in the softmax but
        contributes no value.
      qkv_bias, o_bias: whether the projections have biases.
      scale: factor of the attention scores; None for ``D ** -0.5``.
      soft_cap: scores become ``cap * tanh(score / cap)``; None for no cap.
      query_scale: factor of queries that depends on their position; None for 1.
      in_multiplier, key_multiplier, out_multiplier: factors of the input, of the keys, and of the
        output after the projection, as in muP (Yang et al., arXiv 2203.03466).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    rope_interleaved: bool = False
    window: int | None = None
    chunk: int | None = None
    source: int | None = None
    values_are_keys: bool = False
    normalises_values: bool = False
    norm: HeadNorm | None = None
    eps: float = 1e-6
    has_gate: bool = False
    has_sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    query_scale: QueryScale | None = None
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0

    def __post_init__(self) -> None:
        sizes = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        check_positive("Attention", **sizes, head_dim=self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "Attention: num_heads must be a multiple of num_kv_heads, got num_heads "
                f"{self.num_heads} and num_kv_heads {self.num_kv_heads}."
            )
        if self.head_dim % 2 or self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"Attention: head_dim must be even and at most {MAX_HEAD_DIM}, got {self.head_dim}."
            )
        for name in ("window", "chunk"):
            if (size := getattr(self, name)) is not None:
                check_positive("Attention", **{name: size})
        check_factor("Attention", scale=self.scale, soft_cap=self.soft_cap, eps=self.eps)

    tensor_names = {
        "q_proj": "self_attn.q_proj.weight",
        "k_proj": "self_attn.k_proj.weight",
        "v_proj": "self_attn.v_proj.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "o_proj": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
        "sinks": "self_attn.sinks",
    }
    gguf_names = {
        "q_proj": "attn_q.weight",
        "k_proj": "attn_k.weight",
        "v_proj": "attn_v.weight",
        "qkv_proj": "attn_qkv.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "o_proj": "attn_output.weight",
        "sinks": "attn_sinks.weight",
    }

    @property
    def kv(self) -> KVShape:
        """Shape of a token's keys and values."""
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def reach(self) -> Reach:
        """Limits on the tokens that a query attends to."""
        return Reach(self.window if self.chunk is None else self.chunk, self.chunk)

    @property
    def num_kv_rows(self) -> int:
        """Number of key and value rows per KV head in ``qkv_proj``.

        It is usually 2: a key and a value. It is 1 if the keys are also used as values, and 0 if
        the layer reads the keys and values of another layer.
        """
        if self.source is not None:
            return 0
        return 1 if self.values_are_keys else 2

    def num_features(self, hidden_size: int) -> int:
        """Return the number of activations per token, see `Part.num_features`."""
        del hidden_size
        queries = self.num_heads * (2 if self.has_gate else 1)
        return 4 * (queries + self.num_kv_rows * self.num_kv_heads) * self.head_dim

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        H, K, D = self.num_heads, self.num_kv_heads, self.head_dim
        query_rows = H // K * (2 if self.has_gate else 1)
        qkv, rows = (K, query_rows + self.num_kv_rows, D), ((None, False), (self.num_kv_rows, True))
        parameters = {
            "qkv_proj": matrix(*qkv, hidden_size, divided=4, pieces=rows),
            "o_proj": matrix(hidden_size, H * D, divided=1, is_output=True),
        }
        if self.qkv_bias:
            parameters["qkv_bias"] = vector(*qkv, divided=3, pieces=rows)
        if self.has_sinks:
            parameters["sinks"] = vector(H, divided=1)
        if self.o_bias:
            parameters["o_bias"] = vector(hidden_size)
        if self.norm is not None and self.norm.has_weight:
            initial = self.norm.norm.initial
            if self.norm.scope == "head":
                norms = {name: vector(D, initial=initial) for name in ("q_norm", "k_norm")}
            else:
                divided, copied = ((None, False),), ((None, True),)
                norms = {
                    "q_norm": vector(K, H // K, D, initial=initial, divided=3, pieces=divided),
                    "k_norm": vector(K, D, initial=initial, divided=2, pieces=copied),
                }
            if not self.num_kv_rows:
                del norms["k_norm"]
            parameters |= norms
        return parameters

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the heads can be divided over the devices, see `Part.check_divides`."""
        check_divisible(function, num_devices, num_attention_heads=self.num_heads)
        if self.num_kv_heads % num_devices and num_devices % self.num_kv_heads:
            raise ValueError(
                f"{function}: tensor_parallel_size must be a divisor or a multiple of the model's "
                f"num_key_value_heads, {self.num_kv_heads}, got {num_devices}."
            )

    def widen(self, num_devices: int) -> Self:
        """Return the part with copies of KV heads, so that each device has at least one."""
        return dataclasses.replace(self, num_kv_heads=max(self.num_kv_heads, num_devices))

    def divide(self, num_devices: int) -> Self:
        """Return the part with one device's heads."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // num_devices,
            num_kv_heads=self.num_kv_heads // num_devices,
        )

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the sizes of the all-reduces: norms over all heads average two mean squares."""
        del hidden_size, num_devices
        return [2] if self.norm is not None and self.norm.scope == "projection" else []

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run attention, see `Part.__call__`."""
        heads, gate = self._project(x, call)
        out, carry = call.attend(call.index, heads, carry)
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        out = self.project_out(out.reshape(*x.shape[:-1], -1), call)
        return rounded(multiply(out, self.out_multiplier), call.backend), carry

    def project_in(self, x: jax.Array, call: LayerCall) -> jax.Array:
        """Project ``[..., E]`` to queries, gates, keys and values ``[..., K, rows, D]``.

        Variants override it, for example to clip the results.
        """
        qkv = call.linear(multiply(x, self.in_multiplier), "qkv_proj")
        return add_bias(qkv, call.vector("qkv_bias")) if self.qkv_bias else qkv

    def project_out(self, out: jax.Array, call: LayerCall) -> jax.Array:
        """Project the outputs of the heads ``[..., H * D]``, after gates, to ``[..., E]``.

        Variants override it, for example to normalise the outputs.
        """
        return call.linear(out, "o_proj")

    def add_bias(self, out: jax.Array, call: LayerCall) -> jax.Array:
        """Add the bias of the output projection."""
        if not self.o_bias:
            return out
        return add_bias(out, multiply(call.vector("o_bias"), self.out_multiplier))

    def _project(
        self, x: jax.Array, call: LayerCall
    ) -> tuple[Projection | Heads, jax.Array | None]:
        """Project the input to queries, keys and values, and to gates of the output.

        Returns:
          The `Projection` or `Heads`, and the gates ``[..., H, D]`` before the sigmoid, or None if
          there are no output gates.
        """
        gate = None
        qkv = self.project_in(x, call)
        if self.has_gate:
            qkv, gate = split_gate(qkv, self.num_kv_rows)
        scale = self.scale
        if self.key_multiplier != 1:
            scale = (scale or self.head_dim**-0.5) * self.key_multiplier
        sinks = call.vector("sinks") if self.has_sinks else None
        norms = self._norm_factors(call)
        assert call.rotation is not None
        cos, sin, factors = call.rotation
        is_fused = self.norm is None or self.norm.scope == "head" and factors is None
        if is_fused and self.num_kv_rows == 2 and not self.normalises_values:
            if factors is not None:
                qkv = scale_queries(qkv, factors)
            eps = self.eps if self.norm is None else self.norm.norm.eps
            return (
                Projection(qkv, cos, sin, norms, eps, scale, self.soft_cap, sinks),
                gate,
            )
        q, k, v = self._norm_heads(qkv, norms, call)
        rotated = functools.partial(rotate, cos=cos, sin=sin, backend=call.backend)
        q, k = rotated(q), None if k is None else rotated(k)
        q = q if factors is None else q * factors[..., None, None]
        return Heads(q, k, v, scale, self.soft_cap, sinks), gate

    def _norm_factors(self, call: LayerCall) -> tuple[jax.Array, jax.Array] | None:
        """Return the factors of the norms of queries and keys; None without norms."""
        if self.norm is None:
            return None
        if not self.norm.has_weight:
            unit_weight = jnp.ones(self.head_dim, jnp.float32)
            return unit_weight, unit_weight
        q_norm = call.vector("q_norm")
        k_norm = call.vector("k_norm") if self.num_kv_rows else q_norm
        return self.norm.norm.factor(q_norm), self.norm.norm.factor(k_norm)

    def _norm_heads(
        self, qkv: jax.Array, norms: tuple[jax.Array, jax.Array] | None, call: LayerCall
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Split a fused projection into queries, keys and values, and normalise them.

        The projection ``qkv [..., K, rows, D]`` contains no gates. `norms` is the result of
        `_norm_factors`.

        Returns:
          Queries ``[..., H, D]``, keys and values ``[..., K, D]``. Keys and values are None if the
          layer reads the keys and values of another layer.
        """
        *rows, K, width, D = qkv.shape
        G, backend = width - self.num_kv_rows, call.backend
        scope = None if self.norm is None else self.norm.scope
        eps = self.eps if self.norm is None else self.norm.norm.eps
        if not self.num_kv_rows:
            q = qkv.reshape(*rows, K * G, D)
            if norms is not None:
                q = rms_norm(q, norms[0], eps, num_heads=K * G, backend=backend)
            return q, None, None
        q, k, v = qkv[..., :G, :], qkv[..., G, :], qkv[..., -1, :]
        if norms is not None and scope == "projection":
            q, k = q.reshape(*rows, -1), k.reshape(*rows, -1)
            q, k = _norm_all_heads(q, k, norms, eps, call.mean_over_devices, backend)
        q, k = q.reshape(*rows, K * G, D), k.reshape(*rows, K, D)
        if norms is not None and scope == "head":
            q = rms_norm(q, norms[0], eps, num_heads=K * G, backend=backend)
            k = rms_norm(k, norms[1], eps, num_heads=K, backend=backend)
        if norms is not None and scope == "own":
            q = self._norm_each_head(q, norms[0], backend)
            k = self._norm_each_head(k, norms[1], backend)
        if self.normalises_values:
            v = v * inverse_root(mean_square(v, num_heads=K, backend=backend) + self.eps, backend)
        return q, k, v

    def _norm_each_head(self, x: jax.Array, weight: jax.Array, backend: str | None) -> jax.Array:
        """Normalise each head of ``x [..., heads, D]``, and multiply it by the head's own weight.

        Elements of the weights ``[..., D]`` are in the order of the checkpoint, see `head_order`.
        """
        assert self.norm is not None
        num_heads, D = x.shape[-2:]
        order = self.rope and self._row_order
        weight = weight if order is None else weight[..., np.array(order)]
        normalise = layer_norm if self.norm.norm.kind == "layer" else rms_norm
        unit_weight = jnp.ones(D, jnp.float32)
        normed = normalise(x, unit_weight, self.norm.norm.eps, num_heads=num_heads, backend=backend)
        return normed * expand(weight.reshape(num_heads, D), x.ndim)

    @property
    def _row_order(self) -> tuple[int, ...] | None:
        """Order of a head's rows in checkpoints, see `head_order`."""
        paired_dim = self.head_dim if self.rope is None else self.rope.paired_dim
        return head_order(self.head_dim, paired_dim, interleaved=self.rope_interleaved)

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, see `Part.tensors`."""
        del layout
        E = hidden_size
        mappings = {
            "qkv_proj": self._map_qkv(E, names),
            "qkv_bias": self._map_qkv(E, names, is_bias=True),
            **self._map_norms(names),
        }
        return self.map_others(mappings, E, names)

    def _map_norms(self, names: Mapping[str, str]) -> dict[str, Mappings]:
        D, H, K = self.head_dim, self.num_heads, self.num_kv_heads
        q_norm, k_norm = names["q_norm"], names["k_norm"]
        scope = "head" if self.norm is None else self.norm.scope
        if scope == "own":
            # The weight in the file has a row for each head. The elements of a row are not
            # reordered here, because `_norm_each_head` reorders them when the model runs.
            return {
                "q_norm": (map_tensor(q_norm, (H, D), (K, H // K, D)),),
                "k_norm": (map_tensor(k_norm, (K, D)),),
            }
        shapes = ((D,), (D,)), ((D,), (D,))
        if scope == "projection":
            shapes = ((H * D,), (K, H // K, D)), ((K * D,), (K, D))
        return {
            "q_norm": (map_tensor(q_norm, *shapes[0], row_order=self._row_order),),
            "k_norm": (map_tensor(k_norm, *shapes[1], row_order=self._row_order),),
        }

    def _map_qkv(
        self, hidden_size: int, names: Mapping[str, str], *, is_bias: bool = False
    ) -> Mappings:
        """Map ``qkv_proj`` or ``qkv_bias`` to the tensors of the files.

        Q, K and V of the weights are one fused tensor or three tensors. Biases are always three
        tensors. Queries and keys rotate, so their rows are reordered. Values and gates do not.
        """
        D, H, K = self.head_dim, self.num_heads, self.num_kv_heads
        fused_tensor = None if is_bias else names.get("qkv_proj")
        columns = () if is_bias else (hidden_size,)
        row_order = query_order = self._row_order
        G = H // K
        if self.has_gate:
            # In the tensor, the gate of a head follows its query.
            G, gate = 2 * G, tuple(range(D, 2 * D))
            query_order = None if row_order is None else row_order + gate
        pieces = [
            ("q_proj", G, 0, query_order),
            ("k_proj", 1, G, row_order),
            ("v_proj", 1, G + 1, None),
        ]
        mappings, row, num_rows = [], 0, K * (G + self.num_kv_rows) * D
        for name, heads, first_head, order in pieces[: 1 + self.num_kv_rows]:
            rows = K * heads * D
            tensor = fused_tensor or names[name]
            mappings.append(
                map_tensor(
                    name_bias(tensor) if is_bias else tensor,
                    (num_rows if fused_tensor else rows, *columns),
                    (K, heads, D, *columns),
                    (0, first_head, 0, *[0] * len(columns)),
                    first_row=row if fused_tensor else 0,
                    row_order=order,
                )
            )
            row += rows
        return tuple(mappings)


def _norm_all_heads(
    q: jax.Array,
    k: jax.Array,
    norms: tuple[jax.Array, jax.Array],
    eps: float,
    mean_over_devices: Callable[[jax.Array], jax.Array] | None,
    backend: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Apply RMS norms to queries and keys. The mean square is over all heads of a token.

    Queries are float32 ``[..., H * D]`` with weights ``[K, G, D]``, keys ``[..., K * D]`` with
    weights ``[K, D]``. If the heads are divided over devices, `mean_over_devices` returns the mean
    of its argument over these devices; otherwise it is None.
    """
    q_mean, k_mean = mean_square(q, backend=backend), mean_square(k, backend=backend)
    # Every device has the same number of heads, so the mean over all heads is the mean of the
    # devices' means.
    if mean_over_devices is not None:
        means = mean_over_devices(jnp.concatenate([q_mean, k_mean], axis=-1))
        q_mean, k_mean = means[..., :1], means[..., 1:]
    q = scale_by(q, q_mean, norms[0].reshape(-1), eps, backend)
    return q, scale_by(k, k_mean, norms[1].reshape(-1), eps, backend)


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
