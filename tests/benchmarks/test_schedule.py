"""Tests of the simulated GPU, of the rules that divide a batch, and of the report."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import schedule
from benchmarks.harness import goal_lines
from benchmarks.schedule import Call, Machine, simulate

# Two SMs with room for two program instances each; round numbers of bytes and seconds.
SMALL = Machine(
    num_cores=2,
    programs_per_core=2,
    memory_rate=100.0,
    core_rate=60.0,
    program_rate=40.0,
    start=1.0,
    search=0.5,
    idle=0.25,
    launch=2.0,
    count=0.75,
    merge_turn=1.0,
    merge=3.0,
)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [
        ([80], 2 + 1 + 80 / 40),  # alone
        ([80, 80], 2 + 1 + 80 / 40),  # each on a separate SM
        ([90, 90, 90, 90], 2 + 1 + 360 / 100),  # bound by the memory
        # The third instance shares the SM of the first, at a rate of 30 each, and reaches 40 alone.
        ([30, 40, 70], 2 + 1 + 1 + 40 / 40),
        ([0, 0, 0, 0], 2 + 0.25),
        # The fifth starts when another has found nothing: it reads at 30 instead of 40 while four
        # share the memory, from 3.25 to 4.45 s, at 10/3 until the instances on the other SM are
        # done, and then at full rate.
        ([0, 40, 40, 40, 40], 4.45 + 2.5 / 30 + (10 - 10 / 3) / 40),
    ],
)
def test_simulate_shares_the_rates(num_bytes, seconds) -> None:
    assert simulate(SMALL, np.array(num_bytes)) == pytest.approx(seconds, abs=1e-6)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40))
def test_simulate_keeps_to_the_bounds(num_bytes) -> None:
    seconds = simulate(SMALL, np.array(num_bytes))
    assert seconds >= 2 + sum(num_bytes) / 100 - 1e-6
    assert seconds >= 2 + (1 + max(num_bytes) / 40 if any(num_bytes) else 0.25) - 1e-6
    # At least one instance reads at any time: at worst they run one after another.
    assert seconds <= 2 + sum(1 + size / 40 for size in num_bytes) + 1e-6


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.sampled_from((1, 2, 8)))
def test_rules_read_every_token_once(lengths, kv_heads) -> None:
    call = Call(np.array(lengths), 4096, kv_heads)
    for rule in (schedule.by_table, schedule.whole, schedule.partitions):
        programs = rule(call, SMALL)
        assert programs.tokens.min() >= 0
        assert programs.tokens.sum() == sum(lengths)
        is_divided = len(programs.tokens) > len(lengths)
        assert (programs.merge >= SMALL.launch + SMALL.merge) == is_divided


@pytest.mark.parametrize("lengths", [[3000, 0, 1, 64, 700], [4096], [0, 0]])
def test_by_lengths_reads_every_token_once(lengths) -> None:
    call = Call(np.array(lengths), 4096)
    programs = schedule.by_lengths(call, Machine())
    assert programs.tokens.sum() == sum(lengths)
    assert programs.more > 0
    assert (programs.merge > 0) == (max(lengths) > 64)
    # The same as whole sequences if the kernel divides none.
    assert schedule.by_lengths(Call(np.array([100]), 128), Machine()).more == 0


def test_seconds_counts_the_merge_of_many_parts() -> None:
    lengths = np.array([64 * 40])
    call = Call(lengths, 64 * 40, kv_heads=1, head_dim=1)
    machine = SMALL._replace(num_cores=40)
    plain = simulate(machine._replace(start=1.5 + 0.75), np.full(40, 64 * 4))
    # The last program instance merges 40 parts, 16 at a time.
    assert schedule.call_seconds(call, schedule.by_lengths, machine) == pytest.approx(plain + 3)
    # A separate launch merges five partitions of 512 tokens, in two turns.
    plain = simulate(machine, np.full(5, 512 * 4))
    assert schedule.call_seconds(call, schedule.partitions, machine) == pytest.approx(
        plain + 2 + 3 + 1
    )


def test_mixes_of_traces_are_consecutive_requests(tmp_path) -> None:
    rows = [f"2023-11-16 18:00:{n:02}.0,{100 * n},{n}" for n in range(60)] * 2
    file, capacity, batches = schedule.TRACES["Azure 2023"]
    (tmp_path / file).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    calls = schedule.recorded_mixes(tmp_path, num_draws=2)
    names = [f"{batches[0]} of Azure 2023, draw {n}" for n in (1, 2)]
    # There are 120 requests, too few for a batch of 256, and there is no other trace.
    assert list(calls) == names
    for call in calls.values():
        prompts = call.lengths // 100
        assert len(prompts) == 64 and set(np.diff(prompts)) <= {1, -59}
        assert (call.lengths - 100 * prompts <= prompts).all()
        assert call.capacity == capacity


@pytest.mark.slow
def test_mixes_read_recorded_traces(data_dir) -> None:
    calls = schedule.recorded_mixes(data_dir / "traces", num_draws=1)
    assert len(calls) == sum(len(batches) for *_, batches in schedule.TRACES.values())
    assert all(0 < call.lengths.max() <= call.capacity for call in calls.values())


@pytest.mark.peers
def test_run_says_what_is_met_and_draws_it(tmp_path, monkeypatch, capsys) -> None:
    few = {"even": Call(np.full(8, 512), 512), "skewed": Call(np.array([8192] + [64] * 7), 8192)}
    monkeypatch.setattr(schedule, "made_up", lambda: few)
    monkeypatch.setattr(schedule, "_BATCHES", (1, 8))
    monkeypatch.setattr(schedule, "_CONTEXTS", (512, 2048))
    path, picture = tmp_path / "schedule.json", tmp_path / "schedule.png"
    arguments = ["--quick", "--traces", str(tmp_path), "--json", str(path), "--plot", str(picture)]
    assert schedule.main([*arguments, "--memory-rate", "1000"]) == 0
    found = json.loads(path.read_text())
    assert found["machine"]["memory_rate"] == 1e12
    assert [record["name"] for record in found["mixes"]] == ["even", "skewed"]
    assert len(found["goals"]) == len(schedule.GOALS)
    printed = capsys.readouterr().out
    assert all(line in printed for line in found["goals"]) and "no traces in" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_goals_are_judged_by_the_worst_case() -> None:
    def mix(ours: float, before: float, is_even: bool = False) -> dict:
        us = {schedule.OURS: ours, schedule.BEFORE: before}
        return {"name": f"{ours}", "us": us, "over_bound": us, "is_even": is_even}

    def answers(*records: dict) -> list[str]:
        lines = goal_lines(schedule.GOALS, {"mixes": records})
        return [line[:12].strip() for line in lines]

    assert answers(mix(1.05, 1.2), mix(1.1, 1.1, True)) == ["met", "met"]
    assert answers(mix(1.05, 1.2), mix(1.11, 1.2, True)) == ["NOT met", "met"]
    assert answers(mix(1.05, 1.02), mix(1.05, 1.02, True)) == ["met", "NOT met"]
    assert answers(mix(1.05, 1.02)) == ["met", "not measured"]


def test_traces_are_looked_for_where_tests_look(monkeypatch) -> None:
    monkeypatch.setenv("PAGED_JAX_TEST_DATA", "/data")
    assert schedule._default_traces() == Path("/data/traces")
