"""Programs that interpret a kernel for GPUs or TPUs, compiled in less time."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def jit_interpreted(function: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """`jax.jit` for a program whose machine code is for tests alone, as `kernels/conftest.py` says.

    On a device that the kernel is for it is `jax.jit` and no more.
    """
    return jax.jit(function, compiler_options=_compiler_options(), **jit_options)


@functools.cache
def _compiler_options() -> dict[str, bool] | None:
    """Fusions by XLA's older emitters: MLIR's take twice as long to compile a whole program.

    From jax 0.12 on there are no others. If that is the oldest that is supported, none of this is
    needed.
    """
    options = {"xla_cpu_use_fusion_emitters": False}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return None
    return options
