"""The GPU that kernels are compiled for."""

import contextlib
import contextvars
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax


class GpuInfo(NamedTuple):
    """A GPU that kernels are compiled for.

    Attributes:
      kind: name of the GPU (`jax.Device.device_kind`); "" if unknown.
      num_cores: number of SMs.
      compute_capability: major and minor version, such as ``(9, 0)``.
    """

    kind: str
    num_cores: int
    compute_capability: tuple[int, int] = (9, 0)


# The GPU that is assumed if none is known, for example in ahead-of-time compilation. It is an H100
# or H200 (SXM), which has 132 SMs.
DEFAULT = GpuInfo("", 132)

_assumed: contextvars.ContextVar[GpuInfo | None] = contextvars.ContextVar("_assumed", default=None)


@contextlib.contextmanager
def assume(device: GpuInfo) -> Iterator[None]:
    """Compile kernels for this GPU instead of the GPU of this process (context manager).

    Use it to compile ahead of time. The context must be active while a kernel is traced. It has no
    effect on a function that `jax.jit` has already traced.

    Example:
      >>> with assume(GpuInfo("NVIDIA H200", 132)):
      ...     device().kind
      'NVIDIA H200'
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def device() -> GpuInfo:
    """Return the GPU that kernels are compiled for, also in processes without a GPU.

    It is the first of these that exists: the GPU of `assume`; the abstract GPU of the current mesh
    (`jax.sharding.use_abstract_mesh`, or the mesh inside `jax.shard_map`); the first CUDA device of
    this process; `DEFAULT`.

    JAX does not know the compute capability of an abstract GPU. If the first CUDA device has the
    same name, its capability is used. Otherwise the name decides, see `capability_of`. For an
    unknown name, the capability of the first CUDA device or of `DEFAULT` is used.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    first = _first_gpu()
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is None or abstract.platform != "gpu":
        return first
    kind = abstract.device_kind
    if kind == first.kind:
        return first._replace(num_cores=abstract.num_cores or first.num_cores)
    capability = capability_of(kind) or first.compute_capability
    return GpuInfo(kind, abstract.num_cores or DEFAULT.num_cores, capability)


# Compute capabilities of GPUs by their names. Each pair has a pattern for words in a name, and the
# compute capability of GPUs with such a name. The first matching pattern is used. The values are
# from NVIDIA's list "CUDA GPU Compute Capability".
_CAPABILITY_OF_NAMES: Sequence[tuple[str, tuple[int, int]]] = (
    (r"K80", (3, 7)),
    (r"K\d{2}[a-z]?|Quadro K\d+M?", (3, 5)),
    (r"M\d{1,2}|Quadro M\d+M?|GTX 9\d\d", (5, 2)),
    (r"Quadro RTX \d+|TITAN RTX|RTX 20\d\d|GTX 16\d\d|MX4\d\d|T4G?|T\d{3,4}", (7, 5)),
    (r"P100", (6, 0)),
    (r"P4|P40|Quadro P\d+|GTX 10\d\d|TITAN Xp?", (6, 1)),
    (r"V100S?|GV100|TITAN V", (7, 0)),
    (r"A100X?|A800|A30X?", (8, 0)),
    (r"A2|A10[GM]?|A16|A40|RTX A\d+|RTX 30\d\d", (8, 6)),
    (r"Orin", (8, 7)),
    (r"Ada|L2|L4|L20|L40S?|RTX 40\d\d", (8, 9)),
    (r"H20|H100|H200|H800|GH200", (9, 0)),
    (r"B100|B200|GB200", (10, 0)),
    (r"B300|GB300", (10, 3)),
    (r"Thor", (11, 0)),
    (r"RTX PRO \d+|RTX 50\d\d", (12, 0)),
    (r"GB10", (12, 1)),
)


def capability_of(kind: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU with this name, or None if the name is unknown.

    Example:
      >>> [capability_of(kind) for kind in ("NVIDIA A100-SXM4-80GB", "Tesla T4", "another")]
      [(8, 0), (7, 5), None]
    """
    for names, capability in _CAPABILITY_OF_NAMES:
        if re.search(rf"\b(?:{names})\b", kind):
            return capability
    return None


def is_assumed() -> bool:
    """Return whether kernels are compiled for the GPU of `assume` or for `DEFAULT`."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    is_known = abstract is not None and abstract.platform == "gpu"
    return _assumed.get() is not None or not is_known and not _first_gpu().kind


@functools.cache
def _first_gpu() -> GpuInfo:
    # `jax.local_devices` starts all backends of JAX. On a host with TPUs, or before
    # `jax.distributed.initialize`, a kernel must not start them. So call it only if there may be a
    # GPU.
    platforms = jax.config.jax_platforms or "cuda"  # pyright: ignore[reportAttributeAccessIssue]
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    is_wanted = not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
    if not (is_wanted and any("cuda" in plugin.name for plugin in plugins)):
        return DEFAULT
    try:
        gpu = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # the plugin is installed, but there is no GPU
        return DEFAULT
    major, minor = gpu.compute_capability.split(".")
    return GpuInfo(gpu.device_kind, gpu.core_count, (int(major), int(minor)))
