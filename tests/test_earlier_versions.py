"""What users of an earlier version have keeps working: names, arguments, flags, and their files.

`tests/data/earlier` was written by commit 5a71f36c: `record.json` has its public names with their
parameters, its flags, the fields of its configs, and logits of the models in the other folders.
Costs 10 CPU-seconds.
"""

import dataclasses
import importlib
import inspect
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import Llama, LlamaConfig
from tests.support import DATA

FOLDER = DATA / "earlier"
RECORD = json.loads((FOLDER / "record.json").read_text(encoding="utf-8"))
# Parameters that have another name now, see docs/migration.md.
RENAMED = {
    "BlockTables": {"window"},
    "Heads": {"sm_scale"},
    "PagedCache": {"states"},
    "Rollout": {"num_tokens"},
}


@pytest.mark.parametrize("name", RECORD["public"])
def test_public_names_accept_their_parameters(name) -> None:
    made = getattr(paged_jax, name)
    if (parameters := RECORD["public"][name]) is not None:
        known = inspect.signature(made).parameters
        assert {*parameters} - {*known} == RENAMED.get(name, set())


@pytest.mark.parametrize("command", RECORD["flags"])
def test_commands_have_their_flags(command) -> None:
    parser = importlib.import_module(f"paged_jax.{command}").make_parser()
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {*RECORD["flags"][command]} <= known


def make_config(**changes: Any) -> LlamaConfig:
    fields = {**RECORD["fields"], **changes}
    return LlamaConfig(**fields | {"layer_types": tuple(fields["layer_types"])})


def test_configs_have_their_fields() -> None:
    config = make_config()
    assert {*RECORD["config_fields"]} <= {field.name for field in dataclasses.fields(config)}
    assert (config.rope_theta, config.sliding_windows) == (5e3, (None, 6))


@pytest.mark.parametrize("name", ["folder", "separate", "stacked", "int8"])
def test_files_give_their_logits(name) -> None:
    """A Hugging Face folder, and Orbax checkpoints with separate, stacked and quantised weights."""
    model = Llama.from_pretrained(FOLDER / name)
    if name in ("folder", "separate"):
        expected = make_config().replace()
        assert LlamaConfig.from_file(FOLDER / name) == model.config.replace() == expected
        written = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
        assert LlamaConfig.from_dict(model.config.to_dict()) == LlamaConfig.from_dict(written)
    logits = np.asarray(model(jnp.arange(10)[None] * 5 % 24), np.float64)[0, -1]
    reference = RECORD["separate" if name == "folder" else name]
    np.testing.assert_allclose(logits, reference, rtol=0, atol=2e-6)
