"""ModelOpt of NVIDIA: matrices of fp8 with one scale, matrices of NVFP4, or both in a checkpoint.

The tensors are described in `fp8.py` and `nvfp4.py`. The config names an algorithm for all modules,
or "MIXED_PRECISION" and the algorithm of each quantised module::

    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}
    }

An entry of `quantized_layers` also applies to the modules inside the named module. NVFP4 has static
scales for activations, which are not used, and W4A16_NVFP4 has none.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.fp8 import Fp8Format
from paged_jax.models.codecs.module_matrix import ModuleFormat
from paged_jax.models.codecs.module_names import (
    ModuleRule,
    Quantisation,
    all_modules,
    inside,
    part_of_name,
)
from paged_jax.models.codecs.nvfp4 import ModelOptNvfp4Format

_ALGORITHMS = ("fp8", "nvfp4", "w4a16_nvfp4")
_HARMLESS = ("producer", "config_groups", *KV_CACHE_KEYS)


class ModelOptCodec(Codec):
    """FP8 and NVFP4 of ModelOpt."""

    methods = ("modelopt", "modelopt_fp4")
    formats = (Fp8Format, ModelOptNvfp4Format)
    file = "hf_quant_config.json"

    def content_of_file(self, content: Mapping[str, Any]) -> Any:
        """Return the quantisation config in the content of `file`."""
        return content.get("quantization") or content

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        is_unnamed = config.method is None and config.get("quant_algo")
        if config.method not in self.methods and not is_unnamed:
            return None
        excluded = tuple(map(_exclude, config.names("exclude_modules", "ignore")))
        choices = (*_ALGORITHMS, "mixed_precision")
        if config.choice("quant_algo", choices=choices) == "mixed_precision":
            rules = _read_layers(config)
        else:
            rules = (all_modules(_read_format(config)),)
        config.finish(_HARMLESS)
        return Quantisation(config.where, (*excluded, *rules))


def _read_format(config: Entries) -> ModuleFormat:
    """Read the algorithm of all modules, or of one."""
    algorithm = config.choice("quant_algo", choices=_ALGORITHMS)
    group_size = config.size("group_size", default=16)
    return Fp8Format((None, None)) if algorithm == "fp8" else ModelOptNvfp4Format(group_size)


def _read_layers(config: Entries) -> tuple[ModuleRule, ...]:
    """Read the algorithms of modules. A module precedes the modules that contain it."""
    rules: list[ModuleRule] = []
    for name, layer in config.sections("quantized_layers").items():
        rules.append(inside(name, _read_format(layer)))
        layer.finish()
    config.get("group_size")  # every layer has its own
    return tuple(sorted(rules, key=lambda rule: -len(rule.parts)))


def _exclude(name: str) -> ModuleRule:
    """Return a rule for the modules that an entry excludes, in which * stands for any characters.

    An entry without * is a part of a module's name.
    """
    regex = re.compile(rf"{fnmatch.translate(name)}|(?:.*\.)?{re.escape(name)}(?:\.|$)")
    return part_of_name(name) or ModuleRule(name, None, regex=regex)
