"""Tests of the GPU stages: valid commands, time limits, and kept results."""

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import jax
import pytest

from benchmarks import step
from benchmarks.attention import __main__ as attention
from benchmarks.attention import tune
from benchmarks.gpu import __main__ as run
from benchmarks.gpu import backends
from benchmarks.gpu.__main__ import STAGES, Command, Stage, peer_stage
from benchmarks.step import VARIANTS, gpu_cases
from paged_jax import generate
from paged_jax.kernels import gpu_defaults
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.problem import PoolOp
from paged_jax.kernels.triton import tuning
from tests.support import ROOT

KEY = "D128 G4 C16 q:bfloat16 pool:bfloat16"
PARSERS = {
    "benchmarks.attention": attention._parser,
    "benchmarks.attention.tune": tune._parser,
    "benchmarks.gpu.backends": backends._parser,
    "benchmarks.step": step._parser,
    "paged_jax.generate": generate.make_parser,
}


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.peers if name == "pictures" else ())
            for name in STAGES
        ),
        "peer",
    ],
)
def test_commands_are_understood_by_what_they_start(name, is_quick, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda program: f"/bin/{program}")
    for file in ("decode-attention-gpu.json", "step-gpu.json", "backends-mosaic.json"):
        (tmp_path / file).write_text("{}")
    stage = {**STAGES, "peer": peer_stage(Path("prototype.py"))}[name]
    commands = stage.commands(tmp_path, is_quick)
    # Results of a CPU have no default backends.
    assert commands or (name in ("memcheck", "defaults") and is_quick)
    # A run of one stage checks the device before it.
    assert stage.seconds + STAGES["device"].seconds < 570
    assert len({command.name for command in commands}) == len(commands)
    for command in commands:
        start, *arguments = command.arguments
        if start == "-c":
            compile(arguments[0], name, "exec")
            continue
        module, *arguments = arguments
        if module == "pytest":
            [file] = [argument for argument in arguments if argument.startswith("tests/")]
            assert (ROOT / file).is_file()
        elif module in PARSERS:
            options = PARSERS[module]().parse_args(arguments)
            # The last case or shape to start must have time to end.
            assert is_quick or getattr(options, "budget", 0) <= stage.seconds - 60
        else:
            assert importlib.import_module(module).main


def test_every_kernel_is_run_by_the_tests_of_a_gpu(tmp_path) -> None:
    files = {
        "decode": "test_triton_decode",
        "prefill": "test_triton_prefill",
        "ragged": "test_ragged",
        "write": "test_triton_write",
        "rope_write": "test_rope_write",
        "copy_blocks": "test_writing",
    }
    assert set(files) == set(get_args(PoolOp))
    commands = STAGES["tests"].commands(tmp_path, False)
    run_there = {command.name for command in commands}
    others = {"test_attention", "test_linear", "test_triton_quantised", "test_state_rows"}
    assert {*files.values(), *others} <= run_there
    for command in commands:
        [file] = [argument for argument in command.arguments if argument.startswith("tests/")]
        # Compiled on a GPU, directly or through the contract suite of all backends.
        text = (ROOT / file).read_text()
        assert 'default_backend() != "gpu"' in text or "BACKENDS" in text, file


@pytest.mark.parametrize(
    # The first stages leave time for the device check, tests and compilation; the others for tests,
    # text, and last cases that start when the time is nearly over.
    ("stages", "count", "seconds"),
    [(run.FIRST, 4, run.TOTAL_SECONDS - 90), (run.MORE, 8, 30 * 60 - 8 * 60)],
)
def test_stages_fit_their_time_together(stages, count, seconds, tmp_path) -> None:
    commands = [c for stage in stages.values() for c in stage.commands(tmp_path, False)]
    budgets = {
        command.name: int(command.arguments[command.arguments.index("--budget") + 1])
        for command in commands
        if "--budget" in command.arguments
    }
    assert len(budgets) == count and sum(budgets.values()) <= seconds


def test_stages_end_when_the_time_is_over(tmp_path, monkeypatch, capfd) -> None:
    """A stage gets the time that is left, a stage without enough time is left out."""
    for name in run.FIRST:
        budget = ("--budget", "120") if name == "prompts" else ()
        program = "import sys, time; print(sys.argv[1:]); time.sleep(1)"
        commands = [Command(("-c", program, *budget), name)]
        stage = Stage(name, lambda out, is_quick, commands=commands: commands)
        monkeypatch.setitem(run.FIRST, name, stage)
        monkeypatch.setitem(STAGES, name, stage)
    monkeypatch.setattr(run, "_LEAST_SECONDS", 58)
    assert run.main(["--quick", "--total", "60", "--out", str(tmp_path)]) == 0
    assert "['--budget', '29']" in capfd.readouterr().out
    kept = json.loads((tmp_path / run.SUMMARY).read_text())
    assert kept["prompts"]["statuses"] == {"prompts": 0}
    assert kept["recurrent"] == {"is_skipped": True}


def test_a_budget_shortens_measurements_only(tmp_path, capsys) -> None:
    assert run.main(["--dry-run", "--out", str(tmp_path), "--budget", "60"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--budget 60") == 12 and "--max-tokens 100 " in shown


def test_dry_run_starts_nothing(tmp_path, capsys) -> None:
    out = tmp_path / "results"
    assert run.main(["--dry-run", "--out", str(out), "--peer", "prototype.py"]) == 0
    shown = capsys.readouterr().out
    assert "peer: " in shown and all(f"{name}: " in shown for name in STAGES) and str(out) in shown
    assert not out.exists()


def stage_of(*programs: str, **options) -> Stage:
    """Return a stage that runs programs given as text."""
    commands = [Command(("-c", text), str(i)) for i, text in enumerate(programs)]
    return Stage("a test", lambda out, is_quick: commands, **options)


def test_stages_are_shown_kept_and_counted(tmp_path, monkeypatch, capfd) -> None:
    programs = ("import os; print('one', os.environ['A'])", "import sys; sys.exit('two fails')")
    monkeypatch.setitem(STAGES, "goals", stage_of(*programs, environment={"A": "set"}))
    monkeypatch.setitem(STAGES, "step", stage_of("print('three')"))
    assert run.main(["--stage", "goals", "step", "--quick", "--out", str(tmp_path)]) == 1
    printed = capfd.readouterr()
    assert "one set\n" in printed.out and "two fails\n" in printed.out and "three\n" in printed.out
    assert "failed: goals;" in printed.err
    kept = json.loads((tmp_path / run.SUMMARY).read_text())
    assert {name: each["statuses"] for name, each in kept.items()} == {
        "goals": {"0": 0, "1": 1},
        "step": {"0": 0},
    }
    # Each stage has a log, and lines in it start with the name of their process.
    goals = (tmp_path / "goals.log").read_text().splitlines()
    assert sorted(goals) == ["[0] one set", "[1] two fails"]
    assert (tmp_path / "step.log").read_text() == "three\n"


def test_a_stage_leaves_at_most_eight_files(tmp_path, monkeypatch) -> None:
    """Rented machines may return few files. The test stage has 8 processes but one log."""
    report = '<testsuites><testsuite tests="1" failures="0" errors="0" skipped="0" time="1"/>'
    write = "import sys; open(sys.argv[-1], 'w').write(sys.argv[-2]); print('done')"
    commands = [
        Command(
            ("-c", write, f"{report}</testsuites>", str(tmp_path / f"{command.name}.xml")), name
        )
        for command in STAGES["tests"].commands(tmp_path, False)
        for name in [command.name]
    ]
    monkeypatch.setitem(STAGES, "tests", Stage("tests", lambda out, is_quick: commands))
    for name in ("device", "tests"):
        run.run_stage(name, STAGES[name], tmp_path, is_quick=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "device.json", "device.log", "tests.log", "stages.json"
    }  # fmt: skip
    counts = json.loads((tmp_path / run.SUMMARY).read_text())["tests"]["tests"]
    assert len(counts) == 11 and counts["test_ragged"]["tests"] == 1


def test_memcheck_runs_where_there_is_a_sanitizer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda program: None)
    assert not STAGES["memcheck"].commands(tmp_path, False)
    monkeypatch.setattr(run.shutil, "which", lambda program: f"/cuda/{program}")
    [command] = STAGES["memcheck"].commands(tmp_path, False)
    assert command.wrapper[:3] == ("/cuda/compute-sanitizer", "--tool", "memcheck")
    # The wrapper starts Python, and its status becomes the status of the stage.
    wrapped = Command(("-c", "print('checked')"), "memcheck", ("env", "A=b"))
    monkeypatch.setitem(STAGES, "memcheck", Stage("a test", lambda out, is_quick: [wrapped]))
    assert run.main(["--stage", "memcheck", "--quick", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "memcheck.log").read_text() == "checked\n"


def test_hazardous_variants_run_last_and_alone() -> None:
    hazardous = {name for name, variant in VARIANTS.items() if variant.is_hazardous}
    assert hazardous == {"loops in command buffers"}
    jobs = step.make_jobs(gpu_cases(), None, "gpu")
    assert not hazardous & {name for _, names in jobs for name in names}
    [command] = STAGES["loops"].commands(Path("out"), False)
    options = step._parser().parse_args(command.arguments[2:])
    assert set(options.variants) == hazardous and not options.goals
    jobs = step.make_jobs(list(step._cases(options, False)), options.variants, "gpu")
    assert hazardous <= {name for _, names in jobs for name in names}
    assert list(STAGES)[-2:] == ["loops", "pictures"]  # pictures need no GPU


@pytest.mark.peers
def test_without_matplotlib_pictures_are_left_to_others(tmp_path, monkeypatch) -> None:
    (tmp_path / "step-gpu.json").write_text("{}")
    assert STAGES["pictures"].commands(tmp_path, False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run.main(["--stage", "pictures", "--out", str(tmp_path)]) == 0


def test_a_stage_ends_in_time(tmp_path, monkeypatch) -> None:
    program = "import time; print('begun', flush=True); time.sleep(60)"
    monkeypatch.setitem(STAGES, "step", stage_of(program, seconds=1.0))
    start = time.monotonic()
    summary = run.run_stage("step", STAGES["step"], tmp_path, is_quick=True)
    assert time.monotonic() - start < 20
    assert summary["is_late"] and summary["statuses"]["0"] < 0
    assert (tmp_path / "step.log").read_text() == "begun\n"


@pytest.mark.parametrize(
    ("variable", "file"),
    [
        (tuning.TABLE_VARIABLE, "tuning.json"),
        (gpu_defaults.DEFAULTS_VARIABLE, "gpu-defaults.json"),
    ],
)
def test_later_stages_run_with_what_was_tuned(tmp_path, variable, file) -> None:
    variables = run._environment(STAGES["goals"], tmp_path, is_quick=False)
    assert variable not in variables
    assert variables["JAX_PLATFORMS"].startswith("cuda")
    (tmp_path / file).write_text("{}")
    for name in ("goals", "step", "tests"):
        found = run._environment(STAGES[name], tmp_path, is_quick=False)[variable]
        assert Path(found) == tmp_path / file
    assert variable not in run._environment(STAGES["tune"], tmp_path, is_quick=False)


def test_defaults_are_derived_from_the_results_of_the_stages_before(tmp_path) -> None:
    assert not STAGES["defaults"].commands(tmp_path, False)
    names = list(STAGES)
    files = []
    for name in ("mosaic", "mosaic-updates"):
        assert names.index(name) < names.index("defaults") < names.index("step")
        [command] = STAGES[name].commands(tmp_path, False)
        files.append(Path(command.arguments[command.arguments.index("--json") + 1]))
        times = {"mosaic_gpu": 1.0, "triton": 2.0}
        record = {"op": "decode", "key": KEY, "name": name, "us": times}
        report = {"accelerator": "NVIDIA H200", "versions": {"jax": "0.12.0"}, "commit": None}
        files[-1].write_text(json.dumps(report | {"results": [record]}))
    # No device is needed.
    assert run.main(["--stage", "defaults", "--out", str(tmp_path)]) == 0
    table = gpu_defaults.parse((tmp_path / "gpu-defaults.json").read_text())
    assert table == {"NVIDIA H200": {"decode": {CallShape.parse(KEY): "mosaic_gpu"}}}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_without_a_gpu_nothing_else_runs(tmp_path, capfd) -> None:
    """JAX would fall back to the CPU, and its figures would be stored as figures of a GPU."""
    assert run.main(["--out", str(tmp_path), "--stage", "goals"]) == 1
    assert list(json.loads((tmp_path / run.SUMMARY).read_text())) == ["device"]
    assert "JAX has no GPU here" in capfd.readouterr().out


def test_tests_are_counted_with_their_failures(tmp_path) -> None:
    (tmp_path / "test_x.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1" time="2.5">'
        '<testcase name="a"/><testcase name="b"><failure message="wrong&#10;and why"/></testcase>'
        '<testcase name="c"><skipped message="no"/></testcase></testsuite></testsuites>'
    )
    [found] = run.read_tests(tmp_path).values()
    assert found["failed"] == ["b: wrong"] and found["seconds"] == 2.5
    assert (found["tests"], found["failures"], found["skipped"]) == (3, 1, 1)


def test_the_process_that_starts_stages_does_not_hold_the_gpu() -> None:
    program = "import sys, benchmarks.gpu.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_quick_stages_run_on_a_cpu(tmp_path) -> None:
    names = ["device", "tune", "step", "pictures"]
    assert run.main(["--stage", *names, "--quick", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "step-gpu.json").read_text())["results"]
    assert json.loads((tmp_path / "device.json").read_text())["accelerator"] == "cpu"
    assert (tmp_path / "step-gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "candidates on" in (tmp_path / "tune.log").read_text()
