# pyright: strict, reportUnknownMemberType=false
"""What an op is, and which backend runs a call: the named one, or the best of each platform.

An `Op` has a meaning in plain JAX. A `Backend` is a set of `Kernel`s, by the names of their ops.
A public function binds and checks its arguments, and calls the op::

    paged_attention(q, ...)   bind, check, clip
    DECODE(args, ...)         named backend: check that it supports the call
      gradient(call, args)    the derivative of the op
        call.run(args)        choose a kernel for each platform
          kernel.run(args)    one of many, or the plain meaning

With ``backend=None``, a program contains one branch for each platform that has a kernel for the
call. JAX keeps only the right branch when it lowers the program (`jax.lax.platform_dependent`). The
choice does not depend on the devices of this process, so the same traced function can be compiled
for a GPU on a machine without a GPU.

Batching, export and `checkify` need no rules of an op: plain JAX has them, and kernels are calls of
`opaque_call.only_on` or `native.library.call`, which define them once for all kernels.

Only `BACKENDS` contains the names of backends. It imports the module of a backend when the backend
is first looked up. A backend's module imports no public op and no `Op`.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.core import Tracer

from paged_jax.kernels.backend import Backend, Interpret, Kernel
from paged_jax.kernels.derivatives import with_plain_gradients
from paged_jax.kernels.problem import Problem

_logger = logging.getLogger(__name__)

# Module and attribute of each backend. If a platform has several backends, the first of them is
# used, unless measurements show that another backend is faster for a call (`Backend.preference`).
_BACKENDS = {
    "cpu": ("paged_jax.kernels.cpu.backend", "CPU"),
    "mosaic_tpu": ("paged_jax.kernels.mosaic_tpu.backend", "MOSAIC_TPU"),
    "reference": ("paged_jax.kernels.reference", "REFERENCE"),
    "triton": ("paged_jax.kernels.triton.backend", "TRITON"),
    "mosaic_gpu": ("paged_jax.kernels.mosaic_gpu.backend", "MOSAIC_GPU"),
    "xla": ("paged_jax.kernels.xla.backend", "XLA_BACKEND"),
}

# Backends that the engine's option `backend` does not list, because another option selects them.
# `BACKENDS[name]` finds them, but iterating over `BACKENDS` does not yield them.
_UNLISTED = {
    "cpu_exact": ("paged_jax.kernels.cpu.backend", "CPU_EXACT"),
    "xla_exact": ("paged_jax.kernels.xla.exact", "XLA_EXACT"),
}

# Backends that users have added by `add_backend`.
_ADDED: dict[str, Backend] = {}


class _Backends(Mapping[str, Backend]):
    """Backends by name, imported when they are first looked up."""

    def __getitem__(self, name: str) -> Backend:
        return _ADDED[name] if name in _ADDED else _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*_BACKENDS, *_ADDED))

    def __len__(self) -> int:
        return len(_BACKENDS) + len(_ADDED)

    def __contains__(self, name: object) -> bool:
        return name in _ADDED or name in _BACKENDS or name in _UNLISTED


@functools.cache
def _load(name: str) -> Backend:
    module, attribute = (_BACKENDS if name in _BACKENDS else _UNLISTED)[name]
    return cast(Backend, getattr(importlib.import_module(module), attribute))


BACKENDS: Mapping[str, Backend] = _Backends()


def add_backend(name: str, backend: Backend) -> None:
    """Register a backend in this process. Ops and engines then accept ``backend=name``.

    A backend has a `Kernel` for each op that it implements. Engines run all other ops on the best
    backend for the platform. ``examples/new_backend.py`` is an example.

    Args:
      name: name of the backend. It must differ from the names of the backends of this library.
      backend: the backend. Its `platform` must be None, so that it is used only by its name.

    Raises:
      ValueError: the name is a name of this library, or `platform` is not None.
    """
    if name in _BACKENDS or name in _UNLISTED:
        names = ", ".join(_BACKENDS)
        raise ValueError(f"add_backend: name must not be one of {names}, got {name}.")
    if backend.platform is not None:
        raise ValueError(f"add_backend: backend.platform must be None, got {backend.platform!r}.")
    _ADDED[name] = backend


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
        anywhere = "; the ops run it anywhere with interpret=True"
        raise ValueError(
            f"{function}: backend {name!r} runs on {own} only, got a device of {platform}. Pass "
            "backend=None for the best backend of this device"
            f"{anywhere if backend.can_interpret else ''}."
        )


def backends_of(op: str) -> tuple[str, ...]:
    """Return the names of the backends that implement an op."""
    return tuple(name for name, backend in BACKENDS.items() if backend.has_op(op))


def backend_for(op: str, name: str | None) -> str | None:
    """Return `name`, or None if the backend of this name does not implement the op.

    With ``backend=None``, ops run on the best backend for the platform.
    """
    backend = BACKENDS.get(name or "")
    return None if backend is not None and not backend.has_op(op) else name


def is_exact(name: str | None) -> bool:
    """Return whether a backend gives each row the same bits in any program and batch."""
    backend = BACKENDS.get(name or "")
    return backend is not None and backend.is_exact


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


class BackendChoice(NamedTuple):
    """Name of a backend, and the reason why it was chosen.

    Attributes:
      backend: name of the backend.
      reason: the reason, as a phrase.
    """

    backend: str
    reason: str


def choose_backend(problem: Problem, platform: str) -> BackendChoice:
    """Return the backend that ``backend=None`` selects on a platform, and the reason.

    Args:
      problem: the call, see `paged_jax.kernels.problem.Problem`.
      platform: JAX's name of the platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.
    """
    return _choose(problem.op, problem, platform, _refusal_here)


def _choose(
    op: str, problem: Any, platform: str, refusal: Callable[[Kernel, Any], str | None]
) -> BackendChoice:
    reasons: list[str] = []
    for name, backend, preference in _in_order(op, problem, platform):
        if not backend.has_op(op):
            reasons.append(f"{name} leaves {op} to XLA")
            continue
        reason = refusal(backend.kernels[op], problem)
        if reason is None:
            return BackendChoice(name, preference or f"these are the kernels for {platform}")
        reasons.append(f"{name} does not support the call: {reason}")
    return BackendChoice(
        "xla", "; ".join(reasons) or f"there are no kernels of our own for {platform}"
    )


def _in_order(op: str, problem: Any, platform: str) -> list[tuple[str, Backend, str | None]]:
    """Return ``(name, backend, reason)`` for each backend of a platform, first choice first.

    `reason` says why measurements prefer the backend for this call; None if they do not.
    """
    found: list[tuple[str, Backend, str | None]] = []
    for name, backend in BACKENDS.items():
        if backend.platform == platform:
            prefer = backend.preference if isinstance(problem, Problem) else None
            found.append((name, backend, prefer and prefer(problem)))
    return sorted(found, key=lambda each: each[2] is None)


def _refusal_here(kernel: Kernel, problem: Any) -> str | None:
    """Return why a kernel does not support a call in this process, or None if it does.

    With ``backend=None``, ops are traced without the check of `Kernel.unavailable`: if a kernel is
    unavailable, they run in plain JAX.
    """
    reason = kernel.refusal(problem)
    return kernel.unavailable(problem) if reason is None and kernel.unavailable else reason


@dataclass(frozen=True, eq=False)
class Op:
    """An op: its meaning, its derivative, and what a backend must know of a call.

    Attributes:
      name: name of the op, under which backends have kernels for it.
      plain: its meaning in plain JAX, which XLA compiles for every platform: a function of the
        arguments (a tree of arrays), and of the `Options` if the op has any. It never calls this
        op. Calls that no kernel supports run it.
      describe: function of the arguments and options that returns what `Kernel.refusal` takes.
        None if the refusals take the arguments.
      gradient: function of an `OpCall` and the arguments that runs the call so that JAX can
        differentiate it. None for the derivative of `plain`.
      is_optional: whether a backend that is named, but does not support a call, leaves it to
        `plain`. Otherwise this is an error.
    """

    name: str
    plain: Callable[..., Any]
    describe: Callable[[Any, Any], Any] | None = None
    gradient: "Callable[[OpCall, Any], Any] | None" = None
    is_optional: bool = False

    def __call__(self, args: Any, options: Any = None, **binding: Any) -> Any:
        """Bind and run a call. The arguments and errors are those of `bind`."""
        return self.bind(args, options, **binding)(args)

    def bind(
        self,
        args: Any,
        options: Any = None,
        *,
        function: str | None = None,
        backend: str | None = None,
        interpret: Interpret = False,
        array: jax.Array | None = None,
    ) -> "OpCall":
        """Check that the backend supports a call; return the call without running it.

        Args:
          args: arguments of the op, a tree of arrays, checked and in range.
          options: static options of the op, hashable; None if it has none.
          function: name of the public function, for error messages; None for the name of the op.
          backend: name of a backend, or None for the best backend of each platform.
          interpret: whether to run the kernels of `backend` in Pallas' interpreter.
          array: an array of the call, whose device must be one of the backend; None for no check.

        Raises:
          ValueError: the backend does not exist, does not implement the op, or does not run on the
            device of `array`; or `interpret` is set and the backend is not written in Pallas.
          NotImplementedError: the backend does not support the call.
        """
        function = function or self.name
        call = OpCall(self, options, backend, interpret, function)
        if backend is None or backend in BACKENDS:
            _check_interpret(function, backend, interpret)
        if backend is not None and not self.is_optional:
            call.check(args, array)
        return call

    def problem(self, args: Any, options: Any) -> Any:
        """Return what `Kernel.refusal` takes for a call."""
        return args if self.describe is None else self.describe(args, options)

    @property
    def plain_kernel(self) -> Kernel:
        """The plain meaning as a kernel. JAX differentiates it if there is no other `gradient`."""
        return Kernel(self.plain, is_differentiable=self.gradient is None)


@dataclass(frozen=True)
class OpCall:
    """A call of an op on a named backend, or on the best backend for each platform. Hashable.

    Attributes:
      op: the op.
      options: static options of the op.
      backend: name of a backend, or None for the best backend.
      interpret: whether to run the kernels of `backend` in Pallas' interpreter.
      function: name of the public function, for error messages.
    """

    op: Op
    options: Any
    backend: str | None
    interpret: Interpret
    function: str

    def __call__(self, args: Any) -> Any:
        """Run the call so that JAX can differentiate it."""
        kernel = self.named_kernel
        if self.op.gradient is None or (kernel is not None and kernel.is_differentiable):
            return self.run(args)
        return self.op.gradient(self, args)

    @property
    def named_kernel(self) -> Kernel | None:
        """The kernel of the named backend; None without a name, or if it lacks the op."""
        backend = BACKENDS.get(self.backend or "")
        if backend is None or not backend.has_op(self.op.name):
            return None
        if backend.is_plain:
            return self.op.plain_kernel
        kernel = backend.kernels[self.op.name]
        return kernel.interpreted(self.interpret) if self.interpret else kernel

    def check(self, args: Any, array: jax.Array | None) -> None:
        """Check that the named backend supports the call, see `Op.bind`."""
        kernel = self.named_kernel
        if kernel is None:
            names = ", ".join(map(repr, backends_of(self.op.name)))
            raise ValueError(
                f"{self.function}: backend must be None or one of {names}, got {self.backend!r}."
            )
        reason = _refusal_here(kernel, self.op.problem(args, self.options))
        if reason is not None:
            raise NotImplementedError(
                f"{self.function}: {self.backend} does not support the call: {reason}"
            )
        # Skip the check for traced arrays, because the program may be compiled for another device.
        if array is not None and not isinstance(array, Tracer) and not self.interpret:
            [platform] = {device.platform for device in array.devices()}
            check_backend_runs_on(self.function, self.backend, platform)

    def run(self, args: Any) -> Any:
        """Run the op, without its `gradient`."""
        if self.backend is None:
            return self._run_best(args)
        kernel = self.named_kernel
        if not self.op.is_optional:
            assert kernel is not None  # see `check`
            return self._bound(kernel)(args)
        plain = self._bound(self.op.plain_kernel)
        if kernel is None or kernel.refusal(self.op.problem(args, self.options)) is not None:
            return plain(args)
        platform = BACKENDS[self.backend].platform
        if kernel.interpret or kernel.runs_anywhere or platform is None:
            return self._bound(kernel)(args)
        branches = {platform: self._bound(kernel)}
        return cast(Any, lax.platform_dependent(args, default=plain, **branches))

    def _run_best(self, args: Any) -> Any:
        name, problem = self.op.name, self.op.problem(args, self.options)
        default = self.op.plain_kernel
        branches: dict[str, Callable[[Any], Any]] = {}
        for platform in _platforms():
            # The choice depends only on the properties of the call. Whether this machine has
            # compiled kernels is checked later, when it lowers the program.
            choice = _choose(name, problem, platform, lambda kernel, call: kernel.refusal(call))
            if choice.backend == "xla":
                _logger.info("%s on %s: xla, because %s.", self.function, platform, choice.reason)
                continue
            kernel = BACKENDS[choice.backend].kernels[name]
            if kernel.runs_anywhere:
                default = kernel
            else:
                branches[platform] = self._bound(kernel)
        run = self._bound(default)
        if not branches:
            return run(args)
        return cast(Any, lax.platform_dependent(args, default=run, **branches))

    def _bound(self, kernel: Kernel) -> Callable[[Any], Any]:
        """Return the kernel as a function of the arguments, with the derivative of `Op.plain`."""
        if kernel.is_differentiable or self.op.gradient is not None:
            return _with_options(kernel.run, self.options)
        return differentiable(kernel, self.op, self.options)


def _with_options(run: Callable[..., Any], options: Any) -> Callable[[Any], Any]:
    return run if options is None else functools.partial(run, options=options)


@functools.cache
def differentiable(kernel: Kernel, op: Op, options: Any) -> Callable[[Any], Any]:
    """Return a kernel with the derivative of the op's plain meaning, jitted under the op's name.

    Without `jax.jit`, a call outside of a program would be traced again each time.
    """
    run = with_plain_gradients(_with_options(kernel.run, options), _with_options(op.plain, options))

    def call(args: Any) -> Any:
        return run(args)

    call.__name__ = call.__qualname__ = op.name
    return jax.jit(call)


def _platforms() -> list[str]:
    """Return the platforms that have backends of their own."""
    platforms = (backend.platform for backend in BACKENDS.values())
    return list(dict.fromkeys(each for each in platforms if each is not None))


def _check_interpret(function: str, name: str | None, interpret: Interpret) -> None:
    """Check that `interpret` is only set for a backend that is written in Pallas."""
    backend = BACKENDS.get(name or "")
    if not interpret or (backend is not None and backend.can_interpret):
        return
    names = [each for each, backend in BACKENDS.items() if backend.can_interpret]
    raise ValueError(
        f"{function}: interpret needs a backend that is written in Pallas, got "
        f"backend={name!r}. Pass backend={' or '.join(map(repr, names))}."
    )
