"""Tests of the loss through a cache: equal to the model's, and close for quantised caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kv_dtype
from paged_jax import LLM, Llama


@pytest.mark.slow
def test_loss_is_that_of_the_model(tiny_folder) -> None:
    llm = LLM(tiny_folder, max_num_seqs=kv_dtype.NUM_SLOTS)
    windows = np.random.default_rng(0).integers(2, 43, (3, 30)).tolist()
    logits = jax.jit(Llama.__call__)(llm.model, jnp.array(windows))
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    expected = -np.mean([logprobs[b, t, windows[b][t + 1]] for b in range(3) for t in range(28)])
    assert kv_dtype.loss(llm, windows) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_main_prints_every_type(tiny_folder, tmp_path, monkeypatch, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat in the house, and nobody said a word. " * 4)
    monkeypatch.setattr(kv_dtype, "KV_DTYPES", {"float32": None, "int8": None})
    out = tmp_path / "out.json"
    args = ["--model", str(tiny_folder), "--text", str(text), "--windows", "2", "--json", str(out)]
    assert kv_dtype.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["float32", "int8"]
    assert lines[2].endswith("+0.00000") and not lines[3].endswith("0.00000")
    assert '"loss_change"' in out.read_text()


def test_a_short_text_is_refused(tiny_folder, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    with pytest.raises(SystemExit, match="--text must have 64 tokens, got"):
        kv_dtype.main(["--model", str(tiny_folder), "--text", str(text)])
