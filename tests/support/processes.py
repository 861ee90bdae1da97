"""Programs in separate processes."""

import os
import subprocess
import sys
import textwrap

from tests import COLLECTOR_THRESHOLD


def run_on_devices(program: str, *arguments: object, num_devices: int = 4) -> str:
    """Run a program on simulated devices of this CPU, and return its output.

    It needs a new process, because JAX counts the devices when it starts.
    """
    # Added to the flags of the test run, such as the flags of "--unoptimised".
    asked = os.environ.get("XLA_FLAGS", "")
    flags = f"{asked} --xla_force_host_platform_device_count={num_devices}"
    setup = f"import gc; gc.set_threshold({COLLECTOR_THRESHOLD})\n"
    return subprocess.run(
        [sys.executable, "-c", setup + textwrap.dedent(program), *map(str, arguments)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        timeout=1800,  # for a stuck program, on a busy machine
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
