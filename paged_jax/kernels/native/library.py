"""Compilation, cache, loading, self-test and calls of the C++ kernels for CPUs.

There is one shared library for each kernel and dtype. When a program first needs it, it is compiled
in about two seconds, for the processor of this machine and with the headers of the installed
jaxlib. Loading a model for an engine starts to compile its kernels in background threads, see
`load_soon`. A library must pass a self-test before programs call it. If it does, it is stored in
the user's cache folder, under a name with two digests::

    paged_jax_decode_float32_0123456789abcdef.0f1e2d3c....so
    `------- target: kernel, inputs --------' `-- content --'

The first digest covers everything that the results of the machine code depend on, including the
processor and the version of XLA. So later processes do not repeat the self-test, which takes 30 ms
per kernel. The second digest is the SHA-256 of the file. If the content of the file does not match
it, the file is damaged. It is then deleted, and compiled again. A truncated library must never be
loaded, because that kills the process.

A call is a JAX primitive with an equivalent function in plain JAX. When a program is lowered for a
single CPU of this machine, the primitive becomes a custom call of the kernel. Otherwise, the
primitive becomes the plain function.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from paged_jax import user_cache
from paged_jax.kernels.native.compiler import (
    Unavailable,
    build_folder,
    compile_in_background,
    compile_library,
    temporary_folder,
)
from paged_jax.kernels.native.kernels import (
    CODE_ELEMENTS,
    ELEMENTS,
    INT8_INPUT_CODES,
    SELF_TESTS,
    STATE_DTYPES,
    FloatOp,
    NativeKernel,
    QuantisedOp,
)
from paged_jax.kernels.op_args import Options

_logger = logging.getLogger(__name__)

# Name of an environment variable. If the variable is 0, programs do not call the kernels.
SWITCH = "PAGED_JAX_CPU_KERNELS"

_SOURCE = Path(__file__).parent / "source"


class LoadedKernel(NamedTuple):
    """Result of loading a kernel.

    Attributes:
      target: name of the kernel as an FFI target of XLA; None if it is unavailable.
      reason: reason why it is unavailable; None if it is available.
    """

    target: str | None
    reason: str | None


def load(kernel: NativeKernel) -> LoadedKernel:
    """Compile a kernel, unless the cache has it, and register it with XLA.

    A process does this only once per kernel.
    """
    with _LOCK:
        return _load(kernel)


def load_soon(kernels: Iterable[NativeKernel]) -> None:
    """Start to compile kernels that this process has not loaded, and that the cache does not have.

    Several kernels are compiled at a time, in background threads, in the given order. `load` waits
    for its kernel.
    """
    if os.environ.get(SWITCH) == "0":
        return
    folder = user_cache.cache_folder("kernels")
    for kernel in kernels:
        command = _command(kernel)
        with contextlib.suppress(OSError):  # `load` reports missing sources
            target = _target(kernel, command)
            is_cached = folder is not None and any(folder.glob(f"{target}.*"))
            if not (is_cached or target in _REGISTERED or kernel in _MISSING):
                compile_in_background(command, folder)


def targets() -> list[str]:
    """Return the FFI targets of all kernels on this machine, whether they are loaded or not."""
    try:
        return [_target(kernel, _command(kernel)) for kernel in all_kernels()]
    except OSError:  # an installation without the sources has no kernels
        return []


def find_targets(program: bytes) -> set[str]:
    """Return the FFI targets of our kernels that a serialised program calls.

    The program may have been compiled on another machine.
    """
    ops = "|".join(get_args(FloatOp) + get_args(QuantisedOp)).encode()
    name = rb"paged_jax_(?:" + ops + rb")_\w+?_[0-9a-f]{16}\b"
    return {target.decode() for target in re.findall(name, program)}


def is_any_missing() -> bool:
    """Return whether this process has failed to load a kernel that its programs would call."""
    return bool(_MISSING)


def missing_kernels() -> dict[NativeKernel, str]:
    """Return the kernels that XLA replaces in this process, with the reason for each of them.

    Kernels that the environment variable `SWITCH` disables are not among them.
    """
    return dict(_MISSING)


def load_target(target: str) -> bool:
    """Load the kernel with an FFI target; return whether this machine has it.

    The name of a target contains a digest of the sources, compiler command, processor and version
    of jaxlib. This machine has the kernel only if all of them are the same here.
    """
    kernels = (kernel for kernel in all_kernels() if target.startswith(_prefix(kernel)))
    return any(load(kernel).target == target for kernel in kernels)


def load_called(program: bytes) -> str | None:
    """Load the kernels that a serialised program calls.

    Returns:
      None, or the FFI target of the first kernel that this machine does not have.
    """
    missing = (target for target in sorted(find_targets(program)) if not load_target(target))
    return next(missing, None)


def all_kernels() -> list[NativeKernel]:
    """Return all kernels, also those for which this processor lacks instructions."""
    kernels = [
        NativeKernel(op, dtype)
        for op in get_args(FloatOp)
        for dtype in STATE_DTYPES.get(op, tuple(ELEMENTS))
    ]
    return kernels + [
        NativeKernel(op, jnp.dtype(dtype), code)
        for op in get_args(QuantisedOp)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
        for code in (INT8_INPUT_CODES if dtype == jnp.int8 else CODE_ELEMENTS)
    ]


def _prefix(kernel: NativeKernel) -> str:
    code = "" if kernel.code is None else f"{kernel.code}_"
    return f"paged_jax_{kernel.op}_{code}{kernel.dtype}_"


_LOCK = threading.Lock()

# Targets that are registered with XLA. They cannot be unregistered.
_REGISTERED: set[str] = set()

# Kernels that could not be loaded, although programs would call them, and the reasons.
_MISSING: dict[NativeKernel, str] = {}


@functools.cache
def _load(kernel: NativeKernel) -> LoadedKernel:
    if os.environ.get(SWITCH) == "0":
        return LoadedKernel(None, f"{SWITCH} is 0")
    try:
        return LoadedKernel(_find_or_compile(kernel), None)
    except (Unavailable, OSError) as error:
        is_expected = isinstance(error, Unavailable)
        reason = str(error) if is_expected else f"a file could not be read: {error}"
        _MISSING[kernel] = reason
        _warn(reason)
        return LoadedKernel(None, reason)


@functools.cache
def _warn(reason: str) -> None:
    """Warn once per reason, even if it applies to several kernels."""
    _logger.warning("The kernels for CPUs are replaced by XLA: %s.", reason)


def _find_or_compile(kernel: NativeKernel) -> str:
    command = _command(kernel)
    target = _target(kernel, command)
    folder = user_cache.cache_folder("kernels")
    if folder is not None and _register_cached(kernel, target, folder):
        return target
    with build_folder(folder) as temporary:
        path = Path(temporary) / f"{target}.so"
        compile_library(command, path)
        _register_new(kernel, target, path, folder)
        _check(kernel, target)
        if folder is not None:
            content = path.read_bytes()
            user_cache.write(folder / _cached_name(target, content), content)
    return target


def _register_cached(kernel: NativeKernel, target: str, folder: Path) -> bool:
    """Register the library of `target` from the cache folder; return whether that succeeded.

    An undamaged file may still be unusable: another container that shares the folder may have
    linked it against another C library, or the folder may be mounted with the option noexec.
    """
    for path in sorted(folder.glob(f"{target}.*")):
        content = user_cache.read(path)
        if content is None:
            continue
        if path.name != _cached_name(target, content):
            _logger.info("%s is damaged and is compiled again.", path.name)
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        try:
            _register(kernel, target, path)
        except Unavailable as error:
            _logger.info("%s is compiled again: %s.", path.name, error)
            continue
        return True
    return False


def _cached_name(target: str, content: bytes) -> str:
    return f"{target}.{hashlib.sha256(content).hexdigest()[:32]}.so"


def _register_new(kernel: NativeKernel, target: str, path: Path, cache_folder: Path | None) -> None:
    """Register a new library. If it cannot be loaded, try again with a copy in the cache folder.

    Many systems mount /tmp with the option noexec, so that no library can be loaded from it.
    """
    try:
        _register(kernel, target, path)
    except Unavailable:
        with contextlib.suppress(Unavailable, OSError):
            if cache_folder is not None:
                with temporary_folder(cache_folder) as folder:
                    _register(kernel, target, Path(shutil.copy(path, folder)))
                    return
        raise


def _check(kernel: NativeKernel, target: str) -> None:
    if (failure := _in_a_thread(functools.partial(_find_failure, kernel, target))) is not None:
        raise Unavailable(failure)


def _command(kernel: NativeKernel) -> list[str]:
    """Return the arguments of the compiler, without the output file."""
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    # Disable the vectorisation of straight-line code. With it, GCC packs the addresses of rows into
    # vectors and extracts them again, which takes a quarter of the time of a matmul. The sources
    # use explicit vectors where vectors help.
    no_slp = "-fno-tree-slp-vectorize"
    if kernel.code is None:
        types = [f"-DELEMENT={ELEMENTS[kernel.dtype]}"]
    else:
        types = [f"-DELEMENT={CODE_ELEMENTS[kernel.code]}", f"-DINPUT={ELEMENTS[kernel.dtype]}"]
    return [
        "-std=c++17", "-O2", native, "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti", no_slp,
        "-shared", "-fPIC", *types, f"-I{jax.ffi.include_dir()}",
        str(_SOURCE / f"{kernel.op}.cc"), "-lm",
    ]  # fmt: skip


def _target(kernel: NativeKernel, command: list[str]) -> str:
    # The digest ensures that a cached program never calls another version of the kernel.
    return _prefix(kernel) + _digest(command)


def _digest(command: list[str]) -> str:
    """Return a digest of the sources, compiler command, version of jaxlib, and processor."""
    digest = _hash_sources(_SOURCE).copy()
    for option in (*command, jaxlib.version.__version__, processor()):
        digest.update(b"\0" + option.encode())
    return digest.hexdigest()[:16]


@functools.cache
def _hash_sources(folder: Path) -> "hashlib._Hash":
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(folder.iterdir())))


def processor() -> str:
    """Return the operating system's description of the processor and its instruction sets."""
    lines = [platform.machine(), platform.processor()]
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "\n".join(lines)
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(lines + sorted({x for x in cpuinfo.splitlines() if x.startswith(fields)}))


def _register(kernel: NativeKernel, target: str, path: Path) -> None:
    if target in _REGISTERED:
        return
    try:
        function = getattr(ctypes.CDLL(str(path)), f"paged_jax_{kernel.op}")
    except (OSError, AttributeError) as error:
        message = str(error).replace(str(path), "the file")
        raise Unavailable(f"a library could not be loaded: {message}") from error
    try:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    except Exception as error:  # for example, XLA has another version of the FFI than the kernel
        message = str(error).replace(target, "the kernel")
        raise Unavailable(f"XLA does not accept a kernel: {message}") from error
    _REGISTERED.add(target)


def _in_a_thread(function: Any) -> Any:
    """Call a function in a new thread, without the JAX context managers of the caller."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _find_failure(kernel: NativeKernel, target: str) -> str | None:
    """Run the self-test of a kernel on a CPU; return why it failed, or None if it passed."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:
        return "there is no CPU device for the self-test"
    try:
        with jax.default_device(device):
            got, want = SELF_TESTS[kernel.op](target, kernel)
    except Exception as error:  # Whatever the error is, programs use XLA instead of the kernel.
        return f"a self-test failed: {error}"
    if not np.allclose(got, want, rtol=1e-4, atol=1e-4):
        return f"a self-test failed: the error is {np.abs(got - want).max():.2g}"
    return None


# The static parameters of a kernel, as pairs of a name and a value.
Attributes = tuple[tuple[str, np.generic], ...]
# A function in plain JAX that computes the same as a kernel. It must be hashable, because it is a
# parameter of the primitive: programs with different functions are compiled separately.
PlainFunction = Callable[..., Any]
Arrays = tuple[jax.Array, ...]

_call_p = Primitive("paged_jax_cpu_kernel")
_call_p.multiple_results = True


def call(
    kernel: NativeKernel,
    operands: Arrays,
    plain: PlainFunction,
    args: tuple[Any, ...],
    *,
    attributes: Attributes = (),
    options: Options | None = None,
    is_in_place: bool = False,
) -> list[jax.Array]:
    """Call a kernel, or the equivalent function in plain JAX if it is unavailable.

    Args:
      kernel: the kernel to call.
      operands: arguments of the kernel.
      plain: the equivalent function in plain JAX.
      args: arguments of `plain`, trees of arrays. If a program calls the kernel, XLA removes the
        computation of arrays that only `plain` would read.
      attributes: static parameters of the kernel.
      options: last argument of `plain`; None if it has no such argument.
      is_in_place: whether the kernel updates its first operand in place, and returns it.

    Returns:
      The results of the kernel, which are the leaves of the result of `plain`.
    """
    leaves, structure = jax.tree.flatten(args)
    return _call_p.bind(
        *leaves,
        *operands,
        kernel=kernel,
        plain=plain,
        structure=structure,
        options=options,
        is_in_place=is_in_place,
        attributes=attributes,
    )


def _run_plain(
    *operands: Any, plain: PlainFunction, structure: Any, options: Options | None, **_: Any
) -> list[jax.Array]:
    args = jax.tree.unflatten(structure, operands[: structure.num_leaves])
    return jax.tree.leaves(plain(*args) if options is None else plain(*args, options))


def _abstract(*avals: Any, **params: Any) -> list[Any]:
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    results = jax.eval_shape(functools.partial(_run_plain, **params), *operands)
    return [ShapedArray(x.shape, x.dtype) for x in results]


def _batched(operands: Any, axes: Any, *, structure: Any, **params: Any) -> Any:
    count = structure.num_leaves
    run = functools.partial(_run_plain, structure=structure, **params)
    results = jax.vmap(run, in_axes=axes[:count])(*operands[:count])
    return results, [0] * len(results)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kernel: NativeKernel,
    attributes: Attributes,
    structure: Any,
    is_in_place: bool,
    **params: Any,
) -> Any:
    if _is_for_one_device_here(ctx.module_context):
        target = load(kernel).target
        if target is not None:
            begin = structure.num_leaves
            inner = ctx.replace(avals_in=ctx.avals_in[begin:])
            lower = jax.ffi.ffi_lowering(
                target, operand_output_aliases={0: 0} if is_in_place else None
            )
            return lower(inner, *operands[begin:], **dict(attributes))
    return _lower_plain(ctx, *operands, structure=structure, **params)


def _is_for_one_device_here(context: mlir.ModuleContext) -> bool:
    """Return whether the program will run on a single device of this process, unpartitioned."""
    if context.lowering_parameters.for_export:
        return False
    axes = context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # within jax.shard_map
        return axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


_lower_plain = mlir.lower_fun(_run_plain, multiple_results=True)
_call_p.def_impl(_run_plain)
_call_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_call_p] = _batched
mlir.register_lowering(_call_p, _lower_plain)
mlir.register_lowering(_call_p, _lower_for_cpu, platform="cpu")
