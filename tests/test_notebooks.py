"""Runs of the notebooks in docs/notebooks, each in a separate kernel."""

import json
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def outputs_of(path: Path, folder: Path, monkeypatch) -> list:
    """Run a notebook from an empty folder, and return the outputs of its cells."""
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources=resources
    ).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def text_of(outputs: list) -> str:
    return "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")


def pages_of(outputs: list) -> list[str]:
    return [page for output in outputs if (page := output.get("data", {}).get("text/html"))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_and_is_named_in_the_index(path) -> None:
    """Outputs would change with every run, and fill the history with pictures."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert f"(notebooks/{path.name})" in (ROOT / "docs" / "README.md").read_text()


@pytest.mark.peers
@pytest.mark.slow
def test_ops_notebook_shows_shared_blocks(tmp_path, monkeypatch) -> None:
    outputs = outputs_of(FOLDER / "ops.ipynb", tmp_path, monkeypatch)
    # Both models share the prompt's blocks, and both copy the last one.
    assert text_of(outputs).count("222....") == text_of(outputs).count("221111") == 2
    assert len(pages_of(outputs)) == 1 and 'class="s"' in pages_of(outputs)[0]


@pytest.mark.peers
@pytest.mark.slow
def test_blocks_notebook_shows_copies_and_maps(tmp_path, monkeypatch) -> None:
    outputs = outputs_of(FOLDER / "blocks.ipynb", tmp_path, monkeypatch)
    assert "[0, 1, 2] -> [0, 1, 4]" in text_of(outputs)
    assert "copy_on_write - sample 1" in text_of(outputs)
    assert len(pages_of(outputs)) == 3


@pytest.mark.peers
@pytest.mark.slow
def test_grpo_notebook_learns(tmp_path, monkeypatch) -> None:
    text = text_of(outputs_of(FOLDER / "grpo.ipynb", tmp_path, monkeypatch))
    assert text.count("mean reward") == 14


@pytest.mark.peers
@pytest.mark.slow
def test_exact_notebook_plots_no_divergence_for_exact_numerics(tmp_path, monkeypatch) -> None:
    outputs = outputs_of(FOLDER / "exact.ipynb", tmp_path, monkeypatch)
    lines = [line for line in text_of(outputs).splitlines() if "divergence" in line]
    values = {line.split(":")[0]: float(line.split()[4].rstrip(",")) for line in lines}
    assert values["float32 exact"] == values["bfloat16 exact"] == 0
    assert 0 < values["float32 fast"] < values["bfloat16 fast"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.peers
@pytest.mark.slow
def test_serving_notebook_streams_the_same_text_twice(tmp_path, monkeypatch) -> None:
    text = text_of(outputs_of(FOLDER / "serving.ipynb", tmp_path, monkeypatch))
    assert "vllm:generation_tokens_total" in text
