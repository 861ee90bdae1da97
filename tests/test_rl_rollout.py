"""Test of examples/rl_rollout.py: the reward rises."""

import importlib.util
import re

import pytest

from tests.support import ROOT


@pytest.mark.slow
def test_reward_rises(capsys) -> None:
    spec = importlib.util.spec_from_file_location("rl_rollout", ROOT / "examples" / "rl_rollout.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rewards = example.main(["--steps", "12"])
    assert rewards[0] < 0.1 and rewards[-1] > 0.8
    gaps = [float(gap) for gap in re.findall(r"within (.*)", capsys.readouterr().out)]
    assert len(gaps) == 12 and max(gaps) < 1e-5
