"""Which tensors of Hugging Face make up each parameter of a model, and where in it they lie."""

import dataclasses
from collections.abc import Iterator, Mapping

from paged_jax.models.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of Hugging Face, and the box of a parameter that it is.

    ``parameter[piece.box]`` is the tensor, reshaped to `extent`.

    Attributes:
      tensor: the tensor's name.
      shape: its shape.
      extent: its shape in the parameter. The same numbers in the same order: rows may be counted
        by several indices, and there may be dimensions of one.
      offset: index of its first number in the parameter.
    """

    tensor: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """The first index past the box."""
        return tuple(map(sum, zip(self.offset, self.extent, strict=True)))

    @property
    def box(self) -> tuple[slice, ...]:
        """The part of the parameter that is the tensor."""
        return tuple(map(slice, self.offset, self.end))


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
                yield Piece(tensor, piece.shape, extent, offset)


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
    G = H // K
    return {
        "input_norm": (_piece("input_layernorm.weight", (E,)),),
        "qkv_proj": (
            _piece("self_attn.q_proj.weight", (H * D, E), (K, G, D, E), (0, 0, 0, 0)),
            _piece("self_attn.k_proj.weight", (K * D, E), (K, 1, D, E), (0, G, 0, 0)),
            _piece("self_attn.v_proj.weight", (K * D, E), (K, 1, D, E), (0, G + 1, 0, 0)),
        ),
        "qkv_bias": (
            _piece("self_attn.q_proj.bias", (H * D,), (K, G, D), (0, 0, 0)),
            _piece("self_attn.k_proj.bias", (K * D,), (K, 1, D), (0, G, 0)),
            _piece("self_attn.v_proj.bias", (K * D,), (K, 1, D), (0, G + 1, 0)),
        ),
        "q_norm": (_piece("self_attn.q_norm.weight", (D,)),),
        "k_norm": (_piece("self_attn.k_norm.weight", (D,)),),
        "o_proj": (_piece("self_attn.o_proj.weight", (E, H * D)),),
        "o_bias": (_piece("self_attn.o_proj.bias", (E,)),),
        "post_attention_norm": (_piece("post_attention_layernorm.weight", (E,)),),
        "gate_up_proj": (
            _piece("mlp.gate_proj.weight", (F, E), (1, F, E), (0, 0, 0)),
            _piece("mlp.up_proj.weight", (F, E), (1, F, E), (1, 0, 0)),
        ),
        "down_proj": (_piece("mlp.down_proj.weight", (E, F)),),
    }


def _piece(
    tensor: str,
    shape: tuple[int, ...],
    extent: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
) -> Piece:
    return Piece(tensor, shape, extent or shape, offset or (0,) * len(shape))
