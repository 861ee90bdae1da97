"""Which tensors of Hugging Face make up each parameter of a model, and where in it they lie."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paged_jax.models.config import LlamaConfig
from paged_jax.models.families import FAMILIES
from paged_jax.models.rope import head_order

# Parameters ``[E]`` of a layer, and their tensors where the family has no other name for them.
_VECTORS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "o_bias": "self_attn.o_proj.bias",
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of Hugging Face, or rows of it, and the box of a parameter that they are.

    ``parameter[piece.box]`` is ``piece.to_parameter(tensor)``: as a rule the tensor's numbers in
    the same order, reshaped to `extent`, as rows may be counted by several indices.

    Attributes:
      tensor: the tensor's name.
      shape: its shape.
      extent: the shape of the box. There may be dimensions of one.
      offset: index of its first number in the parameter.
      first_row: the first row of the tensor that is in the box, where others are elsewhere.
      order: which row each row of a head (or whatever the last axis that counts rows counts) is in
        the tensor; None if they lie in the same order.
      axes: where the tensor lies transposed, the order of its axes, the first of them staying.
      split: with `axes`, its shape with some axes counted by two indices; by default `shape`.
    """

    tensor: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    offset: tuple[int, ...]
    first_row: int = 0
    order: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None

    @property
    def end(self) -> tuple[int, ...]:
        """The first index past the box."""
        return tuple(map(sum, zip(self.offset, self.extent, strict=True)))

    @property
    def box(self) -> tuple[slice, ...]:
        """The part of the parameter that is the tensor."""
        return tuple(map(slice, self.offset, self.end))

    @property
    def num_row_axes(self) -> int:
        """Axes of the box that count rows of the tensor."""
        return len(self.extent) - len(self.shape) + 1

    @property
    def rows(self) -> np.ndarray:
        """The row of the tensor at each index of the first `num_row_axes` axes of the box."""
        shape = self.extent[: self.num_row_axes]
        rows = self.first_row + np.arange(math.prod(shape)).reshape(shape)
        return rows if self.order is None else rows[..., self.order]

    def to_parameter(self, tensor: Any) -> Any:
        """The box that a tensor ``[*shape]`` is, ``[*extent]``; of NumPy or JAX."""
        if self.axes is not None:
            return (
                tensor.reshape(self.split or self.shape).transpose(self.axes).reshape(self.extent)
            )
        num_rows = math.prod(self.extent[: self.num_row_axes])
        box = tensor[self.first_row : self.first_row + num_rows].reshape(self.extent)
        if self.order is None:
            return box
        return box[(slice(None),) * (self.num_row_axes - 1) + (np.array(self.order),)]

    def to_rows(self, box: Any) -> Any:
        """The tensor's rows that a box ``[*extent]`` is, the inverse of `to_parameter`."""
        if self.axes is not None:
            split = self.split or self.shape
            box = box.reshape(tuple(split[axis] for axis in self.axes))
            return box.transpose(tuple(np.argsort(self.axes).tolist())).reshape(self.shape)
        if self.order is not None:
            inverse = np.argsort(self.order)
            box = box[(slice(None),) * (self.num_row_axes - 1) + (inverse,)]
        return box.reshape(-1, *self.shape[1:])


def pieces(config: LlamaConfig, name: str) -> Iterator[Piece]:
    """The tensors that a parameter is made of: together they are all of it.

    Args:
      config: configuration of the model.
      name: name of the parameter, ``"layers.3.qkv_proj"``, or ``"layers.qkv_proj"`` where the
        layers are stacked.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
      >>> for piece in pieces(config, "layers.0.gate_up_proj"):
      ...     print(piece.tensor, piece.shape, piece.extent, piece.offset)
      model.layers.0.mlp.gate_proj.weight (32, 16) (1, 32, 16) (0, 0, 0)
      model.layers.0.mlp.up_proj.weight (32, 16) (1, 32, 16) (1, 0, 0)
    """
    scope, _, rest = name.partition(".")
    if scope != "layers":
        yield from _model_pieces(config)[name]
        return
    *index, kind = rest.split(".")  # ["3", "qkv_proj"], or ["qkv_proj"] for all layers
    for layer in [int(index[0])] if index else range(config.num_hidden_layers):
        for piece in _layer_pieces(config)[kind]:
            tensor = f"model.layers.{layer}.{piece.tensor}"
            if index:
                yield dataclasses.replace(piece, tensor=tensor)
            else:
                extent, offset = (1, *piece.extent), (layer, *piece.offset)
                yield dataclasses.replace(piece, tensor=tensor, extent=extent, offset=offset)


def tensor_name(config: LlamaConfig, stored: str) -> str | None:
    """What a tensor of a file is called in `pieces`; None if it is of another part of its model.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
      ...                      model_type="gemma3_text")
      >>> tensor_name(config, "language_model.model.norm.weight")
      'model.norm.weight'
    """
    prefixes = FAMILIES[config.model_type].prefixes if config.model_type in FAMILIES else {}
    for prefix, own in prefixes.items():
        if stored.startswith(prefix):
            return None if own is None else own + stored.removeprefix(prefix)
    return stored


def _model_pieces(config: LlamaConfig) -> Mapping[str, tuple[Piece, ...]]:
    table = config.vocab_size, config.hidden_size
    return {
        "embed_tokens": (_piece("model.embed_tokens.weight", table),),
        "norm": (_piece("model.norm.weight", (config.hidden_size,)),),
        "lm_head": (_piece("lm_head.weight", table),),
    }


def _layer_pieces(config: LlamaConfig) -> Mapping[str, tuple[Piece, ...]]:
    """Those of one layer, whose names begin with ``model.layers.{index}.``"""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, K = config.num_attention_heads, config.num_key_value_heads
    named = FAMILIES[config.model_type].tensors if config.model_type in FAMILIES else {}
    # The order in which a head's numbers rotate. Values do not.
    order = head_order(
        D, int(D * config.partial_rotary_factor), interleaved=config.rope_interleaved
    )
    whole = {name: (_piece(tensor, (E,)),) for name, tensor in {**_VECTORS, **named}.items()}
    if config.qk_norm_scope == "head":
        q_norm, k_norm = ((D,), (D,)), ((D,), (D,))
    else:
        q_norm, k_norm = ((H * D,), (K, H // K, D)), ((K * D,), (K, D))
    return {
        **whole,
        "qkv_proj": _qkv_pieces(config, "weight", order, named.get("qkv_proj")),
        "qkv_bias": _qkv_pieces(config, "bias", order, None),
        "q_norm": (_piece("self_attn.q_norm.weight", *q_norm, order=order),),
        "k_norm": (_piece("self_attn.k_norm.weight", *k_norm, order=order),),
        "o_proj": (_piece("self_attn.o_proj.weight", (E, H * D)),),
        "gate_up_proj": (_piece(named["gate_up_proj"], (2 * F, E), (2, F, E)),)
        if "gate_up_proj" in named
        else (
            _piece("mlp.gate_proj.weight", (F, E), (1, F, E), (0, 0, 0)),
            _piece("mlp.up_proj.weight", (F, E), (1, F, E), (1, 0, 0)),
        ),
        "down_proj": (_piece("mlp.down_proj.weight", (E, F)),),
    }


def _qkv_pieces(
    config: LlamaConfig, kind: str, order: tuple[int, ...] | None, fused: str | None
) -> tuple[Piece, ...]:
    """Queries, keys and values ``[K, G + 2, D, ...]``, of a tensor each or all `fused` in one."""
    D, H, K = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    columns = (config.hidden_size,) if kind == "weight" else ()
    pieces, row = [], 0
    for name, heads, first, its_order in (
        ("q_proj", H // K, 0, order),
        ("k_proj", 1, H // K, order),
        ("v_proj", 1, H // K + 1, None),
    ):
        num_rows = K * heads * D
        pieces.append(
            _piece(
                fused or f"self_attn.{name}.{kind}",
                (config.qkv_features if fused else num_rows, *columns),
                (K, heads, D, *columns),
                (0, first, 0, *[0] * len(columns)),
                first_row=row if fused else 0,
                order=its_order,
            )
        )
        row += num_rows
    return tuple(pieces)


def _piece(
    tensor: str,
    shape: tuple[int, ...],
    extent: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
    *,
    first_row: int = 0,
    order: tuple[int, ...] | None = None,
) -> Piece:
    extent = extent or shape
    return Piece(
        tensor, shape, extent, offset or (0,) * len(extent), first_row=first_row, order=order
    )
