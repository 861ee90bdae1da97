"""XLA compiler options for the programs of an engine."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Compiler options for each `jax.Device.platform`. On GPUs, rematerialization is disabled, because
# XLA counts donated pools twice (as arguments and as results) and concludes that the memory is
# full. To save memory, it would then compute positions and rotary angles again in every layer.
COMPILER_OPTIONS: Mapping[str, dict[str, str]] = {
    "gpu": {"xla_disable_hlo_passes": "rematerialization"}
}

_HAS_OLDER_EMITTERS = jax.__version_info__ < (0, 11)


def compiler_options(platform: str, *, is_unrolled: bool = False) -> Any:
    """Return the compiler options of a program; None for XLA's defaults.

    On CPUs with jax before 0.11, the options select XLA's older code emitters instead of its fusion
    emitters, unless layers are unrolled. During compilation, the fusion emitters need more than 1
    MB per kernel: 230 MB for the 190 kernels of sampling. The older emitters need 30 MB, and
    compile in a sixth less time. Their code is as fast: a decode step takes 0.98 to 1.04 times as
    long, a prompt 0.97 to 0.99 times. They compile programs with unrolled layers more slowly.

    The options for GPUs are in `COMPILER_OPTIONS`.

    Args:
      platform: `jax.Device.platform` of the device that runs the program.
      is_unrolled: whether the layers of the model are unrolled in the program.
    """
    if platform == "cpu" and _HAS_OLDER_EMITTERS and not is_unrolled:
        return {"xla_cpu_use_fusion_emitters": False}
    return COMPILER_OPTIONS.get(platform)


@functools.cache
def jit_for(platform: str, function: Callable[..., Any], **options: Any) -> Any:
    """Return `function`, jitted with the compiler options of a platform.

    The result is cached, so `function` should be defined at module level. `options` are other
    options of `jax.jit`.
    """
    return jax.jit(function, compiler_options=compiler_options(platform), **options)
