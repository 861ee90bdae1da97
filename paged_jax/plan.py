"""What fits in memory, before anything is loaded: ``python -m paged_jax.plan --memory 24GiB``.

Only ``config.json`` is read. The arithmetic is that of `paged_jax.engine.footprint`, by which an
engine with ``memory_fraction`` sizes its pool.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.cache.blocks import num_blocks_needed
from paged_jax.checks import check_positive
from paged_jax.command_line import (
    Parser,
    add_size_arguments,
    size_options,
)
from paged_jax.engine import footprint as memory
from paged_jax.engine.footprint import Footprint, in_units
from paged_jax.engine.inputs import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.huggingface import resolve_dtype
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.runner.sizes import MAX_NUM_BATCHED_TOKENS, Sizes

_UNITS = {"": 1}
_UNITS |= {f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)}
# As vLLM and Kubernetes read them.
_UNITS |= {letter: 1000**i for i, letter in enumerate("kmgt", 1)}
_PLATFORMS = ("cpu", "gpu", "tpu")
_LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an engine takes, and what fits beside it.

    Attributes:
      config: of the model.
      dtype: of the weights.
      kv_dtype: of K and V.
      platform: where it runs.
      sizes: of the engine's programs; `num_blocks` is what fits.
      memory: bytes that the engine may take.
      footprint: bytes that it takes.
    """

    config: LlamaConfig
    dtype: str
    kv_dtype: str
    platform: str
    sizes: Sizes
    memory: int
    footprint: Footprint

    @property
    def num_parameters(self) -> int:
        """Of the model; tied ones count once."""
        return self.footprint.weights // jnp.dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token, in all layers."""
        return self.footprint.block // self.sizes.block_size

    @property
    def num_contiguous(self) -> int:
        """Sequences in the same bytes, were each given `max_model_len` tokens beforehand."""
        footprint, sizes = self.footprint, self.sizes
        return (self.memory - footprint.fixed) // (sizes.max_model_len * self.token_bytes)

    @property
    def num_engine_blocks(self) -> int:
        """Blocks of an engine's pool: no more than all of its slots at full length can use."""
        sizes = self.sizes
        useful = memory.most_useful_blocks(sizes.num_slots, sizes.max_model_len, sizes.block_size)
        return min(sizes.num_blocks, useful)

    def num_paged(self, length: int) -> int:
        """Sequences of so many tokens in the pool, none of which shares a block."""
        return self.sizes.num_blocks // num_blocks_needed(length, self.sizes.block_size)


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


def make_plan(
    config: LlamaConfig,
    memory_bytes: int,
    platform: str,
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_model_len: int | None = None,
    max_chunk: int = 512,
    num_speculative_tokens: int = 0,
) -> Plan:
    """Compute what fits in so many bytes.

    Args:
      config: of the model.
      memory_bytes: that the engine may take in all.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      dtype, kv_dtype, block_size, max_num_seqs, max_model_len, max_chunk, num_speculative_tokens:
        as for `Engine`.

    Raises:
      ValueError: an argument is out of bounds, or not even one block fits.

    Example:
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> plan = make_plan(config, 512 << 20, "cpu")
      >>> plan.num_parameters, plan.token_bytes, plan.sizes.num_blocks > 20_000
      (292800, 1280, True)
    """
    check_positive("plan", block_size=block_size, max_num_seqs=max_num_seqs, max_chunk=max_chunk)
    if num_speculative_tokens:
        check_positive("plan", num_speculative_tokens=num_speculative_tokens)
    context = config.max_position_embeddings
    max_model_len = context if max_model_len is None else max_model_len
    if not 0 < max_model_len <= context:
        raise ValueError(
            f"plan: max_model_len must be positive and at most the model's context of {context}, "
            f"got {max_model_len}."
        )
    weights_dtype = resolve_dtype(dtype, config)
    pool_dtype = memory.resolve_kv_dtype(kv_dtype, weights_dtype, platform)
    sizes = Sizes(
        block_size=block_size,
        num_blocks=0,  # not known yet
        num_slots=max_num_seqs,
        max_model_len=max_model_len,
        max_chunk=min(max_chunk, max_model_len, MAX_NUM_BATCHED_TOKENS),
        max_steps=1,  # of no effect on memory
        num_drafts=num_speculative_tokens,
        max_logit_bias=MAX_LOGIT_BIAS,
        max_stop_ids=len(config.eos_token_ids) + MAX_STOP_TOKEN_IDS,
    )
    footprint = memory.footprint(
        config,
        sizes,
        weights=memory.weight_bytes(config, weights_dtype),
        dtype=weights_dtype,
        kv_dtype=pool_dtype,
        platform=platform,
    )
    footprint.check_fits("plan: memory", memory_bytes)
    return Plan(
        config=config,
        dtype=weights_dtype.name,
        kv_dtype=pool_dtype.name,
        platform=platform,
        sizes=sizes._replace(num_blocks=footprint.num_blocks(memory_bytes)),
        memory=memory_bytes,
        footprint=footprint,
    )


def _from_arguments(args: argparse.Namespace) -> Plan:
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
    device = memory.device_memory(jax.devices()[0])
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


def as_dict(plan: Plan, lengths: list[int]) -> dict[str, Any]:
    """The plan with names and bytes, for machines."""
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
        "num_blocks": sizes.num_blocks,
        "num_engine_blocks": plan.num_engine_blocks,
        "num_tokens": sizes.num_blocks * sizes.block_size,
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


def as_text(plan: Plan, lengths: list[int]) -> str:
    """The plan as people read it."""
    footprint, sizes = plan.footprint, plan.sizes
    pool = sizes.num_blocks * (footprint.block + footprint.block_overhead)
    program = max(footprint.steps, key=lambda name: footprint.steps[name])
    rows = [
        ("memory", plan.memory, f"on {plan.platform}"),
        ("weights", footprint.weights, f"{plan.num_parameters:,} parameters in {plan.dtype}"),
        ("state", footprint.state, f"{sizes.num_slots} slots of {sizes.max_model_len:,} tokens"),
        ("step", footprint.step, f"at most; {program} takes most"),
        (
            "blocks",
            pool,
            f"{sizes.num_blocks:,} of {sizes.block_size} tokens in {plan.kv_dtype}: "
            f"{sizes.num_blocks * sizes.block_size:,} tokens",
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
    if plan.num_engine_blocks < sizes.num_blocks:
        lines += [
            "",
            f"{at_once} at once and can use {plan.num_engine_blocks:,} blocks: an engine takes no "
            "more unless --max-num-seqs is larger.",
        ]
    elif any(plan.num_paged(length) > sizes.num_slots for length in lengths):
        lines += ["", f"{at_once} at once, see --max-num-seqs; others wait."]
    return "\n".join(lines)


def _ratio(plan: Plan, length: int) -> float | None:
    return plan.num_paged(length) / plan.num_contiguous if plan.num_contiguous else None


if __name__ == "__main__":
    sys.exit(main())
