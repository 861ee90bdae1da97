"""Tests that the page on big models agrees with the planner."""

import json
import re

import pytest

from paged_jax.engine.memory_plan import DEVICES, MemoryPlan, collectives, make_plan, step_bound
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.plan import main
from tests.support import ROOT
from tests.support.decode_step import LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B
from tests.support.model_shapes import GEMMA_3_27B, GPT_OSS_20B

PAGE = ROOT / "docs" / "big-models.md"
MODELS = {"8B": LLAMA_3_8B, "70B": LLAMA_3_70B, "405B": LLAMA_3_405B}


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without the column names."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def plan_of(config: LlamaConfig, devices: str, **changes: int) -> MemoryPlan:
    num_devices, name = devices.split()
    device = DEVICES[name]
    return make_plan(
        config,
        device.memory,
        device.platform,
        dtype="bfloat16",
        block_size=128 if device.platform == "tpu" else 16,
        tensor_parallel_size=int(num_devices),
        **{"max_num_seqs": 64, "max_model_len": 8192, **changes},
    )


def row(model: str, devices: str) -> list[str]:
    """Return the expected row for a model on some devices."""
    plan, length = plan_of(MODELS[model], devices), 2048
    batch = plan.num_running(length)
    num_all_reduces, _, sent = collectives(plan, batch)
    bound = step_bound(plan, DEVICES[devices.split()[1]], batch, length)
    assert bound.reading > bound.computing
    return [
        model,
        devices,
        f"{plan.footprint.weights / 1e9:.1f} GB",
        f"{plan.num_blocks * plan.sizes.block_size:,}",
        str(num_all_reduces),
        f"{sent / 1e6:,.0f} MB",
        str(batch),
        f"{1000 * bound.reading:.1f} ms",
        f"{1000 * bound.sending:.1f} ms",
        f"{batch / bound.seconds:,.0f}",
    ]


def test_page_has_the_plans_of_the_planner() -> None:
    rows = table("Plans")
    assert {cells[0] for cells in rows} == set(MODELS)
    assert {cells[1].split()[1] for cells in rows} == set(DEVICES)
    for cells in rows:
        assert cells == row(*cells[:2])


def test_compiled_memory_equals_the_plan() -> None:
    rows = table("Compiled")
    assert {cells[0] for cells in rows} == set(MODELS)
    for model, devices, arguments, pool, *_ in rows:
        plan = plan_of(MODELS[model], devices)
        held = plan.num_engine_blocks * plan.footprint.block
        assert pool == f"{held / 1e9:.2f} GB"
        # In addition to weights and pool: the state and the metadata of blocks.
        rest = float(arguments.split()[0]) - (plan.footprint.weights + held) / 1e9
        assert 0 < rest < 0.12


def test_compiled_memory_of_window_layers_equals_the_plan() -> None:
    models = {"gemma-3-27b": GEMMA_3_27B, "gpt-oss-20b": GPT_OSS_20B}
    rows = table("Layers with different windows")
    assert {cells[0] for cells in rows} == set(models)
    for model, devices, slots, weights, *sizes, part, exchanges in rows:
        plan = plan_of(models[model], devices, max_num_seqs=int(slots), max_model_len=131072)
        held = plan.footprint.pool_bytes(plan.num_engine_blocks)
        assert weights == f"{plan.footprint.weights / 1e9:.2f} GB"
        arguments, pools, aliased, temporaries = (float(size.split()[0]) for size in sizes)
        assert f"{pools:.2f}" == f"{held / 1e9:.2f}"
        # In addition to weights and pools: the state and the metadata of blocks.
        assert 0 < arguments - (plan.footprint.weights + held) / 1e9 < 0.12
        assert 0 < aliased - held / 1e9 < 0.12
        assert 1e6 * temporaries < plan.footprint.step
        assert part == f"{temporaries / pools / 10:.2f}%" and float(part[:-1]) < 1
        sums, gathers, _ = collectives(plan, 1)
        sent = f"{sums} all-reduces, {gathers} all-gather"
        assert exchanges == (sent if plan.num_devices > 1 else "none")


def test_page_has_the_device_figures_of_the_planner() -> None:
    rows = {cells[0]: cells[1:] for cells in table("The bound of a decode step")}
    assert set(rows) == set(DEVICES)
    for name, device in DEVICES.items():
        numbers = [float(re.split(" ", cell)[0]) for cell in rows[name][:4]]
        memory, reads, sends, computes = numbers
        assert memory == device.memory / 1e9
        unit = 1e12 if "TB/s" in rows[name][1] else 1e9
        assert (reads * unit, sends * 1e9) == (device.memory_rate, device.link_rate)
        assert computes * 1e12 == device.operation_rate


def test_page_has_the_output_of_the_command(capsys, tmp_path) -> None:
    page = PAGE.read_text()
    command, printed = re.findall(
        r"^\$ python -m paged_jax.plan (.*?)\n(mem.*?)```", page, re.S | re.M
    )[0]
    model = tmp_path / "Llama-3.1-70B"
    model.mkdir()
    config = LLAMA_3_70B.to_dict() | {"torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config))
    arguments = command.replace("\\\n", " ").replace(model.name, str(model)).split()
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "model, devices",
    [("70B", "8 v5e"), ("70B", "4 v6e"), ("405B", "8 h100")],
)
def test_model_that_does_not_fit_is_an_error(model, devices) -> None:
    with pytest.raises(ValueError, match="plan: memory must leave room for"):
        plan_of(MODELS[model], devices)
