"""Tests of examples/rl_rollout.py: the reward rises, and the ratios of first epochs are 1."""

import importlib.util
import re
from types import ModuleType

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_rollout", ROOT / "examples" / "rl_rollout.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.slow
def test_reward_rises_and_the_ratios_of_first_epochs_are_1(example, capsys) -> None:
    rewards = example.main(["--steps", "12"])
    assert rewards[0] < 0.1 and rewards[-1] > 0.8
    epochs = re.findall(r"epoch (\S+) to (\S+), (\S+) to (\S+)", capsys.readouterr().out)
    assert len(epochs) == 12 and all(ratios[:2] == ("1.0000", "1.0000") for ratios in epochs)
    # The update of the first epoch changes the ratios of the second.
    assert all(float(ratios[2]) < 0.99 for ratios in epochs[:4])


@pytest.mark.slow
def test_ratios_of_an_engine_with_old_weights_are_an_error(example, monkeypatch) -> None:
    for name in ("update_params", "sleep", "wake_up"):
        monkeypatch.setattr(example.LLM, name, lambda *args, **options: None)
    with pytest.raises(AssertionError):
        example.main(["--steps", "2"])
