"""Checks of tensor names and counts that explain why a file does not fit its config."""

import re
from collections.abc import Iterable, Mapping

from paged_jax.models.loading.parameters import WeightsError

# Wrappers of other programs: the part that they add to tensor names, and the wrapper.
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "pretrained_model.": "a model with a value head of TRL",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning",
    "base_model.model.": "PEFT",
    "module.": "DistributedDataParallel or DeepSpeed",
}
_ADAPTERS = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|base_layer|lora_magnitude_vector)(\.|$)")
# Suffixes of tensors that accompany quantised weights, and the tools that write them.
_QUANTISED = {
    ".scales": "MLX or GPTQ",
    ".biases": "MLX",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors or FP8",
    ".weight_scale_inv": "FP8",
    ".weight_scale_2": "NVFP4",
    ".input_scale": "FP8",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def check_names(names: Iterable[str]) -> None:
    """Check that no name belongs to a wrapped model, an adapter or quantised weights.

    Raises:
      WeightsError: a name does. The message names the cause and says what to do.
    """
    for name in names:
        if _ADAPTERS.search(name):
            raise WeightsError(
                f"load_weights: {name} belongs to a LoRA adapter that is not merged. Merge it into "
                "its base model (peft: merge_and_unload), and save the result."
            )
        for part, wrapper in _WRAPPERS.items():
            if name.startswith(part) or f".{part}" in name and part.startswith("_"):
                raise WeightsError(
                    f"load_weights: {name} was saved from a model inside of {wrapper}. Save the "
                    f"inner model, or remove {part!r} from the names of all tensors."
                )
        for suffix, tool in _QUANTISED.items():
            if name.endswith(suffix):
                raise WeightsError(
                    f"load_weights: {name} belongs to weights quantised by {tool}, which are not "
                    "supported. Use the model that is not quantised, with dtype='int8' to save "
                    "memory."
                )


def check_counts(
    shapes: Mapping[str, tuple[int, ...]], num_layers: int, num_experts: int = 0
) -> None:
    """Check that the files contain all layers and experts, before memory is allocated for them.

    Args:
      shapes: shapes of the tensors, by their names.
      num_layers: number of layers in the config.
      num_experts: number of experts in the config.

    Raises:
      WeightsError: the config has more layers or experts than the files.
    """
    layers = [int(match[1]) + 1 for match in map(_LAYER.search, shapes) if match]
    _check_count("num_hidden_layers", num_layers, layers)
    experts = [int(match[1]) + 1 for match in map(_EXPERT.search, shapes) if match]
    experts += [shape[0] for name, shape in shapes.items() if _FUSED_EXPERTS.search(name)]
    _check_count("num_experts", num_experts, experts)


def _check_count(key: str, wanted: int, found: list[int]) -> None:
    if max(found, default=0) < wanted:
        raise WeightsError(
            f"load_weights: {key} must be at most {max(found, default=0)}, the number in the "
            f"files, got {wanted}. Fetch the missing files, or correct config.json."
        )
