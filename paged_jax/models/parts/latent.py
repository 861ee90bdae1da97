"""Latent attention, in which all heads share one latent vector per token (MLA).

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

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import check_positive
from paged_jax.kernels.exact import rounded
from paged_jax.kernels.linear import LayerWeights, Matrix, grouped_linear
from paged_jax.kernels.norm_rope import add_bias, rms_norm, rotate
from paged_jax.kernels.op import is_exact
from paged_jax.kernels.weight_formats import Weight
from paged_jax.models.layer_attention import Heads, Reach
from paged_jax.models.layer_groups import KVShape
from paged_jax.models.parts.part import (
    AttentionPart,
    LayerCall,
    Parameter,
    check_divisible,
    check_factor,
    matrix,
    multiply,
    ones,
    vector,
)
from paged_jax.models.rope import QueryScale, Rope, head_order
from paged_jax.models.tensor_mapping import ExpertLayout, Mappings, map_tensor, name_bias

# Constant added to the mean square in the norms of latent vectors. It is fixed, and may differ from
# the model's `rms_norm_eps`.
_NORM_EPS = 1e-6


class LatentSizes(NamedTuple):
    """Sizes of latent attention, named as in ``config.json``. See `LatentAttention`.

    Attributes:
      q_lora_rank: elements of the latent vector of queries; 0 if there is none.
      kv_lora_rank: elements of the latent vector of keys and values.
      qk_nope_head_dim: number of elements of a query or key that are not rotated.
      qk_rope_head_dim: number of elements of a query or key that are rotated.
      v_head_dim: number of elements of a head's value.
      num_copies: number of copies of the cached vectors. With tensor parallelism, each device has a
        copy of the vectors of all tokens.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_copies: int = 1

    @property
    def query_dim(self) -> int:
        """Number of elements of a head's query, both rotated and unrotated."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_shape(self) -> KVShape:
        """Shape of the cached vectors ``[c | rotated]``. All heads of a device share one vector."""
        return KVShape(self.num_copies, self.kv_lora_rank + self.qk_rope_head_dim, 0)

    def num_features(self, num_heads: int) -> int:
        """Return the number of activations per token in attention, for memory estimates."""
        cached_dim = self.kv_lora_rank + self.qk_rope_head_dim
        return (
            num_heads * (self.query_dim + cached_dim + self.kv_lora_rank)
            + self.q_lora_rank
            + cached_dim
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention(AttentionPart):
    """Latent attention of H heads.

    Parameters::

        latent_proj  [q_lora_rank + R + rotated, E]   projects the hidden state to the latent vector
                                            of queries (if there is one), to the latent vector c of
                                            keys and values, and to the rotated part of keys
        latent_bias  [q_lora_rank + R + rotated]
        q_proj       [H, query_dim, q_lora_rank or E]
        kv_b_proj    [H, qk_nope_head_dim + v_head_dim, R]    A and B of each head
        o_proj       [E, H * v_head_dim]
        o_bias       [E]
        q_a_norm     [q_lora_rank]          kv_a_norm  [R]

    Attributes:
      num_heads: number of heads (H).
      sizes: sizes of the latent vectors and of the heads.
      rope: rotary embedding of the rotated part; None for none.
      rope_interleaved: see `Attention`.
      latent_bias, o_bias: whether ``latent_proj`` and ``o_proj`` have biases.
      scale: factor of the attention scores; None for ``query_dim ** -0.5``.
      query_scale: factor of queries that depends on their position; None for 1.
      out_multiplier: factor of the output.
    """

    num_heads: int
    sizes: LatentSizes
    rope: Rope | None
    rope_interleaved: bool = False
    latent_bias: bool = False
    o_bias: bool = False
    scale: float | None = None
    query_scale: QueryScale | None = None
    out_multiplier: float = 1.0

    def __post_init__(self) -> None:
        sizes = self.sizes._asdict()
        if (q_lora_rank := sizes.pop("q_lora_rank")) < 0:
            raise ValueError(f"LatentAttention: q_lora_rank must be 0 or more, got {q_lora_rank}.")
        check_positive("LatentAttention", num_heads=self.num_heads, **sizes)
        check_factor("LatentAttention", scale=self.scale)

    tensor_names = {
        "latent_proj": "self_attn.kv_a_proj_with_mqa.weight",
        "q_a_proj": "self_attn.q_a_proj.weight",
        "q_proj": "self_attn.q_proj.weight",
        "q_b_proj": "self_attn.q_b_proj.weight",
        "kv_b_proj": "self_attn.kv_b_proj.weight",
        "o_proj": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
        "q_a_norm": "self_attn.q_a_layernorm.weight",
        "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    }
    source = None  # each layer has vectors of its own

    @property
    def kv(self) -> KVShape:
        """Shape of the cached vectors."""
        return self.sizes.kv_shape

    @property
    def reach(self) -> Reach:
        """Limits on the tokens that a query attends to: none."""
        return Reach(None, None)

    @property
    def head_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of rotated elements."""
        return self.sizes.qk_rope_head_dim

    def num_features(self, hidden_size: int) -> int:
        """Return the number of activations per token, see `Part.num_features`."""
        del hidden_size
        return 4 * self.sizes.num_features(self.num_heads)

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        sizes, H = self.sizes, self.num_heads
        num_latent = sizes.q_lora_rank + sizes.kv_lora_rank + sizes.qk_rope_head_dim
        parameters = {
            "latent_proj": matrix(num_latent, hidden_size),
            "q_proj": matrix(H, sizes.query_dim, sizes.q_lora_rank or hidden_size, divided=3),
            "kv_b_proj": matrix(
                H,
                sizes.qk_nope_head_dim + sizes.v_head_dim,
                sizes.kv_lora_rank,
                divided=3,
                stays_float=True,
                is_read_as_floats=True,
            ),
        }
        if self.latent_bias:
            parameters["latent_bias"] = vector(num_latent)
        if sizes.q_lora_rank:
            parameters["q_a_norm"] = vector(sizes.q_lora_rank, initial=ones)
        parameters["kv_a_norm"] = vector(sizes.kv_lora_rank, initial=ones)
        parameters["o_proj"] = matrix(hidden_size, H * sizes.v_head_dim, divided=1, is_output=True)
        if self.o_bias:
            parameters["o_bias"] = vector(hidden_size)
        return parameters

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the heads can be divided over the devices."""
        check_divisible(function, num_devices, num_attention_heads=self.num_heads)

    def widen(self, num_devices: int) -> Self:
        """Return the part with a copy of the cached vectors on each device."""
        return dataclasses.replace(self, sizes=self.sizes._replace(num_copies=num_devices))

    def divide(self, num_devices: int) -> Self:
        """Return the part with one device's heads and copy of the cached vectors."""
        sizes = self.sizes._replace(num_copies=1)
        return dataclasses.replace(self, num_heads=self.num_heads // num_devices, sizes=sizes)

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run attention, see `Part.__call__`."""
        out, carry = call.attend(call.index, self._project(x, call), carry)
        w, first = call.matrix("kv_b_proj"), self.sizes.qk_nope_head_dim
        out = _multiply_heads(out, w, call.backend, first)
        out = call.linear(out.reshape(*x.shape[:-1], -1), "o_proj")
        return rounded(multiply(out, self.out_multiplier), call.backend), carry

    def add_bias(self, out: jax.Array, call: LayerCall) -> jax.Array:
        """Add the bias of the output projection."""
        if not self.o_bias:
            return out
        return add_bias(out, multiply(call.vector("o_bias"), self.out_multiplier))

    def _project(self, x: jax.Array, call: LayerCall) -> Heads:
        """Project hidden states to the queries and cached vectors.

        The returned queries are already multiplied by the transpose of A.
        """
        assert call.rotation is not None
        sizes, backend = self.sizes, call.backend
        cos, sin, query_scale = call.rotation
        q_rank, R, nope = sizes.q_lora_rank, sizes.kv_lora_rank, sizes.qk_nope_head_dim
        projected, bias = call.linear(x, "latent_proj"), call.optional("latent_bias")
        projected = projected if bias is None else add_bias(projected, bias)
        of_queries, c, rotated = jnp.split(projected, [q_rank, q_rank + R], axis=-1)
        if q_rank:
            x = rms_norm(of_queries, call.vector("q_a_norm"), _NORM_EPS, backend=backend)
        q = call.linear(x, "q_proj")
        q = q if query_scale is None else q * query_scale[..., None, None]
        c = rms_norm(c, call.vector("kv_a_norm"), _NORM_EPS, backend=backend)[..., None, :]
        folded = _fold_keys(q[..., :nope], call.matrix("kv_b_proj"), backend)
        return Heads(
            q=jnp.concatenate([folded, rotate(q[..., nope:], cos, sin, backend)], axis=-1),
            k=jnp.concatenate([c, rotate(rotated[..., None, :], cos, sin, backend)], axis=-1),
            v=None,
            scale=self.scale or sizes.query_dim**-0.5,
            value_dim=R,
        )

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, see `Part.tensors`."""
        del layout
        E, H, sizes = hidden_size, self.num_heads, self.sizes
        R, q_rank = sizes.kv_lora_rank, sizes.q_lora_rank
        nope, rope = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
        order = head_order(rope, rope, interleaved=self.rope_interleaved)
        kv = functools.partial(map_tensor, names["latent_proj"], (R + rope, E))
        projections: Mappings = (
            kv((R, E), (q_rank, 0)),
            kv((rope, E), (q_rank + R, 0), first_row=R, row_order=order),
        )
        kv = functools.partial(map_tensor, name_bias(names["latent_proj"]), (R + rope,))
        biases: Mappings = (
            kv((R,), (q_rank,)),
            kv((rope,), (q_rank + R,), first_row=R, row_order=order),
        )
        inputs, of_queries = E, names["q_proj"]
        if q_rank:
            inputs, of_queries = q_rank, names["q_b_proj"]
            first = names["q_a_proj"]
            projections = (map_tensor(first, (q_rank, E)), *projections)
            biases = (map_tensor(name_bias(first), (q_rank,)), *biases)
        query_order = None
        if order is not None:
            query_order = (*range(nope), *(nope + index for index in order))
        size, kv_size = sizes.query_dim, nope + sizes.v_head_dim
        return {
            "latent_proj": projections,
            "latent_bias": biases,
            "q_proj": (
                map_tensor(of_queries, (H * size, inputs), (H, size, inputs),
                           row_order=query_order),
            ),
            "kv_b_proj": (map_tensor(names["kv_b_proj"], (H * kv_size, R), (H, kv_size, R)),),
            "o_proj": (map_tensor(names["o_proj"], (E, H * sizes.v_head_dim)),),
            "o_bias": (map_tensor(names["o_bias"], (E,)),),
            "q_a_norm": (map_tensor(names["q_a_norm"], (q_rank,)),),
            "kv_a_norm": (map_tensor(names["kv_a_norm"], (R,)),),
        }  # fmt: skip


def _fold_keys(q: jax.Array, w: Matrix, backend: str | None) -> jax.Array:
    """Multiply each head's query by the transpose of its matrix A, see the module docstring.

    The queries ``[..., H, qk_nope_head_dim]`` become ``[..., H, R]``. `w` holds A and B of each
    head. The queries are padded with zeros and multiplied by A and B together, because a slice of
    `w` that holds only A would be a copy. An exact backend copies A, because its matmuls read
    weights ``[out, in]``.
    """
    if isinstance(w, LayerWeights):
        return w.apply(lambda q, weight: _fold_keys(q, weight, backend), q)
    values = w.floats
    if is_exact(backend):
        keys = jnp.swapaxes(values[:, : q.shape[-1]], 1, 2)
        return _multiply_heads(q, Weight(keys), backend)
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


def _multiply_heads(x: jax.Array, w: Matrix, backend: str | None, first: int = 0) -> jax.Array:
    """Multiply each head of ``[..., H, in]`` by its own matrix of ``w [H, out, in]``.

    The first `first` outputs are left out.
    """
    *rows, H, size = x.shape
    by_head = jnp.moveaxis(x.reshape(-1, H, size), 1, 0)
    num_rows = by_head.shape[1]
    sizes = jnp.full(H, num_rows, jnp.int32)
    projected = grouped_linear(by_head.reshape(-1, size), w, sizes, backend=backend)
    projected = projected.reshape(H, num_rows, -1)[..., first:]
    return jnp.moveaxis(projected, 0, 1).reshape(*rows, H, -1)
