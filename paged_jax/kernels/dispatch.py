"""Which backend runs an op: the one asked for, or the best one of each platform.

Nothing here asks what devices this process has. With ``backend=None`` a program holds one branch
for each platform that has kernels of its own, and JAX keeps the right one when it lowers the
program (`jax.lax.platform_dependent`): the same traced function can be compiled for a GPU on a
machine without one.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

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
    WriteArgs,
    WritingOps,
    has_op,
)

_logger = logging.getLogger(__name__)

Args = TypeVar("Args", AttentionArgs, RaggedArgs, WriteArgs, RopeWriteArgs, CopyArgs)
Result = TypeVar("Result")


@runtime_checkable
class GeneralBackend(Backend, AttentionOps, WritingOps, LinearOps, GroupedLinearOps, Protocol):
    """A backend that has every op and refuses nothing: what other backends leave, it does."""

    def attend_to_chunks(
        self, args: RaggedArgs, chunks: Any, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with the queries of all chunks of a ragged batch, see `attend_in_parts`."""
        ...

    def grouped_gradients(
        self, x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of `grouped_linear` in `x` and `w`."""
        ...


@runtime_checkable
class PallasBackend(Backend, Protocol):
    """A backend written in Pallas, whose kernels can be run without their device."""

    @property
    def interpret(self) -> Interpret:
        """How its kernels are interpreted, if at all: those of experts, too."""
        ...

    def interpreted(self, interpret: Interpret) -> Backend:
        """The same backend, with its kernels run in Pallas' interpreter on any platform."""
        ...


@runtime_checkable
class CompiledBackend(Backend, Protocol):
    """A backend whose kernels are compiled on the machine that runs them.

    Its ops may be traced and lowered anywhere; where it is unavailable they do the same in plain
    JAX.
    """

    def unavailable(self, problem: Problem) -> str | None:
        """Say in a sentence why its kernels cannot be had in this process; None where they can.

        They are compiled for it, which may take seconds.
        """
        ...

    def is_available(self) -> bool:
        """Return whether this machine has the kernels, or a compiler for them."""
        ...

    def copies_weights(self, dtype: DTypeLike) -> bool:
        """Return whether `linear` copies all weights of this type to float32 on this machine."""
        ...

    def copies_expert_weights(self, dtype: DTypeLike) -> bool:
        """Return whether `grouped_linear` copies all weights of this type to float32 here."""
        ...

    def targets(self) -> list[str]:
        """Return the names by which programs call the kernels of this machine."""
        ...

    def exporting_for_here(self) -> AbstractContextManager[None]:
        """Return a context in which exported programs call kernels that only this machine has."""
        ...

    def load_called(self, program: bytes) -> str | None:
        """Load the kernels that a serialised program calls.

        Returns:
          None, or the target of a kernel that this machine does not have.
        """
        ...

    def is_any_missing(self) -> bool:
        """Return whether a kernel that a program of this process would call is unavailable."""
        ...


# Module and class of each backend. If several are for one platform, the first is preferred.
_CLASSES = {
    "cpu": ("paged_jax.kernels.cpu", "Cpu"),
    "mosaic_tpu": ("paged_jax.kernels.mosaic_tpu", "MosaicTpu"),
    "reference": ("paged_jax.kernels.reference", "Reference"),
    "triton": ("paged_jax.kernels.triton", "Triton"),
    "xla": ("paged_jax.kernels.xla", "Xla"),
}


class _Backends(Mapping[str, Backend]):
    """All backends by name. The module of a backend is imported when it is first looked up."""

    def __getitem__(self, name: str) -> Backend:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES


@functools.cache
def _load(name: str) -> Backend:
    module, class_name = _CLASSES[name]
    return getattr(importlib.import_module(module), class_name)()


BACKENDS: Mapping[str, Backend] = _Backends()


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
    """A backend and why it was chosen.

    Attributes:
      backend: name of the backend.
      reason: the reason, in a phrase.
    """

    backend: str
    reason: str


def backends_of(op: Op) -> tuple[str, ...]:
    """Names of the backends that have an op."""
    return tuple(name for name, backend in BACKENDS.items() if has_op(backend, op))


def backend_for(op: Op, name: str | None) -> str | None:
    """The backend asked for if it has an op, else None, which stands for the platform's best."""
    backend = BACKENDS.get(name or "")
    return name if backend is not None and has_op(backend, op) else None


def general_backend() -> GeneralBackend:
    """Return the backend that has every op in plain JAX, for all platforms."""
    backend = BACKENDS["xla"]
    assert isinstance(backend, GeneralBackend)
    return backend


def compiled_backend(platform: str) -> CompiledBackend | None:
    """Return the backend whose kernels are compiled on this machine, or None if there is none.

    Args:
      platform: JAX's name of the platform that the kernels run on.
    """
    for backend in BACKENDS.values():
        if backend.platform == platform and isinstance(backend, CompiledBackend):
            return backend
    return None


def linear_backend(name: str | None) -> LinearOps:
    """Return the backend that multiplies matrices in a model whose attention runs on `name`.

    Args:
      name: name of a backend. None takes the backend for CPUs, whose calls become plain JAX in a
        program that is lowered for another platform. A backend without these ops leaves them to the
        general one.
    """
    backend = BACKENDS.get(name or "cpu")
    return backend if isinstance(backend, LinearOps) else general_backend()


def run_grouped_linear(args: GroupedArgs, name: str | None, interpret: Interpret) -> jax.Array:
    """Run a grouped matmul on a backend, or on the best one of each platform.

    Args:
      args: the arrays.
      name: name of a backend, or None. XLA does what the backend refuses.
      interpret: how to interpret the kernel of `name`.

    Raises:
      ValueError: there is nothing to interpret.
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
    backend = compiled_backend("cpu")
    assert backend is not None
    if (target := backend.load_called(program)) is not None:
        raise ValueError(
            f"load_cpu_kernels: program must call kernels of this machine and this version of "
            f"paged_jax, got {target}. Compile the program here."
        )


def choose_backend(problem: Problem, platform: str) -> BackendChoice:
    """Say which backend ``backend=None`` takes on a platform, and why.

    Args:
      problem: the call, see `paged_jax.kernels.backend.Problem`.
      platform: JAX's name of the platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.
    """
    return _choose(problem, platform, _why_not)


def _why_not(backend: Backend, problem: Problem) -> str | None:
    """Why a backend cannot solve a problem in this process, or None if it can."""
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
        reasons.append(f"{name} cannot: {reason}")
    return BackendChoice(
        "xla", "; ".join(reasons) or f"there are no kernels of our own for {platform}"
    )


def check_backend_runs_on(function: str, name: str | None, platform: str) -> None:
    """Refuse a backend whose programs a device cannot run.

    Args:
      function: the name of the caller, for the message.
      name: name of the backend, or None for the best one, which always runs.
      platform: `jax.Device.platform` of the device.

    Raises:
      ValueError: there is no such backend, or it is for other devices.
    """
    if name is None:
        return
    if name not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"{function}: backend must be None or one of {names}, got {name!r}.")
    own = BACKENDS[name].platform
    if own == "cuda":  # what programs are lowered for; the device calls itself "gpu"
        own = "gpu"
    if own not in (None, platform):
        can_interpret = isinstance(BACKENDS[name], PallasBackend)
        anywhere = "; the ops run it anywhere with interpret=True" if can_interpret else ""
        raise ValueError(
            f"{function}: backend {name!r} runs on {own} only, got a device of {platform}. Pass "
            f"backend=None for the best one there{anywhere}."
        )


def check_arrays_are_on_its_device(function: str, name: str | None, array: jax.Array) -> None:
    """Refuse a backend whose programs cannot run where an array lies.

    A traced array lies nowhere yet: its program may be compiled for a device that is not here.

    Raises:
      ValueError: as `check_backend_runs_on`.
    """
    if not isinstance(array, Tracer):
        [platform] = {device.platform for device in array.devices()}
        check_backend_runs_on(function, name, platform)


@dataclass(frozen=True)
class Dispatch:
    """The ops of the backend that was asked for, or of the best one of each platform.

    Attributes:
      function: public name of the op, for messages.
      problem: the call.
      backend: name of a backend, or None for the best one of the platform.
      interpret: how to interpret the kernels of `backend`, which is then one written in Pallas.

    Raises (when made):
      ValueError: there is no such backend, it does not have the op, or it has no kernels to
        interpret.
      NotImplementedError: the backend asked for cannot do this, with its reason.
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
        why_not = _why_not(self._asked_for(self.backend), self.problem)
        if why_not is not None:
            raise NotImplementedError(f"{self.function}: {self.backend} cannot: {why_not}")

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Run a decode or prefill, see `AttentionOps`."""
        return self._run(lambda each: partial(_attention(each).attend, options=options), args)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Run a ragged batch, see `AttentionOps`."""
        return self._run(
            lambda each: partial(_attention(each).attend_ragged, options=options), args
        )

    def write(self, args: WriteArgs) -> Pools:
        """Write on the backend, or on that of the platform."""
        return self._run(lambda each: _writing(each).write, args)

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Norm, rotate and write on the backend, or on that of the platform."""
        return self._run(lambda each: partial(_writing(each).rope_write, options=options), args)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks on the backend, or on that of the platform."""
        return self._run(lambda each: _writing(each).copy_blocks, args)

    def _run(self, op_of: Callable[[Backend], Callable[[Args], Result]], args: Args) -> Result:
        """Run an op, given as a function of the backend, with one branch for each platform."""
        if self.backend is not None:
            return op_of(self._asked_for(self.backend))(args)
        branches = {}
        platforms = (backend.platform for backend in BACKENDS.values())
        for platform in dict.fromkeys(each for each in platforms if each is not None):
            # Whether kernels can be had here is asked when the program is lowered.
            choice = _choose(self.problem, platform, lambda each, problem: each.refusal(problem))
            if choice.backend == "xla":
                _logger.info("%s on %s: xla, since %s", self.function, platform, choice.reason)
            else:
                branches[platform] = op_of(BACKENDS[choice.backend])
        return lax.platform_dependent(args, default=op_of(BACKENDS["xla"]), **branches)

    def _asked_for(self, name: str) -> Backend:
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
