"""`FAMILIES`: the supported model families, and the choice of a family for a ``config.json``.

Each entry of a ``config.json`` is read by the family, or known not to change the computation, or
named in a warning; `models.known_keys` decides about entries that the family did not read. An entry
that is known to change the computation in an unsupported way is an error that names it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, stored_defaults
from paged_jax.models.config_json import ConfigEntries, read_names
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.cohere import Cohere, Cohere2
from paged_jax.models.families.common import check_only
from paged_jax.models.families.cwm import Cwm
from paged_jax.models.families.deepseek import DeepseekV2, DeepseekV3
from paged_jax.models.families.dots import Dots1
from paged_jax.models.families.ernie import Ernie45
from paged_jax.models.families.falcon_h1 import FalconH1
from paged_jax.models.families.gemma import Gemma, Gemma2, Gemma3
from paged_jax.models.families.gemma3n import Gemma3n
from paged_jax.models.families.gemma4 import Gemma4
from paged_jax.models.families.glm import Glm, Glm4
from paged_jax.models.families.glm_experts import Glm4Experts, Glm4LiteExperts
from paged_jax.models.families.gpt_oss import GptOss
from paged_jax.models.families.granite import Granite
from paged_jax.models.families.granite_hybrid import GraniteHybrid
from paged_jax.models.families.kimi import KimiLinear
from paged_jax.models.families.lfm import Lfm2, Lfm2Experts
from paged_jax.models.families.llama import Llama3
from paged_jax.models.families.llama4 import Llama4
from paged_jax.models.families.minimax import MiniMaxM2
from paged_jax.models.families.mistral import Ministral3, Mistral
from paged_jax.models.families.mistral4 import Mistral4
from paged_jax.models.families.mixtral import Mixtral
from paged_jax.models.families.nemotron_h import NemotronH
from paged_jax.models.families.olmo import Olmo2, Olmo3
from paged_jax.models.families.olmo_hybrid import OlmoHybrid
from paged_jax.models.families.olmoe import Olmoe
from paged_jax.models.families.phi import Phi3
from paged_jax.models.families.qwen import Qwen2, Qwen3
from paged_jax.models.families.qwen3_next import Qwen3Next, Qwen35, Qwen35Experts
from paged_jax.models.families.qwen_experts import Qwen2Experts, Qwen3Experts
from paged_jax.models.families.seed_oss import SeedOss
from paged_jax.models.families.smollm3 import SmolLM3

# Families by `model_type`. Programs may add their own families, see examples/new_family.py.
FAMILIES: dict[str, Family] = {
    "cohere": Cohere(),
    "cohere2": Cohere2(),
    "cwm": Cwm(),
    "deepseek_v2": DeepseekV2(),
    "deepseek_v3": DeepseekV3(),
    "dots1": Dots1(),
    "ernie4_5": Ernie45(),
    "falcon_h1": FalconH1(),
    "gemma": Gemma(),
    "gemma2": Gemma2(),
    "gemma3_text": Gemma3(),
    "gemma3n_text": Gemma3n(),
    "gemma4_text": Gemma4(),
    "glm": Glm(),
    "glm4": Glm4(),
    "glm4_moe": Glm4Experts(),
    "glm4_moe_lite": Glm4LiteExperts(),
    "gpt_oss": GptOss(),
    "granite": Granite(),
    "granitemoehybrid": GraniteHybrid(),
    "kimi_linear": KimiLinear(),
    "lfm2": Lfm2(),
    "lfm2_moe": Lfm2Experts(),
    "llama": Llama3(),
    "llama4_text": Llama4(),
    "minimax_m2": MiniMaxM2(),
    "ministral3": Ministral3(),
    "mistral": Mistral(),
    "mistral4": Mistral4(),
    "mixtral": Mixtral(),
    "nemotron_h": NemotronH(),
    "olmo2": Olmo2(),
    "olmo3": Olmo3(),
    "olmo_hybrid": OlmoHybrid(),
    "olmoe": Olmoe(),
    "phi3": Phi3(),
    "qwen2": Qwen2(),
    "qwen2_moe": Qwen2Experts(),
    "qwen3": Qwen3(),
    "qwen3_5_moe_text": Qwen35Experts(),
    "qwen3_5_text": Qwen35(),
    "qwen3_moe": Qwen3Experts(),
    "qwen3_next": Qwen3Next(),
    "seed_oss": SeedOss(),
    "smollm3": SmolLM3(),
}

# Prefixes of the `model_type` or class name, in lower case, of models with sparse attention in
# which an indexer chooses the tokens. These models are not supported.
_WITH_INDEXER = (
    "deepseek_v32",
    "deepseekv32",
    "deepseek_v4",
    "deepseekv4",
    "glm_moe_dsa",
    "glmmoedsa",
)


@dataclasses.dataclass(frozen=True)
class OtherName:
    """Another `model_type` of models that a family computes.

    Attributes:
      family: key of the family in `FAMILIES`.
      fixed: entries of the family that have one value in these models, also if files lack them.
    """

    family: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Most of these are text models of multimodal models. Those of Qwen rotate by three positions, which
# are equal for the tokens of a text.
OTHER_NAMES: Mapping[str, OtherName] = {
    "gemma4_unified_text": OtherName("gemma4_text"),
    "kimi_k2": OtherName("deepseek_v3"),
    "qwen2_5_vl_text": OtherName("qwen2"),
    "qwen2_vl_text": OtherName("qwen2"),
    "qwen3_vl_moe_text": OtherName("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_vl_text": OtherName("qwen3"),
}


def _base_architecture(architecture: str) -> str:
    """Return the transformers class that is `architecture` without its output head.

    Example:
      >>> _base_architecture("Qwen3ForCausalLM"), _base_architecture("Gemma3ForCausalLM")
      ('Qwen3Model', 'Gemma3TextModel')
    """
    if architecture in [f"{name}ForCausalLM" for name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4")]:
        return architecture.replace("ForCausalLM", "TextModel")
    return architecture.partition("For")[0] + "Model"


def unsupported(kind: str, name: str, reason: str = "") -> UnsupportedConfigError:
    """Return the error for a model that is not supported.

    Args:
      kind: entry of the file that names the model.
      name: its value.
      reason: why it is not supported, if there is more to say.
    """
    if name.lower().startswith(_WITH_INDEXER):
        reason = "its sparse attention chooses tokens by an indexer"
    because = reason and f": {reason}"
    return UnsupportedConfigError(
        f"LlamaConfig: {kind} {name!r} is not supported{because}. See docs/families.md for the "
        "models that are."
    )


def find_family(config: ConfigEntries) -> tuple[Family, ConfigEntries]:
    """Return the family that a ``config.json`` belongs to, and its entries with all defaults.

    Raises:
      UnsupportedConfigError: the family is not supported.
      ValueError: the entries that name the family are missing or contradict each other.
    """
    name = _find_model_type(config)
    if name not in OTHER_NAMES:
        family = FAMILIES[name]
        return family, config.complete(family.defaults)
    alias = OTHER_NAMES[name]
    family = FAMILIES[alias.family]
    check_only(family, config, **alias.fixed)
    return family, config.complete({**(stored_defaults(name) or family.defaults), **alias.fixed})


def _find_model_type(config: Mapping[str, Any]) -> str:
    """Return the key in `FAMILIES` or `OTHER_NAMES` for a ``config.json``."""
    architectures = read_names(config, "architectures") or []
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    by_architecture |= {_base_architecture(name): kind for name, kind in by_architecture.items()}
    for architecture in architectures:
        if architecture not in by_architecture:
            raise unsupported("architecture", architecture)
    model_type = config.get("model_type")
    if model_type is None and architectures:
        return by_architecture[architectures[0]]
    if model_type is None:
        raise ValueError("LlamaConfig: model_type is missing.")
    if not isinstance(model_type, str):
        raise ValueError(f"LlamaConfig: model_type must be a name, got {model_type!r}.")
    if not is_known(model_type):
        raise unsupported("model_type", model_type)
    family = OTHER_NAMES[model_type].family if model_type in OTHER_NAMES else model_type
    if any(by_architecture[architecture] != family for architecture in architectures):
        raise ValueError(
            f"LlamaConfig: architectures must only contain classes of model_type {family!r}, "
            f"got {architectures}."
        )
    return model_type


def is_known(model_type: str) -> bool:
    """Return whether a `model_type` is that of a family, or another name of one."""
    return model_type in FAMILIES or model_type in OTHER_NAMES
