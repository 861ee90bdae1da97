"""Compile for TPUs without a TPU, and print the resources of the compiled programs as JSON.

    python -m tests.support.aot_tpu v5e              # all cases for this generation
    python -m tests.support.aot_tpu v6e decode       # cases with names that start with this word

Requires the extra "aot". The compiler in libtpu enforces the limits of the chip: alignment of
tiles, the sizes of VMEM and HBM, supported operations. Nothing runs. This shows that programs
compile and their memory. It does not show correctness or speed. Results of programs that have not
changed come from a file, see `aot_store`.

It is a script because JAX and libtpu read their settings from the environment when they are
imported.
"""

import base64
import json
import re
import sys
import traceback
from typing import Any

from tests.support import aot_environment, aot_store

aot_environment.set_for_tpus()
aot_store.omit_locations()

import jax  # noqa: E402
from jax._src.lib import tpu  # noqa: E402
from jax._src.lib.mlir import ir  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from tests.support import aot_reading  # noqa: E402
from tests.support.aot_cases import TPU_CASES, chosen  # noqa: E402
from tests.support.aot_reading import count_collectives  # noqa: E402
from tests.support.engine_step import EngineStep  # noqa: E402

# The smallest topology of each generation that libtpu describes. The script compiles for one of its
# chips.
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}


def find_devices(name: str) -> Any:
    """Return the described devices of a topology to compile for."""
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:
        sys.exit(
            f"aot_tpu.py: jax {jax.__version__} cannot compile for a TPU here: {error}\n"
            'Install the extra "aot", with the libtpu that jax[tpu] names.'
        )
    return topology.devices


def compile_case(name: str, generation: str, store: aot_store.Store) -> dict[str, Any]:
    """Return the resources of a case from the store, or compile it."""
    case, topology = TPU_CASES[generation][name], TOPOLOGIES[generation]
    if isinstance(case, EngineStep):
        topology = case.topology if case.num_devices > 1 else topology
        lowered = case.lower("tpu", find_devices(topology)[: case.num_devices])
    else:
        lowered = case.lower("tpu", SingleDeviceSharding(find_devices(topology)[0]))
    return store.compile(name, lowered, read_resources, facts=(topology,))


def read_resources(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Return the resources of a compiled program."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "multiplied_types": multiplied_types(text),
        "collectives": count_collectives(text),
        "moved_shapes": moved_shapes(text),
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "flops": (compiled.cost_analysis() or {}).get("flops"),
    }


def moved_shapes(text: str) -> list[str]:
    """Return shapes of arrays that XLA gathers, scatters to, slices or updates, such as "8,128"."""
    ops = "gather|scatter|dynamic-slice|dynamic-update-slice"
    return sorted(set(re.findall(rf" = \w+\[([\d,]+)\]\S* (?:{ops})\(", text)))


def multiplied_types(text: str) -> list[str]:
    """Return the dtypes that kernels multiply on the matrix unit, as MLIR names."""
    types = set()
    for body in re.findall(r'"body":"([^"]+)"', text):
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            tpu.register_dialect(context)
            kernel = str(ir.Module.parse(base64.b64decode(body)))
        for left, right in re.findall(
            r"tpu\.matmul.* : \(vector<[^>]*x(\w+)>, vector<[^>]*x(\w+)>", kernel
        ):
            types |= {left, right}
    return sorted(types)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TOPOLOGIES:
        sys.exit(f"usage: python -m tests.support.aot_tpu {{{','.join(TOPOLOGIES)}}} [name ...]")
    generation, *names = sys.argv[1:]
    results = {}
    sources = __file__, aot_reading.__file__, aot_environment.__file__
    store = aot_store.Store("tpu", generation, TPU_CASES[generation], sources)
    for name in chosen(TPU_CASES[generation], names):
        try:
            results[name] = compile_case(name, generation, store)
        except Exception:
            # A case that does not compile must not hide the others.
            results[name] = {"error": traceback.format_exc()}
    document = {"jax": jax.__version__, "cases": results, "counts": store.counts}
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
