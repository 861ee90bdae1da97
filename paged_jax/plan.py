"""Prints what fits in memory, before it is loaded: ``python -m paged_jax.plan --memory 24GiB``.

Only ``config.json`` is read; `paged_jax.engine.memory_plan` computes the plan.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax

from paged_jax.command_line import Parser, add_size_arguments, size_options
from paged_jax.engine.device_memory import device_memory
from paged_jax.engine.footprint import in_units
from paged_jax.engine.memory_plan import MemoryPlan, make_plan
from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.pretrained import bundled_folder

_UNITS = {"": 1}
_UNITS |= {f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)}
# As vLLM and Kubernetes do.
_UNITS |= {letter: 1000**i for i, letter in enumerate("kmgt", 1)}
_PLATFORMS = ("cpu", "gpu", "tpu")
_LENGTHS = (512, 2048, 8192, 32768, 131072)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 where it does not fit, in one line."""
    parser = _parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: _print(args))


def _print(args: argparse.Namespace) -> None:
    plan = _from_arguments(args)
    lengths = _lengths(args.lengths, plan.sizes.max_model_len)
    print(json.dumps(as_dict(plan, lengths)) if args.json else as_text(plan, lengths))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m paged_jax.plan",
        description="Show what an engine takes of a device's memory, and how many sequences fit.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder with a config.json; default: the small bundled model",
    )
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="memory of the device: 24GiB, 24GB, 512MiB or the like, or a number of bytes; "
        "default: that of this machine's device",
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=1.0,
        metavar="X",
        help="fraction of the memory that the engine may take, at most 1; default: 1",
    )
    parser.add_argument(
        "--platform",
        choices=_PLATFORMS,
        help="platform of the device; default: the one that JAX finds on this machine",
    )
    add_size_arguments(parser)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths, in tokens, for which to count the sequences that fit; default: several "
        "lengths up to --max-model-len",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parse_bytes(text: str) -> int:
    """Read a size in bytes.

    Raises:
      ArgumentTypeError: it is not one.

    Example:
      >>> parse_bytes("24GiB"), parse_bytes("24 GB"), parse_bytes("512")
      (25769803776, 24000000000, 512)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            "must be bytes, or a number with KiB, MiB, GiB, TiB, K, M, G, T, KB, MB, GB or TB, "
            f"got {text!r}"
        )
    size = float(match[1]) * _UNITS[match[2]]
    if size >= 2**63:
        raise argparse.ArgumentTypeError(f"must be below 2**63 bytes, got {text[:40]!r}")
    return int(size)


def _from_arguments(args: argparse.Namespace) -> MemoryPlan:
    if not 0 < args.memory_fraction <= 1:
        raise ValueError(
            f"--memory-fraction must be above 0 and at most 1, got {args.memory_fraction}."
        )
    folder = bundled_folder() if args.model is None else Path(args.model)
    memory_bytes = _memory_here() if args.memory is None else args.memory
    return make_plan(
        LlamaConfig.from_file(folder),
        int(args.memory_fraction * memory_bytes),
        args.platform or jax.default_backend(),
        **size_options(args),
    )


def _memory_here() -> int:
    device = device_memory(jax.devices()[0])
    if device is None:
        raise ValueError("--memory must be given: the device does not say how much it has.")
    return device.total


def _lengths(wanted: list[int] | None, max_model_len: int) -> list[int]:
    if wanted is None:
        return [*(length for length in _LENGTHS if length < max_model_len), max_model_len]
    for length in wanted:
        if not 0 < length <= max_model_len:
            raise ValueError(
                f"--lengths must be positive and at most max_model_len = {max_model_len}, "
                f"got {length}."
            )
    return wanted


def as_dict(plan: MemoryPlan, lengths: list[int]) -> dict[str, Any]:
    """The plan as a dict of names and bytes, for machines."""
    footprint, sizes = plan.footprint, plan.sizes
    return {
        "num_parameters": plan.num_parameters,
        "platform": plan.platform,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "memory_bytes": plan.memory,
        "weight_bytes": footprint.weights,
        "state_bytes": footprint.state,
        "step_bytes": footprint.step,
        "program_bytes": footprint.steps,
        "token_bytes": plan.token_bytes,
        "block_bytes": footprint.block,
        "block_overhead_bytes": footprint.block_overhead,
        "block_size": sizes.block_size,
        "num_blocks": plan.num_blocks,
        "num_engine_blocks": plan.num_engine_blocks,
        "num_tokens": plan.num_blocks * sizes.block_size,
        "max_num_seqs": sizes.num_slots,
        "max_model_len": sizes.max_model_len,
        "lengths": [
            {
                "length": length,
                "num_paged": plan.num_paged(length),
                "num_contiguous": plan.num_contiguous,
                "ratio": _ratio(plan, length),
            }
            for length in lengths
        ],
    }


def as_text(plan: MemoryPlan, lengths: list[int]) -> str:
    """The plan as lines of text, for people."""
    footprint, sizes = plan.footprint, plan.sizes
    pool = plan.num_blocks * (footprint.block + footprint.block_overhead)
    program = max(footprint.steps, key=lambda name: footprint.steps[name])
    rows = [
        ("memory", plan.memory, f"on {plan.platform}"),
        ("weights", footprint.weights, f"{plan.num_parameters:,} parameters in {plan.dtype}"),
        ("state", footprint.state, f"{sizes.num_slots} slots of {sizes.max_model_len:,} tokens"),
        ("step", footprint.step, f"at most; {program} takes most"),
        (
            "blocks",
            pool,
            f"{plan.num_blocks:,} of {sizes.block_size} tokens in {plan.kv_dtype}: "
            f"{plan.num_blocks * sizes.block_size:,} tokens",
        ),
        ("a block", footprint.block, f"{in_units(plan.token_bytes)} a token"),
    ]
    lines = [f"{name:<8}{in_units(size):>12}  {note}" for name, size, note in rows]
    lines += ["", f"{'tokens':>8}{'paged':>10}{'contiguous':>12}{'ratio':>8}"]
    for length in lengths:
        ratio = _ratio(plan, length)
        shown = "-" if ratio is None else f"{ratio:.1f}"
        counts = f"{plan.num_paged(length):>10,}{plan.num_contiguous:>12,}"
        lines.append(f"{length:>8,}{counts}{shown:>8}")
    at_once = "1 sequence runs" if sizes.num_slots == 1 else f"{sizes.num_slots} sequences run"
    if plan.num_engine_blocks < plan.num_blocks:
        lines += [
            "",
            f"{at_once} at once and can use {plan.num_engine_blocks:,} blocks: an engine takes no "
            "more unless --max-num-seqs is larger.",
        ]
    elif any(plan.num_paged(length) > sizes.num_slots for length in lengths):
        lines += ["", f"{at_once} at once, see --max-num-seqs; others wait."]
    return "\n".join(lines)


def _ratio(plan: MemoryPlan, length: int) -> float | None:
    return plan.num_paged(length) / plan.num_contiguous if plan.num_contiguous else None


if __name__ == "__main__":
    sys.exit(main())
