"""Which tensors of Hugging Face make up each parameter of a model, and where in it they lie."""

import dataclasses
import functools
from collections.abc import Container, Iterator, Mapping

from paged_jax.models.config import LlamaConfig
from paged_jax.models.families import FAMILIES
from paged_jax.models.loading.expert_map import expert_pieces, fused_pieces
from paged_jax.models.loading.piece import Piece, make_piece
from paged_jax.models.rope import head_order

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_INNER = ("layers.", "embed_tokens.", "norm.")  # what ``model.`` contains

# Parameters ``[E]`` of a layer, and their tensors where the family has no other name for them.
_VECTORS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "o_bias": "self_attn.o_proj.bias",
}


def pieces(config: LlamaConfig, name: str, *, is_fused: bool = False) -> Iterator[Piece]:
    """The tensors that a parameter is made of: together they are all of it.

    Args:
      config: configuration of the model.
      name: name of the parameter, ``"layers.3.qkv_proj"``, or ``"layers.qkv_proj"`` where the
        layers are stacked.
      is_fused: whether experts lie in one tensor where files of the family have one for each.

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
        for piece in _layer_pieces(config, is_fused)[kind]:
            tensor = f"model.layers.{layer}.{piece.tensor}"
            if index:
                yield dataclasses.replace(piece, tensor=tensor)
            else:
                extent, offset = (1, *piece.extent), (layer, *piece.offset)
                yield dataclasses.replace(piece, tensor=tensor, extent=extent, offset=offset)


def find_pieces(config: LlamaConfig, name: str, tensors: Container[str]) -> list[Piece]:
    """As `pieces`, in the form that some tensors have; the usual one if they have none.

    Args:
      config, name: see `pieces`.
      tensors: names of what there is.
    """
    usual, fused = (list(pieces(config, name, is_fused=is_fused)) for is_fused in (False, True))
    has_all = [all(piece.tensor in tensors for piece in form) for form in (usual, fused)]
    return fused if has_all == [False, True] else usual


def tensor_name(config: LlamaConfig, stored: str) -> str | None:
    """Return the name in `pieces` of a tensor in a file; None if another part of the model owns it.

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
    # Models that were saved without a head lack the name of their part.
    return f"model.{stored}" if stored.startswith(_INNER) else stored


def _model_pieces(config: LlamaConfig) -> Mapping[str, tuple[Piece, ...]]:
    table = config.vocab_size, config.hidden_size
    return {
        "embed_tokens": (make_piece(EMBEDDINGS, table),),
        "norm": (make_piece("model.norm.weight", (config.hidden_size,)),),
        "lm_head": (make_piece(HEAD, table),),
    }


@functools.lru_cache(maxsize=8)
def _layer_pieces(config: LlamaConfig, is_fused: bool) -> Mapping[str, tuple[Piece, ...]]:
    """Those of one layer, whose names begin with ``model.layers.{index}.``"""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, K = config.num_attention_heads, config.num_key_value_heads
    named = FAMILIES[config.model_type].tensors if config.model_type in FAMILIES else {}
    # The order in which a head's numbers rotate. Values do not.
    order = head_order(
        D, int(D * config.partial_rotary_factor), interleaved=config.rope_interleaved
    )
    whole = {name: (make_piece(tensor, (E,)),) for name, tensor in {**_VECTORS, **named}.items()}
    if config.qk_norm_scope == "head":
        q_norm, k_norm = ((D,), (D,)), ((D,), (D,))
    else:
        q_norm, k_norm = ((H * D,), (K, H // K, D)), ((K * D,), (K, D))
    return {
        **whole,
        "qkv_proj": _qkv_pieces(config, "weight", order, named.get("qkv_proj")),
        "qkv_bias": _qkv_pieces(config, "bias", order, None),
        "q_norm": (make_piece("self_attn.q_norm.weight", *q_norm, order=order),),
        "k_norm": (make_piece("self_attn.k_norm.weight", *k_norm, order=order),),
        "o_proj": (make_piece("self_attn.o_proj.weight", (E, H * D)),),
        "gate_up_proj": (make_piece(named["gate_up_proj"], (2 * F, E), (2, F, E)),)
        if "gate_up_proj" in named
        else (
            make_piece("mlp.gate_proj.weight", (F, E), (1, F, E), (0, 0, 0)),
            make_piece("mlp.up_proj.weight", (F, E), (1, F, E), (1, 0, 0)),
        ),
        "down_proj": (make_piece("mlp.down_proj.weight", (E, F)),),
        "sinks": (make_piece("self_attn.sinks", (H,)),),
        **(expert_pieces(config) if config.num_experts else {}),
        **(fused_pieces(config) if config.num_experts and is_fused else {}),
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
            make_piece(
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
