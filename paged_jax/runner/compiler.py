"""What XLA is asked for when it compiles."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# By `jax.Device.platform`. For GPUs XLA counts the donated pools twice, as arguments and results,
# takes the memory for overfull where they fill it, and would compute positions, cosines and sines
# again in every layer.
COMPILER_OPTIONS: Mapping[str, dict[str, str]] = {
    "gpu": {"xla_disable_hlo_passes": "rematerialization"}
}

_HAS_OLDER_EMITTERS = jax.__version_info__ < (0, 11)


def compiler_options(platform: str, *, is_unrolled: bool = False) -> Any:
    """Options for a program, or None.

    For CPUs XLA's fusion emitters keep more than 1 MB for each kernel until a program is compiled,
    230 MB for the 190 that choose tokens; the older ones take 30 MB and a sixth less time, and make
    code of the same speed (0.98 to 1.04 of a step's time, 0.97 to 0.99 of a prompt's). Of unrolled
    layers they take longer to make it; and jax 0.11 no longer has them.

    Args:
      platform: that of `jax.Device`.
      is_unrolled: whether the program has the layers of a model one by one.
    """
    if platform == "cpu" and _HAS_OLDER_EMITTERS and not is_unrolled:
        return {"xla_cpu_use_fusion_emitters": False}
    return COMPILER_OPTIONS.get(platform)


@functools.cache
def jit_for(platform: str, function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a function of a module, with the options for a platform; the same each time."""
    return jax.jit(function, compiler_options=compiler_options(platform), **options)
