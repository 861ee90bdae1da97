# pyright: strict, reportUnknownMemberType=false
"""What a backend is: a table of `Kernel`s by the names of their ops.

Attention returns ``(out, lse)``, the output and the log-sum-exp. A write or copy returns the new
`Pools`, changed in place if they are donated; `rope_write` returns the queries and the pools. The
arrays of a call and its options determine its result.

A backend for a platform is the default there, if no other backend of the platform comes first. A
kernel in Pallas calls its kernel by `opaque_call.only_on`, unless it is interpreted, and its
`refusal` also asks for the device.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from jax.typing import DTypeLike

from paged_jax.kernels.problem import Problem

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

# Whether to run a Pallas kernel in Pallas' interpreter. For TPU kernels, the value may also be the
# parameters of the interpreter.
Interpret: TypeAlias = "bool | InterpretParams"


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tuple that calls `function` with the elements of the tuple."""

    @functools.wraps(function)
    def call(args: tuple[Any, ...], **options: Any) -> Any:
        return function(*args, **options)

    return call


def supports_all(*call: Any) -> None:
    """Return None: every call is supported. It is the `Kernel.refusal` of kernels in plain JAX."""
    del call


@dataclass(frozen=True, eq=False)
class Kernel:
    """A backend's implementation of an op.

    Attributes:
      run: function of the arguments of the op (a tree of arrays), and of `options` if the op has
        any. It returns what the op's plain meaning returns. The arguments are in range, because the
        public ops check and clip them.
      refusal: function of what `Op.describe` returns for a call, a `Problem` in most ops. It
        returns why the kernel does not support the call, as a phrase, or None if it does.
      unavailable: function like `refusal`, which compiles the kernel on this machine, and returns
        why that failed. None if nothing must be compiled before a program is lowered.
      can_interpret: whether the kernel is written in Pallas. `run` and `refusal` then have the
        keyword argument `interpret`: whether to run in Pallas' interpreter.
      is_differentiable: whether JAX can differentiate `run` itself, as often as the op promises.
      runs_anywhere: whether a program for another platform may contain the kernel, because it
        becomes plain JAX when it is lowered for another platform, or is plain JAX.
      interpret: whether it runs in Pallas' interpreter, see `interpreted`.
    """

    run: Callable[..., Any]
    refusal: Callable[..., str | None] = supports_all
    unavailable: Callable[[Any], str | None] | None = None
    can_interpret: bool = False
    is_differentiable: bool = False
    runs_anywhere: bool = False
    interpret: Interpret = False

    def interpreted(self, interpret: Interpret) -> "Kernel":
        """Return the kernel in Pallas' interpreter, if it is written in Pallas."""
        return _interpreted(self, interpret) if self.can_interpret else self


@functools.cache
def _interpreted(kernel: Kernel, interpret: Interpret) -> Kernel:
    run, refusal = (functools.partial(x, interpret=interpret) for x in (kernel.run, kernel.refusal))
    return replace(kernel, run=run, refusal=refusal, can_interpret=False, interpret=interpret)


@dataclass(frozen=True, eq=False)
class Backend:
    """Kernels for some ops. All other ops run on the best backend for the platform.

    Attributes:
      kernels: the kernels by the names of their ops (`paged_jax.kernels.ops`).
      platform: JAX's name of the only platform that the backend supports; None if it supports all
        platforms. On its platform, a backend is preferred to the backends for all platforms.
      missing_ops: function that returns the ops for which this device lacks what the kernels need.
        Models run them on other backends.
      preference: function of a `Problem` that returns why measurements prefer this backend to
        others of its platform for the call; None if they do not, or if nothing was measured.
      is_plain: whether ops run their plain meaning, which is then all that the backend has.
      is_exact: whether each row has the same bits in any program and batch.
      unavailable_for: function of the codes of a model's matrices (see `WeightFormat`), its float
        dtype and the dtype of its cache. It returns why the backend cannot run the model on this
        machine, or None if it can.
    """

    kernels: Mapping[str, Kernel]
    platform: str | None = None
    missing_ops: Callable[[], Collection[str]] = tuple
    preference: Callable[[Problem], str | None] | None = None
    is_plain: bool = False
    is_exact: bool = False
    unavailable_for: Callable[[Collection[str], DTypeLike, DTypeLike], str | None] = supports_all

    @property
    def can_interpret(self) -> bool:
        """Whether the backend is written in Pallas, so that it can be interpreted."""
        return any(kernel.can_interpret for kernel in self.kernels.values())

    def has_op(self, op: str) -> bool:
        """Return whether the backend has a kernel for an op that this device can run."""
        return self.is_plain or (op in self.kernels and op not in self.missing_ops())

    def interpreted(self, interpret: Interpret = True) -> "Backend":
        """Return the backend with all of its Pallas kernels in Pallas' interpreter."""
        kernels = {op: kernel.interpreted(interpret) for op, kernel in self.kernels.items()}
        return replace(self, kernels=kernels, missing_ops=tuple)
