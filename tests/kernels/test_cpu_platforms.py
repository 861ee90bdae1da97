"""The C++ kernels compile for other processors, and with GCC and Clang.

Other tests compile them for the processor of this machine. Here, compilers only check syntax and
types of most kernels. With that, Clang rejects assembly for another processor, but GCC does not.
"""

import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest

from paged_jax.kernels.native import library
from paged_jax.kernels.native.kernels import NativeKernel

# Compilers and their flags. Clang uses the headers of the cross compiler for ARM.
_ARM = "--target=aarch64-linux-gnu"
TARGETS = {
    **{f"{name} {level}": (name, f"-march=x86-64-{level}")
       for name in ("g++", "clang++") for level in ("v2", "v3", "v4")},
    "clang++ sapphirerapids": ("clang++", "-march=sapphirerapids"),
    "clang++ armv8": ("clang++", _ARM, "-march=armv8-a"),
    "clang++ apple-m1": ("clang++", _ARM, "-mcpu=apple-m1"),
    "g++ armv8": ("aarch64-linux-gnu-g++", "-march=armv8-a"),
}  # fmt: skip


def compile_for(target: str, kernel: NativeKernel, *flags: str) -> str:
    """Compile a kernel for a target, and return the errors."""
    compiler, *own = TARGETS[target]
    needed = [compiler, "aarch64-linux-gnu-g++"] if _ARM in own else [compiler]
    for name in needed:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is missing")
    command = [x for x in library._command(kernel) if not x.endswith("=native")]
    done = subprocess.run(
        [compiler, *own, *(x for x in command if x not in ("-shared", "-lm")), *flags],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr


def kernels_of(target: str) -> list[NativeKernel]:
    """Return each op in float32, and all kernels of the matmuls.

    Kernels with int8 inputs need instructions for them.
    """
    return [
        kernel
        for kernel in library.all_kernels()
        if (kernel.code is None or kernel.dtype != jnp.int8 or "sapphire" in target)
        and (kernel.op in ("linear", "quantised_linear") or kernel.dtype == jnp.float32)
    ]


def test_quantised_kernels_compile_with_clang_for_apple_processors() -> None:
    kernel = NativeKernel("quantised_linear", jnp.dtype(jnp.float32), "packed4")
    assert not compile_for("clang++ apple-m1", kernel, "-fsyntax-only")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_have_no_errors_on_other_processors(target) -> None:
    for kernel in kernels_of(target):
        assert not compile_for(target, kernel, "-fsyntax-only"), kernel


@pytest.mark.slow
@pytest.mark.parametrize("target", ["g++ armv8", "clang++ apple-m1"])
def test_assembler_accepts_a_kernel_for_arm(target, tmp_path: Path) -> None:
    kernel = NativeKernel("quantised_linear", jnp.dtype(jnp.float32), "packed5")
    out = tmp_path / "out.o"
    assert not compile_for(target, kernel, "-c", "-o", str(out))
    assert out.read_bytes()[18:20] == b"\xb7\0", "the machine of this ELF file is AArch64"
