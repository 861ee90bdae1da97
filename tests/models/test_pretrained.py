"""Unusual heads, names and dtypes in model folders, compared with transformers."""

import dataclasses
import io
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax import monitoring
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import UnsupportedConfigError, WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.orbax import save_checkpoint
from paged_jax.models.loading.pretrained import from_pretrained, read_config
from paged_jax.monitoring import Status
from paged_jax.plan import main as plan
from tests.support import families
from tests.support.families import CASES, VOCAB_SIZE, Case
from tests.support.gguf_files import metadata_of, tensors_of, write
from tests.support.random_model import random_llama

TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (1, 20), np.int32)
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    tie_word_embeddings=True,
)


@pytest.fixture
def folder(tmp_path):
    random_llama(_CONFIG).save_pretrained(tmp_path)
    return tmp_path


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    tensors = edit(tensors) or tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, *removed, part=None, **changes):
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edited = content if part is None else content[part]
    for key in removed:
        edited.pop(key, None)
    edited |= changes
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def double_head(tensors):
    [embeddings] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[_HEAD] = 2 * np.roll(tensors[embeddings], 1, axis=0)


def only_head(tensors):
    [embeddings] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[_HEAD] = tensors.pop(embeddings)


def without_prefix(tensors):
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def check_logits(folder):
    """Check that transformers and Llama compute the same logits for a folder."""
    expected = families.logits(families.load(folder), TOKENS)
    assert np.std(expected) > 0.1
    logits = nnx.jit(lambda model, tokens: model(tokens))(Decoder.from_pretrained(folder), TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", ["qwen3 tied", "gemma3", "llama"])
@pytest.mark.parametrize("edit", [double_head, only_head, without_prefix])
@pytest.mark.filterwarnings("ignore:.*differs from the embeddings:UserWarning")
def test_from_pretrained_reads_unusual_files_like_transformers(tmp_path, name, edit):
    changes = {**CASES[name].changes, "tie_word_embeddings": True}
    families.reference(Case(CASES[name].model_type, changes)).save_pretrained(tmp_path)
    edit_tensors(tmp_path, edit)
    check_logits(tmp_path)


def into_multimodal(folder, prefixes, others=()):
    """Make the Llama in a folder the text model of a model with images.

    Args:
      folder: the folder.
      prefixes: prefixes of the text model's tensors, and those in the new file.
      others: names of further tensors in the new file.
    """

    def edit(tensors):
        edited = dict.fromkeys(others, np.ones(4, np.float32))
        for name, value in tensors.items():
            prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
            edited[prefixes[prefix] + name.removeprefix(prefix)] = value
        return edited

    edit_tensors(folder, edit)
    path = folder / "config.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    outer = {"model_type": "new", "text_config": text, "vision_config": {}}
    outer["tie_word_embeddings"] = text["tie_word_embeddings"]
    path.write_text(json.dumps(outer), encoding="utf-8")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("prefixes", "others"),
    [
        (
            {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
            "vision_tower.",
        ),
        ({"model.": "model.language_model.", "lm_head.": "lm_head."}, "model.audio_tower."),
        ({"model.": "model.text_model.", "lm_head.": "lm_head."}, "model.connector."),
        ({"model.": "language_model.", "lm_head.": "lm_head."}, "multi_modal_projector."),
        ({"model.": "model.", "lm_head.": "lm_head."}, "visual."),
    ],
)
def test_from_pretrained_reads_the_text_part_of_any_multimodal_model(
    tmp_path, is_tied, prefixes, others
):
    random_llama(dataclasses.replace(_CONFIG, tie_word_embeddings=is_tied)).save_pretrained(
        tmp_path
    )
    model = Decoder.from_pretrained(tmp_path)
    into_multimodal(tmp_path, prefixes, [f"{others}layers.7.mlp.fc1.weight", "image_newline"])
    same = Decoder.from_pretrained(tmp_path)
    assert same.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(same), nnx.state(model))


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.1.cross_attn.q_proj.weight",
        "language_model.model.gate.weight",
        "talker.layers.0.mlp.up_proj.weight",
    ],
)
def test_from_pretrained_names_tensors_that_a_multimodal_model_adds(folder, name):
    into_multimodal(folder, {"model.": "language_model.model."}, [name])
    with pytest.raises(WeightsError, match="in the files, but not part of a model") as raised:
        Decoder.from_pretrained(folder)
    assert name.removeprefix("language_model.") in str(raised.value)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("outer", [True, False, "missing", None])
@pytest.mark.parametrize("inner", [True, False])
def test_from_pretrained_ties_models_with_images_like_transformers(tmp_path, outer, inner):
    families.drawn(families.initial_with_images("gemma3")).save_pretrained(tmp_path)
    if outer is False or outer is None:
        edit_tensors(tmp_path, double_head)
    edit_config(tmp_path, part="text_config", tie_word_embeddings=inner)
    edit_config(tmp_path, "tie_word_embeddings")
    if outer != "missing":
        edit_config(tmp_path, tie_word_embeddings=outer)
    check_logits(tmp_path)
    assert read_config(tmp_path).tie_word_embeddings == bool(outer)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", ["qwen3 tied", "gemma3", "with images"])
def test_from_pretrained_reads_models_without_a_head(tmp_path, name):
    if name == "with images":
        theirs = families.drawn(families.initial_with_images("gemma3"))
    else:
        theirs = families.reference(CASES[name])
    theirs.model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["architectures"][0].endswith("Model")
    check_logits(tmp_path)


@pytest.mark.parametrize("keys", [{}, {"dtype": None}, {"torch_dtype": None}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_read_config_takes_a_missing_dtype_from_the_weights(tmp_path, dtype, keys):
    model = random_llama(_CONFIG, dtype=dtype)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, "dtype", "torch_dtype", **keys)
    assert read_config(tmp_path).dtype == dtype
    assert Decoder.from_pretrained(tmp_path).float_dtype == dtype


def test_read_config_prefers_the_dtype_of_the_config(tmp_path):
    random_llama(_CONFIG, dtype="bfloat16").save_pretrained(tmp_path)
    edit_config(tmp_path, "dtype", torch_dtype="float16")
    assert read_config(tmp_path).dtype == "float16"


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_read_config_finds_the_dtype_of_transformers(tmp_path, dtypes):
    """Embeddings and all other tensors have different dtypes."""
    families.reference(CASES["llama"]).save_pretrained(tmp_path)
    edit_config(tmp_path, "dtype", "torch_dtype")

    def round_all(tensors):
        return {
            name: value.astype(jnp.dtype(dtypes[name not in (_EMBEDDINGS, _HEAD)]))
            for name, value in tensors.items()
        }

    edit_tensors(tmp_path, round_all)
    theirs = families.load(tmp_path, dtype="auto").dtype
    assert str(theirs) == f"torch.{read_config(tmp_path).dtype}"


def test_plan_uses_the_dtype_and_head_of_the_files(tmp_path, capsys):
    random_llama(_CONFIG, dtype="bfloat16").save_pretrained(tmp_path)
    edit_config(tmp_path, "dtype", "torch_dtype")
    options = ["--model", str(tmp_path), "--memory", "1GiB", "--json"]
    assert plan(options) == 0
    tied = json.loads(capsys.readouterr().out)
    assert (tied["dtype"], tied["weight_bytes"]) == ("bfloat16", 2 * tied["num_parameters"])
    edit_tensors(tmp_path, double_head)
    with pytest.warns(UserWarning, match="differs from the embeddings"):
        assert plan(options) == 0
    untied = json.loads(capsys.readouterr().out)
    assert untied["num_parameters"] - tied["num_parameters"] == 24 * 16
    (tmp_path / "model.safetensors").unlink()
    assert plan(options) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def test_read_config_checks_the_number_of_layers_first(folder):
    for number in (4, 10**9):
        edit_config(folder, num_hidden_layers=number)
        start = time.process_time()
        for load in (read_config, lambda path: from_pretrained(Decoder, path)):
            with pytest.raises(WeightsError, match="num_hidden_layers must be at most 3"):
                load(folder)
        assert time.process_time() - start < 5
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 10000"):
        read_config(folder)


def test_names_that_do_not_fit_are_shown(folder):
    edit_tensors(
        folder, lambda tensors: {x.replace("layers.", "h."): y for x, y in tensors.items()}
    )
    expected = r"names such as model\.layers\.0\..* got model.embed_tokens.weight, model\.h\.0\."
    with pytest.raises(WeightsError, match=expected) as raised:
        from_pretrained(Decoder, folder)
    assert "at most 0" not in str(raised.value)


def test_scales_of_a_kv_cache_are_ignored_without_a_quantisation(folder):
    want = from_pretrained(Decoder, folder)
    scales = {f"model.layers.0.self_attn.{name}_scale": np.float32([0.5]) for name in ("k", "v")}
    edit_tensors(folder, lambda tensors: tensors | scales)
    with pytest.warns(UserWarning, match="scales for a quantised KV cache, such as .*_scale, are"):
        got = from_pretrained(Decoder, folder)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(got), nnx.state(want))


@pytest.mark.parametrize(
    "key",
    [
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
        *("hidden_size", "head_dim", "num_experts", "num_experts_per_tok"),
        *("moe_intermediate_size",),
    ],
)
def test_from_pretrained_rejects_huge_sizes_early(tmp_path, key):
    config = dataclasses.replace(
        _CONFIG,
        model_type="qwen3_moe",
        qk_norm=True,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
    )
    random_llama(config).save_pretrained(tmp_path)
    edit_config(tmp_path, **{key: 10**9})
    start = time.process_time()
    with pytest.raises(ValueError, match=r"must|missing") as raised:
        from_pretrained(Decoder, tmp_path)
    assert "\n" not in str(raised.value)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("_orig_mod.{}", "torch.compile.*'_orig_mod.'"),
        ("model._orig_mod.{}", "torch.compile"),
        ("pretrained_model.{}", "TRL.*'pretrained_model.'"),
        ("module.{}", "DistributedDataParallel"),
        ("base_model.model.{}", "PEFT"),
        ("{}.scales", "config.json has no quantization_config"),
        ("{}.biases", "config.json has no quantization_config"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "LoRA adapter, which cannot be loaded"),
        (
            "model.layers.0.self_attn.q_proj.base_layer.weight",
            "LoRA adapter, which cannot be loaded",
        ),
        ("{}.qweight", "config.json has no quantization_config"),
        (
            "{}.weight_scale_inv",
            "config.json has no quantization_config",
        ),
        ("{}.absmax", "config.json has no quantization_config"),
    ],
)
def test_from_pretrained_explains_names_of_wrapped_models(folder, rename, message):
    edit_tensors(folder, lambda tensors: {rename.format(x): y for x, y in tensors.items()})
    with pytest.raises(WeightsError, match=message) as raised:
        from_pretrained(Decoder, folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "LlamaForSequenceClassification", "BloomForCausalLM"]
)
def test_read_config_names_an_unsupported_architecture(folder, architecture):
    edit_config(folder, architectures=[architecture])
    with pytest.raises(UnsupportedConfigError, match=architecture) as raised:
        read_config(folder)
    assert "docs/families.md" in str(raised.value)
    assert len(str(raised.value)) < 130
    edit_config(folder, architectures=None, model_type="gpt2")
    with pytest.raises(UnsupportedConfigError, match="'gpt2' .*docs/families.md"):
        read_config(folder)


def _watch(monkeypatch):
    """Return the numbers of bytes that the progress bar is advanced by, and what it writes."""
    numbers, stream = [], io.StringIO()
    advance = Status.advance
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(Status, "advance", lambda *args: numbers.append(args[1]) or advance(*args))
    return numbers, stream


def _save_as(kind, path):
    """Save a model, and return its path and its number of bytes."""
    model = random_llama(dataclasses.replace(_CONFIG, head_dim=8), scan_layers="stacked" in kind)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(model))
    if "orbax" in kind:
        save_checkpoint(model, path)
        return path, num_bytes
    if kind == "gguf":
        tensors = tensors_of(model, "llama", path / "folder")
        return write(path / "a.gguf", metadata_of(model.config, "llama"), tensors), num_bytes
    if kind == "quantised":
        config = dataclasses.replace(_CONFIG, hidden_size=64, intermediate_size=64, head_dim=16)
        random_llama(config).save_pretrained(path / "floats")
        Decoder.from_pretrained(path / "floats", dtype="int8").save_pretrained(path)
        tensors = load_file(path / "model.safetensors").items()
        return path, sum(x.nbytes for name, x in tensors if not name.endswith("_shape"))
    model.save_pretrained(path)
    return path, num_bytes


@pytest.mark.parametrize("kind", ["safetensors", "quantised", "gguf", "orbax", "stacked orbax"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_progress_bar_counts_the_bytes_of_all_weights(tmp_path, monkeypatch, kind, scan_layers):
    path, num_bytes = _save_as(kind, tmp_path)
    numbers, stream = _watch(monkeypatch)
    Decoder.from_pretrained(path, scan_layers=scan_layers, show_progress=True)
    assert len(numbers) > 5 and sum(numbers) == num_bytes
    assert "loading weights:" in stream.getvalue()


def test_progress_bar_is_shown_only_if_loading_is_slow_or_it_is_requested(folder, monkeypatch):
    numbers, stream = _watch(monkeypatch)
    stream.isatty = lambda: True
    for show_progress in (None, False):
        Decoder.from_pretrained(folder, show_progress=show_progress)
        assert numbers != [] and stream.getvalue() == ""
    monkeypatch.setattr(monitoring, "_LOADING_DELAY", 0.0)
    Decoder.from_pretrained(folder)
    assert "loading weights:" in stream.getvalue()
