"""Error messages for folders that do not contain a loadable model."""

import json
import shutil

import pytest

from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.pretrained import bundled_folder, from_pretrained
from paged_jax.plan import main as plan

_CONFIG = (bundled_folder() / "config.json").read_text(encoding="utf-8")
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}


def fill(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"adapter_config.json": _ADAPTER, "adapter_model.safetensors": ""},
            "LoRA adapter for org/base, not a model. Merge it",
        ),
        ({"adapter_model.bin": ""}, "LoRA adapter, not a model"),
        ({"adapters.safetensors": "", "adapter_config.json": {"lora_layers": 4}}, "LoRA adapter"),
        ({"q4_k_m.gguf": ""}, r"contains q4_k_m.gguf. Give this file itself."),
        ({name: "" for name in _SHARDS}, "2 of 2 shards .*Fetch model.safetensors.index.json."),
        ({_SHARDS[1]: ""}, "1 of 2 shards .*index.json and the missing shards."),
        (
            {"params.json": {}, "consolidated.safetensors": "", "tekken.json": {}},
            r"Mistral's own format \(consolidated.safetensors, params.json\). Fetch config.json",
        ),
        ({"params.json": {}, "consolidated.00.pth": ""}, "Meta's own format"),
        ({"consolidated-00001-of-00002.safetensors": ""}, "Mistral's own format"),
        ({"tf_model.h5": ""}, "tf_model.h5 is weights of TensorFlow"),
        ({"model.onnx": ""}, "model.onnx is a model in ONNX format"),
        ({"weights.safetensors": ""}, "weights.safetensors. Rename it to model.safetensors"),
        ({"checkpoint-9/config.json": _CONFIG}, "Give the model's own folder, such as .*point-9"),
        (
            {
                "refs/main": "a",
                "blobs/1": "",
                "snapshots/a/config.json": _CONFIG,
                "snapshots/b/config.json": _CONFIG,
            },
            r"root of a Hugging Face cache. Give the model's own folder, such as .*snapshots/a\.",
        ),
        (
            {"models--o--n/snapshots/a/config.json": _CONFIG},
            "root of a Hugging Face cache.*models--o--n/snapshots/a.",
        ),
        (
            {"hub/models--o--n/snapshots/a/config.json": _CONFIG},
            "root of a Hugging Face cache.*hub/models--o--n/snapshots/a.",
        ),
        ({"refs/main": "a", "blobs/1": ""}, "Hugging Face cache without a whole model"),
    ],
)
def test_from_pretrained_describes_folders_without_a_model(tmp_path, files, message, has_config):
    fill(tmp_path, files | ({"config.json": _CONFIG} if has_config else {}))
    with pytest.raises((FileNotFoundError, ValueError), match=message) as raised:
        from_pretrained(Decoder, tmp_path)
    assert "\n" not in str(raised.value)


def test_from_pretrained_describes_files(tmp_path):
    fill(tmp_path, {"model.onnx": "", "model.safetensors": ""})
    with pytest.raises(OSError, match="model.onnx is a model in ONNX format"):
        from_pretrained(Decoder, tmp_path / "model.onnx")
    with pytest.raises(OSError, match="Give the folder that contains it"):
        from_pretrained(Decoder, tmp_path / "model.safetensors")
    fill(tmp_path, {"sha256-1": "GGUF"})
    with pytest.raises(OSError, match="is in GGUF format. Give the file a name that ends with"):
        from_pretrained(Decoder, tmp_path / "sha256-1")


def test_from_pretrained_reads_a_folder_that_is_named_like_a_file(tmp_path):
    folder = tmp_path / "model.gguf"
    shutil.copytree(bundled_folder(), folder)
    assert from_pretrained(Decoder, folder).config.num_hidden_layers == 5
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        from_pretrained(Decoder, folder)


def test_plan_describes_wrong_paths(tmp_path, capsys):
    fill(tmp_path, {"model.onnx": "", "adapter_config.json": _ADAPTER})
    for path, message in ((tmp_path, "LoRA adapter"), (tmp_path / "model.onnx", "ONNX")):
        assert plan(["--model", str(path), "--memory", "1GiB"]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_from_pretrained_names_a_broken_link(tmp_path):
    shutil.copy(bundled_folder() / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "1")
    with pytest.raises(ValueError, match="model.safetensors is a link to a file that is missing"):
        from_pretrained(Decoder, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "Git LFS"),
        ("<!doctype html><html></html>", "an HTML page"),
    ],
)
def test_from_pretrained_describes_files_that_are_no_safetensors(tmp_path, content, message):
    fill(tmp_path, {"config.json": _CONFIG, "model.safetensors": content})
    with pytest.raises(ValueError, match=message) as raised:
        from_pretrained(Decoder, tmp_path)
    assert "\n" not in str(raised.value)


def test_from_pretrained_warns_of_an_adapter_beside_a_model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bundled_folder(), folder)
    fill(folder, {"adapter_config.json": _ADAPTER, "adapter_model.safetensors": ""})
    with pytest.warns(UserWarning, match="adapter_model.safetensors is an adapter, which is not"):
        from_pretrained(Decoder, folder)
