"""Mapping from the tensors of a Hugging Face checkpoint to the parameters of a model.

A parameter may consist of several tensors. For example, ``layers.3.qkv_proj`` contains the query,
key and value projections. `map_parameter` lists the tensors of a parameter and their positions in
the parameter.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import get_args

from paged_jax.models.config import ModelConfig
from paged_jax.models.families.multimodal import is_of_other_tower, without_text_module
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.tensor_mapping import (
    ExpertLayout,
    Mappings,
    Shape,
    TensorMapping,
    find_name,
    map_tensor,
)

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Names that follow the prefix ``model.`` in most checkpoints.
_INNER = (
    "layers.", "embed_tokens.", "norm.",
    "embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm.",
    "altup_projections.", "altup_unembed_projections.",
)  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
# Tensors that layers do not use if they read the keys and values of another layer. Some files
# contain these tensors anyway, so they are ignored.
_OF_KV = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def map_parameter(
    config: ModelConfig, name: str, *, experts: ExpertLayout = "family"
) -> Iterator[TensorMapping]:
    """Yield the mappings of a parameter to its tensors.

    The boxes of the mappings fill the parameter without overlap.

    Args:
      config: configuration of the model.
      name: name of the parameter, such as ``"layers.3.qkv_proj"``, or ``"layers.qkv_proj"`` if
        the layers are stacked.
      experts: how the files store experts, see `ExpertLayout`.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
      >>> for mapping in map_parameter(config, "layers.0.gate_up_proj"):
      ...     print(mapping.tensor, mapping.shape, mapping.box_shape, mapping.box_start)
      model.layers.0.mlp.gate_proj.weight (32, 16) (1, 32, 16) (0, 0, 0)
      model.layers.0.mlp.up_proj.weight (32, 16) (1, 32, 16) (1, 0, 0)
    """
    scope, _, parameter_path = name.partition(".")
    if scope != "layers":
        yield from _model_mappings(config)[name]
        return
    *index, kind = parameter_path.split(".")  # ["3", "qkv_proj"], or ["qkv_proj"] for all layers
    for layer in [int(index[0])] if index else range(config.num_hidden_layers):
        for mapping in _layer_mappings(config, config.layers[layer], experts)[kind]:
            tensor = f"model.layers.{layer}.{mapping.tensor}"
            if index:
                yield dataclasses.replace(mapping, tensor=tensor)
            else:
                yield dataclasses.replace(
                    mapping,
                    tensor=tensor,
                    box_shape=(1, *mapping.box_shape),
                    box_start=(layer, *mapping.box_start),
                )


def map_to_available(
    config: ModelConfig,
    name: str,
    tensors: Container[str],
    shape_of: Callable[[str], Shape] | None = None,
) -> list[TensorMapping]:
    """Return the mappings of a parameter to the tensors that exist.

    The function tries each `ExpertLayout`, and returns the first mappings for which `tensors`
    contains all tensors, in these shapes if possible. By default, it returns the mappings of the
    layout "family".

    Args:
      config: configuration of the model.
      name: name of the parameter.
      tensors: names of the tensors.
      shape_of: returns the shape of a tensor. Layouts of experts may differ only in shapes.
    """
    family: list[TensorMapping] = []
    available: list[TensorMapping] = []
    for layout in get_args(ExpertLayout):
        mappings = list(map_parameter(config, name, experts=layout))
        family = family or mappings
        if all(mapping.tensor in tensors for mapping in mappings):
            if shape_of is None or all(
                shape_of(mapping.tensor) == mapping.shape for mapping in mappings
            ):
                return mappings
            available = available or mappings
    return available or family


def standard_name(config: ModelConfig, name_in_file: str) -> str | None:
    """Convert the name of a tensor in a file to its name in `map_parameter`.

    The result is None if the tensor is not part of the text model.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
      ...                      model_type="gemma3_text")
      >>> standard_name(config, "language_model.model.norm.weight")
      'model.norm.weight'
    """
    family = config.family
    name = _rename_prefix({} if family is None else family.prefixes, name_in_file)
    for part, replacement in (family.renamed if family and name else {}).items():
        name = name and name.replace(part, replacement)
    if name is None or (match := _LAYER.fullmatch(name)) is None:
        return name
    layer, path = int(match[1]), match[2]
    if layer >= config.num_hidden_layers:
        return None if family is not None and family.has_draft_layers else name
    return None if config.kv_sources[layer] != layer and _OF_KV.match(path) else name


def _rename_prefix(prefixes: Mapping[str, str | None], name_in_file: str) -> str | None:
    if is_of_other_tower(name_in_file):
        return None
    name = without_text_module(name_in_file)
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement and replacement + name.removeprefix(prefix)
    # In checkpoints of a model without its output head, tensor names lack the prefix ``model.``.
    is_inner = name.startswith(_INNER)
    if name != name_in_file:
        is_inner = not name.startswith(("model.", "lm_head."))
    return f"model.{name}" if is_inner else name


def outer_names(config: ModelConfig) -> Mapping[str, str]:
    """Return the tensor names of parameters outside of the layers, also of those in no file."""
    return {
        "embed_tokens": EMBEDDINGS,
        "norm": "model.norm.weight",
        "lm_head": HEAD,
        "embed_tokens_per_layer": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj": "model.per_layer_model_projection.weight",
        "per_layer_norm": "model.per_layer_projection_norm.weight",
        **_family_tensors(config),
    }


def layer_shapes(config: ModelConfig, spec: LayerSpec) -> Mapping[str, Shape]:
    """Return the shapes of a layer's tensors by their names without the layer.

    Tensors of the layout "separate" are included, see `ExpertLayout`.
    """
    mappings = _layer_mappings(config, spec, "separate").values()
    return {mapping.tensor: mapping.shape for group in mappings for mapping in group}


def _model_mappings(config: ModelConfig) -> Mapping[str, Mappings]:
    names = outer_names(config)
    modules = {"stream_proj": "altup_projections", "stream_out_proj": "altup_unembed_projections"}
    mappings: dict[str, Mappings] = {}
    for name, parameter in config.outer_parameters.items():
        if module := modules.get(name):
            n, *shape = parameter.shape
            mappings[name] = tuple(
                map_tensor(
                    f"model.{module}.{stream}.weight", (*shape,), (1, *shape), (stream, 0, 0)
                )
                for stream in range(n)
            )
        else:
            mappings[name] = (map_tensor(find_name(names, name), parameter.shape),)
    return mappings


@functools.lru_cache(maxsize=64)
def _layer_mappings(
    config: ModelConfig, spec: LayerSpec, experts: ExpertLayout
) -> Mapping[str, Mappings]:
    """Return the mappings of all parameters of a layer, by parameter name.

    Tensor names lack the prefix ``model.layers.{index}.``.
    """
    return spec.tensors(config.hidden_size, _family_tensors(config, experts), experts)


def name_in_file(config: ModelConfig, name: str) -> str:
    """Convert a tensor name of `map_parameter` to the name that transformers writes to files."""
    family = config.family
    for prefix, replacement in (family.written_prefixes if family else {}).items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _family_tensors(config: ModelConfig, experts: ExpertLayout = "family") -> Mapping[str, str]:
    family = config.family
    if family is None:
        return {}
    if experts != "fused" or not family.in_memory:
        return family.tensor_names
    tensors = dict(family.tensor_names)
    for part, replacement in family.in_memory.items():
        tensors = {name: tensor.replace(part, replacement) for name, tensor in tensors.items()}
    return tensors
