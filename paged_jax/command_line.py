"""`Parser`, and the engine's arguments: what the command lines share."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax

from paged_jax import distributed
from paged_jax.argument_names import suggest
from paged_jax.engine.config import KV_DTYPES
from paged_jax.kernels import BACKENDS
from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.scheduler.scheduler import Preemption
from paged_jax.user_cache import keep_compiled_programs
from paged_jax.version import __version__

# Errors caused by the arguments, the files or the machine. JAX raises the last for lack of memory.
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


# Short options of llama.cpp.
_SHORT = {"-p": "--prompt", "-n": "--max-tokens", "-c": "--max-model-len", "-m": "--model"}


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line on stderr, without the usage."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)
        version = f"paged_jax {__version__}"
        self.add_argument("--version", action="version", version=version)

    def error(self, message: str) -> NoReturn:
        """Report a mistake in the arguments, and exit with status 2."""
        self.exit(2, f"{self._name}: error: {message}{self._hint(message)}\n")

    def run(self, function: Callable[[], None], *, clear: Callable[[], None] | None = None) -> int:
        """Call a command's function and return the exit status; expected errors print one line.

        Args:
          function: the command's work.
          clear: clears the terminal's current line before an error is printed.
        """
        try:
            function()
            sys.stdout.flush()
            return 0
        except BrokenPipeError:
            # The reader has closed its end, as `head` does; Python's last flush would fail again.
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
        """Return the option that an unknown one, such as --max_tokens, probably means."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            return ""
        names = {
            option.removeprefix("--").replace("-", "_"): option
            for option in self._option_string_actions
            if option.startswith("--")
        }
        given = unknown.split()[0].partition("=")[0]
        given = _SHORT.get(given, given)
        wanted = given.lstrip("-").replace("-", "_")
        meant = wanted if wanted in names else suggest(wanted, names)
        return "" if meant is None else f". Did you mean {names[meant]}?"


def one_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


# The engine's options that decide how much memory it takes, and the others.
_SIZES = (
    "dtype", "kv_dtype", "block_size", "max_num_seqs", "max_model_len", "max_chunk",
    "num_speculative_tokens",
)  # fmt: skip
_OTHERS = (
    "num_blocks", "memory_fraction", "steps_per_dispatch", "preemption", "swap_space", "backend",
    "tensor_parallel_size", "check_replicas",
)  # fmt: skip


def add_size_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the arguments that decide how much memory an engine takes; `size_options` reads them."""
    add = parser.add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        help="type of the weights; int8 rounds their matrices, each row with a scale of its own; "
        "default: auto, as they are saved",
    )
    add(
        "--kv-dtype",
        choices=("auto", *KV_DTYPES),
        help="type of the KV cache; int8 and fp8 quantise it; default: auto, which is float32 on a "
        "CPU and the type of the weights elsewhere",
    )
    add("--block-size", type=int, metavar="N", help="tokens in a block; default: 16")
    add("--max-num-seqs", type=int, metavar="N", help="most samples in a batch; default: 16")
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a sequence, prompt included; default: the model's context",
    )
    add(
        "--max-chunk",
        type=int,
        metavar="N",
        help="most prompt tokens of a sequence that a step processes; default: 512",
    )
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="N",
        help="most tokens drafted by n-gram lookup and verified in one step; the text stays the "
        "same; default: 0",
    )


def size_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `Engine` and `make_plan`: the arguments that were given."""
    return _given(args, _SIZES)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and the engine's arguments; `engine_options` reads them."""
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint folder; default: the small bundled model"
    )
    group = parser.add_argument_group("engine")
    add_size_arguments(group)
    _add_pool_arguments(group)
    group.add_argument(
        "--steps-per-dispatch",
        type=int,
        metavar="N",
        help="decode steps that the device runs before it reports their tokens, which a stream "
        "then gets together; default: 8, but 1 for a single prompt of paged_jax.generate",
    )
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        help="implementation of the attention; default: the best for the device",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="devices that compute the model together, the first that JAX finds, each with a part "
        "of its weights and of the KV cache; default: 1",
    )
    group.add_argument(
        "--check-replicas",
        action="store_true",
        default=None,
        help="compare the tokens that each of several devices chooses for itself, to find one that "
        "computes wrongly; slower",
    )
    group.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs for the next start; by default they are kept in the "
        "user's cache folder, or where JAX_COMPILATION_CACHE_DIR says",
    )
    group.add_argument(
        "--contiguous",
        action="store_true",
        help="one block of --max-model-len tokens for each sequence, and no sharing: the same "
        "engine with a cache that is not paged, to compare with",
    )


def _add_pool_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="blocks in the pool; default: as many as the batch can use and memory allows",
    )
    group.add_argument(
        "--memory-fraction",
        type=float,
        metavar="X",
        help="fraction of the device's memory for weights, steps and pool together, at most 1; "
        "python -m paged_jax.plan shows what fits",
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="do not reuse cached blocks of earlier prompts that begin with the same tokens",
    )
    group.add_argument(
        "--preemption",
        choices=get_args(Preemption),
        help="what happens to the blocks of a preempted sequence: recompute them, swap them to "
        "host memory, or choose the cheaper of the two (auto); default: auto",
    )
    group.add_argument(
        "--swap-space",
        type=float,
        metavar="GIB",
        help="host memory for swapped blocks, in GiB; default: 4",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `Engine` and `LLM`: the arguments that were given.

    Compiled programs are kept from here on, unless an argument says not to.

    Raises:
      ValueError: ``--model`` is empty, or ``--contiguous`` comes with sizes of blocks.
    """
    if args.model == "":
        raise ValueError("--model must not be empty. Leave it out for the bundled model.")
    if not args.no_compilation_cache:
        keep_compiled_programs()
    options = size_options(args) | _given(args, _OTHERS)
    if args.contiguous:
        return options | _one_block_a_slot(args)
    return options | {"enable_prefix_caching": not args.no_prefix_caching}


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for an engine over several processes; `join_processes` reads them."""
    group = parser.add_argument_group(
        "processes",
        "one engine over the devices of several processes: the same command in each, of which "
        "process 0 does the talking",
    )
    group.add_argument(
        "--coordinator-address", metavar="HOST:PORT", help="where process 0 waits for the others"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="N", help="which this is, from 0")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="take the three from the cluster: Cloud TPU, Slurm, Open MPI, Kubernetes",
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=int,
        metavar="SECONDS",
        help="time without a sign of another process after which this one ends; default: "
        f"{distributed.HEARTBEAT_TIMEOUT}",
    )


def join_processes(args: argparse.Namespace) -> None:
    """Connect to the other processes, if the arguments name any; comes before JAX is used.

    The devices of all of them run the model, unless ``--tensor-parallel-size`` says otherwise.

    Raises:
      ValueError: some of the arguments are given, and others that they need are not.
    """
    by_hand = (args.coordinator_address, args.num_processes, args.process_id)
    if by_hand == (None, None, None) and not args.distributed:
        if args.heartbeat_timeout is not None:
            raise ValueError(
                "--heartbeat-timeout must be given with several processes. Add --distributed, or "
                "--coordinator-address, --num-processes and --process-id."
            )
        return
    if None in by_hand and not args.distributed:
        raise ValueError(
            "--coordinator-address, --num-processes and --process-id must be given together, or "
            "--distributed, which finds them."
        )
    try:
        seconds = args.heartbeat_timeout
        distributed.initialize(
            *by_hand,
            heartbeat_timeout=distributed.HEARTBEAT_TIMEOUT if seconds is None else seconds,
        )
    except ValueError as error:
        if not args.distributed:
            raise
        raise ValueError(
            "--distributed must be given on a cluster that JAX knows: Cloud TPU, Slurm, Open MPI "
            f"or Kubernetes. Here name the processes by --coordinator-address. ({one_line(error)})"
        ) from None
    _keep_stdout_for_answers()
    if args.tensor_parallel_size is None:
        args.tensor_parallel_size = jax.device_count()


def _keep_stdout_for_answers() -> None:
    """Send to standard error what C++ writes to standard output: Gloo greets there."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)


def _one_block_a_slot(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("block_size", "num_blocks", "memory_fraction"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--contiguous must be given without --{option}: it means a block.")
    length = args.max_model_len
    if length is None:
        folder = bundled_folder() if args.model is None else Path(args.model)
        length = LlamaConfig.from_file(folder).max_position_embeddings
    # The pool gets what the slots can use by default: a block each.
    return {"block_size": length, "max_model_len": length, "enable_prefix_caching": False}


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
