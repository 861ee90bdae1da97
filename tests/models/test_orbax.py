"""Orbax checkpoints of a decoder."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.kernels.platforms import reads_stacked_weights
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.orbax import load_checkpoint, save_checkpoint
from paged_jax.models.loading.parameters import named_arrays
from tests.support import DATA
from tests.support.processes import run_on_devices

_CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def load(path, **options) -> Decoder:
    return load_checkpoint(Decoder, path, LlamaConfig.from_file(path), **options)


def _model(**options):
    return Decoder(_CONFIG, rngs=nnx.Rngs(0), **options)


def _unstacked_parameters(model):
    """Return the parameters by their names with separate layers."""
    parameters = {}
    for name, parameter in named_arrays(model).items():
        if model.scan_layers and name.startswith("layers."):
            for layer in range(_CONFIG.num_hidden_layers):
                parameters[name.replace("layers.", f"layers.{layer}.")] = parameter[layer]
        else:
            parameters[name] = parameter
    return parameters


def _assert_same(actual, expected):
    actual, expected = _unstacked_parameters(actual), _unstacked_parameters(expected)
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert actual[name].dtype == parameter.dtype
        np.testing.assert_array_equal(actual[name], parameter, err_msg=name)


def _save_edited(path, edit):
    """Save a checkpoint with edited arrays, which no longer fit its config."""
    save_checkpoint(_model(), path)
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, **edit}), encoding="utf-8")


@pytest.mark.parametrize("saved_stacked", [False, True])
@pytest.mark.parametrize("loaded_stacked", [False, True])
def test_load_checkpoint_restores_either_layout(tmp_path, saved_stacked, loaded_stacked):
    model = _model(scan_layers=saved_stacked)
    save_checkpoint(model, tmp_path / "new" / "checkpoint")
    loaded = load(tmp_path / "new" / "checkpoint", scan_layers=loaded_stacked)
    assert loaded.scan_layers == loaded_stacked
    assert loaded.config == _CONFIG.replace()
    _assert_same(loaded, model)


def test_load_checkpoint_keeps_the_dtype_or_converts(tmp_path):
    model = _model(dtype=jnp.bfloat16)
    save_checkpoint(model, tmp_path)
    same = load(tmp_path)
    assert same.config == _CONFIG.replace(dtype="bfloat16")
    _assert_same(same, model)
    wider = load(tmp_path, dtype="float32")
    assert wider.config.dtype == "float32"
    for name, parameter in named_arrays(wider).items():
        expected = _unstacked_parameters(model)[name].astype(jnp.float32)
        np.testing.assert_array_equal(parameter, expected, strict=True)
    with pytest.raises(ValueError, match="dtype must be"):
        load(tmp_path, dtype="int16")


def test_save_checkpoint_never_replaces_a_checkpoint(tmp_path):
    save_checkpoint(_model(), tmp_path)
    with pytest.raises(FileExistsError, match="path must not contain a checkpoint"):
        save_checkpoint(_model(), tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_hidden_layers": 4}, r"layers\.3\..* must have shape .*, got none"),
        ({"num_hidden_layers": 2}, r"layers\.2\..* must have shape none .*, got \["),
        ({"vocab_size": 25}, r"embed_tokens must have shape \[25, 16\], got \[24, 16\]"),
        ({"tie_word_embeddings": True}, "lm_head must have shape none"),
        ({"attention_bias": True}, "bias must have shape"),
    ],
)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_load_checkpoint_names_the_wrong_parameter(tmp_path, edit, message, scan_layers):
    _save_edited(tmp_path, edit)
    with pytest.raises(WeightsError, match=message) as raised:
        load(tmp_path, scan_layers=scan_layers)
    assert "\n" not in str(raised.value)


def test_load_checkpoint_rejects_incomplete_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG.to_dict()), encoding="utf-8")
    with pytest.raises(WeightsError, match="no checkpoint there"):
        load(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(WeightsError, match="damaged") as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


def test_load_checkpoint_rejects_a_damaged_checkpoint(tmp_path):
    """Runs in a separate process, because Orbax leaves other reads running after a failure."""
    save_checkpoint(_model(), tmp_path)
    for file in (tmp_path / "weights").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-10])
    program = """
        import sys
        from paged_jax import Llama
        from paged_jax.models.errors import WeightsError
        try:
            Llama.from_pretrained(sys.argv[1])
        except WeightsError as error:
            print(error)
    """
    output = run_on_devices(program, tmp_path)
    assert output.count("\n") == 1
    assert "the checkpoint is damaged" in output


def test_from_pretrained_recognises_a_checkpoint(tmp_path):
    save_checkpoint(_model(), tmp_path)
    model = Decoder.from_pretrained(tmp_path)
    assert model.scan_layers == (jax.default_backend() == "tpu" or reads_stacked_weights("cpu"))
    _assert_same(model, _model())


@pytest.mark.slow
def test_load_checkpoint_restores_onto_other_devices(tmp_path):
    """Runs in a separate process, because JAX fixes the number of devices when it starts."""
    for stacked in (False, True):
        save_checkpoint(_model(scan_layers=stacked), tmp_path / str(stacked))
    program = """
        import sys
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from paged_jax import Llama
        from paged_jax.models.loading.orbax import save_checkpoint
        from paged_jax.models.loading.parameters import named_arrays

        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

        def place(name, shape):
            stacked = name.startswith("layers.") and name.count(".") == 1
            axes = ("x", "y")[: len(shape) - stacked]
            return NamedSharding(mesh, P(*[None] * stacked, *axes))

        def check(path, scan_layers):
            model = Llama.from_pretrained(path, scan_layers=scan_layers, sharding=place)
            whole = named_arrays(Llama.from_pretrained(path, scan_layers=scan_layers))
            for name, parameter in named_arrays(model).items():
                assert parameter.sharding == place(name, parameter.shape), name
                np.testing.assert_array_equal(parameter, whole[name], err_msg=name)
            return model

        for stored in ("False", "True"):
            for scan_layers in (False, True):
                model = check(f"{sys.argv[1]}/{stored}", scan_layers)
        save_checkpoint(model, f"{sys.argv[1]}/sharded")
        check(f"{sys.argv[1]}/sharded", scan_layers=True)
    """
    run_on_devices(program, tmp_path)
    sharded = load(tmp_path / "sharded")
    _assert_same(sharded, _model(scan_layers=True))


@pytest.mark.slow
def test_scales_of_two_levels_need_not_be_divisible_by_devices(tmp_path) -> None:
    """12 and 20 columns of scales are read by 8 devices, and become 8 and 16 float scales."""
    path = DATA / "quantised" / "gguf-k-quants" / "model.gguf"
    save_checkpoint(Decoder.from_pretrained(path, dtype="float32"), tmp_path)
    program = """
        import sys
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from paged_jax import Llama
        from paged_jax.kernels.weight_formats import dequantise
        from paged_jax.models.matrices import get_matrix

        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

        def place(name, shape):
            return NamedSharding(mesh, P(*[None] * (len(shape) - 1), "x"))

        models = [Llama.from_pretrained(sys.argv[1], scan_layers=False, **options)
                  for options in ({}, {"sharding": place})]
        few, many = (any(x.is_compact for x in model.formats.all_formats) for model in models)
        assert few and not many
        for layers in zip(*(model.layers for model in models)):
            for kind in ("qkv_proj", "o_proj", "gate_up_proj"):
                few, many = (get_matrix(x, kind, x.formats[kind], "float32") for x in layers)
                assert many.scales.sharding == place("", many.scales.shape)
                np.testing.assert_array_equal(
                    *(dequantise(jax.device_get(w.arrays), w.format.code) for w in (few, many))
                )
    """
    run_on_devices(program, tmp_path, num_devices=8)
