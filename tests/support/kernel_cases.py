"""Calls of the ops as shapes, for programs that are lowered or compiled but never run."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from paged_jax.kernels import gpu_device
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import (
    AttentionArgs,
    CopyArgs,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
    WriteArgs,
)
from paged_jax.kernels.ops import OPS
from paged_jax.kernels.pools import Pages, Pools
from paged_jax.kernels.problem import PoolOp

H200 = gpu_device.GpuInfo("NVIDIA H200", 132)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, described by the letters of `paged_jax.dims` and the variants of the op.

    Attributes:
      op: ``"decode"``, ``"prefill"``, ``"ragged"``, ``"write"``, ``"rope_write"`` or
        ``"copy_blocks"``.
      backend: as for `paged_jax.paged_attention`.
      dtype: dtype of queries, of new keys and values, of a projection; also of the pools unless
        `pool_dtype` is given.
      lanes: last dimension of the pools, D if None.
      U: elements of a value if it is a part of the key; None for values with a pool of their own.
    """

    op: PoolOp
    backend: str | None = None
    B: int = 3
    T: int = 5
    K: int = 2
    G: int = 4
    C: int = 16
    D: int = 128
    U: int | None = None
    M: int = 6
    L: int = 2
    P: int = 16
    dtype: str = "bfloat16"
    pool_dtype: str | None = None
    lanes: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_norms: bool = False

    def __str__(self) -> str:
        """Return the op and the differences from the defaults, such as ``"decode C=64 D=80"``."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        del changed["op"]
        changed.pop("backend", None)
        return " ".join((self.op, *(f"{name}={value}" for name, value in changed.items())))

    @property
    def num_tokens(self) -> int:
        """N: the number of tokens of a write or of a ragged batch, or of pairs of a copy."""
        return self.B * self.T

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools of K and V, with their scales."""
        arrays = jax.tree.leaves(self._pools(None))
        return sum(array.size * array.dtype.itemsize for array in arrays)

    def function(self) -> Callable[..., Any]:
        """Return the op for the arrays of `shapes`.

        Raises:
          NotImplementedError: the backend does not support the case.
        """
        options = RaggedOptions(
            scale=self.D**-0.5,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            value_dim=self.U,
        )
        has_options = self.op not in ("write", "copy_blocks")
        args = self.shapes()
        call = OPS[self.op].bind(args, options if has_options else None, backend=self.backend)

        # The name of the function appears in the compiled program.
        def op(*arrays: Any) -> Any:
            results = call.run(type(args)(*arrays))
            return results[0] if self.op == "ragged" else results  # as without `return_lse`

        op.__name__ = self.op
        return op

    def shapes(
        self, sharding: Any = None
    ) -> AttentionArgs | RaggedArgs | WriteArgs | RopeWriteArgs | CopyArgs:
        """Return the arguments of `function` as `jax.ShapeDtypeStruct`, on `device` if given."""

        def array(*shape: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        pools, layer, H, N = self._pools(sharding), array(), self.K * self.G, self.num_tokens
        if self.op == "copy_blocks":
            return CopyArgs(pools, array(N), array(N))
        if self.op == "write":
            new = array(N, self.K, self.D, dtype=self.dtype)
            v = new if self.U is None else None
            return WriteArgs(pools, new, v, array(N), array(N), layer)
        if self.op == "rope_write":
            qkv = array(N, self.K, self.G + 2, self.D, dtype=self.dtype)
            angles = array(N, self.D // 2, dtype=jnp.float32)
            norm = array(self.D, dtype="bfloat16")
            norms = (norm, norm) if self.has_norms else None
            return RopeWriteArgs(pools, qkv, angles, angles, norms, array(N), array(N), layer)
        sinks = array(H, dtype=jnp.float32) if self.has_sinks else None
        tables, lens = array(self.B, self.M), array(self.B)
        if self.op == "ragged":
            q = array(N, H, self.D, dtype=self.dtype)
            return RaggedArgs(q, pools, tables, lens, array(self.B + 1), array(1), sinks)
        if self.op == "decode":
            q = array(self.B, H, self.D, dtype=self.dtype)
            return AttentionArgs(q, pools, tables, lens, None, sinks, layer)
        q = array(self.B, self.T, H, self.D, dtype=self.dtype)
        return AttentionArgs(q, pools, tables, lens, lens, sinks, layer)

    def lower(
        self, platform: str, sharding: Any = None, gpu: gpu_device.GpuInfo = H200
    ) -> jax.stages.Lowered:
        """Lower the op for ``"cuda"`` or ``"tpu"``, with the pools donated if it writes to them."""
        donated = (0,) if self.op in ("write", "rope_write", "copy_blocks") else ()
        shapes = self.shapes(sharding)
        if platform == "tpu" and (sharding or self.op == "ragged"):
            # The kernels read the TPU generation from the mesh if there is no TPU.
            kind = next(iter(sharding.device_set)).device_kind if sharding else "TPU v5e"
            tpu = AbstractDevice(kind, 1, "tpu")
            with use_abstract_mesh(AbstractMesh((), (), abstract_device=tpu)):
                return lower(self.function(), *shapes, platform=platform, donate_argnums=donated)
        with lowering_for(platform, gpu):  # unsupported calls are checked when the op is created
            function = self.function()
        return lower(function, *shapes, platform=platform, gpu=gpu, donate_argnums=donated)

    def _pools(self, sharding: Any) -> Any:
        shape = (self.L, self.P, self.K, self.C)
        dtype = jnp.dtype(self.pool_dtype or self.dtype)
        if self.op == "ragged":
            heads = 2 * self.K if self.U is None else 1
            shape = (self.L * self.P, self.C, heads, self.D)
            return Pages(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))  # type: ignore
        pool: Any = jax.ShapeDtypeStruct((*shape, self.lanes or self.D), dtype, sharding=sharding)
        scale: Any = None
        if KVDtype.of(dtype).has_scales:
            scale = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        if self.U is not None:
            return Pools(pool, None, scale, None)
        return Pools(pool, pool, scale, scale)


def lower(
    function: Callable[..., Any],
    *shapes: Any,
    platform: str,
    gpu: gpu_device.GpuInfo = H200,
    **jit_options: Any,
) -> jax.stages.Lowered:
    """Lower a function for ``"cuda"`` or ``"tpu"``, on a machine that may have neither."""
    with lowering_for(platform, gpu):
        return jax.jit(function, **jit_options).trace(*shapes).lower(lowering_platforms=(platform,))


@contextlib.contextmanager
def lowering_for(platform: str, gpu: gpu_device.GpuInfo = H200) -> Iterator[None]:
    """Return a context for tracing and lowering for a device that may not exist here.

    Args:
      platform: ``"cuda"`` or another platform.
      gpu: the GPU, if the platform is ``"cuda"``.
    """
    if platform != "cuda":
        yield
        return
    with gpu_device.assume(gpu), warnings.catch_warnings():
        # jax 0.11 and later warn that Pallas' Triton backend is deprecated.
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", category=DeprecationWarning
        )
        yield


def equations(program: Any) -> Iterator[Any]:
    """Return all equations of a jaxpr, including those in loops, branches and kernels."""
    for equation in program.eqns:
        yield equation
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from equations(part)
