"""Tests of the command line `generate`: its output, its messages and its errors."""

import contextlib
import gzip
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged_jax import LLM, SamplingParams, distributed
from paged_jax.generate import main
from tests.support import ROOT
from tests.support.tiny_model import SIZES, save_tiny_model

# With four prompts or four samples, these options need the same programs as other tests.
SHAPES = ["--block-size", "4", "--num-blocks", "20", "--max-chunk", "16"]
PROMPTS = ["the cat sat", "in the house", "ab", "one day"]


@pytest.fixture(scope="module")
def llm(tiny_folder) -> LLM:
    return LLM(tiny_folder, **SIZES)


@pytest.fixture
def run(tiny_folder, capsys):
    """Return a function that runs the command line; it returns exit status, stdout and stderr."""

    def run(*args: str, model: Path | None = tiny_folder) -> tuple[int, str, str]:
        args = (*args, "--model", str(model)) if model else args
        try:
            status = main(list(args))
        except SystemExit as error:  # raised by argparse
            status = error.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


def read_samples(out: str) -> list[tuple[int, int, str]]:
    """Return (prompt, sample, text) for each sample in the output."""
    found = re.findall(r"=== prompt (\d+), sample (\d+)\n(.*?)\n(?==== prompt|\Z)", out, re.DOTALL)
    return [(int(prompt), int(sample), text) for prompt, sample, text in found]


# Text


def test_text_goes_to_stdout_and_the_rest_to_stderr(run, tiny_folder) -> None:
    status, out, err = run("--prompt", "ab", "--max-tokens", "8")
    [expected] = LLM(tiny_folder, max_num_seqs=1).generate(
        "ab", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    assert status == 0
    assert out == expected.outputs[0].text + "\n"
    lines = err.splitlines()
    assert lines[0] == "loading the model ..."
    assert all(re.fullmatch(r"compiling .* \.\.\.", line) for line in lines[1:-1])
    assert len(lines) > 3
    number = r"(\d+\.\d|-) tokens/s"
    assert re.fullmatch(
        rf"prompt: 3 tokens, {number} \| generated: \d tokens, {number} \| first token: .* s "
        r"\| compiling: .* s \| blocks: 1 of 4 \| cache: 4\.00 KiB of 16\.00 KiB used at the peak",
        lines[-1],
    ), lines[-1]


def test_quiet_writes_only_the_text(run) -> None:
    args = ("--prompt", "ab", "--temperature", "0", "--max-tokens", "4")
    status, text, _ = run(*args)
    assert status == 0 and run(*args, "--quiet") == (0, text, "")
    assert "loading the model" not in run(*args, "--no-progress")[2]


def test_prompt_can_be_read_from_stdin(run, monkeypatch) -> None:
    expected = run("--prompt", "ab", "--max-tokens", "8")[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    assert run("--prompt", "-", "--max-tokens", "8")[:2] == (0, expected)


def test_outputs_are_in_the_order_of_the_prompts_file(run, prompts_file, llm) -> None:
    status, out, _ = run("--prompts-file", str(prompts_file), "--max-tokens", "12", *SHAPES)
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert status == 0
    assert len({len(output.outputs[0].token_ids) for output in expected}) > 1, "all end at once"
    assert read_samples(out) == [
        (index, 0, output.outputs[0].text) for index, output in enumerate(expected)
    ]


def test_jsonl_file_can_have_texts_and_token_ids(run, tmp_path, llm) -> None:
    token_ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPTS[0] + "\u2028"}, {"prompt": PROMPTS[1]}]
    lines += [{"prompt_token_ids": ids} for ids in token_ids[2:]]
    # U+2028 is a line end for str.splitlines, but not in JSON Lines.
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    status, out, _ = run("--prompts-file", str(path), "--json", "--max-tokens", "3", *SHAPES)
    assert status == 0
    records = [json.loads(line) for line in out.split("\n")[:-1]]
    assert [record["prompt"] for record in records] == [
        PROMPTS[0] + "\u2028",
        PROMPTS[1],
        None,
        None,
    ]
    assert [record["prompt_token_ids"] for record in records[1:]] == token_ids[1:]


def test_json_has_exactly_these_keys(run, llm) -> None:
    args = ["--prompt", "one day", "--n", "4", "--temperature", "1", "--seed", "3"]
    status, out, _ = run(*args, "--max-tokens", "8", "--json", *SHAPES)
    assert status == 0
    [record] = [json.loads(line) for line in out.splitlines()]
    assert list(record) == ["prompt", "prompt_token_ids", "outputs", "stats"]
    assert record["prompt"] == "one day"
    assert record["prompt_token_ids"] == llm.tokenizer.encode("one day")
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=8)
    [expected] = llm.generate("one day", params, use_tqdm=False)
    keys = ["index", "text", "token_ids", "finish_reason", "cumulative_logprob"]
    for completion, same in zip(record["outputs"], expected.outputs, strict=True):
        assert list(completion) == keys
        assert completion == {key: getattr(same, key) for key in keys}
    stats = record["stats"]
    assert list(stats) == [
        "num_prompt_tokens",
        "num_generated_tokens",
        "time_to_first_token_s",
        "total_s",
        "compile_s",
        "peak_blocks",
        "num_blocks",
    ]
    assert stats["num_prompt_tokens"] == len(record["prompt_token_ids"])
    assert stats["num_generated_tokens"] == sum(len(c["token_ids"]) for c in record["outputs"])
    assert 0 < stats["time_to_first_token_s"] <= stats["total_s"]
    assert 0 < stats["peak_blocks"] <= stats["num_blocks"] == 20


def test_json_of_a_prompt_is_a_single_line(run) -> None:
    """Programs that read JSON Lines may use `str.splitlines`."""
    ends = [end for end in map(chr, range(0x3000)) if len(f"a{end}b".splitlines()) > 1]
    prompt = "a".join(["", *ends, ""])
    status, out, _ = run("--prompt", prompt, "--json", "--max-tokens", "1", *SHAPES)
    [line] = out.splitlines()
    assert status == 0 and json.loads(line)["prompt"] == prompt


def test_samples_are_reproducible(run) -> None:
    args = ["--prompt", "one day", "--n", "4", "--temperature", "1", "--max-tokens", "8", *SHAPES]
    first, again, unseeded = (
        run(*args, *seed)[1] for seed in (["--seed", "3"], ["--seed", "3"], [])
    )
    assert [(prompt, sample) for prompt, sample, _ in read_samples(first)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
    ]
    assert len({text for *_, text in read_samples(first)}) == 4
    assert first == again != unseeded
    assert run(*args)[1] == unseeded


def test_options_reach_the_sampling_parameters(run) -> None:
    args = ["--prompt", "one day", "--max-tokens", "8"]
    greedy = run(*args)[1]
    hot = ["--temperature", "1.5", "--seed", "5"]
    assert run(*args, *hot)[1] != greedy
    for narrow in (["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"]):
        assert run(*args, *hot, *narrow)[1] == greedy
    stop = greedy[2:4]
    assert run(*args, "--stop", "never", "--stop", stop)[1] == greedy[: greedy.find(stop)] + "\n"


def test_sampling_defaults_come_from_the_model(run, tmp_path) -> None:
    folder = save_tiny_model(tmp_path)
    greedy = run("--prompt", "one day", "--max-tokens", "8", model=folder)[1]
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.5}')
    args = ["--prompt", "one day", "--max-tokens", "8"]
    assert run(*args, model=folder)[1] != greedy
    assert run(*args, "--temperature", "0", model=folder)[1] == greedy


def test_default_of_max_tokens_comes_from_the_model(run, tmp_path) -> None:
    folder = save_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3}')
    args = ["--prompt", "one day", "--json"]
    for given, count in (([], 3), (["--max-tokens", "5"], 5)):
        out = json.loads(run(*args, *given, model=folder)[1])
        assert len(out["outputs"][0]["token_ids"]) == count


def test_chat_applies_the_chat_template(run, tmp_path, llm) -> None:
    folder = save_tiny_model(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}?")
    args = ["--prompt", "who", "--chat", "--json", "--max-tokens", "4"]
    status, out, _ = run(*args, model=folder)
    assert status == 0
    assert json.loads(out)["prompt_token_ids"] == llm.tokenizer.encode("who?")


# --show-blocks and --profile


def test_show_blocks_shows_sharing_and_copies_on_write(run) -> None:
    args = ["--prompt", "one day", "--n", "4", "--temperature", "1", "--max-tokens", "8"]
    status, plain, _ = run(*args, *SHAPES)
    assert run(*args, "--show-blocks", *SHAPES)[:2] == (0, plain) == (status, plain)
    err = run(*args, "--show-blocks", *SHAPES)[2]
    titles = re.findall(r"^(.*): (\d+) of 20 blocks in use, (\d+) free$", err, re.MULTILINE)
    # 16 tokens: a full block of the prompt, shared by four samples, and three blocks per sample.
    assert titles == [
        ("before", "0", "20"),
        ("when blocks are first shared", "9", "11"),
        ("at its fullest", "13", "7"),
        ("after", "0", "20"),
    ]
    shared = err[err.index("when blocks are first shared") : err.index("at its fullest")]
    assert "\n     0  4" + "1" * 8 + "." * 11 + "\n" in shared
    fullest = err[err.index("at its fullest") : err.index("events:")]
    assert len(re.findall(r"sequence in slot \d, 1[3-6] tokens", fullest)) == 4
    assert len(re.findall(r"logical +0 -> physical +0 +tokens 0\.\.3 .*shared by 4", fullest)) == 4
    assert "\n     0  4" + "1" * 12 + "." * 7 + "\n" in fullest
    events = err[err.index("events:") : err.index("after: ")]
    assert events.count("as a copy of another sample's") == 3
    # The last block of the prompt is not full, so three of the samples write into a copy.
    assert len(re.findall(r"got a copy of block 1 to write into, block \d", events)) == 3
    assert events.count("finished and released") == 4
    # The prefix cache keeps the full block of the prompt.
    assert "\n     0  c" in err[err.index("\nafter: ") :]


def test_contiguous_gives_the_same_text(run) -> None:
    args = ["--prompt", "one day", "--n", "2", "--temperature", "1", "--max-tokens", "8"]
    _, plain, _ = run(*args, *SHAPES)
    options = ["--contiguous", "--max-model-len", "32", "--max-chunk", "16", "--show-blocks"]
    status, out, err = run(*args, *options)
    assert (status, out) == (0, plain)
    assert "at its fullest: 2 of 2 blocks in use" in err and "shared" not in err


def test_profile_has_named_ranges(run, tmp_path) -> None:
    assert run("--prompt", "one", "--max-tokens", "3", *SHAPES, "--profile", str(tmp_path))[0] == 0
    [profile] = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"engine step", "schedule", "decode", "postprocess", "decode of 1 samples"} <= names


# Errors


def check_mistake(result: tuple[int, str, str], message: str, status: int = 1) -> None:
    actual, out, err = result
    assert actual == status
    assert out == ""
    *progress, last = err.splitlines()
    assert all(line.endswith(" ...") for line in progress)
    assert last.startswith("paged_jax.generate: error: ")
    assert re.search(message, last), last


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", ""], "--prompt must not be empty"),
        (["--prompt", "ab", "--max-tokens", "-1"], "max-tokens must be an integer >= 0.*got -1"),
        (["--prompt", "ab", "--temperature", "-1"], "temperature must be finite and >= 0"),
        (["--prompt", "ab", "--temperature", "nan"], "temperature must be finite and >= 0"),
        (["--prompt", "ab", "--top-p", "0"], r"top-p must be in \(0, 1\], got 0"),
        (["--prompt", "ab", "--top-p", "1.5"], r"top-p must be in \(0, 1\], got 1.5"),
        (["--prompt", "ab", "--top-k", "-2"], "top-k must be an integer >= -1"),
        (["--prompt", "ab", "--min-p", "2"], r"min-p must be in \[0, 1\], got 2"),
        (["--prompt", "ab", "--seed", "-2"], r"seed must be an integer in \[0, .*got -2"),
        (["--prompt", "ab", "--n", "0"], r"n must be an integer in \[1, 16384\], got 0"),
        (["--prompt", "ab", "--stop", ""], "stop must be a non-empty string"),
        (["--prompts-file", "/nowhere/prompts.txt"], "readable text file.*No such file"),
        (["--prompt", "ab", "--contiguous", "--num-blocks", "4"], "combined with --num-blocks"),
        (["--prompt", "ab", "--profile", "/dev/null/x"], "--profile must be a folder"),
        (
            ["--prompt", "ab", "--repetition-penalty", "0"],
            "repetition-penalty must be finite and > 0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_reported_before_the_model_is_loaded(run, args, message) -> None:
    result = run(*args, model=Path("/nowhere/model"))
    check_mistake(result, message)
    assert len(result[2].splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "one of the arguments --prompt --prompts-file is required"),
        (["--prompt", "ab", "--prompts-file", "x"], "not allowed with argument"),
        (["--prompt", "ab", "--backend", "magic"], "--backend: invalid choice: 'magic'"),
        (["--prompt", "ab", "--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["--prompt", "ab", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_a_single_line(run, args, message) -> None:
    result = run(*args)
    check_mistake(result, message, status=2)
    assert len(result[2].splitlines()) == 1


def test_distributed_needs_a_cluster_that_jax_knows(run, monkeypatch) -> None:
    # JAX raises this error, but cannot be initialised here after its first use.
    def initialize(*args, **kwargs):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(distributed, "initialize", initialize)
    message = "cluster that JAX can detect.*give --coordinator-address.*should be defined"
    check_mistake(run("--prompt", "ab", "--distributed"), message)


def test_backend_for_another_device_is_an_error(run) -> None:
    check_mistake(run("--prompt", "ab", "--backend", "triton"), "'triton' runs on gpu only")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least one prompt"),
        (b" \n\n", "at least one prompt"),
        (b"\xff\xfe\xfa", "not UTF-8"),
        (b'{"prompt": "ab"}\n{"prompt": ', "line 2 is not JSON"),
        (b'"ab"', "line 1 must be a JSON object with the field prompt"),
        (b'{"prompt_token_ids": 5}', "list of integers, got 5"),
        (b'{"prompt": 5}', "at least one character, got 5"),
        (b'{"prompt": "\\ud800"}', "valid Unicode"),
        (b'{"promt": "ab"}', r"got the keys \['promt'\]"),
        (b'{"prompt": "ab", "prompt_token_ids": [5]}', "either prompt or prompt_token_ids"),
    ],
)
def test_invalid_prompts_files_are_errors(run, tmp_path, content, message) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    check_mistake(run("--prompts-file", str(path)), message)


@pytest.mark.parametrize("name", ["prompts.JSONL", "prompts.ndjson"])
def test_prompts_file_of_json_lines_can_have_several_suffixes(run, tmp_path, name) -> None:
    """A file with an unknown suffix is read as text, so the JSON itself would be the prompt."""
    path = tmp_path / name
    path.write_text('{"promt": "ab"}\n')
    check_mistake(run("--prompts-file", str(path)), r"got the keys \['promt'\]")


def test_prompts_file_with_suffix_json_is_an_error(run, tmp_path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('[{"prompt": "ab"}]')
    check_mistake(
        run("--prompts-file", str(path)),
        "--prompts-file must be .* a .jsonl file with a JSON object in each line, got ",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 5}, "only the keys prompt, .*got max_tokens"),
        ({"cache_salt": 5}, "cache_salt must be a text, got 5"),
        ({"prompt_token_ids": [5]}, "--chat must be used only with text prompts"),
    ],
)
def test_chat_reads_all_fields_of_a_prompts_file(run, tmp_path, fields, message) -> None:
    folder = save_tiny_model(tmp_path, chat_template="{{ messages[0].content }}")
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "ab", **fields}))
    result = run("--chat", "--prompts-file", str(path), model=folder)
    check_mistake(result, message)


def test_folder_as_prompts_file_is_an_error(run, tmp_path) -> None:
    check_mistake(run("--prompts-file", str(tmp_path)), "readable text file.*directory")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "a " * 40], "at most 63 tokens.*context of 64, got 81"),
        (["--prompt", "ab", "--num-blocks", "1"], "pool of 1 blocks of 16 tokens"),
        (["--prompt", "ab", "--num-blocks", "0"], "num-blocks must be a positive integer"),
        (["--prompt", "ab", "--block-size", "-4"], "block-size must be a positive integer"),
        (["--prompt", "ab", "--chat"], "no chat template"),
        (["--prompt", "\udcff"], "valid Unicode"),
    ],
    ids=lambda value: (
        " ".join(value).encode("ascii", "replace").decode()[:30] if isinstance(value, list) else ""
    ),
)
def test_options_that_do_not_suit_the_model_are_errors(run, args, message) -> None:
    check_mistake(run(*args), message)


def test_damaged_models_are_errors(run, tmp_path) -> None:
    check_mistake(run("--prompt", "ab", model=tmp_path / "none"), "--model must be a folder.*none")
    check_mistake(run("--prompt", "ab", model=tmp_path), "config.json")

    folder = save_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    check_mistake(run("--prompt", "ab", model=folder), "model.safetensors")
    weights.unlink()
    check_mistake(run("--prompt", "ab", model=folder), "safetensors")
    weights.write_bytes(whole)
    tensors = dict(load_file(weights))
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, weights)
    check_mistake(run("--prompt", "ab", model=folder), "model.norm.weight.*(nan|NaN|finite)")
    weights.write_bytes(whole)
    (folder / "tokenizer.json").write_text("{}")
    check_mistake(
        run("--prompt", "ab", model=folder), "must be a valid file of the tokenizers library"
    )
    (folder / "tokenizer.json").unlink()
    got = run("--prompt", "ab", model=folder)
    check_mistake(got, "tokenizer for text prompts, got none. Put a tokenizer.json into its folder")
    (folder / "config.json").write_text("{")
    check_mistake(run("--prompt", "ab", model=folder), "config.json")


def test_model_without_a_tokenizer_accepts_token_ids(run, tmp_path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [0, 5, 6]}')
    status, out, _ = run("--prompts-file", str(path), "--json", "--max-tokens", "3", model=folder)
    assert status == 0
    [completion] = json.loads(out)["outputs"]
    assert completion["text"] == "" and completion["token_ids"]


def test_keyboard_interrupt_prints_a_single_word(run, monkeypatch) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupt)
    status, out, err = run("--prompt", "ab")
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def pseudo_terminal(monkeypatch) -> Iterator[list[str]]:
    """Connect stdout and stderr to a pseudo-terminal; the list gets its output afterwards."""
    leader, follower = pty.openpty()
    lines: list[str] = []
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(leader, 4096):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with (
            open(follower, "w", buffering=1) as stream,
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            yield lines
    finally:
        reader.join(30)
        os.close(leader)
    lines += shown(b"".join(parts).decode().replace("\r\n", "\n"))


def shown(written: str) -> list[str]:
    """Return the lines that a terminal shows after `written` was printed."""
    screen = []
    for line in written.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        screen.append("".join(cells).rstrip())
    return screen


def test_terminal_shows_only_the_text_and_the_summary(monkeypatch, tiny_folder) -> None:
    """The first command of the README runs in a new engine, so that the summary can be compiled."""
    args = ["--model", str(tiny_folder), "--max-tokens", "4", "--temperature", "0"]
    with pseudo_terminal(monkeypatch) as lines:
        assert main(["--prompt", "ab", *args]) == 0
    text, summary, rest = lines
    assert summary.startswith("prompt: 3 tokens, ") and rest == ""
    [expected] = LLM(tiny_folder, max_num_seqs=1).generate(
        "ab", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
    )
    assert text == expected.outputs[0].text.rstrip()


def test_terminal_shows_a_bar_and_erases_it(monkeypatch, tiny_folder, prompts_file) -> None:
    args = ["--model", str(tiny_folder), "--max-tokens", "4", *SHAPES]
    with pseudo_terminal(monkeypatch) as lines:
        assert main(["--prompts-file", str(prompts_file), *args]) == 0
    titles = [line for line in lines if line.startswith("===")]
    assert titles == [f"=== prompt {i}, sample 0" for i in range(4)]
    assert lines[-2].startswith("prompt: ") and lines[-1] == ""
    assert not any("compiling " in line or "loading" in line for line in lines[:-2])


def test_error_in_a_stream_is_on_a_separate_line(monkeypatch, tiny_folder) -> None:
    stream = LLM.stream

    def fail(*args, **options):
        yield next(stream(*args, **options))
        raise FloatingPointError("the device is gone")

    monkeypatch.setattr(LLM, "stream", fail)
    args = ["--prompt", "ab", "--model", str(tiny_folder), "--max-tokens", "4"]
    with pseudo_terminal(monkeypatch) as lines:
        assert main([*args, "--temperature", "0"]) == 1
    assert lines[-2] == "paged_jax.generate: error: the device is gone"


def test_usage_error_is_the_only_line_on_a_terminal(monkeypatch, tmp_path) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["--prompt", "ab", "--model", str(tmp_path)]) == 1
    [line, rest] = shown(stream.getvalue())
    assert line.startswith("paged_jax.generate: error: ") and rest == ""


# In a separate process


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paged_jax.generate", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_module_runs_as_a_process(run, tiny_folder) -> None:
    args = ["--model", str(tiny_folder), "--prompt", "one day", "--max-tokens", "8"]
    with start(*args) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(out) > 1 and out == run(*args, model=None)[1]
    assert "tokens/s" in err.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_ends_the_process_cleanly(tiny_folder, tmp_path) -> None:
    # So many tokens that the signal arrives long before the end, even on a slow machine.
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one day\n" * 20_000)
    args = ["--model", str(tiny_folder), "--prompts-file", str(prompts), "--max-num-seqs", "4"]
    with start(*args, *SHAPES) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert first and "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"


@pytest.mark.slow
def test_closed_pipe_is_no_error(tiny_folder) -> None:
    with start("--model", str(tiny_folder), "--prompt", "ab", "--max-tokens", "8") as process:
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=300)
    assert process.returncode == 141, err
    assert "Traceback" not in err and "BrokenPipeError" not in err
