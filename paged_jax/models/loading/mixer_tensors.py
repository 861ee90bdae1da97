"""Mappings of the tensors of recurrent layers and of latent attention to parameters."""

import functools
import math
from collections.abc import Mapping

from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer_groups import LatentSizes
from paged_jax.models.loading.stored_tensors import Mappings, map_tensor
from paged_jax.models.mixer_sizes import Mixer
from paged_jax.models.rope import head_order


def mixer_mappings(mixer: Mixer, hidden_size: int, names: Mapping[str, str]) -> dict[str, Mappings]:
    """Return the mappings of the parameters of a mixer, by parameter name.

    A parameter is stored as one tensor, or in several pieces. Each piece is a tensor, or
    consecutive rows of a tensor, see `Family.tensors`.
    """
    mappings: dict[str, Mappings] = {}
    for name, shape in mixer.shapes(hidden_size).items():
        rest = shape[1:] if len(shape) == 4 else ()  # files flatten vectors that are not 4-D
        if name == "mixer_conv" or name.endswith("_proj"):
            rest = shape[-1:] if name.endswith("_proj") else shape[-2:]
        if name in names:
            rows = math.prod(shape) // math.prod(rest)
            mappings[name] = (map_tensor(names[name], (rows, *rest), shape),)
            continue
        K, first, boxes = shape[0], 0, []
        of_all = names.get(f"{name}.*", "")
        pieces = [
            (names.get(f"{name}.{piece}", of_all.replace("*", piece)), rows)
            for piece, rows in mixer.pieces[name]
        ]
        for index, (tensor, rows) in enumerate(pieces):
            before, total = (
                K * sum(each for other, each in some if other == tensor)
                for some in (pieces[:index], pieces)
            )
            start = (0, first, *[0] * len(rest))
            box = (K, rows, *rest)
            boxes.append(map_tensor(tensor, (total, *rest), box, start, first_row=before))
            first += rows
        mappings[name] = tuple(boxes)
    return mappings


def latent_mappings(config: LlamaConfig, latent: LatentSizes) -> dict[str, Mappings]:
    """Return the mappings of the parameters of latent attention, by parameter name."""
    E, H, R = config.hidden_size, config.num_attention_heads, latent.kv_lora_rank
    q_rank, nope, rope = latent.q_lora_rank, latent.qk_nope_head_dim, latent.qk_rope_head_dim
    order = head_order(rope, rope, interleaved=config.rope_interleaved)
    kv = functools.partial(map_tensor, "self_attn.kv_a_proj_with_mqa.weight", (R + rope, E))
    projections = (
        kv((R, E), (q_rank, 0)),
        kv((rope, E), (q_rank + R, 0), first_row=R, row_order=order),
    )
    kv = functools.partial(map_tensor, "self_attn.kv_a_proj_with_mqa.bias", (R + rope,))
    biases: Mappings = (
        kv((R,), (q_rank,)),
        kv((rope,), (q_rank + R,), first_row=R, row_order=order),
    )
    inputs, name, of_queries = E, "q_proj", ()
    if q_rank:
        inputs, name = q_rank, "q_b_proj"
        of_queries = (map_tensor("self_attn.q_a_proj.weight", (q_rank, E)),)
        biases = (map_tensor("self_attn.q_a_proj.bias", (q_rank,)), *biases)
    query_order = None
    if order is not None:
        query_order = (*range(nope), *(nope + index for index in order))
    size, kv_size = latent.query_dim, nope + latent.v_head_dim
    return {
        "latent_proj": of_queries + projections,
        "latent_bias": biases,
        "q_proj": (
            map_tensor(f"self_attn.{name}.weight", (H * size, inputs), (H, size, inputs),
                 row_order=query_order),
        ),
        "kv_b_proj": (map_tensor("self_attn.kv_b_proj.weight", (H * kv_size, R), (H, kv_size, R)),),
        "q_a_norm": (map_tensor("self_attn.q_a_layernorm.weight", (q_rank,)),),
        "kv_a_norm": (map_tensor("self_attn.kv_a_layernorm.weight", (R,)),),
    }  # fmt: skip
