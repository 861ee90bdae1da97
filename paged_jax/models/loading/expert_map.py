"""Which tensors of Hugging Face make up the parameters of experts: one for each, or one for all."""

from collections.abc import Mapping

from paged_jax.models.config import LlamaConfig
from paged_jax.models.families import FAMILIES
from paged_jax.models.loading.piece import Piece, make_piece

# As they are called in most families. A * is the number of an expert.
_NAMES = {
    "router": "mlp.gate.weight",
    "experts_gate_proj": "mlp.experts.*.gate_proj.weight",
    "experts_up_proj": "mlp.experts.*.up_proj.weight",
    "experts_down_proj": "mlp.experts.*.down_proj.weight",
}

Pieces = tuple[Piece, ...]


def expert_pieces(config: LlamaConfig) -> Mapping[str, Pieces]:
    """Those of one layer, whose names begin with ``model.layers.{index}.``"""
    named = FAMILIES[config.model_type].tensors if config.model_type in FAMILIES else {}
    E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
    names = {**_NAMES, **named}
    shared = config.shared_expert_intermediate_size
    pieces: dict[str, Pieces] = {
        "router": (make_piece(names["router"], (X, E)),),
        "shared_expert_gate": (make_piece("mlp.shared_expert_gate.weight", (1, E)),),
        "gate_up_proj": (
            make_piece("mlp.shared_expert.gate_proj.weight", (shared, E), (1, shared, E)),
            make_piece("mlp.shared_expert.up_proj.weight", (shared, E), (1, shared, E), (1, 0, 0)),
        ),
        "down_proj": (make_piece("mlp.shared_expert.down_proj.weight", (E, shared)),),
    }
    if "experts_gate_up_proj" in names:
        return pieces | _interleaved(config, names)
    return pieces | {
        "experts_gate_up_proj": tuple(
            make_piece(names[name].replace("*", str(x)), (F, E), (1, 1, F, E), (x, half, 0, 0))
            for x in range(X)
            for half, name in enumerate(("experts_gate_proj", "experts_up_proj"))
        ),
        "experts_down_proj": tuple(
            make_piece(
                names["experts_down_proj"].replace("*", str(x)), (E, F), (1, E, F), (x, 0, 0)
            )
            for x in range(X)
        ),
    }


def fused_pieces(config: LlamaConfig) -> Mapping[str, Pieces]:
    """Those that transformers 5 has in memory where files have one for each expert."""
    E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
    gate_up, down = (X, 2 * F, E), (X, E, F)
    return {
        "router": (make_piece("mlp.gate.weight", (X, E)),),
        "experts_gate_up_proj": (
            Piece("mlp.experts.gate_up_proj", gate_up, (X, 2, F, E), (0,) * 4,
                  axes=(0, 1, 2, 3), split=(X, 2, F, E)),
        ),
        "experts_down_proj": (
            Piece("mlp.experts.down_proj", down, down, (0,) * 3, axes=(0, 1, 2)),
        ),
    }  # fmt: skip


def _interleaved(config: LlamaConfig, names: Mapping[str, str]) -> dict[str, Pieces]:
    """Those of gpt-oss: ``[in, out]``, gates and ups by turns."""
    E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
    return {
        "router_bias": (make_piece(names["router_bias"], (X,)),),
        "experts_gate_up_proj": (
            Piece(names["experts_gate_up_proj"], (X, E, 2 * F), (X, 2, F, E), (0,) * 4,
                  axes=(0, 3, 2, 1), split=(X, E, F, 2)),
        ),
        "experts_gate_up_bias": (
            Piece(names["experts_gate_up_bias"], (X, 2 * F), (X, 2, F), (0,) * 3,
                  axes=(0, 2, 1), split=(X, F, 2)),
        ),
        "experts_down_proj": (
            Piece(names["experts_down_proj"], (X, F, E), (X, E, F), (0,) * 3, axes=(0, 2, 1)),
        ),
        "experts_down_bias": (make_piece(names["experts_down_bias"], (X, E)),),
    }  # fmt: skip
