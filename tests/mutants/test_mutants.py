"""The tool for mutants, on a small package, and the list of mutants."""

import ast
import json
import textwrap
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants import run
from tests.mutants.change import OutdatedError, changed_module
from tests.mutants.listed import MUTANTS
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.run import Result, Workshop, run_all
from tests.support import ROOT

# Each part has a mutant that a core test must kill. `kernels` are the files that backends share.
PARTS = {
    "async_engine", "cache", "cache/prefix", "cache/states", "cache/windows", "command_line",
    "engine", "engine/beam_search", "generate", "integrations", "kernels", "kernels/cpu",
    "kernels/mosaic_gpu", "kernels/mosaic_tpu", "kernels/reference", "kernels/triton",
    "kernels/xla", "llm", "models", "models/loading", "models/loading/awq",
    "models/loading/bitsandbytes", "models/loading/compressed", "models/loading/gptq",
    "models/text", "models/text/reasoning", "models/text/tools", "plan", "rollouts", "runner",
    "sampling", "scheduler", "server", "server/chat", "server/messages", "server/responses",
    "server/security",
}  # fmt: skip

SOURCE = '''
"""A module."""

LIMIT = 3


def double(x):
    # A comment.
    return (x  +
            x)


class Counter:
    def count(self, items):
        def weight(item):
            return len(item) + 1

        total = 0
        for item in items:
            total += weight(item)
        return total + LIMIT
'''


def change(function: str, before: str, after: str) -> dict:
    """Return the names of the changed module."""
    names: dict = {}
    tree = changed_module(SOURCE, function, before, after)
    exec(compile(tree, "module", "exec", dont_inherit=True), names)
    return names


def test_change_replaces_one_node() -> None:
    assert change("double", "x + x", "x * x")["double"](3) == 9
    assert change("double", "return x+x", "pass")["double"](3) is None
    assert change("Counter.count", "total + LIMIT", "total")["Counter"]().count(["a"]) == 2
    assert change("Counter.count.weight", "1", "2")["Counter"]().count(["a"]) == 6
    assert change("LIMIT", "3", "4")["LIMIT"] == 4
    after = "total += weight(item)\nbreak"
    assert change("Counter.count", "total += weight( item )", after)["Counter"]().count("aa") == 5


@pytest.mark.parametrize(
    ("function", "before", "after", "message"),
    [
        ("double", "x - x", "x", "'x - x' must occur once in double, not 0"),
        ("double", "x", "y", "'x' must occur once in double, not 2"),
        ("Counter.double", "x + x", "x", "there is no Counter.double"),
        ("Counter.count.weight", "total + LIMIT", "total", "must occur once"),
    ],
)
def test_change_that_does_not_fit_is_outdated(function, before, after, message) -> None:
    with pytest.raises(OutdatedError, match=message.replace("+", r"\+")):
        changed_module(SOURCE, function, before, after)


@pytest.mark.parametrize("after", ["x+x", "( x + x )"])
def test_change_must_change_something(after) -> None:
    with pytest.raises(ValueError, match="must differ"):
        changed_module(SOURCE, "double", "x + x", after)


TESTS = """
import subprocess, sys
import pytest
from small import sums

def test_add():
    assert sums.add(1, 2) == 3

@pytest.mark.slow
def test_double():
    assert sums.double(4) == 8

def test_child():
    code = "from small import child; print(child.answer())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert output.stdout.strip() == "42"
"""
FILES = {
    "small/__init__.py": "",
    "small/sums.py": """
        def add(a, b):
            return a + b

        def double(a):
            return 2 * a

        def unused(a):
            return a
        """,
    "small/child.py": "def answer():\n    return 42\n",
    "small/alone.py": "def answer():\n    return 42\n",
    "test_small.py": TESTS,
    "test_broken.py": "from small import sums\n\ndef test_add():\n    assert sums.add(1, 2) == 4\n",
    "test_no_import.py": "from small.sums import nothing\n",
}


@pytest.fixture
def workshop(tmp_path, monkeypatch) -> Workshop:
    """Return a workshop for a small package, in which a test process starts quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "root"
    for name, text in FILES.items():
        (path := root / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (folder := tmp_path / "workshop").mkdir()
    return Workshop(folder, root, ("-p", "no:cacheprovider"), limit=60, libraries=["pytest"])


def small(path: str, before: str, after: str, test: str = "test_small.py") -> Mutant:
    return mutant(f"{path}: {after}", "small", f"small.{path}", before, after, test)


CASES = {
    "killed": small("sums:add", "a + b", "a - b"),
    "killed by a child process": small("child:answer", "42", "43"),
    "killed in the second tier": small("sums:double", "2 * a", "2 + a"),
    "survived": small("sums:unused", "return a", "pass"),
    "outdated": small("sums:add", "a * b", "a - b"),
    "not applied": small("alone:answer", "42", "43"),
    "test fails without the mutant": small("sums:unused", "return a", "pass", "test_broken.py"),
    "no import": small("sums:unused", "return a", "pass", "test_no_import.py"),
    "no tests": small("sums:unused", "return a", "pass", "test_small.py::test_nothing"),
    "endless": small("sums:add", "return a + b", "while True: pass"),
}


def test_workshop_runs_all_cases(workshop) -> None:
    names = list(CASES)
    names.remove("endless")
    results = run_all([CASES[name] for name in names], list(run.TIERS), workshop, 1, lambda _: None)
    found = {
        name: (result.outcome, result.tier, result.detail.partition("\n")[0])
        for name, result in zip(names, results, strict=True)
    }
    assert found.pop("no tests")[:2] == ("error", "core")
    assert found == {
        "killed": ("killed", "core", "test_small.py::test_add"),
        "killed by a child process": ("killed", "core", "test_small.py::test_child"),
        "killed in the second tier": ("killed", "rest", "test_small.py::test_double"),
        "survived": ("survived", "rest", ""),
        "outdated": ("outdated", "", "'a * b' must occur once in add, not 0"),
        "not applied": ("error", "core", "no process has imported small.alone"),
        "test fails without the mutant": (
            "error", "core", "test_broken.py::test_add also fails without a mutant",
        ),
        "no import": ("error", "core", "pytest ended with 2:"),
    }  # fmt: skip
    # No file of the package has changed, and there is no bytecode beside it. Bytecode of a mutant
    # of `sums` would change the results of later mutants.
    left = {str(path.relative_to(workshop.root)) for path in workshop.root.rglob("*.*")}
    assert left == set(FILES)
    assert [path.read_text() for path in workshop.root.rglob("sums.py")] == [
        textwrap.dedent(FILES["small/sums.py"])
    ]


def test_workshop_stops_an_endless_test(workshop) -> None:
    workshop.limit = 2
    result = workshop.run(CASES["endless"], ["core"])
    assert (result.outcome, result.detail) == ("timeout", "more than 2 s")


def test_command_writes_the_results(monkeypatch, tmp_path, capsys) -> None:
    def run_all(mutants, tiers, workshop, num_jobs, show):
        results = [Result(each, "killed", tiers[0], "test", 1.5) for each in mutants]
        results[-1].outcome = "survived"
        for result in results:
            show(result)
        return results

    monkeypatch.setattr(command, "run_all", run_all)
    file = tmp_path / "results.json"
    assert command.main(["--part", "cache/*", "--marker", "core", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == [
        each.name for each in MUTANTS if each.part.startswith("cache/")
    ]
    assert rows[-1]["outcome"] == "survived" and rows[0]["tier"] == "core"
    assert f"| all | {len(rows) - 1} | 0 | 1 | 0 | 0 | 0 |" in capsys.readouterr().out
    assert command.main(["--list", MUTANTS[0].name]) == 0
    assert MUTANTS[0].path in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["no such mutant"])


@pytest.mark.parametrize("each", MUTANTS, ids=lambda each: each.name)
def test_mutant_fits_the_package(each) -> None:
    """The change compiles, and names tests that exist."""
    each.check()
    assert each.tests
    for test in each.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_mutants_cover_all_parts() -> None:
    names = [each.name for each in MUTANTS]
    assert len(set(names)) == len(names)
    assert {each.part for each in MUTANTS} == PARTS
    folders = {path.parent for path in (ROOT / "paged_jax").glob("**/*.py")}
    changed = {Path(*each.module.split(".")).parent for each in MUTANTS}
    # A folder that is imported by its own name counts too.
    changed |= {Path(*each.module.split(".")) for each in MUTANTS}
    assert {path.relative_to(ROOT) for path in folders} <= changed


def test_hook_imports_only_the_standard_library() -> None:
    """It is imported in each Python process that a test starts, before the environment is set."""
    for path in (Path(run.change.__file__), Path(run.report.__file__)):
        tree = ast.parse(path.read_text())
        modules = {
            alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
        }
        modules |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {name for name in modules if name.startswith(("tests", "paged_jax", "jax"))}
