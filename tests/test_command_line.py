"""Tests of the parts that the command lines share."""

import argparse
import dataclasses
import importlib
import os
import re
import subprocess
import sys

import pytest
from jaxlib import xla_client

from paged_jax import Engine, __main__, command_line, generate, plan, serve
from paged_jax.command_line import add_option_flags, engine_options, given_options
from paged_jax.engine.config import EngineConfig
from paged_jax.options import NOT_NEGATIVE, option, options_of


@dataclasses.dataclass(frozen=True)
class ExtendedConfig(EngineConfig):
    """Configuration with an additional option."""

    num_spare_blocks: int = option(3, "blocks kept free; see num_blocks", bounds=NOT_NEGATIVE)


def parser_of(options) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_option_flags(parser, options, {"num_spare_blocks": "three"})
    return parser


def test_add_option_flags_makes_a_flag_of_each_option_that_has_one() -> None:
    options = options_of(ExtendedConfig)
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
    text = " ".join(parser_of(options_of(ExtendedConfig)).format_help().split())
    assert "blocks kept free; see --num-blocks; default: three" in text
    assert "whole blocks; default: 16; 128 on TPUs" in text
    assert "do not share the cached blocks" in text


def test_given_options_ignores_other_arguments() -> None:
    """The engine has a seed without a flag; `--seed` is the seed of a request."""
    args = argparse.Namespace(block_size=8, dtype=None, prompt="x", seed=3)
    assert given_options(args, options_of(EngineConfig)) == {"block_size": 8}


@pytest.mark.parametrize("command", [generate, serve])
def test_commands_have_the_flags_of_all_options(command) -> None:
    args = command.make_parser().parse_args(["--prompt", "x"] if command is generate else [])
    names = {each.name for each in options_of(EngineConfig) if each.flag}
    assert names <= set(vars(args))
    args.no_compilation_cache = True
    assert engine_options(args) == {}


def test_plan_has_the_flags_of_the_options_that_decide_the_memory() -> None:
    args = vars(plan.make_parser().parse_args([]))
    assert {each.name for each in options_of(EngineConfig) if each.decides_memory} <= set(args)
    assert not {"num_blocks", "steps_per_dispatch"} & set(args)


@pytest.mark.parametrize("each", options_of(EngineConfig), ids=lambda each: each.name)
def test_vllm_names_of_options_are_understood(each) -> None:
    """Errors suggest this library's name for an argument of `Engine` and for a flag."""
    if each.vllm in (None, each.name):
        return
    with pytest.raises(TypeError, match=f"Did you mean {each.name}\\?"):
        Engine(**{each.vllm: 1})
    if each.flag == f"--{each.name.replace('_', '-')}":
        message = f"unrecognized arguments: --{each.vllm.replace('_', '-')} 1"
        assert serve.make_parser()._hint(message) == f". Did you mean {each.flag}?"


def test_subcommands_run_their_modules_with_the_other_arguments(capsys, monkeypatch) -> None:
    assert __main__.main([]) == __main__.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in __main__.COMMANDS:
        assert f"\n  {name} " in shown
        module = importlib.import_module(f"paged_jax.{name}")
        monkeypatch.setattr(module, "main", lambda arguments, name=name: print(name, *arguments))
        __main__.main([name, "--flag", "x"])
        assert capsys.readouterr().out == f"{name} --flag x\n"
    assert __main__.main(["srve"]) == 2
    assert capsys.readouterr().err.startswith("paged-jax: error: COMMAND must be one of generate,")


def test_completion_of_bash_completes_commands_flags_and_values(capsys) -> None:
    assert __main__.main(["--print-completion", "bash"]) == 0
    lines = [
        "",
        "ser",
        "serve --kv-dt",
        "serve --kv-dtype int",
        "plan --device h20",
        "bench --good",
    ]
    complete = """
    while read -ra words; do
      COMP_WORDS=(paged-jax "${words[@]}") COMP_CWORD=${#words[@]} COMPREPLY=()
      if [ ${#words[@]} = 0 ]; then COMP_WORDS=(paged-jax "") COMP_CWORD=1; fi
      _shtab_paged_jax
      echo "${COMPREPLY[@]}"
    done"""
    script = capsys.readouterr().out + complete
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "generate chat serve bench plan", "serve", "--kv-dtype", "int8", "h200", "--goodput",
    ]  # fmt: skip
    # Every flag of every command is in the script.
    for name in __main__.COMMANDS:
        parser = importlib.import_module(f"paged_jax.{name}").make_parser()
        [found] = re.findall(rf"^_shtab_paged_jax_{name}_option_strings=\((.*)\)$", script, re.M)
        assert set(found.split()) == set(parser._option_string_actions)


def test_completion_without_shtab_or_for_an_unknown_shell_is_one_line(capsys, monkeypatch) -> None:
    assert __main__.main(["--print-completion", "nosh"]) == 2
    assert capsys.readouterr().err.startswith(
        "paged-jax: error: --print-completion must be one of bash, zsh, tcsh"
    )
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert __main__.main(["--print-completion", "bash"]) == 2
    assert capsys.readouterr().err == (
        "paged-jax: error: shtab is not installed. Run: pip install 'paged-jax[completion]'\n"
    )


@pytest.mark.parametrize(
    ("started", "name"),
    [
        ("/venv/bin/paged-jax", "paged-jax serve"),
        ("/venv/bin/paged-jax-serve", "python -m paged_jax.serve"),
        ("/site-packages/paged_jax/__main__.py", "python -m paged_jax serve"),
        ("/site-packages/paged_jax/serve.py", "python -m paged_jax.serve"),
    ],
)
def test_help_shows_examples_with_the_name_that_was_started(started, name, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    text = serve.make_parser().format_help()
    assert text.startswith(f"usage: {name} [-h]")
    assert f"examples:\n  {name} --model ./model.gguf --port 8000\n" in text


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--temp", "--temperature"),
        ("-n", "--max-tokens"),
        ("--ctx-size", "--max-model-len"),
        ("--max-new-tokens", "--max-tokens"),
        ("--n-predict", "--max-tokens"),
        ("--repeat-penalty", "--repetition-penalty"),
    ],
)
def test_flags_of_other_programs_are_answered_with_ours(argument, flag, capsys) -> None:
    with pytest.raises(SystemExit):
        generate.make_parser().parse_args(["--prompt", "ab", argument, "1"])
    assert capsys.readouterr().err.endswith(f". Did you mean {flag}?\n")


def test_unknown_flag_in_place_of_a_required_one_is_named(capsys) -> None:
    with pytest.raises(SystemExit):
        generate.make_parser().parse_args(["-p", "ab", "--temperature", "1"])
    assert capsys.readouterr().err.endswith("required. Did you mean --prompt instead of -p?\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("Engine: swap_space must be positive, got -1.", "--swap-space must be positive, got -1."),
        ("SamplingParams: top_p must be in (0, 1].", "--top-p must be in (0, 1]."),
        ("Scheduler.add: a sequence must fit the pool.", "a sequence must fit the pool."),
        ("model.safetensors: damaged.", "model.safetensors: damaged."),
    ],
)
def test_errors_name_flags_instead_of_functions(error, line, capsys) -> None:
    def fail() -> None:
        raise ValueError(error)

    assert generate.make_parser().run(fail) == 1
    assert capsys.readouterr().err.endswith(f"generate: error: {line}\n")


@pytest.mark.parametrize(
    "name", [None, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"]
)
def test_take_gpu_memory_respects_the_variables_of_xla(name, monkeypatch) -> None:
    for each in command_line._GPU_MEMORY_VARIABLES:
        monkeypatch.setenv(each, "")
        monkeypatch.delenv(each)
    if name is not None:
        monkeypatch.setenv(name, "0.5")
    command_line.take_gpu_memory()
    expected = "0.9" if name is None else None
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == expected
    # `jaxlib` reads the variable when it creates its client for GPUs.
    options: dict = xla_client.generate_pjrt_gpu_plugin_options()
    assert options.get("memory_fraction") == {None: 0.9, "XLA_PYTHON_CLIENT_MEM_FRACTION": 0.5}.get(
        name
    )
