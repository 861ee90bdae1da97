"""Multimodal models: their text model is read, and the models of images and audio are left out.

One rule covers all of them:

- The entry ``text_config`` of their ``config.json`` is the config of the text model. Its
  `model_type` is that of a family. In files of Qwen2-VL and Qwen2.5-VL, the entries of the text
  model are beside ``vision_config`` instead.
- The tensors of the text model have the names of its family, after the name of a module that
  contains them. The names of other modules say that they are about images or audio.

Models that compute texts in another way than their text model alone are not supported.
"""

import re
from collections.abc import Mapping
from typing import Any

from paged_jax.models.codecs.quantisation import QUANTISATION_KEYS
from paged_jax.models.config import ModelConfig
from paged_jax.models.config_json import read_names
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.registry import is_known, unsupported

# Module that contains the text model.
_TEXT_MODULE = re.compile(r"(model\.)?(language_model|text_model)\.")
# Words in names of modules, parameters and entries that are about images or audio.
_TOWERS = "vision|visual|image|video|audio|projector|connector|aligner|merger"
_OTHER_TOWER = re.compile(rf"(model\.)?\w*({_TOWERS})\w*(\.|$)")
_TOWER_ENTRY = re.compile(_TOWERS)
# Entries of the whole model that also apply to its text model.
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", *QUANTISATION_KEYS)
# Ends of the names of classes that generate text, and of those without an output head.
_CLASSES = ("ForConditionalGeneration", "ForCausalLM", "Model")
# Multimodal models that apply the soft cap of the text model's logits. In transformers, the head
# belongs to the whole model, and most of them apply neither the cap nor a factor.
_WITH_SOFT_CAP = ("gemma3n", "gemma4", "gemma4_unified")
# Models that compute texts in another way than their text model alone.
_CHANGED: Mapping[str, str] = {
    "mllama": "its cross-attention layers read images",
    "paligemma": "all tokens of a prompt attend to each other",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model, which is `config` itself without other models.

    Raises:
      UnsupportedConfigError: the multimodal model is not supported.
      ValueError: the entry ``text_config`` is no object.
    """
    if not _is_multimodal(config):
        return config
    model_type = config.get("model_type")
    if model_type in _CHANGED:
        raise unsupported("model_type", str(model_type), _CHANGED[str(model_type)])
    for architecture in read_names(config, "architectures") or ():
        if not architecture.endswith(_CLASSES):
            raise unsupported("architecture", architecture)
    shared = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    part = {**_text_entries(config), **shared, "architectures": None}
    if is_known(f"{model_type}_text"):
        part.setdefault("model_type", f"{model_type}_text")
    # The head belongs to the whole model, which also decides whether it is tied. If no entry says
    # so, it is tied as in the text model's family.
    if "tie_word_embeddings" in config:
        part["tie_word_embeddings"] = config["tie_word_embeddings"] or False
    elif not part.get("tie_word_embeddings"):
        part.pop("tie_word_embeddings", None)
    return part


def _is_multimodal(config: Mapping[str, Any]) -> bool:
    return config.get("text_config") is not None or is_known(f"{config.get('model_type')}_text")


def _text_entries(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries of the text model in the config of a multimodal model."""
    part = config.get("text_config")
    if part is None and "vision_config" in config:
        text_entries = {key: value for key, value in config.items() if not _TOWER_ENTRY.search(key)}
        return {**text_entries, "model_type": f"{config['model_type']}_text"}
    if not isinstance(part, Mapping):
        raise ValueError(
            "LlamaConfig: text_config must be a JSON object with the config of the text model, got "
            f"{part!r}."
        )
    return part


def check_head(config: Mapping[str, Any], text: ModelConfig) -> None:
    """Check that a multimodal model computes logits as its text model does.

    Args:
      config: content of the ``config.json``.
      text: config of the text model.

    Raises:
      UnsupportedConfigError: it does not.
    """
    model_type = config.get("model_type")
    if not _is_multimodal(config) or model_type in _WITH_SOFT_CAP:
        return
    for value, neutral, name in (
        (text.final_logit_softcapping, None, "the soft cap of logits (final_logit_softcapping)"),
        (text.logit_scale, 1.0, "the factor of logits (such as logit_scale)"),
    ):
        if value != neutral:
            raise UnsupportedConfigError(
                f"LlamaConfig: {name} must be {neutral} in the multimodal model {model_type!r}, "
                f"because transformers ignores it there, got {value!r}."
            )


def is_of_other_tower(name: str) -> bool:
    """Return whether a tensor belongs to a part of a multimodal model that is not read.

    Example:
      >>> [is_of_other_tower(name) for name in ("model.visual.norm.weight", "model.norm.weight")]
      [True, False]
    """
    return _OTHER_TOWER.match(name) is not None


def without_text_module(name: str) -> str:
    """Remove the module that contains the text model from the name of a tensor.

    Example:
      >>> without_text_module("model.language_model.layers.0.mlp.up_proj.weight")
      'layers.0.mlp.up_proj.weight'
      >>> without_text_module("model.layers.0.mlp.up_proj.weight")
      'model.layers.0.mlp.up_proj.weight'
    """
    return name[match.end() :] if (match := _TEXT_MODULE.match(name)) else name
