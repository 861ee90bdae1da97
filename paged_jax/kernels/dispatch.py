# pyright: strict, reportUnknownMemberType=false
"""Choice of the backend for an op: the requested one, or the best one for each platform.

With ``backend=None``, a program contains one branch for each platform that has its own kernels. JAX
keeps only the right branch when it lowers the program (`jax.lax.platform_dependent`). The choice
does not depend on the devices of this process, so the same traced function can be compiled for a
GPU on a machine without a GPU.

Only this module contains the names of backends. It imports the module of a backend when the backend
is first looked up.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
from jax import lax
from jax.core import Tracer

from paged_jax.kernels.backend import (
    ATTENTION,
    Backend,
    ExactBackend,
    Interpret,
    LinearOps,
    Op,
    Problem,
    WeightStore,
)

if TYPE_CHECKING:
    from paged_jax.kernels.cpu import Cpu, CpuInt8
    from paged_jax.kernels.xla import Xla

_logger = logging.getLogger(__name__)


# Module and class of each backend. If a platform has several backends, the first of them is used,
# unless measurements show that another backend is faster for a call, see `_in_order`.
_CLASSES = {
    "cpu": ("paged_jax.kernels.cpu", "Cpu"),
    "mosaic_tpu": ("paged_jax.kernels.mosaic_tpu", "MosaicTpu"),
    "reference": ("paged_jax.kernels.reference", "Reference"),
    "triton": ("paged_jax.kernels.triton", "Triton"),
    "mosaic_gpu": ("paged_jax.kernels.mosaic_gpu", "MosaicGpu"),
    "xla": ("paged_jax.kernels.xla", "Xla"),
}


# Backends that the engine's option `backend` does not list, because another option selects them.
# `BACKENDS[name]` finds them, but iterating over `BACKENDS` does not yield them.
_UNLISTED = {
    "cpu_int8": ("paged_jax.kernels.cpu", "CpuInt8"),
    "cpu_exact": ("paged_jax.kernels.cpu", "CpuExact"),
    "xla_exact": ("paged_jax.kernels.xla.exact", "XlaExact"),
}

# Backends that users have added by `add_backend`.
_ADDED: dict[str, Backend] = {}


class _Backends(Mapping[str, Backend]):
    """Backends by name, imported when they are first looked up."""

    def __getitem__(self, name: str) -> Backend:
        return _ADDED[name] if name in _ADDED else _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*_CLASSES, *_ADDED))

    def __len__(self) -> int:
        return len(_CLASSES) + len(_ADDED)

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES or name in _ADDED or name in _UNLISTED


@functools.cache
def _load(name: str) -> Backend:
    module, class_name = (_CLASSES | _UNLISTED)[name]
    return getattr(importlib.import_module(module), class_name)()


BACKENDS: Mapping[str, Backend] = _Backends()


def add_backend(name: str, backend: Backend) -> None:
    """Register a backend in this process. Ops and engines then accept ``backend=name``.

    A backend needs the method `Backend.refusal`, and a method for each op that it implements, see
    `paged_jax.kernels.backend`. Engines run all other ops on the best backend for the platform. To
    support ``interpret=True``, a backend must be a dataclass with a field `interpret`.
    ``examples/new_backend.py`` is an example.

    Args:
      name: name of the backend. It must differ from the names of the backends of this library.
      backend: the backend. Its `platform` must be None, so that it is used only by its name.

    Raises:
      ValueError: the name is a name of this library, or `platform` is not None.
    """
    if name in _CLASSES or name in _UNLISTED:
        raise ValueError(f"add_backend: name must not be one of {', '.join(_CLASSES)}, got {name}.")
    if backend.platform is not None:
        raise ValueError(f"add_backend: backend.platform must be None, got {backend.platform!r}.")
    _ADDED[name] = backend


def _check_interpret(function: str, name: str | None, interpret: Interpret) -> None:
    """Check that `interpret` is only set for a backend that is written in Pallas."""
    if not interpret or _can_interpret(BACKENDS.get(name or "")):
        return
    names = [each for each, backend in BACKENDS.items() if _can_interpret(backend)]
    raise ValueError(
        f"{function}: interpret needs a backend that is written in Pallas, got "
        f"backend={name!r}. Pass backend={' or '.join(map(repr, names))}."
    )


# Maps each op to the name of the backend method that runs it.
_METHODS: dict[Op, str] = {
    "decode": "attend",
    "prefill": "attend",
    "ragged": "attend_ragged",
    "write": "write",
    "rope_write": "rope_write",
    "copy_blocks": "copy_blocks",
}


def _can_interpret(backend: Backend | None) -> bool:
    """Return whether a backend is written in Pallas, so that it can be interpreted."""
    return is_dataclass(backend) and hasattr(backend, "interpret")


def _interpreted(name: str, interpret: Interpret) -> Backend:
    """Return the backend `name`. If `interpret` is set, its kernels run in the interpreter."""
    backend: Any = BACKENDS[name]
    return replace(backend, interpret=interpret) if interpret else backend


class BackendChoice(NamedTuple):
    """Name of a backend, and the reason why it was chosen.

    Attributes:
      backend: name of the backend.
      reason: the reason, as a phrase.
    """

    backend: str
    reason: str


def _has_op(backend: Backend, op: Op) -> bool:
    """Return whether a backend has the method of an op, and the op is not in `missing_ops`."""
    return hasattr(backend, _METHODS[op]) and op not in getattr(backend, "missing_ops", ())


def backends_of(op: Op) -> tuple[str, ...]:
    """Return the names of the backends that implement an op."""
    return tuple(name for name, backend in BACKENDS.items() if _has_op(backend, op))


def backend_for(op: Op, name: str | None) -> str | None:
    """Return `name`, or None if the backend of this name does not implement the op.

    With ``backend=None``, ops run on the best backend for the platform.
    """
    backend = BACKENDS.get(name or "")
    return None if backend is not None and not _has_op(backend, op) else name


def general_backend() -> "Xla":
    """Return the backend in plain JAX, which implements every op on all platforms."""
    return cast("Xla", BACKENDS["xla"])


def cpu_backend() -> "Cpu":
    """Return the backend for CPUs, which also compiles and loads its C++ kernels."""
    return cast("Cpu", BACKENDS["cpu"])


def int8_backend() -> "CpuInt8":
    """Return the backend for CPUs that rounds the inputs of matmuls to int8."""
    return cast("CpuInt8", BACKENDS["cpu_int8"])


# Exact backends that can replace a backend, the preferred one first.
_EXACT_VARIANTS = {
    None: ("cpu_exact", "xla_exact"),
    "cpu": ("cpu_exact",),
    "cpu_exact": ("cpu_exact",),
    "xla": ("xla_exact",),
    "xla_exact": ("xla_exact",),
}


def exact_variants(name: str | None) -> tuple[str, ...]:
    """Return the exact backends that can replace a backend, the preferred one first.

    See `is_exact`.

    Args:
      name: name of a backend, or None for the best backend.

    Raises:
      ValueError: the backend has no exact variant.
    """
    if name not in _EXACT_VARIANTS:
        raise ValueError(
            f"numerics: the backend must be None, 'cpu' or 'xla' for exact numerics, got {name!r}. "
            "Pass numerics='fast' or another backend."
        )
    return _EXACT_VARIANTS[name]


def exact_backend(name: str) -> ExactBackend:
    """Return a backend of `exact_variants` by its name."""
    return cast(ExactBackend, BACKENDS[name])


def is_exact(name: str | None) -> bool:
    """Return whether a backend gives each row the same bits in any program and batch."""
    return getattr(BACKENDS.get(name or ""), "is_exact", False)


def linear_backend(name: str | None) -> LinearOps:
    """Return the backend for the matmuls of a model.

    Args:
      name: name of the backend for attention. If this backend has no ops for matmuls, the general
        backend is returned. None returns the backend for CPUs, because its ops become plain JAX in
        programs for other platforms.
    """
    backend = BACKENDS.get(name or "cpu")
    return backend if isinstance(backend, LinearOps) else general_backend()


# Backends that store weights in their own way, by platform. The general backend stores the weights
# for other platforms.
_WEIGHT_STORES = {"cpu": "cpu"}


def weight_store(platform: str, name: str | None = None) -> WeightStore:
    """Return the backend that chooses the formats and layouts of a model's weights.

    Args:
      platform: `jax.Device.platform` of the devices that hold the weights.
      name: name of the backend that will read the weights, or None for the best backend.
    """
    own = _WEIGHT_STORES.get(platform, "xla")
    return cast(WeightStore, BACKENDS[own if name in (None, own) else "xla"])


def run_kernel(
    op: str,
    args: tuple[Any, ...],
    name: str | None,
    default: Callable[..., Any],
    interpret: Interpret = False,
) -> Any:
    """Run an op that only some backends implement, on a given or the best backend.

    Args:
      op: name of the op, see `paged_jax.kernels.backend`.
      args: arguments of the op, trees of arrays.
      name: name of a backend, or None for the best backend on each platform.
      default: function that runs the op for arguments and platforms that no backend supports.
      interpret: whether to run the Pallas kernel of backend `name` in Pallas' interpreter.

    Raises:
      ValueError: `interpret` is set, and the backend is not written in Pallas.
    """
    _check_interpret(op, name, interpret)
    branches: dict[str, Callable[..., Any]] = {}
    for each in BACKENDS if name is None else [name] if name in BACKENDS else []:
        backend = _interpreted(each, interpret)
        refusal = getattr(backend, f"{op}_refusal", None)
        if refusal is None or refusal(*args) is not None:
            continue
        run = getattr(backend, op)
        if name is not None and getattr(backend, "interpret", False):
            return run(*args)
        if backend.platform is not None:
            branches.setdefault(backend.platform, run)
    if not branches:
        return default(*args)
    return cast(Any, lax.platform_dependent(*args, default=default, **branches))


def load_cpu_kernels(program: bytes) -> None:
    """Register the C++ kernels for CPUs that a serialised executable calls.

    Call it before `jax.experimental.serialize_executable.deserialize_and_load`. A process that
    compiles its own programs does not need it.

    Args:
      program: the bytes that `jax.experimental.serialize_executable.serialize` returned. If the
        program calls none of these kernels, nothing is done.

    Raises:
      ValueError: a kernel is not available: the program was compiled for another processor, jaxlib
        or version of paged_jax, or the kernel cannot be compiled here.

    Example:
      >>> load_cpu_kernels(b"an executable without calls")  # does nothing
    """
    if (target := cpu_backend().load_called(program)) is not None:
        raise ValueError(
            f"load_cpu_kernels: program must only call kernels of this machine and this version "
            f"of paged_jax, got a call of {target}. Compile the program on this machine."
        )


def choose_backend(problem: Problem, platform: str) -> BackendChoice:
    """Return the backend that ``backend=None`` selects on a platform, and the reason.

    Args:
      problem: the call, see `paged_jax.kernels.backend.Problem`.
      platform: JAX's name of the platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.
    """
    return _choose(problem, platform, _why_not)


def _why_not(backend: Backend, problem: Problem) -> str | None:
    """Return why a backend does not support a call in this process, or None if it does.

    A backend that compiles its kernels on this machine has a method `unavailable`. The method
    compiles the kernel for a call, and returns why that failed, or None if it succeeded. Ops with
    ``backend=None`` are traced without this check: if a kernel is unavailable, they run in plain
    JAX.
    """
    why_not = backend.refusal(problem)
    unavailable = getattr(backend, "unavailable", None)
    return why_not if why_not is not None or unavailable is None else unavailable(problem)


def _in_order(problem: Problem, platform: str) -> list[tuple[str, Backend, str | None]]:
    """Return ``(name, backend, reason)`` for each backend of a platform, first choice first.

    `reason` is the result of the backend's method `preference`: why measurements prefer the backend
    for this call, or None. It is also None if the backend has no such method.
    """
    found: list[tuple[str, Backend, str | None]] = []
    for name, backend in BACKENDS.items():
        if backend.platform == platform:
            preference = getattr(backend, "preference", None)
            found.append((name, backend, None if preference is None else preference(problem)))
    return sorted(found, key=lambda each: each[2] is None)


def _choose(
    problem: Problem, platform: str, why_not: Callable[[Backend, Problem], str | None]
) -> BackendChoice:
    reasons: list[str] = []
    for name, backend, preference in _in_order(problem, platform):
        if not _has_op(backend, problem.op):
            reasons.append(f"{name} leaves {problem.op} to XLA")
            continue
        reason = why_not(backend, problem)
        if reason is None:
            return BackendChoice(name, preference or f"these are the kernels for {platform}")
        reasons.append(f"{name} does not support the call: {reason}")
    return BackendChoice(
        "xla", "; ".join(reasons) or f"there are no kernels of our own for {platform}"
    )


def check_backend_runs_on(function: str, name: str | None, platform: str) -> None:
    """Check that a backend exists and runs on a platform.

    Args:
      function: name of the caller, for the error message.
      name: name of the backend. None passes the check, because every platform has a best backend.
      platform: `jax.Device.platform` of the device.

    Raises:
      ValueError: there is no backend of this name, or it is for another platform.
    """
    if name is None:
        return
    if name not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"{function}: backend must be None or one of {names}, got {name!r}.")
    backend = BACKENDS[name]
    own = backend.platform
    if own == "cuda":  # JAX lowers for the platform "cuda", which `Device.platform` calls "gpu"
        own = "gpu"
    if own not in (None, platform):
        can_interpret = _can_interpret(backend)
        anywhere = "; the ops run it anywhere with interpret=True" if can_interpret else ""
        raise ValueError(
            f"{function}: backend {name!r} runs on {own} only, got a device of {platform}. Pass "
            f"backend=None for the best backend of this device{anywhere}."
        )


@dataclass(frozen=True)
class Dispatch:
    """Call of an op, which runs on a given backend or on the best backend for each platform.

    The constructor raises `ValueError` if the backend does not exist, does not implement the op, or
    does not run on the device of `array`. It also raises `ValueError` if `interpret` is set and the
    backend is not written in Pallas. It raises `NotImplementedError` if the backend does not
    support the call.

    Attributes:
      function: public name of the op, for error messages.
      problem: sizes, dtypes and options of the call.
      backend: name of a backend, or None for the best backend.
      interpret: whether to run the kernels of `backend` in Pallas' interpreter.
      array: an array of the call. The constructor checks its device, unless it is None.
    """

    function: str
    problem: Problem
    backend: str | None
    interpret: Interpret = False
    array: InitVar[jax.Array | None] = None

    def __post_init__(self, array: jax.Array | None) -> None:
        if self.backend is None or self.backend in BACKENDS:
            _check_interpret(self.function, self.backend, self.interpret)
        if self.backend is None:
            return
        op, is_known = self.problem.op, self.backend in BACKENDS
        if not is_known or backend_for(op, self.backend) is None:
            names = ", ".join(map(repr, backends_of(op)))
            raise ValueError(
                f"{self.function}: backend must be None or one of {names}, got {self.backend!r}."
            )
        why_not = _why_not(_interpreted(self.backend, self.interpret), self.problem)
        if why_not is not None:
            raise NotImplementedError(
                f"{self.function}: {self.backend} does not support the call: {why_not}"
            )
        # Skip the check for traced arrays, because the program may be compiled for another device.
        if array is not None and not isinstance(array, Tracer) and not self.interpret:
            [platform] = {device.platform for device in array.devices()}
            check_backend_runs_on(self.function, self.backend, platform)

    def run(self, args: Any) -> Any:
        """Run the op on the requested backend, or on the best backend for each platform.

        Args:
          args: arrays of the op, such as `AttentionArgs`.

        Returns:
          The result of the op, see `paged_jax.kernels.backend`.
        """
        op = self.problem.op
        takes_options = op in ATTENTION or op == "rope_write"
        options = {"options": self.problem.options} if takes_options else {}

        def bound(backend: Backend) -> Callable[[Any], Any]:
            return functools.partial(getattr(backend, _METHODS[op]), **options)

        if self.backend is not None:
            return bound(_interpreted(self.backend, self.interpret))(args)
        branches: dict[str, Callable[[Any], Any]] = {}
        platforms = (backend.platform for backend in BACKENDS.values())
        for platform in dict.fromkeys(each for each in platforms if each is not None):
            # The choice depends only on the properties of the call. Whether this machine has
            # compiled kernels is checked later, when it lowers the program.
            choice = _choose(self.problem, platform, lambda each, problem: each.refusal(problem))
            if choice.backend == "xla":
                _logger.info("%s on %s: xla, because %s.", self.function, platform, choice.reason)
            else:
                branches[platform] = bound(BACKENDS[choice.backend])
        default = bound(BACKENDS["xla"])
        return cast(Any, lax.platform_dependent(args, default=default, **branches))
