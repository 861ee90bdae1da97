"""Which backend runs an op: the one asked for, or the best one of each platform.

Nothing here asks what devices this process has. With ``backend=None`` a program holds one branch
for each platform that has kernels of its own, and JAX keeps the right one when it lowers the
program (`jax.lax.platform_dependent`): the same traced function can be compiled for a GPU on a
machine without one.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
from jax import lax
from jax.core import Tracer

from paged_jax.kernels import cpu, mosaic_tpu, reference, triton, xla
from paged_jax.kernels.backend import (
    AttentionArgs,
    AttentionOps,
    Backend,
    CompiledBackend,
    CopyArgs,
    Interpret,
    Op,
    Options,
    PallasBackend,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
    WriteArgs,
    WritingOps,
    has_op,
)
from paged_jax.kernels.rope import rope_write

_logger = logging.getLogger(__name__)

Args = TypeVar("Args", AttentionArgs, RaggedArgs, WriteArgs, RopeWriteArgs, CopyArgs)
Result = TypeVar("Result")


# In the order of preference, of those that are for the same platform.
BACKENDS: Mapping[str, Backend] = {
    "cpu": cpu.Cpu(),
    "mosaic_tpu": mosaic_tpu.MosaicTpu(),
    "reference": reference.Reference(),
    "triton": triton.Triton(),
    "xla": xla.Xla(),
}

# The platforms with kernels of their own. On the others, and for what these kernels refuse, XLA
# compiles the plain form.
_PLATFORMS = tuple(
    dict.fromkeys(each.platform for each in BACKENDS.values() if each.platform is not None)
)

# Those with kernels in Pallas, which can be interpreted.
_IN_PALLAS = tuple(name for name, each in BACKENDS.items() if isinstance(each, PallasBackend))
_PLAIN = tuple(name for name in BACKENDS if name not in _IN_PALLAS)


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
    return name if name in backends_of(op) else None


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
        anywhere = "; the ops run it anywhere with interpret=True" if name in _IN_PALLAS else ""
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
        if self.interpret and self.backend in (None, *_PLAIN):
            raise ValueError(
                f"{self.function}: interpret needs a backend that is written in Pallas, got "
                f"backend={self.backend!r}. Pass backend={' or '.join(map(repr, _IN_PALLAS))}."
            )
        if self.backend is None:
            return
        names = backends_of(self.problem.op)
        if self.backend not in names:
            raise ValueError(
                f"{self.function}: backend must be None or one of {', '.join(map(repr, names))}, "
                f"got {self.backend!r}."
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
        return self._run(lambda each: partial(rope_write, _writing(each), options=options), args)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks on the backend, or on that of the platform."""
        return self._run(lambda each: _writing(each).copy_blocks, args)

    def _run(self, op_of: Callable[[Backend], Callable[[Args], Result]], args: Args) -> Result:
        """Run an op, given as a function of the backend, with one branch for each platform."""
        if self.backend is not None:
            return op_of(self._asked_for(self.backend))(args)
        branches = {}
        for platform in _PLATFORMS:
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
