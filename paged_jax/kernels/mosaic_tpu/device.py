"""The TPU that kernels are compiled for."""

import functools
import importlib.util
import re

import jax

# Mosaic cannot compile the attention kernels for these TPUs, which lack a gather over sublanes.
_OLD_GENERATIONS = re.compile(r"TPU v[2-4]\b")


def device_refusal() -> str | None:
    """Return why these kernels cannot run on the TPU of this program, or None if they can.

    The TPU is the device of the current mesh, or else the first TPU of this process. On a machine
    without a TPU, the TPU is unknown, and the result is None.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform == "tpu":
        kind = abstract.device_kind
    else:
        kind = _first_tpu_kind()
    if _OLD_GENERATIONS.match(kind):
        return f"the kernels are for TPU v5e and later, and this is a {kind}"
    return None


@functools.cache
def _first_tpu_kind() -> str:
    """Return the device kind of the first TPU of this process, or "" if there is none."""
    # `jax.local_devices` initialises all backends of JAX. Call it only if there may be a TPU.
    platforms = jax.config.jax_platforms or "tpu"  # pyright: ignore[reportAttributeAccessIssue]
    if "tpu" not in platforms.split(",") or importlib.util.find_spec("libtpu") is None:
        return ""
    try:
        return jax.local_devices(backend="tpu")[0].device_kind
    except RuntimeError:  # libtpu is installed, but there is no TPU
        return ""
