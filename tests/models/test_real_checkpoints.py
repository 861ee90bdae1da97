"""The checkpoints that people have: every tensor of theirs is read once, and none is left over.

`data/real_checkpoints.json` holds, of a real checkpoint or two of each family, what its config.json
says, the names of its tensors and its `total_size` in bytes, each as its source has it. In names,
``{32}`` stands for each number below 32. "seen" says of which names the source is a witness: "all",
a "part" of the layers, which are alike, or only the "totals", the bytes and perhaps the number of
tensors; the rest of the names are those of transformers' modules. Of an index that was seen whole
its length is kept: pages of each were compared, and a file of these names has as many characters.
"stored" is the type of tensors that a config says wrongly.
"""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from paged_jax.models.config import LlamaConfig
from paged_jax.models.families import FAMILIES
from paged_jax.models.llama import Llama
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.loading.stored_tensors import (
    MXFP4_BLOCK,
    MXFP4_BLOCK_BYTES,
    StoredTensor,
    combine_quantised,
)
from paged_jax.models.loading.tensor_map import map_parameter, standard_name

_CHECKPOINTS = {
    checkpoint["model"]: checkpoint
    for checkpoint in json.loads(
        (Path(__file__).parent / "data" / "real_checkpoints.json").read_text(encoding="utf-8")
    )
}
_WHOLE = [model for model, checkpoint in _CHECKPOINTS.items() if checkpoint["seen"] == "all"]


@pytest.mark.parametrize("model", _CHECKPOINTS)
def test_every_tensor_of_a_real_checkpoint_is_read_once(model):
    checkpoint = _CHECKPOINTS[model]
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
    assert in_blocks <= _paired({x: shapes[x] for x in in_blocks})
    total = sum(
        _num_bytes_in_blocks(shape) if tensor in in_blocks else math.prod(shape) * item_bytes
        for tensor, shape in shapes.items()
    )
    total += sum(math.prod(shape) for shape in others.values()) * item_bytes
    assert total == checkpoint["total_size"]


@pytest.mark.parametrize("model", _WHOLE)
def test_a_whole_index_is_as_long_as_its_names_make_it(model):
    checkpoint = _CHECKPOINTS[model]
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
    # Transformers ends its files with a newline; those of one line have none.
    assert len(text) + (indent is not None) == index["num_chars"]


def test_the_families_without_a_whole_index_are_these():
    whole = {_CHECKPOINTS[model]["family"] for model in _WHOLE}
    assert FAMILIES.keys() - whole == {"smollm3", "qwen2_moe", "olmo3", "glm4", "cohere2"}


def _read_rows(config):
    """The rows that are read of each tensor, first and past the last, and the tensors' shapes."""
    # All layers have the parameters of the first.
    one = dataclasses.replace(config, num_hidden_layers=1, layer_types=(), rope_layers=())
    rows, shapes = {}, {}
    for name in ModelSpec(Llama, one, one.dtype, scan_layers=False).parameters():
        stacked = re.sub(r"^layers\.0\.", "layers.", name)
        for mapping in map_parameter(config, stacked):
            assert shapes.setdefault(mapping.tensor, mapping.shape) == mapping.shape
            num_rows = math.prod(mapping.box_shape) // math.prod(mapping.shape[1:])
            rows.setdefault(mapping.tensor, []).append(
                (mapping.first_row, mapping.first_row + num_rows)
            )
    return rows, shapes


def _num_bytes_in_blocks(shape):
    return math.prod(shape) // MXFP4_BLOCK * (MXFP4_BLOCK_BYTES + 1)


def _paired(shapes):
    """The tensors of these shapes that blocks and scales of theirs in a folder are read as."""
    stored = {}
    for tensor, (X, num_inputs, num_outputs) in shapes.items():
        scales = X, num_outputs, num_inputs // MXFP4_BLOCK
        blocks = *scales, MXFP4_BLOCK_BYTES
        for end, shape in (("_blocks", blocks), ("_scales", scales)):
            stored[tensor + end] = StoredTensor(Path("x"), tensor + end, shape, "U8")
    paired = combine_quantised(stored, has_mxfp4=True)
    assert {tensor: found.shape for tensor, found in paired.items()} == shapes
    return paired.keys()


def _expand(pattern):
    """The names that ``{32}`` stands for: one for each number below it."""
    parts = re.split(r"\{(\d+)\}", pattern)
    choices = [range(int(part)) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(map(str, name)) for name in itertools.product(*choices)]
