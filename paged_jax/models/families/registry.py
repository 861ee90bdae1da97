"""`FAMILIES`: the supported model families, and the choice of a family for a ``config.json``.

Each entry of a ``config.json`` is read by the family, or known not to change the computation, or
named in a warning. An entry that is known to change the computation in an unsupported way is an
error that names it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paged_jax.models.codecs.quantisation import QUANTISATION_KEYS
from paged_jax.models.config import Family
from paged_jax.models.config_json import read_names
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.cohere import Cohere, Cohere2
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
# Keys of the outer config of a multimodal model that also apply to its text model.
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", *QUANTISATION_KEYS)


@dataclasses.dataclass(frozen=True)
class InnerTextModel:
    """Text model that is part of a multimodal model, which also reads images, audio or video.

    Attributes:
      architecture: class of the multimodal model in transformers.
      model_type: key of the text model in `families.FAMILIES`; None if the text model's config
        contains it.
      defaults: default values of missing keys in the text model's config, for keys whose default in
        transformers differs from the family's default.
      is_tied: whether the output head is tied to the embeddings if the outer config has no
        `tie_word_embeddings`.
      has_cap: whether the multimodal model in transformers applies ``final_logit_softcapping``.
      key: key of the text model's config in the outer config.
    """

    architecture: str
    model_type: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_tied: bool = True
    has_cap: bool = True
    key: str = "text_config"


# Other values of `model_type`, each with the key of its family in `FAMILIES`.
ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}

# Models with images, by `model_type`.
PARTS: Mapping[str, InnerTextModel] = {
    "gemma3": InnerTextModel("Gemma3ForConditionalGeneration", has_cap=False),
    "gemma3n": InnerTextModel("Gemma3nForConditionalGeneration"),
    "gemma4": InnerTextModel("Gemma4ForConditionalGeneration"),
    "llama4": InnerTextModel("Llama4ForConditionalGeneration", is_tied=False),
    "mistral3": InnerTextModel(
        "Mistral3ForConditionalGeneration", defaults={"model_type": "mistral"}
    ),
    # The text model of Qwen3-VL is Qwen3. Its rotary embedding has three position ids per token,
    # which are equal for text tokens.
    "qwen3_vl": InnerTextModel(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        {"max_position_embeddings": 128000, "rope_theta": 5e5},
        is_tied=False,
    ),
    # Rotates by three positions, which are equal for text.
    "qwen3_5": InnerTextModel("Qwen3_5ForConditionalGeneration", is_tied=False),
    "qwen3_5_moe": InnerTextModel("Qwen3_5MoeForConditionalGeneration", is_tied=False),
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model: `config`, or an entry of it in multimodal models."""
    for model_type, text in PARTS.items():
        architectures = config.get("architectures")
        if config.get("model_type") == model_type or architectures == [text.architecture]:
            known = (text.architecture, _base_architecture(text.architecture))
            for other in architectures if isinstance(architectures, list) else ():
                if other not in known:
                    raise _unsupported("architecture", other)
            return _text_part(config, text)
    return config


def _text_part(config: Mapping[str, Any], text: InnerTextModel) -> Mapping[str, Any]:
    if not isinstance(part := config.get(text.key), Mapping):
        raise ValueError(
            f"LlamaConfig: {text.key} must be a JSON object with the config of the text model, got "
            f"{part!r}."
        )
    if part.get("final_logit_softcapping") is not None and not text.has_cap:
        raise UnsupportedConfigError(
            "LlamaConfig: final_logit_softcapping must be null in this multimodal model, because "
            f"transformers ignores it there, got {part['final_logit_softcapping']!r}."
        )
    shared = {name: config[name] for name in _SHARED_KEYS if config.get(name) is not None}
    # The outer config decides whether embeddings are tied, because the output head belongs to the
    # whole model.
    tied = config.get("tie_word_embeddings", text.is_tied) or False
    outer = {**shared, "tie_word_embeddings": tied, "architectures": None}
    kind = {} if text.model_type is None else {"model_type": text.model_type}
    return {**text.defaults, **part, **outer, **kind}


def _base_architecture(architecture: str) -> str:
    """Return the transformers class that is `architecture` without its output head.

    Example:
      >>> _base_architecture("Qwen3ForCausalLM"), _base_architecture("Gemma3ForCausalLM")
      ('Qwen3Model', 'Gemma3TextModel')
    """
    if architecture in [f"{name}ForCausalLM" for name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4")]:
        return architecture.replace("ForCausalLM", "TextModel")
    return architecture.partition("For")[0] + "Model"


def _unsupported(kind: str, name: str) -> UnsupportedConfigError:
    is_sparse = name.lower().startswith(_WITH_INDEXER)
    reason = ": its sparse attention chooses tokens by an indexer" if is_sparse else ""
    return UnsupportedConfigError(
        f"LlamaConfig: {kind} {name!r} is not supported{reason}. See docs/families.md for the "
        "models that are."
    )


def find_model_type(config: Mapping[str, Any]) -> str:
    """Return the key in `FAMILIES` of the family that a ``config.json`` belongs to.

    Raises:
      UnsupportedConfigError: the family is not supported.
      ValueError: the entries that name the family are missing or contradict each other.
    """
    architectures = read_names(config, "architectures") or []
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    by_architecture |= {_base_architecture(name): kind for name, kind in by_architecture.items()}
    for architecture in architectures:
        if architecture not in by_architecture:
            raise _unsupported("architecture", architecture)
    model_type = config.get("model_type")
    if model_type is None and architectures:
        return by_architecture[architectures[0]]
    if model_type is None:
        raise ValueError("LlamaConfig: model_type is missing.")
    if not isinstance(model_type, str):
        raise ValueError(f"LlamaConfig: model_type must be a name, got {model_type!r}.")
    model_type = ALIASES.get(model_type, model_type)
    if model_type not in FAMILIES:
        raise _unsupported("model_type", model_type)
    if any(by_architecture[architecture] != model_type for architecture in architectures):
        raise ValueError(
            f"LlamaConfig: architectures must only contain classes of model_type {model_type!r}, "
            f"got {architectures}."
        )
    return model_type
