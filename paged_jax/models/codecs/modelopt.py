"""ModelOpt of NVIDIA: matrices of fp8 with one scale, or of NVFP4.

The tensors are described in `fp8.py` and `nvfp4.py`. The config has an algorithm for all modules:
"FP8" or "NVFP4".
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.fp8 import Fp8Format
from paged_jax.models.codecs.module_names import (
    ModuleRule,
    Quantisation,
    all_modules,
    part_of_name,
)
from paged_jax.models.codecs.nvfp4 import ModelOptNvfp4Format

_HARMLESS = ("producer", "config_groups", *KV_CACHE_KEYS)


class ModelOptCodec(Codec):
    """FP8 and NVFP4 of ModelOpt."""

    methods = ("modelopt", "modelopt_fp4")
    formats = (Fp8Format, ModelOptNvfp4Format)
    file = "hf_quant_config.json"

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        is_unnamed = config.method is None and config.get("quant_algo")
        if config.method not in self.methods and not is_unnamed:
            return None
        algorithm = config.choice("quant_algo", choices=("fp8", "nvfp4"))
        group_size = config.size("group_size", default=16)
        is_fp8 = algorithm == "fp8"
        format = Fp8Format((None, None)) if is_fp8 else ModelOptNvfp4Format(group_size)
        excluded = tuple(map(_exclude, config.names("exclude_modules", "ignore")))
        config.finish(_HARMLESS)
        return Quantisation(config.where, (*excluded, all_modules(format)))

    def content_of_file(self, content: Mapping[str, Any]) -> Any:
        """Return the quantisation config in the content of `file`."""
        return content.get("quantization") or content


def _exclude(name: str) -> ModuleRule:
    """Return a rule for the modules that an entry excludes, in which * stands for any characters.

    An entry without * is a part of a module's name.
    """
    regex = re.compile(rf"{fnmatch.translate(name)}|(?:.*\.)?{re.escape(name)}(?:\.|$)")
    return part_of_name(name) or ModuleRule(name, None, regex=regex)
