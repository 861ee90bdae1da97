"""Self-tests of the C++ kernels on an emulated ARM processor.

``python -m tests.support.emulated_arm`` needs Debian with `qemu-user-static` and
`g++-aarch64-linux-gnu`, and the permission to add the architecture arm64 to apt, so that it can
download Debian's Python. Nothing is installed: packages are unpacked in a temporary folder. It
takes about five minutes. The exit status is 1 if a kernel failed its self-test.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jaxlib.version
import lazy_loader
import packaging
import platformdirs

from tests.support import ROOT

_PYTHON = "python3.11"
# Debian's packages of Python and of the libraries that it and jaxlib need.
_DEBS = (
    f"{_PYTHON}-minimal", f"lib{_PYTHON}-minimal", f"lib{_PYTHON}-stdlib", "libc6", "libstdc++6",
    "libgcc-s1", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", "libcrypt1",
)  # fmt: skip
# Pure Python packages of this environment that the kernels import.
_PURE = (lazy_loader, packaging, platformdirs)
# The emulated processor has no name that `-mcpu=native` knows.
_COMPILER = """#!/bin/sh
for flag; do
  shift
  [ "$flag" != -mcpu=native ] || flag=-mcpu=cortex-a72
  set -- "$@" "$flag"
done
exec /usr/bin/aarch64-linux-gnu-g++ "$@"
"""
_PROGRAM = """
import platform
from paged_jax.kernels.native import library

print(platform.machine(), flush=True)
failed = 0
for kernel in library.all_kernels():
    if kernel.code is None or kernel.dtype != "int8":  # int8 inputs need AVX512-VNNI
        why_not = library.load(kernel).reason
        failed += why_not is not None
        print(kernel.op, kernel.code or "", kernel.dtype, why_not or "passed", flush=True)
raise SystemExit(failed > 0)
"""


def main() -> int:
    """Download the packages, run the self-tests, and return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        system, site = folder / "system", folder / "site"
        _unpack_debs(folder / "debs", system)
        _unpack_wheels(folder / "wheels", site)
        for package in _PURE:
            source = Path(str(package.__file__)).parent
            shutil.copytree(source, site / source.name, dirs_exist_ok=True)
        compiler = folder / "c++"
        compiler.write_text(_COMPILER)
        compiler.chmod(0o755)
        environment = {
            "CXX": str(compiler), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": name,
            "PYTHONPATH": f"{site}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        python = system / "usr/bin" / _PYTHON
        command = ["qemu-aarch64-static", "-L", str(system), str(python), "-c", _PROGRAM]
        return subprocess.run(command, env=environment).returncode


def _unpack_debs(downloads: Path, system: Path) -> None:
    downloads.mkdir()
    has_arm = "arm64" in _output("dpkg", "--print-foreign-architectures").split()
    if not has_arm:
        _output("dpkg", "--add-architecture", "arm64")
    try:
        _output("apt-get", "update", "--quiet")
        _output("apt-get", "download", *(f"{each}:arm64" for each in _DEBS), cwd=downloads)
    finally:
        if not has_arm:
            _output("dpkg", "--remove-architecture", "arm64")
    for package in downloads.iterdir():
        _output("dpkg", "--extract", str(package), str(system))


def _unpack_wheels(downloads: Path, site: Path) -> None:
    platforms = [f"manylinux_2_{version}_aarch64" for version in (28, 27, 17)]
    version = jaxlib.version.__version__
    _output(
        sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(downloads),
        *(word for each in platforms for word in ("--platform", each)),
        "--python-version", "3.11", "--only-binary=:all:",
        f"jax=={version}", f"jaxlib=={version}", "numpy",
    )  # fmt: skip
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)


def _output(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
