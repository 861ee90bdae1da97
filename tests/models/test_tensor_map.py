"""Mapping of checkpoint tensors to parameters, also for real checkpoints."""

import itertools
import json
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged_jax.models.codecs.mxfp4 import MXFP4_BLOCK, MXFP4_BLOCK_BYTES
from paged_jax.models.codecs.quantisation import combine_quantised, find_quantisation
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading import conversion, huggingface, saving, stored_matrices
from paged_jax.models.loading.parameters import ModelSpec, named_arrays
from paged_jax.models.loading.safetensors_files import find_tensors
from paged_jax.models.loading.stored_tensors import StoredTensor
from paged_jax.models.loading.tensor_map import map_parameter, standard_name
from paged_jax.models.rope import RopeScaling
from paged_jax.models.tensor_mapping import TensorMapping
from tests.support.real_checkpoints import REAL_CHECKPOINTS

_WHOLE = [model for model, checkpoint in REAL_CHECKPOINTS.items() if checkpoint["seen"] == "all"]


@pytest.mark.parametrize("model", REAL_CHECKPOINTS)
def test_map_parameter_reads_every_tensor_of_real_checkpoints_once(model):
    checkpoint = REAL_CHECKPOINTS[model]
    config = LlamaConfig.from_dict(checkpoint["config"])
    item_bytes = jnp.dtype(checkpoint.get("stored", config.dtype)).itemsize
    others = {
        name: shape
        for pattern, shape in checkpoint.get("others", {}).items()
        for name in _expand(pattern)
    }
    names = [name for pattern in checkpoint["weights"] for name in _expand(pattern)]
    assert checkpoint.get("num_tensors", len(names)) == len(names)
    assert all(standard_name(config, name) is None for name in others)

    rows, shapes = _read_rows(config)
    ours = [standard_name(config, name) or "" for name in names]
    in_blocks = {name.removesuffix("_blocks") for name in ours if name.endswith("_blocks")}
    expected = {*ours, *in_blocks} - {x + end for x in in_blocks for end in ("_blocks", "_scales")}
    assert len(ours) == len(expected) + len(in_blocks)
    assert sorted(shapes) == sorted(expected)
    for tensor, parts in rows.items():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1], tensor
        assert ends[-1] == shapes[tensor][0], tensor
    assert in_blocks <= _combined_names({x: shapes[x] for x in in_blocks})
    total = sum(
        _mxfp4_bytes(shape) if tensor in in_blocks else math.prod(shape) * item_bytes
        for tensor, shape in shapes.items()
    )
    total += sum(math.prod(shape) for shape in others.values()) * item_bytes
    assert total == checkpoint["total_size"]


@pytest.mark.parametrize("model", _WHOLE)
def test_recorded_names_reproduce_the_length_of_a_real_index(model):
    checkpoint = REAL_CHECKPOINTS[model]
    index = checkpoint["index"]
    patterns = [*checkpoint["weights"], *checkpoint.get("others", {})]
    file = f"model-00001-of-{index['num_files']:05}.safetensors"
    indent = index.get("indent", 2)
    text = json.dumps(
        {
            "metadata": {**index.get("metadata", {}), "total_size": checkpoint["total_size"]},
            "weight_map": {name: file for pattern in patterns for name in _expand(pattern)},
        },
        indent=indent,
    )
    # transformers ends indented files with a newline.
    assert len(text) + (indent is not None) == index["num_chars"]


def _read_rows(config):
    """Return the ranges of rows that are read of each tensor, and the shapes of the tensors."""
    # All layers have the same parameters as the first.
    names = [f"layers.{name}" for name in config.layers[0].parameters(config.hidden_size)]
    rows, shapes = {}, {}
    for name in (*config.outer_parameters, *names):
        for mapping in map_parameter(config, name):
            assert shapes.setdefault(mapping.tensor, mapping.shape) == mapping.shape
            num_rows = math.prod(mapping.box_shape) // math.prod(mapping.shape[1:])
            rows.setdefault(mapping.tensor, []).append(
                (mapping.first_row, mapping.first_row + num_rows)
            )
    return rows, shapes


def _mxfp4_bytes(shape):
    return math.prod(shape) // MXFP4_BLOCK * (MXFP4_BLOCK_BYTES + 1)


def _combined_names(shapes):
    """Return the names of tensors with these shapes, after combining their blocks and scales."""
    if not shapes:
        return set()
    stored = {}
    for tensor, (X, num_inputs, num_outputs) in shapes.items():
        scales = X, num_outputs, num_inputs // MXFP4_BLOCK
        blocks = *scales, MXFP4_BLOCK_BYTES
        for end, shape in (("_blocks", blocks), ("_scales", scales)):
            stored[tensor + end] = StoredTensor(Path("x"), tensor + end, shape, "U8")
    quantisation = find_quantisation(
        {"quantization_config": {"quant_method": "mxfp4"}}, has_mxfp4=True
    )
    assert quantisation is not None
    paired = combine_quantised(stored.values(), quantisation)
    assert {found.name: found.shape for found in paired} == shapes
    return {found.name for found in paired}


def _expand(pattern):
    """Return the names that a pattern stands for."""
    parts = re.split(r"\{(\d+)\}", pattern)
    choices = [range(int(part)) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(map(str, name)) for name in itertools.product(*choices)]


# Config with partial, interleaved heads and layers that rotate differently.
_MIXED = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_scaling=RopeScaling("linear", 4.0),
    rope_local_base_freq=100.0,
    sliding_window=4,
    layer_types=("sliding_attention", "full_attention") * 2,
    rope_layers=(True, True, True, False),
    partial_rotary_factor=0.5,
    rope_interleaved=True,
    qkv_bias=True,
    qk_norm=True,
)

_MAPPINGS = {
    "as it is": TensorMapping("x", (12, 3), (3, 2, 2, 3), (0, 1, 0, 0)),
    "rows of it": TensorMapping("x", (20, 3), (3, 2, 2, 3), (0, 1, 0, 0), first_row=4),
    "in order": TensorMapping("x", (24, 3), (3, 2, 4, 3), (0, 1, 0, 0), row_order=(0, 2, 3, 1)),
    "rows of a stack in order": TensorMapping(
        "x", (30, 3), (1, 3, 2, 4, 3), (1, 0, 1, 0, 0), first_row=6, row_order=(0, 2, 3, 1)
    ),
    "a vector in order": TensorMapping("x", (4,), (4,), (0,), row_order=(0, 2, 3, 1)),
    "transposed": TensorMapping(
        "x", (2, 3, 8), (2, 2, 4, 3), (0, 0, 0, 0), axes=(0, 3, 2, 1), split_shape=(2, 3, 4, 2)
    ),
    "transposed in a stack": TensorMapping(
        "x", (2, 3, 4), (1, 2, 4, 3), (1, 0, 0, 0), axes=(0, 2, 1)
    ),
    "transposed rows of all experts": TensorMapping(
        "x", (6, 4), (2, 4, 3), (0, 0, 0), axes=(0, 2, 1), split_shape=(2, 3, 4)
    ),
}


@pytest.mark.parametrize("name", _MAPPINGS)
def test_mapping_fills_any_part_of_a_parameter_and_is_invertible(tmp_path, name):
    mapping = _MAPPINGS[name]
    tensor = np.random.default_rng(0).normal(size=mapping.shape).astype(np.float32)
    box = mapping.to_box(tensor)
    assert box.shape == mapping.box_shape and len(set(box.ravel().tolist())) == box.size
    np.testing.assert_array_equal(mapping.to_box(jnp.asarray(tensor)), box)
    first = mapping.first_row
    rows = tensor if mapping.axes else tensor[first : first + mapping.rows.size]
    np.testing.assert_array_equal(mapping.to_rows(box), rows)
    np.testing.assert_array_equal(mapping.to_rows(jnp.asarray(box)), rows)

    save_file({"x": tensor}, tmp_path / "model.safetensors")
    stored = find_tensors(tmp_path, _MIXED)
    parameter = np.zeros(mapping.box_end, np.float32)
    parameter[mapping.box] = box
    for cut in (slice(None), slice(1, None), slice(None, -1), slice(1, 2)):
        for axis in range(len(mapping.box_end)):
            index = tuple(cut if axis == i else slice(None) for i in range(len(mapping.box_end)))
            if 0 in parameter[index].shape:
                continue
            # The mapping does not fill the rest of the parameter.
            inside = np.zeros(mapping.box_end, bool)
            inside[mapping.box] = True
            got = stored_matrices.read_box(
                stored, [mapping], mapping.box_end, index, np.dtype(np.float32)
            )
            inside = inside[index]
            np.testing.assert_array_equal(got[inside], parameter[index][inside])


def test_partial_and_interleaved_heads_are_permuted(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {
        name: array.shape
        for name, array in ModelSpec(Decoder, _MIXED, "float32", scan_layers=False)
        .parameters()
        .items()
    }
    tensors = {
        mapping.tensor: rng.normal(size=mapping.shape).astype(np.float32)
        for name in shapes
        for mapping in map_parameter(_MIXED, name)
    }
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    model = huggingface.load_weights(Decoder, tmp_path / "theirs", _MIXED)
    q = tensors["model.layers.0.self_attn.q_proj.weight"].reshape(2, 2, 16, 64)
    order = [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    np.testing.assert_array_equal(model.layers[0].qkv_proj[...][:, :2], q[:, :, order])
    v = tensors["model.layers.0.self_attn.v_proj.weight"].reshape(2, 16, 64)
    np.testing.assert_array_equal(model.layers[0].qkv_proj[...][:, 3], v)
    norm = tensors["model.layers.3.self_attn.k_norm.weight"]
    # This layer does not rotate. Any order is right that queries and keys have in common.
    evens, odds = norm[0::2], norm[1::2]
    np.testing.assert_array_equal(model.layers[3].k_norm[...], np.concatenate([evens, odds]))

    parameters = named_arrays(model)
    back = {
        mapping.tensor: saving._to_tensor(parameters[name], [mapping])
        for name in shapes
        for mapping in map_parameter(_MIXED, name)
    }
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
    # Updates of a running engine assemble parameters in the same way.
    names = {name: array.shape for name, array in tensors.items()}
    sources = conversion.find_sources("test", _MIXED, shapes, names, {})
    for name in ("layers.0.qkv_proj", "layers.1.qkv_bias", "layers.2.q_norm"):
        arrays = {key: jnp.asarray(tensor) for key, tensor in tensors.items()}
        assembled = conversion.assemble(_MIXED, name, arrays, sources)
        np.testing.assert_array_equal(assembled, parameters[name])
