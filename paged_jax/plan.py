"""Command line that plans an engine's memory: ``python -m paged_jax.plan --memory 24GiB``.

It does not load the model: it reads ``config.json`` and, if there are weight files, their headers.
`paged_jax.engine.memory_plan` computes the plan.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

from paged_jax.command_line import (
    MODEL_OPTIONS,
    Parser,
    add_option_flags,
    given_options,
    model_folder,
    take_gpu_memory,
)
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.device_memory import device_memory
from paged_jax.engine.footprint import GroupFootprint
from paged_jax.engine.memory_plan import (
    DEVICES,
    DeviceSpec,
    MemoryPlan,
    collectives,
    make_plan,
    step_bound,
)
from paged_jax.formatting import format_bytes
from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.pretrained import read_config, read_formats
from paged_jax.options import options_of
from paged_jax.runner.devices import server_memory_share

# Engine options that affect how much memory the engine needs.
_OPTIONS = [option for option in options_of(EngineConfig) if option.decides_memory]
_UNITS = {"": 1}
_UNITS |= {f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)}
# A single letter is a decimal unit, as in vLLM and Kubernetes.
_UNITS |= {letter: 1000**i for i, letter in enumerate("kmgt", 1)}
_PLATFORMS = ("cpu", "gpu", "tpu")
_LENGTHS = (512, 2048, 8192, 32768, 131072)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status. It is 1 if the model does not fit."""
    parser = make_parser()
    args = parser.parse_args(argv)
    take_gpu_memory()  # as the server does, so that a GPU of this machine reports the same memory
    return parser.run(lambda: _print(args))


def _print(args: argparse.Namespace) -> None:
    device = None if args.device is None else DEVICES[args.device]
    plan = _from_arguments(args, device)
    lengths = _lengths(args.lengths, plan.sizes.max_model_len)
    arguments = (plan, lengths, device)
    print(json.dumps(as_dict(*arguments)) if args.json else as_text(*arguments))


def make_parser() -> Parser:
    """Return the parser of the command ``plan``."""
    parser = Parser(
        "plan",
        examples=(
            "--model ./folder --device h100",
            "--model ORG/NAME --memory 24GiB --dtype int4",
            "--model ./model.gguf --lengths 4096 32768 --json",
        ),
        description="Show the memory that an engine needs on a device, and how many sequences fit.",
    )
    add_option_flags(parser, MODEL_OPTIONS, {})
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="memory of a device, such as 24GiB, 24GB, 512MiB or a number of bytes; "
        "default: the memory of --device, or of this machine's device",
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        metavar="X",
        help="the engine's option, at most 1; default: show what fits in all of the memory, and "
        "how much of it an engine without this option takes",
    )
    parser.add_argument(
        "--platform",
        choices=_PLATFORMS,
        help="platform of the device; default: the platform of --device, or of this machine",
    )
    parser.add_argument(
        "--device",
        type=str.lower,
        choices=tuple(DEVICES),
        help="plan for this device, and show the minimum time of a decode step on it",
    )
    add_option_flags(parser, _OPTIONS, {})
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="show how many sequences of these lengths (in tokens) fit; default: several lengths "
        "up to --max-model-len",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as a JSON object")
    return parser


def parse_bytes(text: str) -> int:
    """Convert a text such as "24GiB" to a number of bytes.

    Args:
      text: a number with an optional unit, in upper or lower case.

    Raises:
      ArgumentTypeError: the text is not a number with a known unit, or is too large.

    Example:
      >>> parse_bytes("24GiB"), parse_bytes("24 GB"), parse_bytes("512")
      (25769803776, 24000000000, 512)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            "must be a number of bytes, or a number with a unit (KiB, MiB, GiB, TiB, K, M, G, T, "
            f"KB, MB, GB or TB), got {text!r}"
        )
    size = float(match[1]) * _UNITS[match[2]]
    if size >= 2**63:
        raise argparse.ArgumentTypeError(f"must be below 2**63 bytes, got {text[:40]!r}")
    return int(size)


def _from_arguments(args: argparse.Namespace, device: DeviceSpec | None) -> MemoryPlan:
    if args.memory_fraction is not None and not 0 < args.memory_fraction <= 1:
        raise ValueError(
            f"--memory-fraction must be above 0 and at most 1, got {args.memory_fraction}."
        )
    if device is not None and args.platform not in (None, device.platform):
        raise ValueError(
            f"--platform must be {device.platform} with --device {args.device}, got "
            f"{args.platform}. Leave one of them out."
        )
    folder = model_folder(given_options(args, MODEL_OPTIONS))
    config, options = read_config(folder), given_options(args, _OPTIONS)
    kwargs = {name: options[name] for name in ("dtype", "dequantise") if name in options}
    num_devices = options.get("tensor_parallel_size", 1)
    is_this_machine = args.memory is None and device is None
    memory_bytes = _memory(device) if args.memory is None else args.memory
    platform = args.platform or (jax.default_backend() if device is None else device.platform)
    # This machine's device reports only the share of its memory that JAX takes.
    share = 1.0 if is_this_machine else server_memory_share(platform)
    kwargs |= {"num_devices": num_devices, "platform": platform}
    formats = read_formats(Decoder, folder, config, **kwargs)
    return make_plan(
        config,
        memory_bytes,
        platform,
        formats,
        memory_fraction=args.memory_fraction,
        share=share,
        **options,
    )


def _memory(device: DeviceSpec | None) -> int:
    """Return the memory of a device in bytes. None stands for this machine's first device.

    Raises:
      ValueError: this machine's device does not report its memory.
    """
    if device is not None:
        return device.memory
    memory = device_memory(jax.devices()[0])
    if memory is None:
        raise ValueError("--memory must be given, because this device does not report its memory.")
    return memory.total


def _lengths(lengths: list[int] | None, max_model_len: int) -> list[int]:
    if lengths is None:
        return [*(length for length in _LENGTHS if length < max_model_len), max_model_len]
    for length in lengths:
        if not 0 < length <= max_model_len:
            raise ValueError(
                f"--lengths must be positive and at most max_model_len = {max_model_len}, "
                f"got {length}."
            )
    return lengths


def as_dict(
    plan: MemoryPlan, lengths: list[int], device: DeviceSpec | None = None
) -> dict[str, Any]:
    """Return the plan as a dict for JSON. Numbers of bytes are per device.

    Args:
      plan: the plan.
      lengths: sequence lengths in tokens. For each, the plan says how many sequences fit.
      device: the device for which minimum times of decode steps are computed; None for no times.
    """
    footprint, sizes = plan.footprint, plan.sizes
    return {
        "num_parameters": plan.num_parameters,
        "num_devices": plan.num_devices,
        "platform": plan.platform,
        "dtype": str(plan.formats),
        "kv_dtype": plan.kv_dtype,
        "memory_bytes": plan.memory,
        "weight_bytes": footprint.weights,
        "state_bytes": footprint.state,
        **_states(plan),
        "step_bytes": footprint.step,
        "program_bytes": footprint.steps,
        "token_bytes": plan.token_bytes,
        "block_bytes": footprint.block,
        "block_overhead_bytes": footprint.block_overhead,
        "block_size": sizes.block_size,
        "num_blocks": plan.num_blocks,
        "num_engine_blocks": plan.num_engine_blocks,
        "engine_limit": plan.pool.limit,
        "num_tokens": plan.num_blocks * sizes.block_size,
        "max_num_seqs": sizes.num_slots,
        "max_model_len": sizes.max_model_len,
        "collectives": collectives(plan, sizes.num_slots)._asdict(),
        "lengths": [_length_as_dict(plan, length, device) for length in lengths],
    } | ({"groups": _groups(plan)} if plan.has_windows else {})


def _states(plan: MemoryPlan) -> dict[str, int]:
    """Return the memory for states of recurrent layers; an empty dict without such layers."""
    footprint = plan.footprint
    if not footprint.num_states:
        return {}
    return {
        "recurrent_bytes": footprint.recurrent,
        "sequence_state_bytes": footprint.sequence_state,
        "num_states": footprint.num_states,
    }


def _groups(plan: MemoryPlan) -> list[dict[str, Any]]:
    """Return the pool size of each group of layers with the same window and KV shape."""
    sizes = plan.footprint.group_sizes(plan.num_blocks)
    return [
        {
            "kept": group.retention.label,
            "num_layers": group.num_layers,
            "num_blocks": size,
            "block_bytes": group.block,
            "most_blocks_of_a_sequence": group.max_blocks_per_slot,
        }
        for group, size in zip(plan.footprint.token_groups, sizes, strict=False)
    ]


def _length_as_dict(plan: MemoryPlan, length: int, device: DeviceSpec | None) -> dict[str, Any]:
    counts = {
        "length": length,
        "num_paged": plan.num_paged(length),
        "num_contiguous": plan.num_contiguous,
        "ratio": _ratio(plan, length),
    }
    if plan.keeps_less:
        counts["sequence_bytes"] = plan.sequence_bytes(length)
        counts["uniform_bytes"] = plan.uniform_bytes(length)
    if device is None:
        return counts
    batch = plan.num_running(length)
    bound = step_bound(plan, device, batch, length)
    return counts | {"num_running": batch, "step_seconds": bound.seconds, **bound._asdict()}


def as_text(plan: MemoryPlan, lengths: list[int], device: DeviceSpec | None = None) -> str:
    """Return the plan as text. The arguments are the same as for `as_dict`."""
    lines = [f"{name:<8}{format_bytes(size):>12}  {note}" for name, size, note in _rows(plan)]
    lines += ["", *_table(plan, lengths, device)]
    sizes = plan.sizes
    runs_at_once = "1 sequence runs" if sizes.num_slots == 1 else f"{sizes.num_slots} sequences run"
    if plan.num_engine_blocks < plan.num_blocks:
        blocks = f"{plan.num_engine_blocks:,} blocks"
        lines += ["", f"{runs_at_once} at once. An engine allocates {blocks}: {plan.pool.limit}."]
    elif any(plan.num_paged(length) > sizes.num_slots for length in lengths):
        lines += ["", f"{runs_at_once} at once, see --max-num-seqs; others wait."]
    return "\n".join(lines)


def _rows(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    """Return a row (name, number of bytes, explanation) for each use of memory.

    With several devices, there is also a row for the bytes that a device sends per decode step.
    """
    footprint, sizes, num_devices = plan.footprint, plan.sizes, plan.num_devices
    program = max(footprint.steps, key=lambda name: footprint.steps[name])
    parameters = f"{plan.num_parameters:,} parameters in {plan.formats}"
    rows = [
        ("memory", plan.memory, f"on {plan.platform}"),
        ("weights", footprint.weights, parameters),
        ("state", footprint.state, f"{sizes.num_slots} slots of {sizes.max_model_len:,} tokens"),
        *_state_rows(plan),
        ("step", footprint.step, f"at most, for {program}, the largest program"),
        *_block_rows(plan),
    ]
    if num_devices == 1:
        return rows
    rows[0] = ("memory", plan.memory, f"on each of {num_devices} devices, {plan.platform}")
    rows[1] = ("weights", footprint.weights, f"of {parameters}")
    if plan.num_copies > 1:
        heads = f"{plan.config.num_key_value_heads} KV heads, each on {plan.num_copies} devices"
        rows = [
            (name, size, f"{note}; {heads}" if name == "a block" else note)
            for name, size, note in rows
        ]
    sums, gathers, num_bytes = collectives(plan, sizes.num_slots)
    note = f"by each device in a decode step of {sizes.num_slots}: {sums} all-reduces, "
    return [*rows, ("sent", num_bytes, f"{note}{gathers} all-gather")]


def _state_rows(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    """Return a list with the row for states of recurrent layers; [] without such layers."""
    footprint, num_slots = plan.footprint, plan.sizes.num_slots
    if not footprint.num_states:
        return []
    num_layers = sum(g.num_layers for g in footprint.groups if g.retention.is_fixed)
    note = (
        f"of {num_layers} recurrent layers: {num_slots} slots and "
        f"{footprint.num_states - num_slots} snapshots of {format_bytes(footprint.sequence_state)}"
    )
    return [("states", footprint.recurrent, note)]


def _block_rows(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    """Return a row for the pool of each group of layers, and a row for a single block.

    If some layers do not keep K and V of all tokens, there is also a row for a sequence of the
    maximum length.
    """
    footprint, block_size, kv_dtype = plan.footprint, plan.sizes.block_size, plan.kv_dtype
    rows = []
    sizes = footprint.group_sizes(plan.num_blocks)
    for group, size in zip(footprint.token_groups, sizes, strict=False):
        note = f"{size:,} of {block_size} tokens in {kv_dtype}"
        if not group.retention.frees:
            note += f": {size * block_size:,} tokens"
        if plan.keeps_less:
            note += f", in {_layers(plan, group)}"
        rows.append(("blocks", size * (group.block + group.overhead), note))
    rows.append(("a block", footprint.block, f"{format_bytes(plan.token_bytes)} a token"))
    if plan.keeps_less:
        length = plan.sizes.max_model_len
        num_bytes = plan.sequence_bytes(length)
        share = num_bytes / plan.uniform_bytes(length)
        note = f"of {length:,} tokens, {share:.3f} of the bytes if all layers kept all tokens"
        layers = "all layers" if plan.has_windows else "these layers"
        rows[-1] = ("a block", footprint.block, f"{rows[-1][2]} in {layers}")
        rows.append(("sequence", num_bytes, note))
    return rows


def _layers(plan: MemoryPlan, group: GroupFootprint) -> str:
    """Return a text with the number of layers of a group and the tokens that they keep.

    If the layers have a sliding window, the text also has the maximum blocks per sequence.
    """
    rule, num_layers = group.retention, plan.config.num_hidden_layers
    text = f"{group.num_layers} of {num_layers} layers {rule.text}"
    suffix = f", at most {group.max_blocks_per_slot} blocks per sequence"
    return text + suffix if rule.frees else text


def _table(plan: MemoryPlan, lengths: list[int], device: DeviceSpec | None) -> Iterator[str]:
    """Yield the lines of the table with a row for each sequence length.

    A row has the number of sequences that fit with and without paging, and the ratio of both. If
    `device` is given, the row also has the number of sequences in a decode step, the minimum time
    of the step, and the maximum number of generated tokens per second.
    """
    header = f"{'tokens':>8}{'paged':>10}{'contiguous':>12}{'ratio':>8}"
    yield header if device is None else f"{header}{'at once':>9}{'ms/step':>9}{'tokens/s':>10}"
    for length in lengths:
        ratio = _ratio(plan, length)
        ratio_text = "-" if ratio is None else f"{ratio:.1f}"
        line = f"{length:>8,}{plan.num_paged(length):>10,}{plan.num_contiguous:>12,}{ratio_text:>8}"
        if device is not None:
            batch = plan.num_running(length)
            seconds = step_bound(plan, device, batch, length).seconds
            line += f"{batch:>9,}{1000 * seconds:>9.2f}{batch / seconds:>10,.0f}"
        yield line
    if device is not None:
        yield ""
        yield "The times are lower bounds, computed from the published figures of the device."


def _ratio(plan: MemoryPlan, length: int) -> float | None:
    return plan.num_paged(length) / plan.num_contiguous if plan.num_contiguous else None


if __name__ == "__main__":
    sys.exit(main())
