"""Loading and saving Hugging Face folders of safetensors."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax.kernels.platforms import reads_stacked_weights
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading import pretrained, stored_matrices
from paged_jax.models.loading.huggingface import load_weights
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.loading.saving import save_weights
from tests.support.processes import run_on_devices

_CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
_Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _model(config=_CONFIG, **options):
    """Return a model with random, distinct elements, so that every permutation is detected."""
    model = Decoder(config, rngs=nnx.Rngs(0), **options)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    leaves = [
        jax.random.normal(key, leaf.shape).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


@nnx.jit
def _forward(model, tokens):
    return model(tokens)


def _assert_same(actual, expected):
    actual, expected = named_arrays(actual), named_arrays(expected)
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert actual[name].dtype == parameter.dtype
        np.testing.assert_array_equal(actual[name], parameter, err_msg=name)


@pytest.fixture
def folder(tmp_path):
    save_weights(_model(), tmp_path)
    return tmp_path


def _edit(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _rename(tensors, names):
    for old, new in names.items():
        tensors[new] = tensors.pop(old)


@pytest.mark.parametrize("saved_stacked", [False, True])
@pytest.mark.parametrize("loaded_stacked", [False, True])
def test_save_weights_and_load_weights_are_inverse_in_either_layout(
    tmp_path, saved_stacked, loaded_stacked
):
    config = dataclasses.replace(_CONFIG, qkv_bias=True, o_bias=True)
    model = _model(config, scan_layers=saved_stacked)
    save_weights(model, tmp_path)
    loaded = load_weights(Decoder, tmp_path, config, scan_layers=loaded_stacked)
    assert loaded.scan_layers == loaded_stacked
    tokens = np.arange(5, dtype=np.int32)[None]
    logits, expected = _forward(loaded, tokens), _forward(model, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    if loaded_stacked == saved_stacked:
        _assert_same(loaded, model)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "qwen3", "qk_norm": True}, {"tie_word_embeddings": True}],
)
def test_save_weights_and_load_weights_are_inverse_for_each_family(tmp_path, change):
    config = dataclasses.replace(_CONFIG, **change)
    model = _model(config)
    save_weights(model, tmp_path)
    assert LlamaConfig.from_file(tmp_path) == config.replace()
    _assert_same(load_weights(Decoder, tmp_path, config), model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_save_weights_keeps_narrow_dtypes(tmp_path, dtype):
    model = _model(dtype=dtype)
    save_weights(model, tmp_path)
    config = LlamaConfig.from_file(tmp_path)
    assert config.dtype == dtype
    _assert_same(load_weights(Decoder, tmp_path, config), model)


def test_load_weights_rounds_to_the_requested_dtype(folder):
    model = load_weights(Decoder, folder, _CONFIG, dtype=jnp.bfloat16)
    assert model.config.dtype == "bfloat16"
    expected = named_arrays(_model())
    for name, parameter in named_arrays(model).items():
        np.testing.assert_array_equal(parameter, expected[name].astype(jnp.bfloat16))


def test_load_weights_reads_large_tensors_in_parts(folder, monkeypatch):
    monkeypatch.setattr(stored_matrices, "READ_ELEMENTS", 50)
    _assert_same(load_weights(Decoder, folder, _CONFIG), _model())


def test_save_weights_splits_large_models_into_files(tmp_path):
    model = _model()
    save_weights(model, tmp_path, max_file_bytes=3000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all(len(load_file(tmp_path / file)) > 0 for file in files)
    _assert_same(load_weights(Decoder, tmp_path, _CONFIG), model)


def test_save_weights_removes_files_of_an_earlier_save(tmp_path):
    save_weights(_model(), tmp_path, max_file_bytes=3000)
    save_weights(_model(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save_weights(_model(), tmp_path, max_file_bytes=3000)
    assert not (tmp_path / "model.safetensors").exists()
    _assert_same(load_weights(Decoder, tmp_path, _CONFIG), _model())


def test_load_weights_ignores_redundant_tensors(tmp_path):
    config = dataclasses.replace(_CONFIG, tie_word_embeddings=True)
    save_weights(_model(config), tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached"):
            tensors[f"model.layers.0.self_attn.rotary_emb.{name}"] = np.zeros(3, np.float32)

    _edit(tmp_path, add)
    _assert_same(load_weights(Decoder, tmp_path, config), _model(config))


@pytest.mark.parametrize("row", [0, 23])
def test_load_weights_unties_a_head_that_differs_from_the_embeddings(tmp_path, row):
    untied = _model()
    untied.lm_head[...] = untied.embed_tokens[...].at[row, 3].add(1.0)
    save_weights(untied, tmp_path)
    tied = dataclasses.replace(_CONFIG, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="lm_head.weight differs from the embeddings"):
        model = load_weights(Decoder, tmp_path, tied)
    assert not model.config.tie_word_embeddings
    _assert_same(model, untied)


def test_load_weights_uses_a_single_head_as_embeddings(tmp_path):
    config = dataclasses.replace(_CONFIG, tie_word_embeddings=True)
    save_weights(_model(config), tmp_path)
    rename = {"model.embed_tokens.weight": "lm_head.weight"}
    _edit(tmp_path, lambda tensors: _rename(tensors, rename))
    _assert_same(load_weights(Decoder, tmp_path, config), _model(config))
    with pytest.raises(WeightsError, match="model.embed_tokens.weight is missing"):
        load_weights(Decoder, tmp_path, _CONFIG)


def test_load_weights_reads_names_without_model_prefix(folder):
    tensors = load_file(folder / "model.safetensors")
    rename = {name: name.removeprefix("model.") for name in tensors}
    _edit(folder, lambda tensors: _rename(tensors, rename))
    _assert_same(load_weights(Decoder, folder, _CONFIG), _model())

    def add_twice(tensors):
        tensors["model.norm.weight"] = tensors["norm.weight"].copy()

    _edit(folder, add_twice)
    with pytest.raises(WeightsError, match="must not both be 'model.norm.weight'"):
        load_weights(Decoder, folder, _CONFIG)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(_Q_PROJ), f"{_Q_PROJ} is missing"),
        (
            lambda tensors: tensors.pop("lm_head.weight"),
            "lm_head.weight is missing. The model was saved without its head",
        ),
        (
            lambda tensors: tensors.update({"model.layers.3.extra": np.zeros(1, np.float32)}),
            "model.layers.3.extra is in the files, but not part of",
        ),
        (
            lambda tensors: tensors.update({_Q_PROJ: np.zeros((24, 17), np.float32)}),
            rf"{_Q_PROJ} must have shape \[24, 16\], got \[24, 17\]",
        ),
        (
            lambda tensors: tensors.update({_Q_PROJ: np.zeros(24 * 16, np.float32)}),
            rf"{_Q_PROJ} must have shape \[24, 16\], got \[384\]",
        ),
        (
            lambda tensors: tensors.update({_Q_PROJ: np.zeros((24, 16), np.int8)}),
            f"{_Q_PROJ} must have a floating-point dtype, got I8",
        ),
        (
            lambda tensors: tensors[_Q_PROJ].__setitem__((23, 15), np.nan),
            f"{_Q_PROJ} must be finite",
        ),
        (
            lambda tensors: tensors[_Q_PROJ].__setitem__((0, 0), -np.inf),
            f"{_Q_PROJ} must be finite",
        ),
    ],
)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_load_weights_names_the_wrong_tensor(folder, edit, message, scan_layers):
    _edit(folder, edit)
    with pytest.raises(WeightsError, match=message) as raised:
        load_weights(Decoder, folder, _CONFIG, scan_layers=scan_layers)
    assert "\n" not in str(raised.value)


def test_load_weights_rejects_values_that_overflow(folder):
    _edit(folder, lambda tensors: tensors[_Q_PROJ].__setitem__((0, 0), 1e6))
    load_weights(Decoder, folder, _CONFIG)
    with pytest.raises(WeightsError, match=f"{_Q_PROJ} must be finite in float16"):
        load_weights(Decoder, folder, _CONFIG, dtype="float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_weights_accepts_the_largest_finite_values(tmp_path, dtype):
    model = _model(dtype=dtype)
    largest = jnp.finfo(dtype).max
    model.norm[...] = jnp.full_like(model.norm[...], largest).at[0].set(-largest)
    save_weights(model, tmp_path)
    _assert_same(load_weights(Decoder, tmp_path, model.config, dtype=dtype), model)


def test_load_weights_rejects_other_dtypes(folder):
    for dtype in ("int16", "float64", "nonsense"):
        with pytest.raises(ValueError, match=f"dtype must be .* got '{dtype}'"):
            load_weights(Decoder, folder, _CONFIG, dtype=dtype)


def test_load_weights_rejects_folders_without_safetensors(tmp_path):
    with pytest.raises(WeightsError, match="no such folder"):
        load_weights(Decoder, tmp_path / "none", _CONFIG)
    with pytest.raises(
        WeightsError, match="neither model.safetensors nor .*. Fetch the weights, too."
    ):
        load_weights(Decoder, tmp_path, _CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="pytorch_model.bin, which can run code"):
        load_weights(Decoder, tmp_path, _CONFIG)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_load_weights_rejects_truncated_files(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="model.safetensors: not a whole safetensors file"):
        load_weights(Decoder, folder, _CONFIG)


def test_load_weights_rejects_a_wrong_index(tmp_path):
    save_weights(_model(), tmp_path / "model", max_file_bytes=3000)
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    shard = content["weight_map"][_Q_PROJ]
    shutil.copy(tmp_path / "model" / shard, tmp_path / "outside.safetensors")
    for astray in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), 3):
        edited = {"weight_map": {**content["weight_map"], _Q_PROJ: astray}}
        index.write_text(json.dumps(edited), encoding="utf-8")
        with pytest.raises(WeightsError, match="must not contain a folder"):
            load_weights(Decoder, tmp_path / "model", _CONFIG)
    index.write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "model" / shard).unlink()
    with pytest.raises(WeightsError, match=f"the file {shard} is missing"):
        load_weights(Decoder, tmp_path / "model", _CONFIG)
    shutil.copy(tmp_path / "outside.safetensors", tmp_path / "model" / shard)
    copied = {**content["weight_map"], _Q_PROJ: "copy.safetensors"}
    shutil.copy(tmp_path / "outside.safetensors", tmp_path / "model" / "copy.safetensors")
    index.write_text(json.dumps({"weight_map": copied}), encoding="utf-8")
    with pytest.raises(WeightsError, match="is in another file too"):
        load_weights(Decoder, tmp_path / "model", _CONFIG)
    index.write_text("{}", encoding="utf-8")
    with pytest.raises(WeightsError, match="weight_map must be an object"):
        load_weights(Decoder, tmp_path / "model", _CONFIG)


@pytest.mark.parametrize(("kind", "is_stacked"), [("TPU v6 lite", True), ("TPU7x", False)])
def test_from_pretrained_chooses_separate_layers_on_tpu_7x(folder, kind, is_stacked, monkeypatch):
    """There, XLA changes the layout of stacked weights in each step (2.8 of 3.4 GB)."""
    tpu = SimpleNamespace(platform="tpu", device_kind=kind)
    monkeypatch.setattr(pretrained, "_device", lambda config, sharding: tpu)
    assert Decoder.from_pretrained(folder).scan_layers == is_stacked
    # XLA for TPUs copies quantised matrices out of a stack.
    assert not Decoder.from_pretrained(folder, dtype="int8").scan_layers


def test_from_pretrained_recognises_a_hugging_face_folder(folder):
    model = Decoder.from_pretrained(folder)
    assert model.scan_layers == (jax.default_backend() == "tpu" or reads_stacked_weights("cpu"))
    _assert_same(Decoder.from_pretrained(folder, scan_layers=False), _model())
    with pytest.raises(FileNotFoundError, match="folder must exist"):
        Decoder.from_pretrained(folder / "none")


def test_save_pretrained_is_inverse_to_from_pretrained(tmp_path):
    _model().save_pretrained(tmp_path / "new" / "folder")
    _assert_same(Decoder.from_pretrained(tmp_path / "new" / "folder", scan_layers=False), _model())


def test_load_weights_places_parts_on_their_devices(folder):
    """Runs in a separate process, because JAX fixes the number of devices when it starts."""
    program = """
        import sys
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from paged_jax.models.llama_config import LlamaConfig
        from paged_jax.models.decoder import Decoder
        from paged_jax.models.loading.huggingface import load_weights
        from paged_jax.models.loading.parameters import named_arrays

        folder = sys.argv[1]
        config = LlamaConfig.from_file(folder)
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

        def place(name, shape):
            stacked = name.startswith("layers.") and name.count(".") == 1
            axes = ("x", "y")[: len(shape) - stacked]
            return NamedSharding(mesh, P(*[None] * stacked, *axes))

        for scan_layers in (False, True):
            whole = load_weights(Decoder, folder, config, scan_layers=scan_layers)
            whole = named_arrays(whole)
            model = load_weights(Decoder, folder, config, scan_layers=scan_layers, sharding=place)
            for name, parameter in named_arrays(model).items():
                assert parameter.sharding == place(name, parameter.shape), name
                assert parameter.addressable_shards[0].data.size < parameter.size, name
                np.testing.assert_array_equal(parameter, whole[name], err_msg=name)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[2])
        model = load_weights(Decoder, folder, config, sharding=one)
        assert all(x.devices() == {jax.devices()[2]} for x in named_arrays(model).values())
    """
    run_on_devices(program, folder)


def test_named_arrays_has_the_order_of_tree_leaves() -> None:
    """Layer 10 comes after layer 2, because callers pair the names with leaves."""
    config = dataclasses.replace(_CONFIG, num_hidden_layers=12)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    named = named_arrays(state)
    assert list(map(id, named.values())) == list(map(id, jax.tree.leaves(state)))
    names = [name for name in named if name.endswith(".o_proj")]
    assert names == [f"layers.{i}.o_proj" for i in range(12)]
