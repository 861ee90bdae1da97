"""Compile an engine's program for several described devices, and print its resources.

    python -m tests.support.aot_parallel v5e:4x4 70B          # 16 chips of TPU v5e
    python -m tests.support.aot_parallel h200:8 405B          # 8 H200s
    python -m tests.support.aot_parallel v6e:2x4 70B --program prefill

Requires the extra "aot". The pool has the number of blocks that `paged_jax.plan` computes, so a
compiler that enforces the memory limit of its device, as the TPU compiler does, also checks the
plan. Nothing runs. This shows that programs compile, their memory and their communication. Results
of programs that have not changed come from a file, see `aot_store`.

It is a script because JAX and libtpu read their settings from the environment when they are
imported.
"""

import argparse
import dataclasses
import json
import re
import sys
import time
from typing import Any

from tests.support import aot_environment, aot_store

aot_environment.set_for_tpus()
aot_store.omit_locations()

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from paged_jax.engine.memory_plan import DEVICES, MemoryPlan, collectives, make_plan  # noqa: E402
from tests.support import aot_reading  # noqa: E402
from tests.support.aot_reading import count_collectives  # noqa: E402
from tests.support.decode_step import LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B  # noqa: E402
from tests.support.engine_step import EngineStep  # noqa: E402
from tests.support.gpus import GPUS  # noqa: E402
from tests.support.model_shapes import GEMMA_3_27B, GPT_OSS_20B, with_layers  # noqa: E402

MODELS = {
    "8B": LLAMA_3_8B,
    "70B": LLAMA_3_70B,
    "405B": LLAMA_3_405B,
    "gemma-3-27b": GEMMA_3_27B,
    "gpt-oss-20b": GPT_OSS_20B,
}


def find_devices(device: str, shape: str) -> list[Any]:
    """Return the described devices to compile for."""
    if DEVICES[device].platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{device}:{shape}")
    else:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"1x{shape}x1", target_config=GPUS[device].target_config
        )
    return list(topology.devices)


def describe(plan: MemoryPlan) -> dict[str, Any]:
    """Return the planned resources of a program on each device."""
    return {
        "num_blocks": plan.num_engine_blocks,
        "planned": {
            "weights": plan.footprint.weights,
            "pool": plan.footprint.pool_bytes(plan.num_engine_blocks),
            "step": plan.footprint.step,
            "collectives": collectives(plan, plan.sizes.num_slots)._asdict(),
        },
    }


def read_resources(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Return the resources of a compiled program on each device."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        # Counts a loop once.
        "collectives": count_collectives(text),
        "kernels": len(re.findall(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla)', text)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aot_parallel")
    parser.add_argument("devices", help="such as v5e:4x4 or h200:8")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--program", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--memory-fraction", type=float, default=1.0)
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    args = parser.parse_args()
    name, _, shape = args.devices.partition(":")
    devices, device = find_devices(name, shape), DEVICES[name]
    config = MODELS[args.model]
    if args.layers is not None:
        config = with_layers(config, args.layers)
    config = dataclasses.replace(config, dtype="bfloat16")
    plan = make_plan(
        config,
        int(args.memory_fraction * device.memory),
        device.platform,
        dtype=args.dtype,
        block_size=args.block_size,
        max_num_seqs=args.batch,
        max_model_len=args.max_model_len,
        tensor_parallel_size=len(devices),
    )
    start = time.process_time()
    step = EngineStep.of_plan(plan, program=args.program)
    is_gpu = device.platform == "gpu"
    lowered = step.lower("cuda" if is_gpu else device.platform, devices)
    case = " ".join(sys.argv[2:])
    store = aot_store.Store(
        device.platform,
        args.devices,
        [case],
        (__file__, aot_reading.__file__, aot_environment.__file__),
    )
    facts = (args.devices, GPUS[name].target_config if is_gpu else None)
    resources = store.compile(case, lowered, read_resources, facts=facts)
    seconds = round(time.process_time() - start)  # only of lowering if the result is stored
    results = {args.program: describe(plan) | resources | {"compile_seconds": seconds}}
    document = {"jax": jax.__version__, "cases": results, "counts": store.counts}
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
