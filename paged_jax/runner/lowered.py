"""Programs as they are lowered, kept for the next process, which traces none of them.

JAX keeps compiled programs under what they are lowered to, so that a process has to trace and lower
each to find it: for a small model most of its second start. So that, too, is kept, as `jax.export`
writes it, under all that tracing depends on:

    this package's files, the versions of what they call, JAX's settings, our variables;
    the structure of the model, the static arguments, shapes and types of all others.

What tracing does besides, which is to make kernels known to XLA, is done when a file is read. The
process that writes it compiles what it has written, so that both compile the same.

Only for one CPU: on other devices tracing asks the device for more than is named here.
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
from paged_jax.kernels.dispatch import CompiledBackend, compiled_backend
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
# Files that are newer may not be those that were imported: imports before this one took a second
# or two.
_IMPORTED = time.time() - 5
# What programs take and return besides tuples and lists. The state goes as a list of its arrays.
for _type in (Pools, StepTokens, Scores, BeamTokens):
    export.register_namedtuple_serialization(_type, serialized_name=f"paged_jax.{_type.__name__}")


class LoweredPrograms:
    """The programs of an engine, from files where there are any, else into files.

    Nothing is kept where `user_cache.keep_compiled_programs` has not been called, or where the key
    would not name everything: on several devices or other ones than CPUs, with modules from outside
    of this package, or when a file of it has changed since the process began.

    Args:
      program_key: what the programs depend on besides shapes.
      model: the model that they run.
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
        """The same call of the program as it was kept, or will be; the call itself if neither.

        Args:
          call: the call.
          weights, state: what it is called with besides.
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
            # So that `jit` leaves out what the program does not read.
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
        # Unwrapped, because a program within another cannot have options of the compiler.
        state, result = call.program.__wrapped__(weights, state, *args, **call.static)
        assert jax.tree.structure(state) == tree
        return jax.tree.leaves(state), result

    program.__name__ = call.program.__name__
    jitted = jax.jit(program, donate_argnums=1)
    kernels = _kernels()
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in kernels.targets()]
    with kernels.exporting_for_here():
        return export.export(jitted, disabled_checks=checks)(weights, leaves, call.args)


def _read(folder: Path, key: str) -> export.Exported | None:
    content = user_cache.read(folder / key)
    if content is None or not content.startswith(_checksum(key, content[_CHECKSUM_BYTES:])):
        return None
    exported = export.deserialize(bytearray(content[_CHECKSUM_BYTES:]))
    missing = _kernels().load_called(exported.mlir_module_serialized)
    return exported if missing is None else None


def _kernels() -> CompiledBackend:
    backend = compiled_backend("cpu")
    assert backend is not None
    return backend


def _write(folder: Path, key: str, exported: export.Exported) -> None:
    # What goes without a kernel that could not be made would go without it for ever.
    if not _kernels().is_any_missing():
        blob = bytes(exported.serialize())
        user_cache.write(folder / key, _checksum(key, blob) + blob)


_CHECKSUM_BYTES = hashlib.sha256().digest_size


def _checksum(key: str, blob: bytes) -> bytes:
    return hashlib.sha256(key.encode() + blob).digest()


def _key(program_key: ProgramKey, call: Call, weights: list[jax.Array], state: DecodeState) -> str:
    leaves, tree = jax.tree.flatten((weights, state, call.args))
    # Guards of transfers are those of a thread, and stop what runs, not what is traced.
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
    """A digest of the code that is traced; None if it has changed since it was imported."""
    versions = (sys.version, *(x.__version__ for x in (jax, jaxlib.version, flax, np)))
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(_PACKAGE.rglob("*")):
        if path.is_file() and path.parent.name != "__pycache__":
            # Of the inode: tools that copy files set their times of modification.
            if path.stat().st_ctime > _IMPORTED:
                return None
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(_PACKAGE)} {content}\n".encode())
    return digest.hexdigest()
