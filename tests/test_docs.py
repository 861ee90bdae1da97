"""Tests of the documentation: output of samples, links, generated pages."""

import contextlib
import importlib.util
import inspect
import io
import re
import shlex
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import paged_jax
from paged_jax import kernels
from tests.support import ROOT
from tests.support.processes import run_on_devices

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"
# Pages for contributors, which hosts of repositories look for at the top level.
TOP_PAGES = sorted(set(ROOT.glob("*.md")) - {README})

_SAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def script(name: str) -> ModuleType:
    """Return a script of the documentation as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples(page: Path) -> list[str]:
    return _SAMPLE.findall(page.read_text())


# Pages with samples that compile a model or an engine.
_SLOW = (
    "embedding",
    "exact-numerics",
    "generate",
    "more-ops",
    "paged-attention",
    "trainers",
    "training",
)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in _SLOW))
        for page in PAGES
        if samples(page)
    ],
)
def test_samples_print_the_output_in_the_page(page: Path) -> None:
    names: dict[str, object] = {}
    for sample in samples(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(sample, str(page), "exec"), names)
        assert printed.getvalue().splitlines() == _PRINTED.findall(sample)


@pytest.mark.slow
def test_readme_samples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for sample in samples(README):
        exec(compile(sample, str(README), "exec"), names)
    assert len(capsys.readouterr().out.split()) > 20  # words of two completions


@pytest.mark.slow
def test_sharded_sample_prints_the_output_in_the_page_on_two_devices() -> None:
    texts = samples(DOCS / "more-ops.md")
    sample = "".join(text for text in texts if "shard_map" in text or "auto_axes" in text)
    assert "shard_map" in sample and "auto_axes" in sample
    program = f"{sample}\nassert out.sharding.num_devices == 2"
    printed = run_on_devices(program, num_devices=2)
    assert printed.splitlines() == _PRINTED.findall(sample)


@pytest.mark.parametrize(
    "page",
    [README, *TOP_PAGES, *PAGES, *sorted(DOCS.glob("api/*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("## Where does") : text.index("## What a change needs")]
    named = re.findall(r"(tests/[\w/.]+)|`(paged_jax/[\w/.]+)`", table)
    assert len(named) >= 14
    for path in map("".join, named):
        assert (ROOT / path).exists(), path
    # `make quick` deselects slow tests, so such a command would run nothing.
    for files, is_slow in re.findall(
        r'TESTS="?(tests/[\w/.]+(?: tests/[\w/.]+)*)( -m slow)?', table
    ):
        for path in (ROOT / name for name in files.split() if name.endswith(".py")):
            has_slow_mark = "\npytestmark = pytest.mark.slow" in path.read_text()
            assert has_slow_mark == bool(is_slow), f"add or remove -m slow: {path}"


def test_workflow_runs_all_jobs_of_the_script() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    asked = subprocess.run([ROOT / ".ci/run", "nothing"], capture_output=True, text=True)
    assert asked.returncode == 2
    names = re.findall(r"\w+", asked.stderr.partition("[")[2])
    # `.ci/run` without a job chooses the job docs itself.
    used = [*jobs["ci"]["strategy"]["matrix"]["job"], *jobs["weekly"]["strategy"]["matrix"]["job"]]
    assert sorted(used) == sorted(set(names) - {"docs"})


def test_scripts_name_files_of_tests_that_exist() -> None:
    """With a file that is missing, pytest's workers run no test at all."""
    for script in (".ci/run", "Makefile"):
        words = re.findall(r"tests/[\w/.{},]+", (ROOT / script).read_text())
        assert words
        # Bash expands tests/{scheduler,sampling}.
        run = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {' '.join(words)}"], capture_output=True, text=True
        )
        for path in run.stdout.split():
            assert (ROOT / path).exists(), f"{script} names {path}"


def test_workflow_checks_the_release_on_every_python() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["release"]
    pythons = re.findall(
        r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()
    )
    assert release["strategy"]["matrix"]["python"] == pythons
    assert release["steps"][-1]["run"] == ".ci/release python"


def test_templates_and_citation_are_valid() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        template = yaml.safe_load(path.read_text())
        assert template["name"] and template["description"], path
        assert all(field["attributes"]["label"] for field in template["body"]), path
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == paged_jax.__version__


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each shell command in a page that runs something of this repository."""
    joined = re.sub(r" \\\n *", " ", text)
    for line in re.findall(
        r"^(?:\$ | {4})?((?:[A-Z_]+=\S+ )*(?:paged-jax|python -m|python|pip|make) .*)$",
        joined,
        re.MULTILINE,
    ):
        words = shlex.split(line, comments=True)
        yield [word for word in words if word != "&" and not re.match(r"[A-Z_]+=", word)]


def check_command(words: list[str]) -> None:
    """Fail if a command has an unknown flag, target, extra or file."""
    match words:
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                assert re.search(
                    rf"^({target}|{target.partition('-')[0]}-%):", makefile, re.MULTILINE
                )
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
            for package in packages:
                named = re.search(r"(?:^\.|paged-jax)\[([\w,]+)\]", package)
                assert not named or set(named[1].split(",")) <= set(extras)
        case ["paged-jax", "--print-completion", shell, *_]:
            assert shell in ("bash", "zsh", "fish", "tcsh")
        case ["paged-jax", name, *flags] | ["python", "-m", "paged_jax", name, *flags]:
            importlib.import_module(f"paged_jax.{name}").make_parser().parse_args(flags)
        case ["python", "-m", module, *flags] if module.startswith("paged_jax."):
            importlib.import_module(module).make_parser().parse_args(flags)
        case ["python", "-m", module, *_] if module.startswith(("benchmarks.", "tests.")):
            assert importlib.util.find_spec(module), module
        case ["python", file, *_] if file != "-m":
            assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("page", [README, *TOP_PAGES, *PAGES], ids=lambda page: page.name)
def test_commands_have_known_names_and_flags(page: Path) -> None:
    for words in commands(page.read_text()):
        try:
            check_command(words)
        except SystemExit as error:
            raise AssertionError(words) from error


def test_pages_have_commands_of_every_kind() -> None:
    found = {words[0] for page in PAGES for words in commands(page.read_text())}
    assert found == {"paged-jax", "python", "pip", "make"}


def test_index_names_every_page() -> None:
    links = _LINK.findall((DOCS / "README.md").read_text())
    assert {page.name for page in PAGES} - {"README.md"} <= set(links)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert script("make_tables").with_tables(text) == text, "run `make docs`"


def test_pages_have_every_table() -> None:
    texts = "".join(page.read_text() for page in PAGES)
    for name in script("make_tables").TABLES:
        assert texts.count(f"<!-- {name}: written by make docs -->") == 1, name


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site as `make docs` does. Broken links and anchors are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_reference_holds_every_public_name(site: Path) -> None:
    objects = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split()[0] for line in objects.splitlines()}
    # A module hides a function with the same name.
    assert "py:module" not in objects
    public = {
        name
        for package in (paged_jax, kernels)
        for name in package.__all__
        if not inspect.ismodule(getattr(package, name))
    }
    # BACKENDS is for authors of backends.
    for name in public - {"BACKENDS"}:
        assert documented & {f"paged_jax.{name}", f"paged_jax.kernels.{name}"}, name


@pytest.mark.slow
def test_site_loads_nothing_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"([^\"]+)", page.read_text())
        assert loaded and not [url for url in loaded if "//" in url], page


@pytest.mark.slow
def test_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    script("make_pictures").main(["--out", str(tmp_path)])
    drawn = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(drawn) == {path.name for path in DOCS.glob("pictures/*")}
    assert min(drawn.values()) > 10_000
