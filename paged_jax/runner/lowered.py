"""Cache of lowered programs, so that the next process needs no tracing.

JAX's compilation cache finds a program by its lowered text, so a process must trace and lower each
program first. For a small model this takes most of the time of a second start. This module
therefore stores the output of `jax.export`, under a key of everything that tracing depends on:

    the files of this package, the versions of its dependencies, JAX's settings, PAGED_JAX_*
    variables; the program key, the static arguments, the shapes and dtypes of all arguments.

Tracing also registers kernels with XLA, so this module registers them when it reads a file. The
process that writes a file compiles the exported program as well, so that all processes compile the
same program.

Programs are stored only for a single CPU device: on other devices tracing depends on more than the
key contains.
"""

import functools
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from flax import nnx
from jax import export

from paged_jax import user_cache
from paged_jax.kernels import Pools
from paged_jax.kernels.dispatch import cpu_backend
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner.compiler import compiler_options
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.programs import (
    BeamTokens,
    Call,
    ProgramKey,
    Scores,
)

_PACKAGE = Path(__file__).parents[1]
# A file that was changed after this time may differ from the imported module. The margin of 5 s is
# for modules of the package that are imported before this module (1 to 2 s earlier).
_IMPORTED = time.time() - 5
# `jax.export` must know the types of arguments and results. `DecodeState` needs no entry, because
# the state is passed as a list of arrays.
for _type in (Pools, StepTokens, Scores, BeamTokens):
    export.register_namedtuple_serialization(_type, serialized_name=f"paged_jax.{_type.__name__}")


class LoweredPrograms:
    """Programs of an engine that are read from files or written to files.

    Nothing is stored if `user_cache.keep_compiled_programs` was not called, or if the key would be
    incomplete: with several devices, on other devices than CPUs, with modules from outside of this
    package, or if a file of this package has changed since the process started.

    Args:
      program_key: see `ProgramKey`.
      model: the model of the programs.
    """

    def __init__(self, program_key: ProgramKey, model: PagedModel):
        modules = (type(module).__module__ for _, module in nnx.iter_modules(model))
        is_named = (
            program_key.division is None
            and program_key.platform == "cpu"
            and all(module.startswith("paged_jax.") for module in modules)
        )
        folder = user_cache.folder_beside_programs("lowered") if is_named else None
        self._folder = None if folder is None or _source() is None else folder
        self._program_key = program_key
        self._programs: dict[str, Any] = {}

    def resolve(self, call: Call, weights: list[jax.Array], state: DecodeState) -> Call:
        """Return the call with its program read from a file, which is written first if missing.

        Returns the call itself if programs are not stored.

        Args:
          call: the call.
          weights: the first argument of the program.
          state: the second argument of the program.
        """
        if self._folder is None:
            return call
        program = self._programs.get(call.name)
        if program is None:
            program = self._programs[call.name] = self._find(self._folder, call, weights, state)
        return call._replace(program=program, static={})

    def _find(self, folder: Path, call: Call, weights: list[jax.Array], state: DecodeState) -> Any:
        key = _key(self._program_key, call, weights, state)
        exported = _read(folder, key)
        if exported is None:
            exported = _lower(call, weights, state)
            _write(folder, key, exported)
        used = set(exported.module_kept_var_idx)

        def program(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
            # Replace unused weights by zeros, so that `jit` drops these arguments.
            weights = [x if i in used else jnp.zeros_like(x) for i, x in enumerate(weights)]
            leaves, tree = jax.tree.flatten(state)
            leaves, result = exported.call(weights, leaves, args)
            return jax.tree.unflatten(tree, leaves), result

        program.__name__ = call.program.__name__
        program_key = self._program_key
        options = compiler_options(program_key.platform, is_unrolled=not program_key.is_scanned)
        return jax.jit(program, donate_argnums=1, compiler_options=options)


def _lower(call: Call, weights: list[jax.Array], state: DecodeState) -> export.Exported:
    leaves, tree = jax.tree.flatten(state)

    def program(weights: list[jax.Array], leaves: list[jax.Array], args: Any) -> Any:
        state = jax.tree.unflatten(tree, leaves)
        # Call the function that `jit` wraps: a nested `jit` cannot have compiler options.
        state, result = call.program.__wrapped__(weights, state, *args, **call.static)
        assert jax.tree.structure(state) == tree
        return jax.tree.leaves(state), result

    program.__name__ = call.program.__name__
    jitted = jax.jit(program, donate_argnums=1)
    backend = cpu_backend()
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in backend.targets()]
    with backend.exporting_for_here():
        return export.export(jitted, disabled_checks=checks)(weights, leaves, call.args)


def _read(folder: Path, key: str) -> export.Exported | None:
    content = user_cache.read(folder / key)
    if content is None or not content.startswith(_checksum(key, content[_CHECKSUM_BYTES:])):
        return None
    exported = export.deserialize(bytearray(content[_CHECKSUM_BYTES:]))
    missing = cpu_backend().load_called(exported.mlir_module_serialized)
    return exported if missing is None else None


def _write(folder: Path, key: str, exported: export.Exported) -> None:
    # Do not store a program that was traced while a C++ kernel was missing.
    if not cpu_backend().is_any_missing():
        blob = bytes(exported.serialize())
        user_cache.write(folder / key, _checksum(key, blob) + blob)


_CHECKSUM_BYTES = hashlib.sha256().digest_size


def _checksum(key: str, blob: bytes) -> bytes:
    return hashlib.sha256(key.encode() + blob).digest()


def _key(program_key: ProgramKey, call: Call, weights: list[jax.Array], state: DecodeState) -> str:
    leaves, tree = jax.tree.flatten((weights, state, call.args))
    # Transfer guards belong to a thread, and do not affect tracing.
    settings = {k: v for k, v in jax.config.values.items() if "transfer_guard" not in k}
    parts = (
        _source(),
        [(name, getattr(jax.config, name, settings[name])) for name in sorted(settings)],
        sorted(item for item in os.environ.items() if item[0].startswith("PAGED_JAX_")),
        program_key,
        call.name,
        sorted(call.static.items()),
        tree,
        [jax.typeof(leaf) for leaf in leaves],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _source() -> str | None:
    """Return a digest of this package and its dependencies' versions.

    Returns None if a file of this package has changed since it was imported.
    """
    versions = (sys.version, *(x.__version__ for x in (jax, jaxlib.version, flax, np)))
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(_PACKAGE.rglob("*")):
        if path.is_file() and path.parent.name != "__pycache__":
            # Use the inode change time: tools that copy files set the modification time.
            if path.stat().st_ctime > _IMPORTED:
                return None
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(_PACKAGE)} {content}\n".encode())
    return digest.hexdigest()
