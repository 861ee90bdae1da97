"""Pallas' Triton backend, which may be gone one day, and kernels for GPUs that are not here.

JAX has deprecated the backend since 0.11. Without it these kernels refuse every call, and the
library goes on without them.

Since 0.11, too, JAX asks which GPU it lowers a Triton kernel for, and refuses where neither this
process has one nor `jax.sharding.use_abstract_mesh` names one. It asks when it lowers, of the mesh
that the kernel was traced under; so the kernels name the device that they are shaped for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.triton import tuning
from paged_jax.opaque import only_on

# XLA does not compile Triton kernels for older GPUs (Turing, Volta and earlier).
_LEAST_CAPABILITY = (8, 0)

plgpu: Any = None
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    pass


def refusal() -> str | None:
    """Return why no kernel can be built with this jax, or None."""
    return f"jax {jax.__version__} has no Triton backend of Pallas" if plgpu is None else None


def gpu_refusal() -> str | None:
    """Return why no kernel can be compiled for `tuning.device`, or None."""
    gpu = tuning.device()
    if gpu.compute_capability < _LEAST_CAPABILITY:
        needed, found = (".".join(map(str, x)) for x in (_LEAST_CAPABILITY, gpu.compute_capability))
        return (
            f"XLA compiles Triton for compute capability {needed} and later only, and {gpu.kind} "
            f"has {found}"
        )
    return None


def pallas_call(
    kernel: Callable, out_shape: Any, *, interpret: Interpret, **options: Any
) -> Callable:
    """`pl.pallas_call` for the device that `tuning.device` says."""
    if interpret:
        return pl.pallas_call(kernel, out_shape, interpret=interpret, **options)
    mesh = _mesh_of_device()
    if mesh is None:
        return partial(only_on, "cuda", pl.pallas_call(kernel, out_shape, **options))
    # Types of arrays, made under the mesh that is current here: made by Pallas under the other one,
    # results would not have the type of other arrays, and what takes them would be traced again.
    out_types = jax.tree.map(lambda out: ShapedArray(out.shape, out.dtype), out_shape)
    call = pl.pallas_call(kernel, out_types, **options)

    def run(*arrays: Any) -> Any:
        with use_abstract_mesh(mesh):
            return call(*arrays)

    return partial(only_on, "cuda", run)


def _mesh_of_device() -> AbstractMesh | None:
    """A mesh without axes on the device of `tuning.device`, where JAX could not tell it."""
    if not (tuning.is_assumed() and get_abstract_mesh().empty):
        # A mesh with axes is left alone: the arrays are divided over it.
        return None
    device = tuning.device()
    gpu = AbstractDevice(device.kind or "NVIDIA H100", device.num_cores, "gpu")
    return AbstractMesh((), (), abstract_device=gpu)
