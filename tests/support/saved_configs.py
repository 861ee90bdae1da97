"""Configs as transformers saves them, with as many layers as real models have.

Small models have fewer layers than ten, so some entries look different in their files.
`tests/data/saved_configs/configs.json` has the ``config.json`` of each case, and the head dimension
and number of KV heads of each layer. `write` computes them with transformers.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.models.families.registry import FAMILIES
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts.latent import LatentAttention
from tests.support import DATA
from tests.support.attempts import compute_each

FOLDER = DATA / "saved_configs"
_NAME = "configs.json"
# Entries of real models that differ from the defaults of transformers, which describe no model.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "deepseek_v2": {"num_experts_per_tok": 6, "num_hidden_layers": 60},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 13},
}
_LARGE_GEMMA4 = {
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
}
# For each case, the model type, and the entries that differ from the defaults.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{model_type: (model_type, _CHANGES.get(model_type, {})) for model_type in FAMILIES},
    "gemma4 with other KV heads": ("gemma4_text", _LARGE_GEMMA4),
    "gemma4 with all layers listed": (
        "gemma4_text",
        {**_LARGE_GEMMA4, "serialize_explicit_per_layer_config": True},
    ),
}


def read() -> dict[str, dict[str, Any]]:
    """Read the stored cases: the ``config``, and the ``heads`` of each layer."""
    return json.loads((FOLDER / _NAME).read_text(encoding="utf-8"))


def compute(case: str) -> dict[str, Any]:
    """Save a config with transformers, and count the heads of its layers."""
    import transformers

    model_type, changes = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **changes)
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    saved = save(config)
    del saved["transformers_version"]
    ours = LlamaConfig.from_dict(saved)
    is_latent = any(layer.find(LatentAttention) for layer in ours.layers)
    return {"config": saved, "heads": [] if is_latent else [_heads(layer) for layer in layers]}


def save(config: Any) -> dict[str, Any]:
    """Save a config of transformers, and read the file."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def _heads(layer: Any) -> list[int]:
    """Return the head dimension and the number of KV heads in the config of a layer."""
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return [head_dim, getattr(layer, "num_key_value_heads", None) or heads]


def write(folder: Path) -> list[str]:
    """Write the file, and return a line for each case that fails."""
    stored = read()
    cases, failures = compute_each(sorted(CASES), compute, stored.get)
    lines = [f"{json.dumps(case)}: {json.dumps(content)}" for case, content in cases.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NAME).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return failures
