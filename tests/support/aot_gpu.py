"""Compile for a GPU without a GPU, and print the resources of the compiled programs as JSON.

    python -m tests.support.aot_gpu                  # all cases, for an H200
    python -m tests.support.aot_gpu decode step      # cases with names that start with these words
    python -m tests.support.aot_gpu --gpu l4 decode  # for another GPU, see `gpus`; only ops

Requires the extra "aot". XLA compiles for the description of a GPU. ptxas, run again on the PTX of
this library's kernels, reports registers and spills. For kernels that spill, and for the cases in
`GPU_LISTED`, nvdisasm lists the instructions of loops. Nothing runs. This shows that programs
compile and their registers, shared memory, copies, instructions and launches. It does not show
correctness or speed. Results of programs that have not changed come from a file, see `aot_store`.

It is a script because JAX reads its settings from the environment when it is imported.
"""

import argparse
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support import aot_store

_folder = tempfile.TemporaryDirectory(prefix="aot_gpu_")  # removed at exit
DUMP = Path(_folder.name)
os.environ["JAX_PLATFORMS"] = "cpu"
aot_store.omit_locations()
# Programs from a cache would dump no PTX.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
)
# Mosaic GPU compiles its kernels itself, and XLA calls them.
os.environ.update(MOSAIC_GPU_DUMP_TO=str(DUMP), MOSAIC_GPU_DUMP_PTX="1")

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.mosaic.gpu import utils as mosaic_utils  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from tests.support import aot_reading  # noqa: E402
from tests.support.aot_cases import (  # noqa: E402
    GPU_CASES,
    GPU_COMPILER_OPTIONS,
    GPU_LISTED,
    chosen,
)
from tests.support.aot_reading import (  # noqa: E402
    OUR_KERNELS,
    count_collectives,
    count_weight_reads,
)
from tests.support.engine_step import EngineStep  # noqa: E402
from tests.support.expert_cases import ExpertCase  # noqa: E402
from tests.support.gpus import GPUS, Gpu  # noqa: E402
from tests.support.kernel_cases import Case  # noqa: E402
from tests.support.quantised_cases import QuantisedCase  # noqa: E402
from tests.support.state_cases import StateCase  # noqa: E402


def find_tool(name: str) -> str:
    """Return the path of a CUDA tool that pip installed, as for XLA, or on the PATH."""
    found = aot_store.find_cuda(f"bin/{name}") or shutil.which(name)
    if found is None:
        sys.exit(
            f'aot_gpu.py: no {name}. Install the extra "aot", or put a CUDA toolkit on the PATH.'
        )
    return str(found)


def find_devices(shape: str, gpu: Gpu) -> Any:
    """Return the described devices to compile for."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=shape, target_config=gpu.target_config
        )
    except Exception as error:
        sys.exit(
            f"aot_gpu.py: jax {jax.__version__} cannot compile for a GPU here: {error}\n"
            'Install the extra "aot", with jax-cuda13-pjrt of the version of jax.'
        )
    return topology.devices


def compile_case(name: str, gpu: Gpu, store: aot_store.Store) -> dict[str, Any]:
    """Return the resources of a case from the store, or compile it."""
    case, topology = GPU_CASES[name], "1x1x1"
    # Without a GPU, Mosaic GPU would compile for compute capability 9.0.
    mosaic_utils._infer_arch = lambda: gpu.device.compute_capability
    if isinstance(case, EngineStep):
        topology = case.topology
        lowered = case.lower("cuda", find_devices(topology, gpu))
    else:
        sharding = SingleDeviceSharding(find_devices(topology, gpu)[0])
        is_op = isinstance(case, Case | ExpertCase | QuantisedCase | StateCase)
        others = {"gpu": gpu.device} if is_op else {}
        lowered = case.lower("cuda", sharding, **others)
    for path in DUMP.iterdir():
        path.unlink()
    is_listed = name in GPU_LISTED
    return store.compile(
        name,
        lowered,
        functools.partial(read_resources, is_listed=is_listed),
        options=GPU_COMPILER_OPTIONS.get(name),
        facts=(gpu.target_config, topology, is_listed),
    )


def read_resources(compiled: jax.stages.Compiled, *, is_listed: bool) -> dict[str, Any]:
    """Return the resources of a program that was just compiled."""
    memory = compiled.memory_analysis()
    launches, num_conditionals = read_launches()
    return {
        "launches": launches,
        "num_conditionals": num_conditionals,
        "kernels": [
            examine_kernel(path, is_listed=is_listed)
            for path in sorted(DUMP.glob("*.ptx"))
            if is_ours(path)
        ],
        "collectives": count_collectives(compiled.as_text()),
        "weight_reads": count_weight_reads(compiled.as_text()),
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
    }


def read_launches() -> tuple[list[dict[str, Any]], int]:
    """Return everything that XLA launches on the GPU, in order; launches in a loop count once.

    Each launch comes with its surroundings, outermost first: the ``"body"`` or ``"condition"`` of a
    loop, or a branch of a conditional. Also returns the number of conditionals.
    """
    listings = list(DUMP.glob("*.thunk_sequence.txt"))
    if len(listings) != 1:
        raise RuntimeError(f"XLA must dump exactly one sequence of launches, got {listings}.")
    thunk = re.compile(r" *\d+: k(\w+) +\[[^]]*\] *(\w*)(.*)")
    launches, num_conditionals = [], 0
    parts: list[tuple[int, str]] = []  # the surroundings of the next line, and their indentation
    for line in listings[0].read_text().splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip().removeprefix("No thunks.")
        if text.endswith(":"):
            name = text.strip(" :")
            if name == "body":  # its loop is the last loop with a preceding condition
                loop = max(i for i, part in enumerate(parts) if part[1] == "condition")
                indent = parts[loop][0]
            elif name == "condition":  # follows its loop directly, and is not always indented
                indent = parts[-1][0]
            parts = [part for part in parts if part[0] < indent] + [(indent, name)]
            continue
        if not (found := thunk.match(line)):
            continue
        kind, name, rest = found.groups()
        parts = [part for part in parts if part[0] <= indent]
        if kind == "While":
            parts.append((indent + 1, "condition"))
        num_conditionals += kind == "Conditional"
        if kind in ("While", "Conditional", "Sequential", "CommandBuffer", "DynamicSliceFusion"):
            continue  # their contents are listed below them
        shared = re.search(r"shared_memory: (\d+) bytes", rest)
        launches.append(
            {
                "name": name,
                "shared_memory_bytes": int(shared[1]) if shared else 0,
                "within": [name for _, name in parts],
            }
        )
    return launches, num_conditionals


def is_ours(path: Path) -> bool:
    """Return whether a PTX file contains a kernel of this library."""
    entry = re.search(r"\.entry (\w+)", path.read_text())
    return entry is not None and entry[1].startswith(OUR_KERNELS)


def examine_kernel(path: Path, *, is_listed: bool) -> dict[str, Any]:
    """Count instructions in the PTX of a kernel, and read registers and loops from its assembly.

    nvdisasm needs half a second for any kernel, more than ptxas. So it lists the instructions only
    if `is_listed` is True, or if the kernel spills registers.
    """
    ptx, cubin = path.read_text(), path.with_suffix(".cubin")
    target = find(r"\.target (\w+)", ptx)
    _, log = run("ptxas", "--verbose", f"--gpu-name={target}", str(path), f"--output-file={cubin}")
    spilled_bytes = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    listed = examine_listing(cubin) if is_listed or spilled_bytes else {"spills_in_loops": 0}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?\], *\[.*?\], *(\w+)", ptx)
    return {
        "name": find(r"\.entry (\w+)", ptx).removesuffix("_mosaic_gpu_kernel"),
        "target": target,
        "registers": int(find(r"Used (\d+) registers", log)),
        "spilled_bytes": spilled_bytes,
        "async_copies": Counter(f"{int(size, base=0)} bytes" for size in copies),
        "global_accesses": count_accesses(ptx),
        "tensor_core_products": len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
        "warpgroup_products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "bulk_copies": Counter(
            re.findall(r"cp\.async\.bulk\.(?:tensor\.\dd\.)?(global|shared)", ptx)
        ),
        "divisions_by_constants": find_divisions_by_constants(ptx),
        "waits_first": waits_first(ptx),
    } | listed


def examine_listing(cubin: Path) -> dict[str, Any]:
    """Disassemble a kernel, and return facts about its instructions."""
    listing, _ = run("nvdisasm", "--print-code", str(cubin))
    loops = find_loops(listing)
    return {
        "loop_instructions": [len(loop) for loop in loops],
        "warpgroup_loops": [len(x) for x in loops if any("HGMMA" in line for line in x)],
        "spills_in_loops": sum("SpillRefill" in line for loop in loops for line in loop),
        "counting": find_counting(listing),
    }


def run(tool: str, *arguments: str) -> tuple[str, str]:
    """Run a tool and return its stdout and stderr."""
    done = subprocess.run([find_tool(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(arguments)}: {done.stderr}")
    return done.stdout, done.stderr


def count_accesses(ptx: str) -> dict[str, int]:
    """Count the loads and stores of 16 bytes per thread in global memory, in the code."""
    return Counter(re.findall(r"(ld|st)\.global\S*?\.v4\.b32", ptx))


def find_loops(listing: str) -> list[list[str]]:
    """Return the instructions of each loop of a disassembled kernel."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    # The code after the last EXIT belongs to diverged threads, and branches back: leave it out.
    for line in listing[: listing.rfind(" EXIT ")].splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            instructions.append(line)
            back = re.search(r"\bBRA\b.*(\.L_x_\d+)", line)
            begin = labels.get(back[1]) if back else None
            # A branch to itself only stops execution after the end of the kernel.
            if begin is not None and begin < len(instructions) - 1:
                loops.append(instructions[begin:])
    return loops


def find_counting(listing: str) -> list[str]:
    """Return the memory-ordering instructions around an atomic addition, without repetitions.

    The range is from the last store before the addition to the next load. Empty if there is no
    addition. Mosaic GPU stores by bulk copies (UBLKCP), and loads by generic addresses (LD).
    """
    pattern = r"\b(STG|UBLKCP|LDG|LD(?=\.)|BAR\.SYNC|MEMBAR[.\w]*|ATOMG[.\w]*|CCTL\.IVALL)"
    names = [name for name, _ in itertools.groupby(re.findall(pattern, listing))]
    counts = [i for i, name in enumerate(names) if name.startswith("ATOMG")]
    if not counts:
        return []
    [count] = counts
    begin = max(i for i in range(count) if names[i] in ("STG", "UBLKCP"))
    end = min(i for i in range(count, len(names)) if names[i] in ("LDG", "LD"))
    return names[begin : end + 1]


def find_divisions_by_constants(ptx: str) -> list[str]:
    """Return the divisors of approximate divisions by a number that the compiler knows."""
    constants = dict(re.findall(r"mov\.[bf]32\s+(%\w+), (0f\w+|\d+);", ptx))
    divisors = re.findall(r"div\.full\.f32\s+%\w+, [^,]+, ([^;]+);", ptx)
    return [constants.get(x, x) for x in divisors if x in constants or not x.startswith("%")]


def waits_first(ptx: str) -> bool | None:
    """Return whether a kernel waits for the one before it ahead of all global memory accesses.

    XLA launches kernels of GPUs of compute capability 9.0 and later before the previous one ends
    (programmatic dependent launch). None if the kernel never waits, as on older GPUs.
    """
    wait = ptx.find("griddepcontrol.wait")
    access = re.search(r"\b(ld|st|atom|red|cp|prefetch)\b\S*\.global", ptx)
    return None if wait < 0 else access is None or wait < access.start()


def find(pattern: str, text: str) -> str:
    """Return the group of a pattern that must occur in the output of a tool."""
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in what the compiler wrote: {text[:1000]}")
    return match[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aot_gpu")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("names", nargs="*", help="regular expressions, from the beginning of names")
    args = parser.parse_args()
    results = {}
    store = aot_store.Store("gpu", args.gpu, GPU_CASES, (__file__, aot_reading.__file__))
    for name in chosen(GPU_CASES, args.names):
        try:
            results[name] = compile_case(name, GPUS[args.gpu], store)
        except Exception:
            # A case that does not compile must not hide the others.
            results[name] = {"error": traceback.format_exc()}
    document = {"jax": jax.__version__, "cases": results, "counts": store.counts}
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
