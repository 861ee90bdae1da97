"""Tests of the parts that the command lines share."""

import argparse
import dataclasses

import pytest

from paged_jax import Engine, generate, plan, serve
from paged_jax.command_line import add_option_flags, engine_options, given_options
from paged_jax.engine.config import NOT_NEGATIVE, EngineConfig, option, option_specs


@dataclasses.dataclass(frozen=True)
class ExtendedConfig(EngineConfig):
    """Configuration with an additional option."""

    num_spare_blocks: int = option(3, "blocks kept free; see num_blocks", bounds=NOT_NEGATIVE)


def parser_of(options) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_option_flags(parser, options, {"num_spare_blocks": "three"})
    return parser


def test_add_option_flags_makes_a_flag_of_each_option_that_has_one() -> None:
    options = option_specs(ExtendedConfig)
    parser = parser_of(options)
    args = parser.parse_args([])
    assert set(vars(args)) == {each.name for each in options if each.flag}
    assert given_options(args, options) == {}
    given = parser.parse_args(
        ["--num-spare-blocks", "7", "--no-prefix-caching", "--check-replicas", "--dtype", "int8"]
        + ["--swap-space", "1.5", "--no-cascade-attention", "--model", "folder"]
    )
    assert given_options(given, options) == {
        "num_spare_blocks": 7,
        "enable_prefix_caching": False,
        "check_replicas": True,
        "dtype": "int8",
        "swap_space": 1.5,
        "cascade_attention": False,
        "model": "folder",
    }
    assert parser.parse_args(["--cascade-attention"]).cascade_attention is True


def test_add_option_flags_explains_each_option() -> None:
    text = " ".join(parser_of(option_specs(ExtendedConfig)).format_help().split())
    assert "blocks kept free; see --num-blocks; default: three" in text
    assert "tokens in a block; default: 16" in text
    assert "do not share the cached blocks" in text


def test_given_options_ignores_other_arguments() -> None:
    """The engine has a seed without a flag; `--seed` is the seed of a request."""
    args = argparse.Namespace(block_size=8, dtype=None, prompt="x", seed=3)
    assert given_options(args, option_specs()) == {"block_size": 8}


@pytest.mark.parametrize("command", [generate, serve])
def test_commands_have_the_flags_of_all_options(command) -> None:
    args = command._parser().parse_args(["--prompt", "x"] if command is generate else [])
    names = {each.name for each in option_specs() if each.flag}
    assert names <= set(vars(args))
    args.no_compilation_cache = True
    assert engine_options(args) == {}


def test_plan_has_the_flags_of_the_options_that_decide_the_memory() -> None:
    args = vars(plan._parser().parse_args([]))
    assert {each.name for each in option_specs() if each.decides_memory} <= set(args)
    assert not {"num_blocks", "steps_per_dispatch"} & set(args)


@pytest.mark.parametrize("each", option_specs(), ids=lambda each: each.name)
def test_vllm_names_of_options_are_understood(each) -> None:
    """Errors suggest this library's name for an argument of `Engine` and for a flag."""
    if each.vllm in (None, each.name):
        return
    with pytest.raises(TypeError, match=f"Did you mean {each.name}\\?"):
        Engine(**{each.vllm: 1})
    if each.flag == f"--{each.name.replace('_', '-')}":
        message = f"unrecognized arguments: --{each.vllm.replace('_', '-')} 1"
        assert serve._parser()._hint(message) == f". Did you mean {each.flag}?"
