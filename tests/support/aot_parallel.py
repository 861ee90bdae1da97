"""Compile an engine's program for several devices that are not here, and say what it needs.

    python -m tests.support.aot_parallel v5e:4x4 70B          # 16 chips of TPU v5e
    python -m tests.support.aot_parallel h200:8 405B          # 8 H200s
    python -m tests.support.aot_parallel v6e:2x4 70B --program prefill

Needs the extra "aot". The pool has the blocks that `paged_jax.plan` finds room for, so a compiler
that enforces the memory of its device, as that of TPUs does, checks the plan as well. Nothing runs:
this proves that programs compile, what they allocate and what devices send each other, no more.

It is a script because JAX and libtpu must find their settings in the environment when imported.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
import time
from typing import Any

from tests.support import aot_environment

aot_environment.set_for_tpus()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from paged_jax import Llama  # noqa: E402
from paged_jax.engine.memory_plan import MemoryPlan, make_plan  # noqa: E402
from paged_jax.engine.step_bound import DEVICES, collectives  # noqa: E402
from paged_jax.models.config import LlamaConfig  # noqa: E402
from paged_jax.models.paged_model import create_cache  # noqa: E402
from paged_jax.models.tensor_parallel import TensorParallel, parameter_names  # noqa: E402
from paged_jax.runner import DecodeState  # noqa: E402
from paged_jax.runner.placement import Division  # noqa: E402
from paged_jax.runner.programs import Call, Structure, list_programs  # noqa: E402
from paged_jax.sampling import MAX_LOGPROBS  # noqa: E402
from tests.support.aot_cases import count_collectives  # noqa: E402
from tests.support.decode_step import LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B  # noqa: E402
from tests.support.h200 import H200  # noqa: E402
from tests.support.kernel_cases import lowering_for  # noqa: E402

MODELS = {"8B": LLAMA_3_8B, "70B": LLAMA_3_70B, "405B": LLAMA_3_405B}


def find_devices(device: str, shape: str) -> list[Any]:
    """Devices to compile for, which are only descriptions."""
    if DEVICES[device].platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{device}:{shape}")
    else:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"1x{shape}x1", target_config=H200
        )
    return list(topology.devices)


@dataclasses.dataclass(frozen=True)
class Programs:
    """What an engine over some devices would compile, from its plan and shapes alone."""

    plan: MemoryPlan
    parallel: TensorParallel

    @functools.cached_property
    def _weights(self) -> tuple[list[jax.ShapeDtypeStruct], Structure]:
        """The weights as programs read them, each in its place."""
        plan, parallel = self.plan, self.parallel
        scan_layers = plan.platform == "tpu"  # as the engine has them there

        def model_of(config: LlamaConfig) -> Llama:
            make = functools.partial(Llama, config, dtype=plan.dtype, scan_layers=scan_layers)
            return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))

        padded = plan.shard.vocab_size * plan.num_devices
        state = nnx.state(model_of(dataclasses.replace(parallel.wide, vocab_size=padded)))
        arrays, treedef = jax.tree.flatten(state)
        specs = tuple(
            parallel.spec(name, x.ndim)
            for name, x in zip(parameter_names(state), arrays, strict=True)
        )
        part = parallel.model_of_part(model_of(parallel.config))
        structure = Structure(
            nnx.graphdef(part),
            treedef,
            cascade=False,
            backend=None,
            division=Division(parallel.mesh, specs),
            platform=plan.platform,
        )
        return [self._placed(x, spec) for x, spec in zip(arrays, specs, strict=True)], structure

    def _placed(self, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.parallel.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def _state(self) -> DecodeState:
        plan, sizes = self.plan, self.plan.sizes

        def create() -> DecodeState:
            cache = create_cache(
                self.parallel.wide,
                num_slots=sizes.num_slots,
                max_length=sizes.max_model_len,
                num_blocks=plan.num_engine_blocks,
                block_size=sizes.block_size,
                dtype=plan.kv_dtype,
                platform=plan.platform,
            )
            return DecodeState.create(
                cache,
                plan.config.vocab_size,
                max_logit_bias=sizes.max_logit_bias,
                max_stop_ids=sizes.max_stop_ids,
                max_forced=sizes.max_forced,
            )

        return jax.eval_shape(create)

    def _call(self, program: str, structure: Structure) -> Call:
        sizes = self.plan.sizes
        programs = list_programs(structure, sizes, MAX_LOGPROBS)
        slots = np.zeros(sizes.num_slots, np.int32)
        if program == "decode":
            return programs.decode.call(slots, np.int32(1), np.bool_(False), np.bool_(False))
        token_ids = np.zeros((1, sizes.max_chunk), np.int32)
        return programs.prefill.call(token_ids, slots[:1], slots[:1])

    def compile(self, program: str) -> jax.stages.Compiled:
        """Compile ``"decode"`` of all slots, or ``"prefill"`` of one chunk."""
        weights, structure = self._weights
        state = self._state()
        assert structure.division is not None
        places = structure.division.shardings(state)
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
        )
        call = self._call(program, structure)
        args = [self._placed(x, PartitionSpec()) for x in call.args]
        platform = "cuda" if self.plan.platform == "gpu" else "tpu"
        with lowering_for(platform):
            traced = call.program.trace(weights, state, *args, **call.static)
            return traced.lower(lowering_platforms=(platform,)).compile()


def describe(plan: MemoryPlan, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What a program needs of each device, beside what was planned."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = plan.num_engine_blocks * plan.footprint.block
    return {
        "num_blocks": plan.num_engine_blocks,
        "planned": {
            "weights": plan.footprint.weights,
            "pool": pool,
            "step": plan.footprint.step,
            "collectives": collectives(plan, plan.sizes.num_slots)._asdict(),
        },
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        # Of a loop once, whatever it does.
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
    parser.add_argument("--layers", type=int, help="of the model, in place of all of them")
    args = parser.parse_args()
    name, _, shape = args.devices.partition(":")
    devices, device = find_devices(name, shape), DEVICES[name]
    config = MODELS[args.model]
    config = dataclasses.replace(
        config, num_hidden_layers=args.layers or config.num_hidden_layers, dtype="bfloat16"
    )
    plan = make_plan(
        config,
        int(args.memory_fraction * device.memory),
        device.platform,
        dtype=args.dtype,
        block_size=args.block_size or (128 if device.platform == "tpu" else 16),
        max_num_seqs=args.batch,
        max_model_len=args.max_model_len,
        tensor_parallel_size=len(devices),
    )
    mesh = Mesh(np.asarray(devices), ("devices",))
    start = time.process_time()
    compiled = Programs(plan, TensorParallel.over("aot_parallel", mesh, config)).compile(
        args.program
    )
    case = describe(plan, compiled) | {"compile_seconds": round(time.process_time() - start)}
    json.dump({"jax": jax.__version__, "cases": {args.program: case}}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
