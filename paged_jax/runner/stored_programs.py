"""Compiled programs in files, which later processes load without tracing and compiling.

JAX's compilation cache finds a program by its lowered text, so a process must first trace and lower
each program. For a small model, this takes most of the time of a second start. So this module
stores the executables. The key of an executable is a digest of everything that it depends on:

    the files of this package, the versions of its dependencies, JAX's settings, the environment
    variables PAGED_JAX_* and XLA_*, the processor; the program key, the static arguments, the
    shapes and dtypes of all arguments

Tracing a program also registers its kernels with XLA. Since a stored program is not traced, its
kernels are registered when its file is read.

A file contains machine code and pickled data. So it is only read if it belongs to the user of this
process and nobody else may write to it, see `user_cache.read`.

Programs are stored only for a single CPU device, because programs for other devices depend on more
than the key contains.

Reading an executable takes 0.02 to 0.15 s, so the first programs are read while the model is being
loaded. Their keys cannot be computed yet at that time, so they come from a file that lists the
first programs of the last engine with the same options, see `FirstPrograms`.
"""

import concurrent.futures
import functools
import hashlib
import logging
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jaxlib.version
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable

from paged_jax import user_cache
from paged_jax.kernels.native import library
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner.compiler import compiler_options
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.devices import can_store_executables
from paged_jax.runner.programs import Call, ProgramKey

_logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
# Import time of this module, minus 5 s. If a file was changed after this time, it may differ from
# the imported module. The 5 s are subtracted because other modules are imported up to 2 s before
# this module; the other 3 s are a safety margin.
_IMPORTED = time.time() - 5

# Number of programs that `FirstPrograms` lists. An engine needs four programs for its first token:
# they make the empty state, prefill a prompt, assign the sequence to a slot, and decode.
_NUM_FIRST = 4
_PLAIN = str | int | float | Path | None


class FirstPrograms:
    """The first programs of an engine, which a thread reads from files while the model is loaded.

    A file in the folder ``starts`` lists the keys of the programs that the last engine with the
    same options needed first. If this engine needs other programs, reading the listed files only
    wastes time: `StoredPrograms` looks up programs by key, so it never uses a wrong one.

    Args:
      options: options of the engine by name. Only strings, numbers, paths and None are compared.
    """

    def __init__(self, options: Mapping[str, object]):
        self._file: Path | None = None
        self._keys: list[str] = []
        self._reading: dict[str, concurrent.futures.Future[Any]] = {}
        folder = user_cache.folder_beside_programs("executables")
        starts = user_cache.folder_beside_programs("starts")
        is_possible = can_store_executables(jax.default_backend()) and _source() is not None
        if folder is None or starts is None or not is_possible:
            return
        device = jax.local_devices()[0]
        plain_options = [item for item in options.items() if isinstance(item[1], _PLAIN)]
        name = hashlib.sha256(repr((_environment(device), plain_options)).encode()).hexdigest()
        self._file = starts / name
        keys = (user_cache.read(self._file) or b"").decode(errors="replace").split()
        thread = concurrent.futures.ThreadPoolExecutor(1)
        self._reading = {key: thread.submit(_read, folder, key, device) for key in keys}
        thread.shutdown(wait=False)

    def take(self, key: str) -> jax.stages.Compiled | None:
        """Return the program with key `key`, and list the key for the next start.

        Waits until the thread has read the program. Returns None if the program was not listed, if
        its file cannot be used, or if the engine has already asked for `_NUM_FIRST` programs.
        """
        if self._file is None or len(self._keys) == _NUM_FIRST:
            return None
        future = self._reading.pop(key, None)
        self._keys.append(key)
        if len(self._keys) == _NUM_FIRST:
            content = "\n".join(self._keys).encode()
            if user_cache.read(self._file) != content:
                user_cache.write(self._file, content)
            self._reading.clear()
        return None if future is None else future.result()


class StoredPrograms:
    """Reads the programs of an engine from files, or compiles them and writes the files.

    Programs are only stored if `user_cache.keep_compiled_programs` was called. They are also not
    stored if their key would be incomplete. This is the case with several devices, with devices
    other than CPUs, if the model contains modules that are neither from this package nor from Flax,
    or if a file of this package has changed since the process started.

    Args:
      program_key: see `ProgramKey`.
      model: the model that the programs run.
      device: the device that runs the programs.
      first: the programs that have been read while the model was loaded, if any.
    """

    def __init__(
        self,
        program_key: ProgramKey,
        model: PagedModel,
        device: Any,
        first: FirstPrograms | None = None,
    ):
        modules = {type(module).__module__ for _, module in nnx.iter_modules(model)}
        # Parts of layers may come from a program of the user, too.
        modules |= set[str]().union(*(spec.modules for spec in getattr(model.config, "layers", ())))
        is_named = (
            program_key.division is None
            and can_store_executables(program_key.platform)
            and all(module.startswith(("paged_jax.", "flax.")) for module in modules)
        )
        folder = user_cache.folder_beside_programs("executables") if is_named else None
        self._folder = None if folder is None or _source() is None else folder
        self._program_key = program_key
        self._device = device
        self._first = first
        self._programs: dict[str, Any] = {}

    def resolve(self, call: Call, weights: list[jax.Array], state: DecodeState) -> Call:
        """Replace the program of a call by the stored executable, which is compiled if needed.

        A newly compiled program is written to its file. If programs are not stored, `call` is
        returned unchanged.

        Args:
          call: the call.
          weights: the first argument of the program.
          state: the second argument of the program.
        """
        if self._folder is None:
            return call
        program_key = self._program_key
        options = compiler_options(program_key.platform, is_unrolled=not program_key.is_scanned)
        arguments = (weights, state, *call.args)
        source = _Source(call.program.__wrapped__, arguments, call.static, 1, options)
        return call._replace(program=self._find(self._folder, call.name, source), static={})

    def find(
        self,
        name: str,
        jitted: Any,
        arguments: tuple[Any, ...],
        donated: int | None = None,
        **static: Any,
    ) -> Callable[..., Any]:
        """Return the executable of a function, read from its file or newly compiled.

        A newly compiled executable is written to its file. If programs are not stored, the result
        is `jitted` with its static arguments.

        Args:
          name: a name that identifies the function and the shapes of its arguments.
          jitted: the function, a result of `jit_for`.
          arguments: arguments of the function; only their shapes and dtypes matter.
          donated: index of the argument to donate, or None.
          **static: static arguments of the function.
        """
        if self._folder is None:
            return functools.partial(jitted, **static)
        options = compiler_options(self._program_key.platform)
        source = _Source(jitted.__wrapped__, arguments, static, donated, options)
        return self._find(self._folder, name, source)

    def _find(self, folder: Path, name: str, source: "_Source") -> jax.stages.Compiled:
        program = self._programs.get(name)
        if program is None:
            key = _key(self._program_key, self._device, name, source)
            program = None if self._first is None else self._first.take(key)
            program = program or _read(folder, key, self._device)
            if program is None or program.in_tree != source.structure:
                program = _compile(folder, key, source)
            self._programs[name] = program
        return program


class _Source(NamedTuple):
    """A function to compile, and its arguments.

    Attributes:
      function: the function.
      arguments: its positional arguments; only their shapes and dtypes matter.
      static: its static arguments, by name.
      donated: index of the element of `arguments` that is donated; None if none is donated.
      options: XLA compiler options, see `compiler_options`.
    """

    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    donated: int | None
    options: Any

    @property
    def structure(self) -> Any:
        """Tree structure of the arguments, in the form of `jax.stages.Compiled.in_tree`."""
        return jax.tree.structure((self.arguments, {}))


class _Stored(NamedTuple):
    """Content of the file of a stored program, after the checksum.

    Attributes:
      executable: the tuple that `serialize_executable.serialize` returned.
      targets: the FFI targets of the C++ kernels that the program calls.
    """

    executable: tuple[bytes, Any, Any]
    targets: list[str]


def _compile(folder: Path, key: str, source: _Source) -> jax.stages.Compiled:
    """Compile a program, and write it to a file unless a C++ kernel could not be loaded.

    Without the kernel, the program uses XLA operations, so later processes should not load it.
    """
    lowered = _lower(source, key)
    program = lowered.compile()
    if library.is_any_missing():
        return program
    try:
        executable = serialize_executable.serialize(program)
    except jax.errors.JaxRuntimeError:
        # JAX has read the program from its compilation cache. XLA cannot serialise such a program
        # if it contains a sort. So compile the program under a name that is not in the cache.
        lowered = _lower(source, secrets.token_hex(8))
        program = lowered.compile()
        executable = serialize_executable.serialize(program)
    targets = sorted(library.find_targets(lowered.as_text().encode()))
    blob = pickle.dumps(tuple(_Stored(executable, targets)))
    user_cache.write(folder / key, _checksum(key, blob) + blob)
    return program


def _lower(source: _Source, suffix: str) -> jax.stages.Lowered:
    """Lower a function under a new name, so that JAX's compilation cache does not contain it.

    The name ends with `suffix`.
    """

    def program(*arguments: Any) -> Any:
        return source.function(*arguments, **source.static)

    program.__name__ = f"{source.function.__name__}_{suffix[:16]}"
    jitted = jax.jit(program, donate_argnums=source.donated, compiler_options=source.options)
    return jitted.lower(*source.arguments)


def _read(folder: Path, key: str, device: Any) -> jax.stages.Compiled | None:
    """Return a stored program; None if the file is missing, damaged or cannot be used here.

    `device` runs the program.
    """
    content = user_cache.read(folder / key)
    if content is None or not content.startswith(_checksum(key, content[_CHECKSUM_BYTES:])):
        return None
    try:
        stored = _Stored(*pickle.loads(content[_CHECKSUM_BYTES:]))
        if not all(map(library.load_target, stored.targets)):
            return None
        return serialize_executable.deserialize_and_load(
            *stored.executable, execution_devices=(device,)
        )
    except Exception as error:  # Compile the program again, whatever the error is.
        _logger.info("%s is compiled again: %s", key, error)
        return None


_CHECKSUM_BYTES = hashlib.sha256().digest_size


def _checksum(key: str, blob: bytes) -> bytes:
    return hashlib.sha256(key.encode() + blob).digest()


def _key(program_key: ProgramKey, device: Any, name: str, source: _Source) -> str:
    leaves, tree = jax.tree.flatten(source.arguments)
    parts = (
        *_environment(device),
        program_key,
        name,
        sorted(source.static.items()),
        source.donated,
        source.options,
        tree,
        [jax.typeof(leaf) for leaf in leaves],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _environment(device: Any) -> tuple[Any, ...]:
    """Return everything outside of an engine that affects its programs."""
    # Leave the settings of transfer guards out of the key, because they differ between threads and
    # do not affect tracing.
    settings = {k: v for k, v in jax.config.values.items() if "transfer_guard" not in k}
    return (
        _source(),
        library.processor(),
        os.cpu_count(),
        device.id,
        [(name, getattr(jax.config, name, settings[name])) for name in sorted(settings)],
        sorted(item for item in os.environ.items() if item[0].startswith(("PAGED_JAX_", "XLA_"))),
    )


@functools.cache
def _source() -> str | None:
    """Return a digest of the files of this package and of the versions of its dependencies.

    The result is None if a file of this package has changed since it was imported.
    """
    versions = (sys.version, *(x.__version__ for x in (jax, jaxlib.version, flax, np)))
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(_PACKAGE.rglob("*")):
        if path.is_file() and path.parent.name != "__pycache__":
            # Use the inode change time, because tools that copy files may set an old modification
            # time.
            if path.stat().st_ctime > _IMPORTED:
                _logger.info("Programs are not stored, because %s was just changed.", path)
                return None
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(_PACKAGE)} {content}\n".encode())
    return digest.hexdigest()
