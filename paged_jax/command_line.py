"""Code shared by all command lines: the parser, and the flags for engines and processes."""

import argparse
import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from paged_jax import __version__, distributed
from paged_jax.arguments import advise, suggest
from paged_jax.engine.config import VLLM_NAMES, EngineConfig
from paged_jax.models.hub import find_model
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.monitoring import Status
from paged_jax.options import Option, options_of
from paged_jax.runner.devices import GPU_SHARE
from paged_jax.user_cache import keep_compiled_programs

# Exceptions that are reported in one line instead of a traceback: the arguments, the files or the
# machine cause them. JAX raises JaxRuntimeError if a device has too little memory.
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    NotImplementedError,
    FloatingPointError,
    MemoryError,
    jax.errors.JaxRuntimeError,
)

# Exit statuses after SIGINT and SIGPIPE, as shells report them: 128 + the number of the signal.
_INTERRUPTED = 130
_BROKEN_PIPE = 141
# Maps flags of llama.cpp and mlx-lm to flags of this project, for hints in error messages. It has
# only names that are too different to be found by their spelling.
_OTHER_FLAGS = {
    "-p": "--prompt",
    "-n": "--max-tokens",
    "-c": "--max-model-len",
    "-m": "--model",
    "-hf": "--model",
    "-s": "--seed",
    "-np": "--max-num-seqs",
    "-sys": "--system",
    "--ctx-size": "--max-model-len",
    "--hf-repo": "--model",
    "--parallel": "--max-num-seqs",
    "--file": "--prompts-file",
    "--explain": "--show-blocks",
    "--api-key": "PAGED_JAX_API_KEY, an environment variable",
}
# Matches the beginning of the error message of a Python function: "FUNCTION: ARGUMENT".
_CALLABLE = re.compile(
    r"(?:Engine|LLM|Server|Limits|SamplingParams|Scheduler\.add|request|from_pretrained): (\w+)"
)


_EXAMPLES = "examples:"


# The options that select the model.
MODEL_OPTIONS = [
    option
    for option in options_of(EngineConfig)
    if option.name in ("model", "revision", "download")
]


class _Formatter(argparse.HelpFormatter):
    """Help formatter that does not join the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line on stderr, without the usage.

    Args:
      command: name of the command, such as ``"serve"``; `program_name` converts it to `prog`. None
        if `options` has `prog`.
      examples: command-line arguments of examples, which are shown at the end of the help.
      **options: options of `argparse.ArgumentParser`.
    """

    def __init__(self, command: str | None = None, *, examples: Iterable[str] = (), **options: Any):
        if command is not None:
            options["prog"] = program_name(command)
        lines = [f"\n  {options['prog']} {example}" for example in examples]
        super().__init__(
            epilog="".join([_EXAMPLES, *lines]) if lines else None,
            formatter_class=_Formatter,
            **options,
            allow_abbrev=False,
        )
        version = f"paged_jax {__version__}"
        self._argv: list[str] = []
        self.add_argument("--version", action="version", version=version)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. Store them, because hints in error messages depend on them."""
        self._argv = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error message of an invalid argument, with a hint, and exit with status 2."""
        self.exit(2, f"{self._name}: error: {message}{self._hint(message)}\n")

    def run(self, function: Callable[[], None], *, clear: Callable[[], None] | None = None) -> int:
        """Call the function of a command and return the exit status.

        Exceptions of `EXPECTED_ERRORS` are printed in one line; others are not caught.

        Args:
          function: function that does the work of the command.
          clear: function that clears the terminal's current line, which may show a status, before
            an error is printed.
        """
        try:
            function()
            sys.stdout.flush()
            return 0
        except BrokenPipeError:
            # The program that reads this output, such as `head`, has closed the pipe. Redirect
            # stdout, because Python flushes it once more at exit, which would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _BROKEN_PIPE
        except EXPECTED_ERRORS as error:
            if clear is not None:
                clear()
            print(f"{self._name}: error: {self._name_flag(one_line(error))}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return _INTERRUPTED

    @property
    def _name(self) -> str:
        return self.prog.removeprefix("python -m ")

    def _name_flag(self, message: str) -> str:
        """Rewrite "FUNCTION: ARGUMENT ..." as "--FLAG ..."; return other messages unchanged."""
        match = _CALLABLE.match(message)
        if match is None:
            return message
        name, suffix = match[1], message[match.end() :]
        flag = _option_flags().get(name, f"--{name.replace('_', '-')}")
        return (flag if flag in self._option_string_actions else name) + suffix

    def _hint(self, message: str) -> str:
        """Return a sentence with the flag that the user probably meant; "" for no suggestion.

        Args:
          message: argparse's error about unrecognized or missing arguments.
        """
        if message.endswith(" required"):
            if self._argv and not self._argv[0].startswith("-"):
                return self._positional_hint(self._argv[0])
            for word in self._argv:
                if (flag := _OTHER_FLAGS.get(word)) and flag in message.split():
                    return f". Did you mean {flag} instead of {word}?"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            return ""
        names = {
            option.removeprefix("--").replace("-", "_"): option
            for option in self._option_string_actions
            if option.startswith("--")
        }
        argument = unknown.split()[0].partition("=")[0]
        if argument in _OTHER_FLAGS:
            flag = _OTHER_FLAGS[argument]
            is_known = flag in self._option_string_actions or not flag.startswith("-")
            return f". Did you mean {flag}?" if is_known else ""
        if not argument.startswith("-"):
            return self._positional_hint(argument)
        option = argument.lstrip("-").replace("-", "_")
        if option not in names and (advice := advise(option)) is not None:
            return f". {advice.rstrip('.')}"
        suggestion = option if option in names else suggest(option, names, VLLM_NAMES)
        return "" if suggestion is None else f". Did you mean {names[suggestion]}?"

    def _positional_hint(self, argument: str) -> str:
        """Return a hint for a value that was given without its flag; "" for no hint."""
        if argument == "serve":  # as in `vllm bench serve`
            return ". Leave out serve"
        flags = [flag for flag in ("--prompt", "--model") if flag in self._option_string_actions]
        new = [flag for flag in flags if flag not in self._argv]
        return f". Did you mean {new[0]} {shlex.quote(argument)}?" if new else ""


def program_name(command: str) -> str:
    """Return the name of a command in the form that the user typed.

    This is ``paged-jax serve``, ``python -m paged_jax serve`` or ``python -m paged_jax.serve``.

    Args:
      command: name of the command, such as ``"serve"``.
    """
    started = Path(sys.argv[0])
    if started.name.startswith("paged-jax") and started.name != f"paged-jax-{command}":
        return f"paged-jax {command}"
    if started.parts[-2:] == ("paged_jax", "__main__.py"):
        return f"python -m paged_jax {command}"
    return f"python -m paged_jax.{command}"


def one_line(error: BaseException) -> str:
    """Return the message of an exception in one line; its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def read_prompts(flag: str, file: str) -> list[Any]:
    """Return the prompts of a file, one for each line. Blank lines are skipped.

    A prompt is the text of the line, or a dict if the file is a .jsonl or .ndjson file.

    Args:
      flag: name of the flag, for error messages.
      file: path of the file.

    Raises:
      ValueError: the file cannot be read, has no prompts, or has a line that is not a JSON object
        although the file is a .jsonl or .ndjson file.
    """
    path = Path(file)
    kind = path.suffix.lower()
    if kind == ".json":
        raise ValueError(
            f"{flag} must be a text file with a prompt in each line, or a .jsonl file with a JSON "
            f"object in each line, got {path}. Convert it to .jsonl."
        )
    try:
        # Do not use `splitlines`: it also splits at characters such as U+2028, which JSON strings
        # may contain.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(
            f"{flag} must be a readable text file, got {path}: it is not UTF-8 text."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{flag} must be a readable text file, got {path}: {reason}.") from None
    prompts = [
        _parse_line(f"{flag}: {path}, line {number}", line)
        if kind in (".jsonl", ".ndjson")
        else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{flag} must have at least one prompt, got none in {path}.")
    return prompts


def _parse_line(location: str, line: str) -> Any:
    try:
        prompt = json.loads(line)
    except RecursionError:
        raise ValueError(f"{location} is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{location} is not JSON: {error.msg}.") from None
    if not isinstance(prompt, dict):
        raise ValueError(
            f"{location} must be a JSON object with the field prompt or prompt_token_ids, got "
            f"{line.strip()[:40]}."
        )
    return prompt


def add_engine_arguments(
    parser: argparse.ArgumentParser, defaults: Mapping[str, str] | None = None
) -> None:
    """Add the flags of the options of `EngineConfig`. `engine_options` reads their values.

    Args:
      parser: the parser of a command that builds an engine.
      defaults: see `add_option_flags`.
    """
    group = parser.add_argument_group("engine")
    add_option_flags(group, options_of(EngineConfig), defaults or {})
    group.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs for the next start; by default they are kept in the "
        "user's cache folder, or in JAX_COMPILATION_CACHE_DIR",
    )
    group.add_argument(
        "--contiguous",
        action="store_true",
        help="store each sequence in a single block of --max-model-len tokens, and share no "
        "blocks: a cache without paging, for comparison",
    )


def add_quiet_argument(group: argparse._ArgumentGroup) -> None:
    """Add the flag ``--quiet``, which `status_of` and `engine_options` read."""
    group.add_argument(
        "--quiet",
        action="store_true",
        help="write nothing but results and errors: no progress and no summary",
    )


def status_of(args: argparse.Namespace) -> Status:
    """Return the `Status` of a command. With ``--quiet`` it shows nothing."""
    if args.quiet:
        return Status(is_shown=False)
    return Status(is_shown=args.show_progress, has_lines=args.show_progress is not False)


def add_option_flags(
    group: argparse._ActionsContainer,
    options: Iterable[Option],
    defaults: Mapping[str, str],
) -> None:
    """Add a flag for each option. The parsed value is None if the user does not give the flag.

    Args:
      group: a parser or one of its argument groups.
      options: the options. Options without a flag are skipped.
      defaults: maps the names of options to texts that describe their defaults in the help. It is
        needed only for options that have another default in this command than in `Option`.
    """
    for option in options:
        if option.flag is None:
            continue
        default = defaults.get(option.name, option.default_help)
        help_text = f"{option.help}; default: {default}"
        if option.type is not bool:
            kind: dict[str, Any] = {
                "type": option.type,
                "choices": option.choices or None,
                "metavar": option.metavar,
            }
            if option.is_repeated:
                kind["action"] = "append"
                help_text = f"{option.help}; may be repeated; default: {default}"
        elif option.default is None:
            kind = {"action": argparse.BooleanOptionalAction}
        else:
            kind = {"action": "store_const", "const": not option.default}
            help_text = f"do not {option.help}" if option.default else option.help
        group.add_argument(
            option.flag,
            dest=option.name,
            default=None,
            help=_escape(_name_flags(help_text)),
            **kind,
        )


def _escape(text: str) -> str:
    """Return a text that `argparse` shows unchanged: it formats each help with the operator %."""
    return text.replace("%", "%%")


def _name_flags(text: str) -> str:
    """Adapt a help text to command lines.

    Names of options become flags. A remark "; in Python ..." is removed, up to the next ";".
    """
    text = re.sub("; in Python [^;]*", "", text)
    flags = {name: flag for name, flag in _option_flags().items() if "_" in name}
    return re.sub(r"\w+", lambda match: flags.get(match[0], match[0]), text)


@functools.cache
def _option_flags() -> dict[str, str]:
    return {option.name: option.flag for option in options_of(EngineConfig) if option.flag}


def given_options(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Return a dict from names to values of the options that the user set with flags."""
    values = {option.name: getattr(args, option.name, None) for option in options if option.flag}
    return {name: value for name, value in values.items() if value is not None}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `Engine` or `LLM` that the flags set.

    This also turns on JAX's compilation cache, unless ``--no-compilation-cache`` is given.

    Raises:
      ValueError: ``--model`` is empty, or ``--contiguous`` is given together with ``--block-size``,
        ``--num-blocks`` or ``--memory-fraction``.
    """
    if args.model == "":
        raise ValueError("--model must not be empty. Omit it to use the bundled model.")
    if not args.no_compilation_cache:
        keep_compiled_programs()
    options = given_options(args, options_of(EngineConfig))
    if getattr(args, "quiet", False):
        options["show_progress"] = False
    return options | _contiguous_options(options) if args.contiguous else options


def model_folder(options: Mapping[str, Any]) -> Path:
    """Return the folder or file of the selected model, see `find_model`.

    Args:
      options: result of `given_options`. If it has no ``model``, the bundled model is used.
    """
    if "model" not in options:
        return bundled_folder()
    kwargs = {
        option.name: options[option.name] for option in MODEL_OPTIONS if option.name in options
    }
    return find_model(**kwargs)


def _contiguous_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine options of ``--contiguous``: one block holds a whole sequence."""
    for name in ("block_size", "num_blocks", "memory_fraction"):
        if name in options:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--contiguous must not be combined with --{flag}, because each block then holds a "
                "whole sequence. Leave one of them out."
            )
    length = options.get("max_model_len")
    if length is None:
        folder = model_folder(options)
        length = LlamaConfig.from_file(folder).max_position_embeddings
    # The pool then has one block per slot, because a block holds a whole sequence.
    return {"block_size": length, "max_model_len": length, "enable_prefix_caching": False}


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for an engine that spans several processes. `join_processes` reads them."""
    group = parser.add_argument_group(
        "processes",
        "run one engine on the devices of several processes; start the same command in each "
        "process; only process 0 reads the input and writes the output",
    )
    group.add_argument(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="address at which process 0 waits for the other processes",
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="N", help="index of this process, from 0")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="detect the address, the number of processes and the index of this process; works on "
        "Cloud TPU, Slurm, Open MPI and Kubernetes",
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=int,
        metavar="SECONDS",
        help="end this process if another process has sent no heartbeat for this many seconds; "
        f"default: {distributed.HEARTBEAT_TIMEOUT}",
    )


# Environment variables of XLA that decide how much of a GPU's memory JAX takes.
_GPU_MEMORY_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


def take_gpu_memory() -> None:
    """Let JAX take `GPU_SHARE` of a GPU, unless an environment variable says something else.

    Call it before any other use of JAX. It changes nothing on other devices.
    """
    if not any(name in os.environ for name in _GPU_MEMORY_VARIABLES):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_SHARE)


def join_processes(args: argparse.Namespace) -> None:
    """Connect to the other processes if the flags of `add_process_arguments` are given.

    Call it before any other use of JAX. The default of ``--tensor-parallel-size`` becomes the
    number of devices of all processes.

    Raises:
      ValueError: only some of the required flags are given, or JAX does not know the cluster.
    """
    address = (args.coordinator_address, args.num_processes, args.process_id)
    if address == (None, None, None) and not args.distributed:
        if args.heartbeat_timeout is not None:
            raise ValueError(
                "--heartbeat-timeout must be combined with flags for several processes. Add "
                "--distributed, or --coordinator-address, --num-processes and --process-id."
            )
        return
    if None in address and not args.distributed:
        raise ValueError(
            "--coordinator-address, --num-processes and --process-id must be given together. On "
            "Cloud TPU, Slurm, Open MPI and Kubernetes, --distributed detects all three."
        )
    try:
        seconds = args.heartbeat_timeout
        distributed.initialize(
            *address,
            heartbeat_timeout=distributed.HEARTBEAT_TIMEOUT if seconds is None else seconds,
        )
    except ValueError as error:
        if not args.distributed:
            raise
        raise ValueError(
            "--distributed must be used on a cluster that JAX can detect: Cloud TPU, Slurm, Open "
            "MPI or Kubernetes. Elsewhere, give --coordinator-address, --num-processes and "
            f"--process-id. JAX reported: {one_line(error)}"
        ) from None
    _redirect_cpp_stdout()
    if args.tensor_parallel_size is None:
        args.tensor_parallel_size = jax.device_count()


def _redirect_cpp_stdout() -> None:
    """Redirect the standard output of C++ code to standard error.

    Gloo, JAX's library for collectives on CPUs, writes a message when it connects.
    `sys.stdout` still writes to the original file.
    """
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
