"""Count the instruction bundles of TPU kernels, without a TPU, and print them as JSON.

    python -m tests.support.aot_bundles v6e decode "write of 64 tokens"

A bundle holds the instructions of about one cycle. The compiler writes the bundles of each kernel
to a file, in which ``LB`` marks the first bundle of a loop, and ``>`` stands for the depth.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import aot_environment

_DUMPS = Path(tempfile.mkdtemp())
os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={_DUMPS} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
)
aot_environment.set_for_tpus()

import json  # noqa: E402
import shutil  # noqa: E402

from jax.sharding import SingleDeviceSharding  # noqa: E402

from tests.support.aot_cases import TPU_CASES, Case  # noqa: E402
from tests.support.aot_tpu import TOPOLOGIES, find_devices  # noqa: E402

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*([A-Z]{2})?\s*:\s*(>*)")


def read_bundles(text: str) -> dict[str, Any]:
    """Return the number of bundles of a kernel, and for each loop its bundles, copies and waits."""
    bundles = [(match, line) for line in text.splitlines() if (match := _BUNDLE.match(line))]
    loops = []
    for first, (match, _) in enumerate(bundles):
        if match[1] != "LB":
            continue
        depth, end = len(match[2]), first + 1
        while end < len(bundles) and len(bundles[end][0][2]) >= depth:
            if bundles[end][0][1] == "LB" and len(bundles[end][0][2]) == depth:
                break
            end += 1
        body = "\n".join(line for _, line in bundles[first:end])
        loops.append(
            {
                "depth": depth,
                "bundles": end - first,
                "copies": len(re.findall(r"= dma\.(?!done)", body)),
                "waits": len(re.findall(r"= dma\.done\.wait", body)),
            }
        )
    return {"bundles": len(bundles), "loops": loops}


def compile_case(generation: str, name: str) -> dict[str, Any]:
    """Compile a case with a single kernel, and read its bundles."""
    case = TPU_CASES[generation][name]
    assert isinstance(case, Case)
    shutil.rmtree(_DUMPS)
    _DUMPS.mkdir()
    case.lower("tpu", SingleDeviceSharding(find_devices(TOPOLOGIES[generation])[0])).compile()
    [path] = [
        path
        for path in _DUMPS.glob("*-final_bundles.txt")
        if "paged_" in path.name and "schedule-analysis" not in path.name
    ]
    return read_bundles(path.read_text())


def main() -> None:
    generation, *names = sys.argv[1:]
    cases = {name: compile_case(generation, name) for name in names}
    shutil.rmtree(_DUMPS)
    json.dump({"cases": cases, "counts": {}}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
