"""Tests of examples/train.py with a tiny model: exact resumption, and an export that loads."""

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.huggingface import load_weights
from paged_jax.models.model_folder import read_json
from tests.support import ROOT

SCRIPT = ROOT / "examples" / "train.py"
SIZES = {
    "steps": 10,
    "batch-size": 2,
    "sequence-length": 32,
    "checkpoint-every": 4,
    "warmup-steps": 2,
    "vocab-size": 300,
    "hidden-size": 16,
    "intermediate-size": 24,
    "layers": 1,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 8,
}


def _load_script():
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


train = _load_script()


def _arguments(data: Path, out: Path, **changes: object) -> list[str]:
    options = SIZES | {name.replace("_", "-"): value for name, value in changes.items()}
    flags = [(f"--{name}", str(value)) for name, value in options.items()]
    return [*itertools.chain(("--data", str(data), "--out", str(out)), *flags)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write two texts; one of them has the header and footer of Project Gutenberg."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    words = "the a grey small cat dog bird runs sees likes and then never always\n again.\n"
    for name in ("one", "two"):
        text = " ".join(generator.choice(words.split(" "), size=3000))
        if name == "two":
            text = f"About\n*** START OF THE BOOK ***\n{text}\n*** END OF THE BOOK ***\nLicence\n"
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def exported(data: Path, tmp_path_factory) -> Path:
    """Run the training without interruption."""
    out = tmp_path_factory.mktemp("uninterrupted")
    train.main(_arguments(data, out))
    return out


@pytest.mark.slow
def test_main_gives_the_same_files_after_a_restart(data, exported, tmp_path, capsys):
    arguments = _arguments(data, tmp_path)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        seen = any(line.startswith("step 8:") for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert seen and process.wait() == -signal.SIGKILL
    assert not (tmp_path / "model.safetensors").exists()

    train.main(arguments)

    assert "resumed at step" in capsys.readouterr().out
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (exported / name).read_bytes()


@pytest.mark.slow
def test_main_rejects_checkpoints_with_other_settings(data, exported):
    with pytest.raises(SystemExit, match="another learning-rate, 0.003"):
        train.main(_arguments(data, exported, learning_rate=0.001))


def test_main_reports_a_missing_folder(tmp_path):
    with pytest.raises(SystemExit, match=r"folder with \*\.txt files, got .*nowhere"):
        train.main(_arguments(tmp_path / "nowhere", tmp_path))


def test_main_reports_too_little_text(data, tmp_path):
    with pytest.raises(SystemExit, match="must have more than --sequence-length 65536 tokens"):
        train.main(_arguments(data, tmp_path, sequence_length=65536))


def test_main_exports_a_trained_model_that_loads(data, exported):
    config = LlamaConfig.from_dict(read_json(exported / "config.json"))
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    generation = read_json(exported / "generation_config.json")
    assert (config.head_dim, config.max_position_embeddings) == (8, 32)
    assert config.bos_token_id == generation["bos_token_id"] == tokenizer.token_to_id("<s>")
    assert config.eos_token_ids == (tokenizer.token_to_id("</s>"),)

    assert load_weights(Decoder, exported, config).embed_tokens[...].dtype == jnp.bfloat16
    args = train.parse_args(_arguments(data, exported))
    parts = [train.split(text, args.held_out_fraction) for text in train.read_texts(data)]
    corpus = train.build_corpus(tokenizer, parts)
    graphdef, initial = nnx.split(train.build_model(args))
    evaluate = train.make_evaluate(graphdef, corpus, args)
    trained = nnx.state(load_weights(Decoder, exported, config, dtype="float32"))
    assert evaluate(trained) < evaluate(initial) - 0.1


def test_evaluate_counts_every_token_once(data):
    args = train.parse_args(_arguments(data, data))
    model = train.build_model(args)
    graphdef, params = nnx.split(model)
    ids = np.random.default_rng(1).integers(2, 300, 32 * 2 + 5).astype(np.int32)
    corpus = train.Corpus(ids, ids[:1], ids, 1)

    places = np.array([0, 32, 37])[:, None] + np.arange(32)[None]
    targets = ids[places]
    logits = nnx.jit(model)(jnp.asarray(np.insert(targets, 0, train.BOS_ID, axis=1)[:, :-1]))
    logits = np.asarray(logits, np.float64)
    nats = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], 2)[..., 0]
    )
    total = nats[:2].sum() + nats[2, 27:].sum()  # the last window begins 27 tokens early

    held_out = train.make_evaluate(graphdef, corpus, args)(params)
    assert held_out == pytest.approx(total / len(ids), rel=1e-6)


def test_windows_predicts_the_token_after_each_input():
    inputs, targets = train.windows(jnp.arange(10, 20), jnp.array([0, 6]), 4)
    assert inputs.tolist() == [[0, 10, 11, 12], [0, 16, 17, 18]]
    assert targets.tolist() == [[10, 11, 12, 13], [16, 17, 18, 19]]


def test_window_length_is_short_at_first_and_full_at_the_end():
    args = train.parse_args(_arguments(Path(), Path(), steps=10))
    assert [train.window_length(step, args) for step in range(10)] == [8] * 8 + [32] * 2


def test_split_cuts_at_a_line_without_loss():
    text = "".join(f"line {i}\n" for i in range(100))
    first, rest = train.split(text, 0.1)
    assert first + rest == text
    assert first.endswith("\n") and 0 < len(rest) <= len(text) * 0.1


def test_read_texts_removes_header_and_footer(data):
    one, two = train.read_texts(data)
    assert one.strip() == (data / "one.txt").read_text(encoding="utf-8").strip()
    assert "BOOK" not in two and "About" not in two and "Licence" not in two


def test_build_corpus_starts_lines_after_newlines(data):
    texts = train.read_texts(data)
    tokenizer = train.train_tokenizer(texts, 300)
    corpus = train.build_corpus(tokenizer, [(text, "the cat\n") for text in texts])
    text = "".join(tokenizer.decode([int(i)]) for i in corpus.train)
    assert text == "".join(texts)
    assert len(corpus.starts) == text.count("\n")
    assert corpus.held_out_bytes == 16
    assert (corpus.train == train.BOS_ID).sum() == (corpus.train == train.EOS_ID).sum() == 2


def test_train_tokenizer_encodes_any_text_without_loss(data):
    tokenizer = train.train_tokenizer(train.read_texts(data), 300)
    text = "  naïve — 日本\t🙂\r\n\x00 end "
    ids = tokenizer.encode(text).ids
    assert ids[0] == train.BOS_ID and ids.count(train.BOS_ID) == 1
    assert tokenizer.decode(ids) == text


def test_train_tokenizer_reports_the_largest_vocabulary():
    with pytest.raises(ValueError, match="--vocab-size must be 26[0-9] for this text"):
        train.train_tokenizer(["ab ab ab"], 300)
