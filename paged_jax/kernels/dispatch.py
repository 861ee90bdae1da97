"""Choice of the backend that runs an op: the requested backend, or the best one per platform.

With ``backend=None`` a program contains one branch per platform that has its own kernels. JAX keeps
the right branch when it lowers the program (`jax.lax.platform_dependent`). The devices of this
process are not looked at, so the same traced function can be compiled for a GPU on a machine
without one.

This is the only module that names backends. It imports the module of a backend when the backend is
first looked up.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import jax
from jax import lax
from jax.core import Tracer

from paged_jax.kernels.backend import (
    AttentionArgs,
    AttentionOps,
    Backend,
    CopyArgs,
    GroupedArgs,
    GroupedLinearOps,
    Interpret,
    LinearOps,
    Op,
    Options,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
    Weight,
    WriteArgs,
    WritingOps,
    has_op,
)

if TYPE_CHECKING:
    from paged_jax.kernels.cpu import Cpu
    from paged_jax.kernels.state_rows import StateStep
    from paged_jax.kernels.xla import Xla

_logger = logging.getLogger(__name__)

Args = TypeVar("Args", AttentionArgs, RaggedArgs, WriteArgs, RopeWriteArgs, CopyArgs)
Result = TypeVar("Result")


@runtime_checkable
class PallasBackend(Backend, Protocol):
    """A backend written in Pallas, which can run in Pallas' interpreter without its device."""

    @property
    def interpret(self) -> Interpret:
        """Whether the kernels are interpreted; may also be parameters of the interpreter."""
        ...

    def interpreted(self, interpret: Interpret) -> Backend:
        """Return the same backend with interpreted kernels."""
        ...


@runtime_checkable
class CompiledBackend(Backend, Protocol):
    """A backend with kernels that are compiled on the machine that runs them.

    Its ops can be traced and lowered anywhere. Without the kernels they run in plain JAX.
    """

    def unavailable(self, problem: Problem) -> str | None:
        """Compile the kernel for a problem; return why this machine cannot, or None if it can."""
        ...


@runtime_checkable
class QuantisedLinearOps(Protocol):
    """Op of a backend that multiplies by quantised weights without a copy of them in floats."""

    def quantised_refusal(self, x: jax.Array, w: Weight) -> str | None:
        """Return why the backend does not multiply these arrays, or None if it does."""
        ...

    def quantised_linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension by a weight, as `paged_jax.kernels.linear.linear`."""
        ...


@runtime_checkable
class StateOps(Protocol):
    """Op of a backend that advances the states of recurrent layers in their pool."""

    def state_refusal(self, step: "StateStep") -> str | None:
        """Return why the backend cannot run a step, or None if it can."""
        ...

    def advance_rows(self, step: "StateStep") -> tuple[jax.Array, jax.Array]:
        """Return the output and the new pool, as `paged_jax.kernels.recurrent.advance_rows`."""
        ...


# Module and class of each backend. Of several backends for a platform, the first is preferred.
_CLASSES = {
    "cpu": ("paged_jax.kernels.cpu", "Cpu"),
    "mosaic_tpu": ("paged_jax.kernels.mosaic_tpu", "MosaicTpu"),
    "reference": ("paged_jax.kernels.reference", "Reference"),
    "triton": ("paged_jax.kernels.triton", "Triton"),
    "mosaic_gpu": ("paged_jax.kernels.mosaic_gpu", "MosaicGpu"),
    "xla": ("paged_jax.kernels.xla", "Xla"),
}


# Backends of the user, see `add_backend`.
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
        return name in _CLASSES or name in _ADDED


@functools.cache
def _load(name: str) -> Backend:
    module, class_name = _CLASSES[name]
    return getattr(importlib.import_module(module), class_name)()


BACKENDS: Mapping[str, Backend] = _Backends()


def add_backend(name: str, backend: Backend) -> None:
    """Add a backend to this process, which calls and engines use with ``backend=name``.

    A backend needs `Backend.refusal` and the methods of `AttentionOps` or of `WritingOps`. Other
    ops use the backend that is best for the platform. ``examples/new_backend.py`` is an example.

    Args:
      name: name of the backend, not the name of a backend of this library.
      backend: the backend. Its `platform` is None, so that it is used only by its name.

    Raises:
      ValueError: the name is taken, or `platform` is not None.
    """
    if name in _CLASSES:
        raise ValueError(f"add_backend: name must not be one of {', '.join(_CLASSES)}, got {name}.")
    if backend.platform is not None:
        raise ValueError(f"add_backend: backend.platform must be None, got {backend.platform!r}.")
    _ADDED[name] = backend


def _check_interpret(function: str, name: str | None, interpret: Interpret) -> None:
    """Check that `interpret` is only set for a backend that is written in Pallas."""
    if not interpret or isinstance(BACKENDS.get(name or ""), PallasBackend):
        return
    names = [each for each, backend in BACKENDS.items() if isinstance(backend, PallasBackend)]
    raise ValueError(
        f"{function}: interpret needs a backend that is written in Pallas, got "
        f"backend={name!r}. Pass backend={' or '.join(map(repr, names))}."
    )


class BackendChoice(NamedTuple):
    """A backend, and why it was chosen.

    Attributes:
      backend: name of the backend.
      reason: the reason, a phrase.
    """

    backend: str
    reason: str


def backends_of(op: Op) -> tuple[str, ...]:
    """Return the names of the backends that have an op."""
    return tuple(name for name, backend in BACKENDS.items() if has_op(backend, op))


def backend_for(op: Op, name: str | None) -> str | None:
    """Return `name` if that backend has an op, else None, which selects the best backend."""
    backend = BACKENDS.get(name or "")
    return name if backend is not None and has_op(backend, op) else None


def general_backend() -> "Xla":
    """Return the backend that has every op, in plain JAX for all platforms."""
    return cast("Xla", BACKENDS["xla"])


def cpu_backend() -> "Cpu":
    """Return the backend for CPUs, which also manages its compiled kernels."""
    return cast("Cpu", BACKENDS["cpu"])


def linear_backend(name: str | None) -> LinearOps:
    """Return the backend for matrix multiplication in a model whose attention backend is `name`.

    Args:
      name: name of a backend, or None for the best one. The best one is the backend for CPUs,
        because its calls become plain JAX in programs that are lowered for other platforms. For a
        backend without these ops, the general backend is returned.
    """
    backend = BACKENDS.get(name or "cpu")
    return backend if isinstance(backend, LinearOps) else general_backend()


def run_linear(x: jax.Array, w: Weight, name: str | None) -> jax.Array:
    """Multiply by a weight on the backend of `linear_backend`, or by kernels for quantised weights.

    Args:
      x: the rows.
      w: the weight.
      name: name of a backend, or None for the best one on each platform.
    """
    general = linear_backend(name).linear
    if w.scales is None:
        return general(x, w)
    has_kernel = {
        each: backend
        for each, backend in BACKENDS.items()
        if isinstance(backend, QuantisedLinearOps) and backend.quantised_refusal(x, w) is None
    }
    own = has_kernel.get(name or "")
    if isinstance(own, PallasBackend) and own.interpret:
        return own.quantised_linear(x, w)
    branches = {
        backend.platform: backend.quantised_linear
        for each, backend in has_kernel.items()
        if backend.platform is not None and name in (None, each)
    }
    return lax.platform_dependent(x, w, default=general, **branches) if branches else general(x, w)


def run_grouped_linear(args: GroupedArgs, name: str | None, interpret: Interpret) -> jax.Array:
    """Run a grouped matmul on a backend, or on the best one for each platform.

    Args:
      args: the arrays.
      name: name of a backend, or None. XLA runs calls that the backend does not support.
      interpret: whether to run the Pallas kernel of `name` in the interpreter.

    Raises:
      ValueError: `interpret` is set, and the backend is not written in Pallas.
    """
    _check_interpret("grouped_linear", name, interpret)
    own = BACKENDS.get(name or "")
    if isinstance(own, PallasBackend) and (interpret := interpret or own.interpret):
        interpreted = own.interpreted(interpret)
        assert isinstance(interpreted, GroupedLinearOps)
        return interpreted.grouped_linear(args)
    branches = {}
    for each, backend in BACKENDS.items():
        if backend.platform is None or name not in (None, each):
            continue
        if isinstance(backend, GroupedLinearOps) and backend.grouped_refusal(args) is None:
            branches[backend.platform] = backend.grouped_linear
    return lax.platform_dependent(args, default=general_backend().grouped_linear, **branches)


def run_state_step(step: "StateStep", name: str | None) -> tuple[jax.Array, jax.Array]:
    """Advance states by one token on a backend, or on the best one for each platform.

    Args:
      step: the arrays, see `paged_jax.kernels.state_rows`.
      name: name of a backend, or None. XLA runs steps that the backend does not support.

    Returns:
      The output of each row, and the new pool.
    """
    has_kernel = {
        each: backend
        for each, backend in BACKENDS.items()
        if name in (None, each)
        and isinstance(backend, StateOps)
        and backend.state_refusal(step) is None
    }
    own = has_kernel.get(name or "")
    if isinstance(own, PallasBackend) and own.interpret:
        return own.advance_rows(step)
    branches = {
        backend.platform: backend.advance_rows
        for backend in has_kernel.values()
        if backend.platform is not None
    }
    return lax.platform_dependent(step, default=general_backend().advance_rows, **branches)


def load_cpu_kernels(program: bytes) -> None:
    """Register the kernels for CPUs that a serialised executable calls.

    Call it before `jax.experimental.serialize_executable.deserialize_and_load`. A process that
    compiles its own programs does not need it.

    Args:
      program: the bytes that `jax.experimental.serialize_executable.serialize` returned. If the
        program calls none of these kernels, nothing is done.

    Raises:
      ValueError: a kernel is not available: the program was compiled for another processor, jaxlib
        or version of paged_jax, or the kernel cannot be compiled here.

    Example:
      >>> load_cpu_kernels(b"an executable without calls")
    """
    if (target := cpu_backend().load_called(program)) is not None:
        raise ValueError(
            f"load_cpu_kernels: program must call kernels of this machine and this version of "
            f"paged_jax, got {target}. Compile the program here."
        )


def choose_backend(problem: Problem, platform: str) -> BackendChoice:
    """Return the backend that ``backend=None`` takes on a platform, and why.

    Args:
      problem: the call, see `paged_jax.kernels.backend.Problem`.
      platform: JAX's name of the platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.
    """
    return _choose(problem, platform, _why_not)


def _why_not(backend: Backend, problem: Problem) -> str | None:
    """Return why a backend cannot solve a problem in this process, or None if it can."""
    why_not = backend.refusal(problem)
    if why_not is None and isinstance(backend, CompiledBackend):
        return backend.unavailable(problem)
    return why_not


def _choose(
    problem: Problem, platform: str, why_not: Callable[[Backend, Problem], str | None]
) -> BackendChoice:
    reasons = []
    for name, backend in BACKENDS.items():
        if backend.platform != platform:
            continue
        if not has_op(backend, problem.op):
            reasons.append(f"{name} leaves {problem.op} to XLA")
            continue
        reason = why_not(backend, problem)
        if reason is None:
            return BackendChoice(name, f"these are the kernels for {platform}")
        reasons.append(f"{name} does not support the call: {reason}")
    return BackendChoice(
        "xla", "; ".join(reasons) or f"there are no kernels of our own for {platform}"
    )


def check_backend_runs_on(function: str, name: str | None, platform: str) -> None:
    """Check that a backend exists and runs on a platform.

    Args:
      function: name of the caller, for the error message.
      name: name of the backend, or None for the best one, which always runs.
      platform: `jax.Device.platform` of the device.

    Raises:
      ValueError: there is no such backend, or it is for another platform.
    """
    if name is None:
        return
    if name not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"{function}: backend must be None or one of {names}, got {name!r}.")
    own = BACKENDS[name].platform
    if own == "cuda":  # JAX lowers for "cuda", but the platform of the device is "gpu"
        own = "gpu"
    if own not in (None, platform):
        can_interpret = isinstance(BACKENDS[name], PallasBackend)
        anywhere = "; the ops run it anywhere with interpret=True" if can_interpret else ""
        raise ValueError(
            f"{function}: backend {name!r} runs on {own} only, got a device of {platform}. Pass "
            f"backend=None for the best one there{anywhere}."
        )


def check_array_device(function: str, name: str | None, array: jax.Array) -> None:
    """Check that a backend runs on the device of an array.

    It raises the errors of `check_backend_runs_on`. Traced arrays pass, because their program may
    be compiled for another device.
    """
    if not isinstance(array, Tracer):
        [platform] = {device.platform for device in array.devices()}
        check_backend_runs_on(function, name, platform)


@dataclass(frozen=True)
class Dispatch:
    """A call of an op: runs it on the requested backend, or on the best one for each platform.

    The constructor checks the backend. It raises `ValueError` if the backend does not exist or does
    not have the op, or if `interpret` is set and the backend is not written in Pallas. It raises
    `NotImplementedError` if the backend does not support the problem.

    Attributes:
      function: public name of the op, for error messages.
      problem: sizes, dtypes and options of the call.
      backend: name of a backend, or None for the best one.
      interpret: whether to run the kernels of `backend` in Pallas' interpreter.
    """

    function: str
    problem: Problem
    backend: str | None
    interpret: Interpret = False

    def __post_init__(self) -> None:
        if self.backend is None or self.backend in BACKENDS:
            _check_interpret(self.function, self.backend, self.interpret)
        if self.backend is None:
            return
        if backend_for(self.problem.op, self.backend) is None:
            names = ", ".join(map(repr, backends_of(self.problem.op)))
            raise ValueError(
                f"{self.function}: backend must be None or one of {names}, got {self.backend!r}."
            )
        why_not = _why_not(self._requested(self.backend), self.problem)
        if why_not is not None:
            raise NotImplementedError(
                f"{self.function}: {self.backend} does not support the call: {why_not}"
            )

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Run a decode or prefill; see `AttentionOps`."""
        return self._run(lambda each: partial(_attention(each).attend, options=options), args)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Run a ragged batch; see `AttentionOps`."""
        return self._run(
            lambda each: partial(_attention(each).attend_ragged, options=options), args
        )

    def write(self, args: WriteArgs) -> Pools:
        """Write new tokens; see `WritingOps`."""
        return self._run(lambda each: _writing(each).write, args)

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Normalise, rotate and write new tokens; see `WritingOps`."""
        return self._run(lambda each: partial(_writing(each).rope_write, options=options), args)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks; see `WritingOps`."""
        return self._run(lambda each: _writing(each).copy_blocks, args)

    def _run(self, op_of: Callable[[Backend], Callable[[Args], Result]], args: Args) -> Result:
        """Run an op on the requested backend, or on the best one for each platform.

        `op_of` takes a backend and returns the function that runs the op on it.
        """
        if self.backend is not None:
            return op_of(self._requested(self.backend))(args)
        branches = {}
        platforms = (backend.platform for backend in BACKENDS.values())
        for platform in dict.fromkeys(each for each in platforms if each is not None):
            # Whether this machine has compiled kernels is only checked when it lowers a program.
            choice = _choose(self.problem, platform, lambda each, problem: each.refusal(problem))
            if choice.backend == "xla":
                _logger.info("%s on %s: xla, because %s.", self.function, platform, choice.reason)
            else:
                branches[platform] = op_of(BACKENDS[choice.backend])
        return lax.platform_dependent(args, default=op_of(BACKENDS["xla"]), **branches)

    def _requested(self, name: str) -> Backend:
        backend = BACKENDS[name]
        if self.interpret and isinstance(backend, PallasBackend):
            return backend.interpreted(self.interpret)
        return backend


def _attention(backend: Backend) -> AttentionOps:
    assert isinstance(backend, AttentionOps)
    return backend


def _writing(backend: Backend) -> WritingOps:
    assert isinstance(backend, WritingOps)
    return backend
