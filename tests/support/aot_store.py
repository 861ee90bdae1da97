"""Results of ahead-of-time compilation, kept in ``tests/data/aot.json``.

A result depends only on what its digest covers:

- the program as the compiler gets it, with the kernels inside it, and the compiler options;
- the described device, and the processor of this machine;
- the versions of JAX and of all compilers;
- environment variables that compilers read;
- the code that compiles, and that reads the figures from the compiled program.

So a program with a stored digest is lowered, but not compiled. A changed kernel, option or compiler
changes the digest: an old file costs time, but gives no wrong result. Source lines are no part of
the digest, because scripts lower without them (`omit_locations`). The variable `MODE` chooses what
happens; options of pytest set it:

- ``stored``, the default: compile only programs with digests that are not in the file;
- ``update`` (``--aot-update``): the same, and write the new results to the file;
- ``verify`` (``--aot-verify``): compile all, and fail where a result differs from the stored one.

A program that does not compile has no result.
"""

import ast
import contextlib
import copy
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import ROOT

MODE = "PAGED_JAX_AOT"
MODES = ("stored", "update", "verify")
PATH = ROOT / "tests" / "data" / "aot.json"

# Packages that compile for each kind of device.
COMPILERS = {
    "gpu": r"jax|jaxlib|jax-cuda\d+-(pjrt|plugin)"
    r"|nvidia-(cuda-nvcc|cuda-nvdisasm|nvvm|nvjitlink)\b.*",
    "tpu": r"jax|jaxlib|libtpu\b.*",
}

# Files of the CUDA toolkit that XLA, JAX and `aot_gpu` use.
_CUDA_FILES = ("bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc")

# The environment before JAX adds variables of its own.
ENVIRONMENT = dict(os.environ)

# Variables that compilers read, except those that JAX or a script sets, also for child processes.
_VARIABLES = re.compile(r"(XLA|LIBTPU|TPU|MOSAIC|TRITON|LLVM|MLIR|CUDA|NVPTX)_")
_OF_JAX = re.compile(
    r"TPU_(SKIP_MDS_QUERY|ML_PLATFORM.*)|XLA_PYTHON_CLIENT_.*|CUDA_VISIBLE_DEVICES"
    r"|MOSAIC_GPU_(CUDA_ROOT|RUNTIME_LIB_PATH|NVSHMEM_.*|DUMP_.*)"
)

# Marks a packed list of records.
_FIELDS = "fields"


class Difference(AssertionError):
    """A program that was compiled again has another result than the stored one."""


def omit_locations() -> None:
    """Let JAX lower programs without source lines. Call this before importing JAX."""
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


class Store:
    """The stored results for one target, and the digests of its programs.

    Args:
      kind: ``"gpu"`` or ``"tpu"``.
      target: name of the described device, such as ``"h200"``.
      names: names of all programs for the target. An update removes the results of others.
      sources: files with the code that compiles and reads.
      mode: one of `MODES`; by default, the value of the environment variable.
      path: the file with the results. Nothing is read from it or written to it if a part of a
        compiler is not from a package, because its version is unknown.

    Attributes:
      counts: number of programs that were ``"stored"``, ``"compiled"``, or ``"verified"``.
    """

    def __init__(
        self,
        kind: str,
        target: str,
        names: Collection[str],
        sources: Iterable[Path | str],
        *,
        mode: str | None = None,
        path: Path = PATH,
    ):
        self.mode = mode or os.environ.get(MODE) or "stored"
        if self.mode not in MODES:
            raise ValueError(f"{MODE} must be one of {', '.join(MODES)}, got {self.mode}.")
        has_packages = kind != "gpu" or None not in map(find_cuda, _CUDA_FILES)
        if not has_packages:
            if self.mode != "stored":
                raise ValueError(f"{MODE}={self.mode} requires compilers from packages.")
            print(
                f"{target}: compilers are not from packages, so no result is read", file=sys.stderr
            )
        self.kind, self.target, self.names = kind, target, frozenset(names)
        self.compilers = installed(COMPILERS[kind])
        self.version = importlib.metadata.version("jax")
        self.path = path
        self.counts: Counter[str] = Counter()
        self._code = [code_of(source) for source in sources]
        if self.mode == "update":
            self._remove_old()
        self._programs = read_file(path)["programs"] if has_packages else {}
        self._stored = dict(self._programs.values())

    def compile(
        self,
        name: str,
        lowered: Any,
        read: Callable[[Any], Mapping[str, Any]],
        *,
        options: Mapping[str, Any] | None = None,
        facts: Iterable[Any] = (),
    ) -> dict[str, Any]:
        """Return the stored result of a program, or compile it.

        Args:
          name: name of the program.
          lowered: the `jax.stages.Lowered` to compile.
          read: makes the result from the `jax.stages.Compiled`.
          options: compiler options.
          facts: everything else that the result depends on, such as the description of the device.
        """
        with _watched(lambda program: self._look_up(program, [*map(str, facts)])) as seen:
            try:
                compiled = lowered.compile(compiler_options=dict(options or {}))
            except _Known as known:
                self.counts["stored"] += 1
                digest, _ = self._programs.get(self._key(name), (None, None))
                # Otherwise another name has the same program.
                if self.mode == "update" and digest != known.digest:
                    self._write(name, known.digest, known.result)
                return known.result
        # Stored results are read from JSON too. Threads of the compiler write kernels in any order.
        result = json.loads(json.dumps(read(compiled)))
        if isinstance(result.get("kernels"), list):
            result["kernels"].sort(key=json.dumps)
        [digest] = seen  # fails if JAX did not compile in the way that is watched
        stored = self._stored.get(digest)
        self.counts["compiled" if stored is None else "verified"] += 1
        if stored is not None and unpack(stored) != result:
            raise Difference(_describe(f"{self.target}: {name}", unpack(stored), result))
        if self.mode == "update":
            self._write(name, digest, result)
        return result

    def _look_up(self, program: list[str], facts: list[str]) -> str:
        """Return the digest of a program, or raise its stored result if that is to be used."""
        parts = [program, facts, self.compilers, _variables(), platform.machine(), self._code]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        if self.mode != "verify" and digest in self._stored:
            raise _Known(digest, unpack(self._stored[digest]))
        return digest

    def _key(self, name: str) -> str:
        return f"{self.target}: {name}; jax {self.version}"

    def _write(self, name: str, digest: str, result: Mapping[str, Any]) -> None:
        """Write a result. Other processes may write theirs at the same time."""
        packed = pack(result)
        self._stored[digest] = packed
        with _locked(self.path):
            document = read_file(self.path)
            document["programs"][self._key(name)] = [digest, packed]
            document["compilers"][f"{self.kind}, jax {self.version}"] = self.compilers
            write_file(document, self.path)

    def _remove_old(self) -> None:
        """Remove programs that have no name any more, and versions of JAX before this one.

        Results with the oldest supported version and with newer ones stay: CI tests several.
        """
        with _locked(self.path):
            document = read_file(self.path)
            before = len(document["programs"])
            for key in [*document["programs"]]:
                target, name, version = _parts(key)
                is_removed = target == self.target and name not in self.names
                is_old = _order(oldest_version()) < _order(version) < _order(self.version)
                if is_removed or is_old:
                    del document["programs"][key]
            versions = {_parts(key)[2] for key in document["programs"]}
            for key in [*document["compilers"]]:
                if key.partition(", jax ")[2] not in versions:
                    del document["compilers"][key]
            if len(document["programs"]) < before:
                write_file(document, self.path)


class _Known(Exception):
    """Ends a compilation with a stored result."""

    def __init__(self, digest: str, result: dict[str, Any]):
        super().__init__(digest)
        self.digest, self.result = digest, result


@contextlib.contextmanager
def _watched(look_up: Callable[[list[str]], str]) -> Iterator[list[str]]:
    """Call `look_up` with the program and options of each compilation; yield what it returns."""
    from jax._src import compiler

    seen: list[str] = []
    compile_program = compiler.compile_or_get_cached

    def watch(backend: Any, computation: Any, devices: Any, options: Any, *rest: Any, **more: Any):
        seen.append(look_up([text_of(computation), _options(options)]))
        return compile_program(backend, computation, devices, options, *rest, **more)

    with mock.patch.object(compiler, "compile_or_get_cached", watch):
        yield seen


def text_of(module: Any) -> str:
    """Return an MLIR module as text, with the names from which XLA makes names in its programs.

    A kernel of Mosaic GPU is inside as bytes, which contain the paths of source files. The text of
    the kernel, without them, replaces the bytes and their digest.
    """
    from jaxlib.mlir import ir

    kernels: list[str] = []

    def find_kernel(op: Any) -> Any:
        if "mhlo.backend_config" in op.attributes:
            config = op.attributes["mhlo.backend_config"]
            if isinstance(config, ir.DictAttr) and "kernel_hash" in config:
                kernels.append(_text_of_kernel(ir.StringAttr(config["module"]).value_bytes))
        return ir.WalkResult.ADVANCE

    module.operation.walk(find_kernel)
    text = module.operation.get_asm(enable_debug_info=True)
    text = re.sub('kernel_hash = "[^"]*", module = "[^"]*"', "", text)
    return "\n".join((text, *kernels))


def _text_of_kernel(kernel: bytes) -> str:
    from jax._src.interpreters import mlir
    from jax.experimental.mosaic.gpu import dialect
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    dialect.register_dialect(context)
    with context:
        return ir.Module.parse(kernel).operation.get_asm(enable_debug_info=False)


def _options(options: Any) -> str:
    """Return all options of a compilation as text, except the folders of this machine."""
    options = copy.deepcopy(options)
    debug_options = options.executable_build_options.debug_options
    debug_options.xla_dump_to = ""
    # The versions of the packages there are part of the digest.
    debug_options.xla_gpu_cuda_data_dir = ""
    return options.SerializeAsString().hex()


def _variables() -> list[str]:
    """Return the environment variables that compilers read."""
    variables = {
        name: value
        for name, value in ENVIRONMENT.items()
        if _VARIABLES.match(name) and not _OF_JAX.fullmatch(name)
    }
    library = importlib.util.find_spec("libtpu")
    if library and library.origin:
        # The package names its own library for child processes.
        own = str(Path(library.origin).with_name("libtpu.so"))
        if variables.get("TPU_LIBRARY_PATH") == own:
            del variables["TPU_LIBRARY_PATH"]
    return [f"{name}={variables[name]}" for name in sorted(variables)]


def installed(pattern: str) -> list[str]:
    """Return the installed packages with names that match a pattern, and their versions."""
    packages = {
        re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower(): package.version
        for package in importlib.metadata.distributions()
    }
    return [f"{name} {packages[name]}" for name in sorted(packages) if re.fullmatch(pattern, name)]


def find_cuda(name: str) -> Path | None:
    """Return the path of a file of the CUDA toolkit if a package has installed it."""
    site_packages = Path(str(importlib.metadata.distribution("jaxlib").locate_file("")))
    return next(site_packages.glob(f"nvidia/*/{name}"), None)


def code_of(path: Path | str) -> str:
    """Return the code of a file without comments, docstrings and line breaks."""
    tree = ast.parse(Path(path).read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Strings that are statements.
            node.body = [  # type: ignore
                x
                for x in body
                if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))
            ] or [ast.Pass()]
    return ast.unparse(tree)


def oldest_version() -> str:
    """Return the oldest supported version of JAX."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [version] = re.findall(r"\bjax>=([\d.]+)", " ".join(project["dependencies"]))
    return version


def read_file(path: Path = PATH) -> dict[str, Any]:
    """Return the versions of compilers, and the digest and the packed result of each program."""
    if not path.exists():
        return {"compilers": {}, "programs": {}}
    return json.loads(path.read_text())


def write_file(document: Mapping[str, Mapping[str, Any]], path: Path = PATH) -> None:
    """Write a file with a line for each program, so that differences between commits are short."""
    parts = []
    for part, entries in document.items():
        lines = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(entries[key], separators=(',', ':'))}"
            for key in sorted(entries)
        )
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _parts(key: str) -> tuple[str, str, str]:
    """Return the target, the name, and the version of JAX in the key of a program."""
    program, _, version = key.rpartition("; jax ")
    target, _, name = program.partition(": ")
    return target, name, version


def pack(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result in the form of the file: lists of records have the names of fields once."""
    return {name: _pack_records(value) for name, value in result.items()}


def _pack_records(value: Any) -> Any:
    is_table = isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict)
    if not is_table or any(not isinstance(x, dict) or [*x] != [*value[0]] for x in value):
        return value
    return {_FIELDS: [*value[0]], "rows": [[*record.values()] for record in value]}


def unpack(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result that `pack` got."""
    return {
        name: [dict(zip(value[_FIELDS], row, strict=True)) for row in value["rows"]]
        if isinstance(value, dict) and _FIELDS in value
        else value
        for name, value in packed.items()
    }


def _describe(program: str, stored: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    lines = [
        f"  {key}: stored {stored.get(key)}, compiled {result.get(key)}"
        for key in sorted({*stored, *result})
        if stored.get(key) != result.get(key)
    ]
    return "\n".join((f"{program}: the stored result differs from the compiled result.", *lines))
