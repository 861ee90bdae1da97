"""Tests of the plots: every file of results has a plot, with the origin of its figures."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, memory, plots, schedule, step
from benchmarks.attention import __main__ as attention

PNG = b"\x89PNG\r\n"


def draw_copy(tmp_path: Path, name: str, **changes: Any) -> Path | None:
    """Draw a copy of a result file with changed fields."""
    report = json.loads((plots.RESULTS / name).read_text()) | changes
    file = tmp_path / name
    file.write_text(json.dumps(report))
    return plots.draw(harness.plotter(), file, tmp_path)


# They draw with matplotlib.
pytestmark = pytest.mark.peers


@pytest.mark.parametrize("start", plots.DRAWN_BY)
def test_draw_writes_a_picture_of_committed_results(start: str, tmp_path: Path) -> None:
    files = sorted(plots.RESULTS.glob(f"{start}*.json"))
    assert files, f"benchmarks/results has no {start}*.json"
    path = draw_copy(tmp_path, files[0].name)
    assert path is not None and path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


def test_figures_say_where_they_come_from() -> None:
    report = {
        "command": "python -m benchmarks.kv_dtype --text /home/me/a.txt --json benchmarks/x.json",
        "commit": "0123abc",
        "device": "a CPU, 2 cores",
        "versions": {"jax": "0.10.2"},
    }
    assert plots._origin(report).splitlines() == [
        "python -m benchmarks.kv_dtype --text a.txt --json benchmarks/x.json",
        "commit 0123abc, a CPU, 2 cores, jax 0.10.2",
    ]


def test_generate_shows_the_better_cache_of_transformers() -> None:
    report = json.loads((plots.RESULTS / "generate-cpu.json").read_text())
    [large] = [r for r in report["results"] if (r["shape"], r["dtype"]) == ("135M", "bfloat16")]
    rates = large["decode"][1]["tokens_per_s"]
    assert rates["transformers static"] > rates["transformers"]
    figure = plots.plot_generate(harness.plotter(), report)
    heights = [bar.get_height() for axes in figure.axes for bar in axes.patches]
    assert rates["transformers static"] in heights and rates["transformers"] not in heights


def test_main_says_what_it_cannot_draw(tmp_path: Path, capsys) -> None:
    file = tmp_path / "weather.json"
    file.write_text("{}")
    assert plots.main([str(file), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "weather.json: there is no plot for this file\n"
    assert list(tmp_path.iterdir()) == [file]


def test_main_refuses_a_file_that_is_not_there(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        plots.main([str(tmp_path / "serving.json")])
    assert exit_.value.code == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [attention, memory, schedule, step])
def test_plot_needs_matplotlib(monkeypatch, capsys, benchmark) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--plot", "plot.png"])
    assert "--plot: matplotlib is missing. Run `pip install" in capsys.readouterr().err
