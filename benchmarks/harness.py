"""Shared parts of all benchmarks: turns, goals, tables, reports, command lines and processes.

A benchmark makes its parser with `command_line`, measures in turns (`take_turns`), and ends with
`finish`, which prints the tables and writes the report::

    python -m benchmarks.harness      # prints the machine and the versions, as in every report

This module does not import JAX, because peers import it in their own Python, and because
`benchmarks.gpu` must not use the GPU. `benchmarks.common` has times on a device and model shapes.

The commit in a report comes from the environment variable PAGED_JAX_COMMIT, otherwise from git. Set
the variable if the sources were copied without their repository.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.common.bandwidth import num_cores

# Root of the checkout, from which modules are imported.
ROOT = Path(__file__).resolve().parents[1]

_PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "llama-cpp-python")

Report = dict[str, Any]
"""Content of a JSON file."""
Plot = Callable[[Any, Report], Any]
"""Function of pyplot and a report that returns a figure."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


# Turns.


def take_turns(
    runs: Mapping[_Key, Callable[[], _Value]], num_rounds: int
) -> dict[_Key, list[_Value]]:
    """Call every function once in each round, and collect the results.

    Slow changes of the machine then affect all functions.
    """
    results: dict[_Key, list[_Value]] = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, run in runs.items():
            results[name].append(run())
    return results


def medians(values: Mapping[_Key, Iterable[float]]) -> dict[_Key, float]:
    """Return the median for each name."""
    return {name: statistics.median(each) for name, each in values.items()}


def median_ratios(values: Mapping[_Key, list[float]], base: _Key) -> dict[_Key, float]:
    """Return for each name the median over rounds of its value relative to `base` in that round.

    Example:
      >>> median_ratios({"naive": [10.0, 20.0, 10.0], "other": [20.0, 60.0, 50.0]}, "naive")
      {'naive': 1.0, 'other': 3.0}
    """
    pairs = {name: zip(each, values[base], strict=True) for name, each in values.items()}
    return medians({name: [value / other for value, other in p] for name, p in pairs.items()})


def elapsed(function: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


# Goals.

# Figure of a goal in a report: one value, one value per case by name, or None if not measured.
Figure = float | dict[str, float] | None


class Goal(NamedTuple):
    """A goal for the figure of every case to which it applies.

    Attributes:
      text: description of the goal.
      figure: returns the figure in a report.
      low: the smallest figure that meets the goal; None means no bound.
      high: the largest figure that meets the goal; None means no bound.
      form: format of the figure.
    """

    text: str
    figure: Callable[[Any], Figure]
    low: float | None = None
    high: float | None = None
    form: str = ".3g"

    def is_met(self, figure: float) -> bool:
        """Return whether one figure is within the bounds."""
        is_low = self.low is not None and figure < self.low
        return not is_low and (self.high is None or figure <= self.high)


def goal_lines(goals: Iterable[Goal], report: Any, device: str | None = None) -> list[str]:
    """Return the `goal_line` of each goal, followed by the accelerator that was measured, if any.

    Args:
      goals: the goals.
      report: report of a benchmark.
      device: name of the accelerator; None for a CPU, where no device is shown.
    """
    where = "" if device is None else f" [{device}]"
    return [f"{goal_line(goal, report)}{where}" for goal in goals]


def goal_line(goal: Goal, report: Any) -> str:
    """Return one line: met, NOT met, or not measured. With several cases the line shows the worst.

    Example:
      >>> goal_line(Goal("twice as fast", lambda report: report["ratio"], low=2.0), {"ratio": 2.5})
      'met           twice as fast: 2.5'
    """
    figure = goal.figure(report)
    if figure is None or figure == {}:
        return f"{'not measured':12s}  {goal.text}"
    if not isinstance(figure, dict):
        answer = "met" if goal.is_met(figure) else "NOT met"
        return f"{answer:12s}  {goal.text}: {figure:{goal.form}}"
    names = sorted(figure, key=lambda name: figure[name], reverse=goal.low is None)
    num_met = sum(map(goal.is_met, figure.values()))
    answer = "met" if num_met == len(names) else "NOT met"
    worst = f"worst {figure[names[0]]:{goal.form}} in {names[0]}"
    return f"{answer:12s}  {goal.text}; {num_met} of {len(names)} cases, {worst}"


# Tables.


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      title: the first line.
      width: number of characters; negative to align at the left.
      figure: key of the value in a record, or a function of the record. A value that is missing or
        None leaves the cell empty.
      form: format of the value, which may include a unit, such as "{:.1f} us".
    """

    title: str
    width: int
    figure: str | Callable[[Any], Any]
    form: str = "{}"

    def cell(self, text: str) -> str:
        """Return a text with the width of the column."""
        return f"{text:<{-self.width}}" if self.width < 0 else f"{text:>{self.width}}"

    def show(self, record: Any) -> str:
        """Return the cell of a record."""
        value = record.get(self.figure) if isinstance(self.figure, str) else self.figure(record)
        return self.cell("" if value is None else self.form.format(value))


def heading(columns: Iterable[Column]) -> str:
    """Return the first line of a table."""
    return "".join(column.cell(column.title) for column in columns)


def row(columns: Iterable[Column], record: Any) -> str:
    """Return the line of a record."""
    return "".join(column.show(record) for column in columns)


def table(columns: Iterable[Column], records: Iterable[Any]) -> list[str]:
    """Return the lines of a table."""
    columns = tuple(columns)
    return [heading(columns), *(row(columns, record) for record in records)]


# Reports.


def environment() -> Report:
    """Return device, commit, versions and command of this process, for JSON.

    Example:
      >>> sorted(environment())
      ['command', 'commit', 'device', 'python', 'versions']
    """
    return {
        "device": f"{_cpu()}, {num_cores()} cores",
        "commit": os.environ.get("PAGED_JAX_COMMIT") or _commit(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "command": " ".join(["python", "-m", _module(Path(sys.argv[0])), *sys.argv[1:]]),
    }


def _commit() -> str | None:
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def _module(script: Path) -> str:
    """Return the module name that was passed to ``python -m``."""
    path = script.resolve().with_suffix("")
    names = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else path.parts[-1:]
    return ".".join(name for name in names if name != "__main__")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path | None, report: Any, *, sort_keys: bool = False) -> None:
    """Write a report, and create its folder if necessary. The file is always complete.

    Args:
      path: the file; None writes nothing.
      report: content of the file.
      sort_keys: whether to sort the keys of objects.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1, sort_keys=sort_keys) + "\n")
    part.replace(path)


def finish(
    options: argparse.Namespace,
    report: Report,
    lines: Iterable[str] = (),
    plot: Plot | None = None,
) -> None:
    """Print the lines, and write the report to --json and its figure to --plot.

    Args:
      options: options of `command_line`.
      report: the report.
      lines: tables and goals.
      plot: draws the figure, for a command with --plot.
    """
    for line in lines:
        print(line)
    write_json(options.json, report)
    if plot is not None and options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(plotter(), report).savefig(options.plot, dpi=120)


class PlotUnavailable(RuntimeError):
    """Matplotlib is not installed."""


def plotter() -> Any:
    """Return Matplotlib's pyplot, with a backend that writes files.

    Raises:
      PlotUnavailable: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotUnavailable("matplotlib is missing. Run `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# Command lines.


def command_line(
    description: str,
    *,
    budget: float | None = None,
    rounds: int | None = None,
    goals: bool = False,
    plot: bool = False,
    show_defaults: bool = False,
) -> argparse.ArgumentParser:
    """Create a parser with the options that benchmarks share. All of them have --json.

    Args:
      description: purpose of the command.
      budget: default of --budget in seconds; None for no such option.
      rounds: default of --rounds; None for no such option.
      goals: whether to add --goals.
      plot: whether to add --plot, which is an error if matplotlib is missing.
      show_defaults: whether the help shows the default of every option.
    """
    form = argparse.ArgumentDefaultsHelpFormatter if show_defaults else argparse.HelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    if plot:
        add("--plot", type=_picture, metavar="FILE", help="draw the results, as PNG or SVG")
    if goals:
        add("--goals", action="store_true", help="report which goals are met")
    if rounds is not None:
        add("--rounds", type=int, default=rounds, help="turns of each; default: %(default)s")
    if budget is not None:
        add(
            "--budget",
            type=float,
            default=budget,
            metavar="SECONDS",
            help="start no new measurement after this time; default: %(default)g",
        )
    return parser


def _picture(path: str) -> Path:
    try:
        plotter()
    except PlotUnavailable as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(path)


class Budget:
    """Time limit of a run.

    Args:
      seconds: seconds from now on.
    """

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def is_over(self, needed: float = 0.0) -> bool:
        """Return whether a measurement of `needed` seconds must not start any more."""
        return time.monotonic() + needed > self._end


# Models.


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--shape``."""
    from benchmarks.common.shapes import SHAPES

    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--model", type=Path, metavar="FOLDER", help="model; default: the bundled one"
    )
    weights.add_argument("--shape", choices=SHAPES, help="random weights with this shape")


@contextlib.contextmanager
def model_folder(options: argparse.Namespace, dtype: str = "float32") -> Iterator[Path]:
    """Yield the folder of the model. The folder for a shape is temporary."""
    from paged_jax.models.loading.pretrained import bundled_folder

    if options.shape is None:
        yield options.model or bundled_folder()
        return
    with random_model_folder(options.shape, dtype) as folder:
        yield folder


@contextlib.contextmanager
def random_model_folder(shape: str, dtype: str) -> Iterator[Path]:
    """Yield a temporary model folder with random weights, see `benchmarks.common.shapes`.

    Another process writes it, because its tensors would stay in the memory of this process.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / shape
        run_module("benchmarks.common.shapes", shape, folder, "--dtype", dtype, check=True)
        yield folder


def model_name(options: argparse.Namespace) -> str:
    """Return the name of the model in a report."""
    return options.shape or str(options.model or "bundled")


# Peers and processes.


class PeerUnavailable(RuntimeError):
    """A peer cannot run here, for example because its packages are missing. It is skipped."""


def import_peer(module: str, package: str) -> Any:
    """Import and return a module of a peer.

    Args:
      module: name of the module.
      package: package to install if the module is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable(
            f"peers: {package} must be installed, got {error}. Run `pip install {package}`."
        ) from error


def reason(error: Exception) -> str:
    """Return an exception as one line that is short enough for a table."""
    first = (str(error).splitlines() or [""])[0][:200]
    return first if isinstance(error, PeerUnavailable) else f"{type(error).__name__}: {first}"


def run_module(
    module: str, *arguments: Any, python: str | Path = sys.executable, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m module``.

    Args:
      module: name, such as ``"benchmarks.common.shapes"``.
      *arguments: command line arguments.
      python: the interpreter.
      **options: options of `subprocess.run`.
    """
    command = [str(python), "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, **options)


def measure_in_process(
    name: str, module: str, *arguments: Any, timeout: float | None = None, **options: Any
) -> dict[str, Any]:
    """Run ``python -m module`` in a fresh process, and return the JSON of its last line.

    Args:
      name: name of the engine, for the error.
      module: name of the module.
      *arguments: command line arguments.
      timeout: seconds after which the process is ended; None for no limit.
      **options: options of `run_module`.

    Raises:
      PeerUnavailable: the process failed or took too long.
    """
    try:
        done = run_module(
            module, *arguments, capture_output=True, text=True, timeout=timeout, **options
        )
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"{name}: took more than {timeout:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PeerUnavailable(f"{name}: {reason}")
    return json.loads(lines[-1])


def resident_bytes() -> tuple[int, int]:
    """Return the current (0 without Linux's /proc) and peak resident memory of this process.

    Mapped files are included: llama.cpp maps its weights.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # Imported here, because Windows has no such module. macOS counts in bytes, other systems in
        # KiB.
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # ru_maxrss would be wrong: on Linux it includes the size of the parent process.
    fields = dict(line.split(":", 1) for line in lines)
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


if __name__ == "__main__":
    print(json.dumps(environment(), indent=1))
