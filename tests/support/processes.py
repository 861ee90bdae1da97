"""Programs that run in processes of their own."""

import os
import subprocess
import sys
import textwrap


def run_on_devices(program: str, *arguments: object, num_devices: int = 4) -> str:
    """What a program prints, run on devices that are parts of this CPU.

    A process of its own, because JAX counts the devices when it starts.
    """
    # After what a run of tests asks for, as "--unoptimised" does.
    asked = os.environ.get("XLA_FLAGS", "")
    flags = f"{asked} --xla_force_host_platform_device_count={num_devices}"
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
