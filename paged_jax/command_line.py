"""What the command lines have in common: one-line errors, and the arguments of an engine."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, get_args

import jax

from paged_jax.engine.footprint import KV_DTYPES
from paged_jax.kernels import BACKENDS
from paged_jax.scheduler.scheduler import Preemption
from paged_jax.version import __version__

# Mistakes of the user, or of the files and the machine that are used. (JAX raises the last where
# memory does not suffice.)
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    NotImplementedError,
    FloatingPointError,
    MemoryError,
    jax.errors.JaxRuntimeError,
)


# 128 + the signal, as shells report it.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, without the usage."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)
        version = f"paged_jax {__version__}"
        self.add_argument("--version", action="version", version=version)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self._name}: error: {message}{self._hint(message)}\n")

    def run(self, function: Callable[[], None], *, clear: Callable[[], None] | None = None) -> int:
        """Do a command's work and return its exit status: mistakes of the user end in one line.

        Args:
          function: the work.
          clear: called before the line, where something else stands on the terminal.
        """
        try:
            function()
            sys.stdout.flush()
            return 0
        except BrokenPipeError:
            # The reader has left, as `head` does; Python would complain again on its last flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _BROKEN_PIPE
        except EXPECTED_ERRORS as error:
            if clear is not None:
                clear()
            print(f"{self._name}: error: {one_line(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return _INTERRUPTED

    @property
    def _name(self) -> str:
        return self.prog.removeprefix("python -m ")

    def _hint(self, message: str) -> str:
        """The option that somebody may have meant, as in --max_tokens."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            return ""
        wanted = unknown.split()[0].partition("=")[0].replace("_", "-")
        close = difflib.get_close_matches(wanted, self._option_string_actions, n=1)
        return f". Did you mean {close[0]}?" if close else ""


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Options of an engine by which it takes more or less memory, and the others.
_SIZES = (
    "dtype", "kv_dtype", "block_size", "max_num_seqs", "max_model_len", "max_chunk",
    "num_speculative_tokens",
)  # fmt: skip
_OTHERS = (
    "num_blocks", "memory_fraction", "steps_per_dispatch", "preemption", "swap_space", "backend",
)  # fmt: skip


def add_size_arguments(parser: argparse._ActionsContainer) -> None:
    """Add what determines how much memory an engine takes; `size_options` reads it."""
    add = parser.add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of the weights")
    add(
        "--kv-dtype",
        choices=("auto", *KV_DTYPES),
        help="of the cache; int8 and fp8 quantise it; auto is float32 on CPU, else as the weights",
    )
    add("--block-size", type=int, metavar="N", help="tokens in a block; default: 16")
    add("--max-num-seqs", type=int, metavar="N", help="samples that run at once; default: 16")
    add("--max-model-len", type=int, metavar="N", help="longest sequence; default: the context")
    add(
        "--max-chunk",
        type=int,
        metavar="N",
        help="prompt tokens that a step reads of a sequence; default: 512",
    )
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="N",
        help="tokens guessed from earlier text and verified at once; the text is the same",
    )


def size_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `Engine` and `make_plan`: those given, as defaults stay there."""
    return _given(args, _SIZES)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and what shapes the engine; `engine_options` reads them."""
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint folder; the small bundled model if not given"
    )
    group = parser.add_argument_group("engine")
    add_size_arguments(group)
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks in the pool")
    group.add_argument(
        "--memory-fraction",
        type=float,
        metavar="X",
        help="of the device's memory, for weights, steps and pool together; see paged_jax.plan",
    )
    group.add_argument(
        "--steps-per-dispatch",
        type=int,
        metavar="N",
        help="tokens of a sequence that the device makes at a time; default: 8 (but 1 for a "
        "single prompt on the command line), and a stream gets them at once",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="compute what prompts have in common anew"
    )
    group.add_argument(
        "--preemption",
        choices=get_args(Preemption),
        help="what happens to a sequence that must leave for lack of blocks; default: auto",
    )
    group.add_argument("--swap-space", type=float, metavar="GIB", help="host memory for that")
    group.add_argument("--backend", choices=tuple(BACKENDS), help="of the attention")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `Engine` and `LLM`: those that were given, as defaults stay there.

    Raises:
      ValueError: the model's folder is named by an empty text.
    """
    if args.model == "":
        raise ValueError("--model must not be empty. Leave it out for the bundled model.")
    options = size_options(args) | _given(args, _OTHERS)
    return options | {"enable_prefix_caching": not args.no_prefix_caching}


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
