"""Which backend runs an op: the one asked for, or the best one of each platform.

Nothing here asks what devices this process has. With ``backend=None`` a program holds one branch
for each platform that has kernels of its own, and JAX keeps the right one when it lowers the
program (`jax.lax.platform_dependent`): the same traced function can be compiled for a GPU on a
machine without one.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer

from paged_jax.kernels import mosaic_tpu, reference, triton, xla
from paged_jax.kernels.backend import Problem

_logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """Functions by the name of their op, and what they refuse; see `paged_jax.kernels.backend`.

    Attributes:
      ops: from ``"decode"``, ``"prefill"``, ``"write"`` and ``"copy_blocks"`` to functions.
      refusal: says why a problem cannot be done, or returns None.
      platform: the only one that its programs can be compiled for, as JAX names it; None for any.
        There it is the first choice.
    """

    ops: Mapping[str, Callable[..., Any]]
    refusal: Callable[[Problem], str | None]
    platform: str | None = None


class Choice(NamedTuple):
    """A backend and why it was chosen."""

    backend: str
    reason: str


BACKENDS: Mapping[str, Backend] = {
    "mosaic_tpu": Backend(
        {"decode": mosaic_tpu.decode, "prefill": mosaic_tpu.prefill}, mosaic_tpu.refusal, "tpu"
    ),
    "reference": Backend(
        {"decode": reference.decode, "prefill": reference.prefill}, reference.refusal
    ),
    "triton": Backend(
        {
            "decode": triton.decode,
            "prefill": triton.prefill,
            "write": triton.write,
            "copy_blocks": triton.copy_blocks,
        },
        triton.refusal,
        "cuda",
    ),
    "xla": Backend(
        {
            "decode": xla.decode,
            "prefill": xla.prefill,
            "write": xla.write,
            "copy_blocks": xla.copy_blocks,
        },
        xla.refusal,
    ),
}

# The platforms with kernels of their own. On the others, and for what these kernels refuse, XLA
# compiles the plain form.
_OWN_KERNELS = {
    backend.platform: name for name, backend in BACKENDS.items() if backend.platform is not None
}


def backends_of(op: str) -> tuple[str, ...]:
    """Names of the backends that have an op."""
    return tuple(name for name, backend in BACKENDS.items() if op in backend.ops)


def backend_for(op: str, name: str | None) -> str | None:
    """The backend asked for if it has an op, else None: what is best on the platform."""
    return name if name in backends_of(op) else None


def choose_backend(problem: Problem, platform: str) -> Choice:
    """Say which backend ``backend=None`` takes on a platform, and why.

    Args:
      problem: the call, see `paged_jax.kernels.backend.Problem`.
      platform: as JAX names it: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.
    """
    name = _OWN_KERNELS.get(platform)
    if name is None:
        return Choice("xla", f"there are no kernels of our own for {platform}")
    if problem.op not in BACKENDS[name].ops:
        return Choice("xla", f"{name} leaves {problem.op} to XLA")
    why_not = BACKENDS[name].refusal(problem)
    if why_not is not None:
        return Choice("xla", f"{name} cannot: {why_not}")
    return Choice(name, f"these are the kernels for {platform}")


def check_backend_runs_on(function: str, name: str | None, platform: str) -> None:
    """Refuse a backend whose programs a device cannot run.

    Args:
      function: the name of the caller, for the message.
      name: of the backend, or None for the best one, which always runs.
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
        raise ValueError(
            f"{function}: backend {name!r} runs on {own} only, got a device of {platform}. Pass "
            "backend=None for the best one there; the ops run it anywhere with interpret=True."
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


def backend_over_devices(function: str, name: str | None, platform: str) -> str:
    """The backend of programs that `jit` divides over devices: it cannot divide Pallas kernels.

    Args:
      function: the name of the caller, for the message.
      name: of the backend that is asked for, or None.
      platform: `jax.Device.platform` of the devices.

    Raises:
      ValueError: the backend is written in Pallas, or the devices are GPUs, where blocks are copied
        by a Pallas kernel whatever the backend.
    """
    if platform == "gpu":
        raise ValueError(
            f"{function}: sharding must keep to one GPU, got several. The kernel that copies "
            "blocks there cannot be divided."
        )
    if name is not None and BACKENDS[name].platform is not None:
        raise ValueError(
            f"{function}: backend must be 'xla' for weights on several devices, got {name!r}. Its "
            "kernels cannot be divided."
        )
    return name or "xla"


@dataclass(frozen=True)
class Dispatch:
    """An op with its backend chosen, called with a backend's arguments, `Options` last.

    Attributes:
      function: public name of the op, for messages.
      problem: the call.
      backend: a backend's name, or None for the best one of the platform.

    Raises (when made):
      ValueError: there is no such backend, or it does not have the op.
      NotImplementedError: the backend asked for cannot do this, with its reason.
    """

    function: str
    problem: Problem
    backend: str | None

    def __post_init__(self) -> None:
        op, options = self.problem.op, self.problem.options
        if options.interpret and self.backend in (None, "xla", "reference"):
            raise ValueError(
                f"{self.function}: interpret needs a backend that is written in Pallas, got "
                f"backend={self.backend!r}. Pass backend='triton' or 'mosaic_tpu'."
            )
        if self.backend is None:
            return
        if self.backend not in backends_of(op):
            names = ", ".join(map(repr, backends_of(op)))
            raise ValueError(
                f"{self.function}: backend must be None or one of {names}, got {self.backend!r}."
            )
        why_not = BACKENDS[self.backend].refusal(self.problem)
        if why_not is not None:
            raise NotImplementedError(f"{self.function}: {self.backend} cannot: {why_not}")

    def __call__(self, *arguments: Any) -> Any:
        op = self.problem.op
        if self.backend is not None:
            return BACKENDS[self.backend].ops[op](*arguments)
        *arrays, options = arguments
        branches = {}
        for platform in _OWN_KERNELS:
            choice = choose_backend(self.problem, platform)
            if choice.backend == "xla":
                _logger.info("%s on %s: xla, since %s", self.function, platform, choice.reason)
            else:
                run = BACKENDS[choice.backend].ops[op]
                branches[platform] = functools.partial(_run, run, options)
        default = functools.partial(_run, BACKENDS["xla"].ops[op], options)
        return lax.platform_dependent(*arrays, default=default, **branches)


def _run(function: Callable[..., Any], options: Any, *arrays: Any) -> Any:
    return function(*arrays, options)
