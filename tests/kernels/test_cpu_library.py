"""Compilation, cache and loading of the C++ kernels, and failures of each step."""

import ctypes
import functools
import logging
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import choose_backend
from paged_jax.kernels.linear import linear
from paged_jax.kernels.native import compiler, library
from paged_jax.kernels.native.compiler import compile_library
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import Problem
from tests.support import compiler as compiler_support
from tests.support.compiler import needs_compiler, needs_vnni
from tests.support.paged_batch import PagedBatch, queries
from tests.support.processes import run_on_devices

pytestmark = needs_compiler

F32 = jnp.dtype(jnp.float32)
LINEAR = library.NativeKernel("linear", F32)
PROBLEM = Problem(
    op="decode",
    sizes=tuple({"B": 2, "H": 4, "K": 2, "D": 64, "C": 16}.items()),
    q_dtype=F32,
    pool_dtype=F32,
    has_sinks=False,
    options=Options(),
    lanes=64,
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Use an empty cache folder, as in a process that has not loaded any kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forgetful = functools.cache(library._load.__wrapped__)
    monkeypatch.setattr(library, "_load", forgetful)
    monkeypatch.setattr(library, "_MISSING", {})
    monkeypatch.setattr(compiler, "_JOBS", {})
    library._warn.cache_clear()
    return tmp_path


@pytest.fixture
def unregistered(fresh, monkeypatch):
    """Pretend to have another processor, so that the kernels get targets unknown to XLA."""
    monkeypatch.setattr(library, "processor", lambda: str(fresh))


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory) -> bytes:
    """Content of the compiled library of a kernel."""
    path = tmp_path_factory.mktemp("kernel") / "linear.so"
    compile_library(library._command(LINEAR), path)
    return path.read_bytes()


@pytest.fixture
def compiled(fresh, monkeypatch, machine_code) -> list[Path]:
    """Paths written by a fake compiler, which only copies existing machine code."""
    paths = []

    def write(command: list[str], path: Path) -> None:
        paths.append(path)
        path.write_bytes(machine_code)

    monkeypatch.setattr(compiler, "_run", write)
    return paths


def run_fresh(num_inputs: int) -> str:
    """Return the program of a correct matmul. Each number of inputs makes a new program."""
    rng = np.random.default_rng(num_inputs)
    x, w = (rng.normal(size=(n, num_inputs)).astype(np.float32) for n in (2, 3))
    lowered = jax.jit(lambda x, w: linear(x, w)).lower(x, w)
    np.testing.assert_allclose(lowered.compile()(x, w), x @ w.T, rtol=1e-5, atol=1e-5)
    return lowered.as_text()


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("paged_jax/kernels/*"))


def kernel_cases() -> list:
    """Return all kernels. Those of float32 are quick, for quantised weights two codes."""
    cases = []
    for kernel in library.all_kernels():
        is_quick = kernel.dtype == F32 and kernel.code in (None, "int8", "packed4")
        marks = [] if is_quick else [pytest.mark.slow]
        if kernel.code is not None and kernel.dtype == jnp.int8:
            marks.append(needs_vnni)
        cases.append(pytest.param(kernel, id=_name(kernel), marks=marks))
    return cases


def _name(kernel: library.NativeKernel) -> str:
    return "-".join(filter(None, (kernel.op, kernel.code, kernel.dtype.name)))


@pytest.mark.parametrize("kernel", kernel_cases())
def test_load_compiles_every_kernel_and_runs_its_self_test(kernel) -> None:
    """Without this test, a kernel that cannot be loaded would only be replaced by XLA."""
    target, why_not = library.load(kernel)
    assert why_not is None and target is not None, why_not


def test_check_kernels_names_a_kernel_that_xla_replaces(fresh, monkeypatch) -> None:
    """It does so once, and not for kernels that the user disables."""
    monkeypatch.setattr(compiler_support, "_REPORTED", set())
    compiler_support.check_kernels()
    monkeypatch.setenv(library.SWITCH, "0")
    library.load(library.NativeKernel("prefill", F32))
    compiler_support.check_kernels()
    monkeypatch.delenv(library.SWITCH)
    monkeypatch.setenv("CXX", "false")
    library.load(LINEAR)
    with pytest.raises(pytest.fail.Exception, match="linear float32: false says: "):
        compiler_support.check_kernels()
    compiler_support.check_kernels()


@pytest.mark.parametrize(
    ("variable", "value", "reason", "warnings"),
    [
        (library.SWITCH, "0", "PAGED_JAX_CPU_KERNELS is 0", 0),
        ("CXX", "false", "false says: ", 1),
        ("CXX", "no-such-compiler -O3", "no-such-compiler could not be run: ", 1),
        ("CXX", 'g++ "open', 'CXX must be a command, got g\\+\\+ "open: No closing quotation', 1),
        ("CXX", "''", " could not be run: ", 1),
        ("CXX", "true", "true wrote no file", 1),
        ("PATH", "/nowhere", "there is no C\\+\\+ compiler: install g\\+\\+ or clang\\+\\+", 1),
    ],
)
def test_load_without_a_compiler_leaves_the_work_to_xla(
    fresh, monkeypatch, caplog, variable, value, reason, warnings
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        assert "custom_call" not in run_fresh(21)
        library.load(library.NativeKernel("prefill", F32))
    assert len(caplog.records) == warnings
    # After a failure, lowered programs are not kept for later processes.
    assert library.is_any_missing() == (variable != library.SWITCH)
    choice = choose_backend(PROBLEM, "cpu")
    assert choice.backend == "xla" and re.match(
        "cpu does not support the call: " + reason, choice.reason
    )
    batch = PagedBatch.random([3])
    with pytest.raises(NotImplementedError, match="cpu does not support the call: " + reason):
        batch.decode(queries((1, 2, 16)), backend="cpu", scale=0.7)


def test_load_rejects_a_kernel_with_wrong_results(fresh, monkeypatch, caplog) -> None:
    """The sources contain an error that the compiler does not detect."""
    broken = shutil.copytree(library._SOURCE, fresh / "source")
    products = broken / "products.h"
    text, right, wrong = (
        products.read_text(),
        "add_product(total, w, x)",
        "add_product(total, w, w)",
    )
    assert right in text
    products.write_text(text.replace(right, wrong))
    monkeypatch.setattr(library, "_SOURCE", broken)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        assert "custom_call" not in run_fresh(23)
    [record] = caplog.records
    assert "are replaced by XLA: a self-test failed: the error is " in record.getMessage()
    assert not list(fresh.glob("paged_jax/kernels/*")), "a wrong kernel must not be kept"


def test_load_compiles_a_kernel_once(fresh, monkeypatch) -> None:
    """The library is kept for later processes under a digest of everything that it depends on."""
    assert "paged_jax_linear_float32" in run_fresh(24)
    [kept] = fresh.glob("paged_jax/kernels/*")
    library._load.cache_clear()
    monkeypatch.setenv("CXX", "false")
    assert "paged_jax_linear_float32" in run_fresh(25)
    assert list(fresh.glob("paged_jax/kernels/*")) == [kept]
    monkeypatch.setattr(library, "processor", lambda: "another")
    library._load.cache_clear()
    assert "custom_call" not in run_fresh(26)


def test_load_works_without_a_writable_cache_folder(fresh, monkeypatch) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert "paged_jax_linear_float32" in run_fresh(27)


def test_load_ignores_a_blank_compiler_name(fresh, monkeypatch) -> None:
    monkeypatch.setenv("CXX", " \t ")
    assert "paged_jax_linear_float32" in run_fresh(28)


# Reports an error in the source, in the encoding of a Latin-1 locale.
_FAILING_COMPILER = """#!/bin/sh
for word; do
    case $word in *.cc) printf "%s:7: error: fichier ferm\\351\\n" "$word" >&2;; esac
done
exit 1
"""


def test_load_reports_an_error_of_the_compiler_once(fresh, monkeypatch, caplog) -> None:
    """The message may have any encoding. File names are removed, as they differ between kernels."""
    script = fresh / "compiler"
    script.write_text(_FAILING_COMPILER)
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    with caplog.at_level(logging.WARNING, "paged_jax"):
        for op in ("linear", "decode", "prefill"):
            why_not = library.load(library.NativeKernel(op, F32)).reason
            assert (
                why_not
                == f"{script} says: the source:7: error: fichier ferm\N{REPLACEMENT CHARACTER}"
            )
    assert len(caplog.records) == 1


def test_load_without_sources_leaves_the_work_to_xla(fresh, monkeypatch, caplog) -> None:
    """Tools that bundle only Python files omit the C++ sources."""
    monkeypatch.setattr(library, "_SOURCE", fresh / "source")
    with caplog.at_level(logging.WARNING, "paged_jax"):
        assert "custom_call" not in run_fresh(29)
    [record] = caplog.records
    assert "a file could not be read: " in record.getMessage()
    assert library.targets() == []


def test_load_runs_the_self_test_before_a_kernel_is_kept(fresh, compiled, monkeypatch) -> None:
    """Only kernels that passed it are kept, so it runs again only if one is compiled again."""
    failures = ["it is off by 7", None, "it is off by 9"]
    monkeypatch.setattr(library, "_find_failure", lambda *args: failures.pop(0))
    assert library.load(LINEAR).reason == "it is off by 7" and not kept_files(fresh)
    for _ in range(3):
        library._load.cache_clear()
        assert library.load(LINEAR).target
    assert len(compiled) == 2
    kept_files(fresh)[0].write_bytes(b"damaged")
    library._load.cache_clear()
    assert library.load(LINEAR).reason == "it is off by 9" and not kept_files(fresh)


HARMS = {
    "truncated": lambda good: good[:4096],
    "empty": lambda good: b"",
    "one bit": lambda good: good[:-9] + bytes([good[-9] ^ 1]) + good[-8:],
    "longer": lambda good: good + b"0",
    "group may write": lambda good: good,
}


@pytest.mark.parametrize("harm", HARMS)
def test_load_compiles_a_damaged_kernel_again(fresh, machine_code, compiled, caplog, harm) -> None:
    """No warning is logged. The kernel is compiled only once, because the file is replaced."""
    assert library.load(LINEAR).target
    [kept] = kept_files(fresh)
    kept.unlink()  # this process may have mapped it
    kept.write_bytes(HARMS[harm](machine_code))
    kept.chmod(0o620 if harm == "group may write" else 0o600)
    (kept.parent / f"{kept.name.split('.')[0]}.{'0' * 32}.so").write_bytes(machine_code[:100])
    with caplog.at_level(logging.WARNING, "paged_jax"):
        for _ in range(2):
            library._load.cache_clear()
            assert library.load(LINEAR).target
    assert len(compiled) == 2 and not caplog.records
    assert kept_files(fresh) == [kept] and kept.read_bytes() == machine_code


def test_load_in_a_new_process_survives_a_truncated_kernel(fresh, machine_code, compiled) -> None:
    """The system kills a process (SIGBUS) that reads a mapped file past its end."""
    target = library.load(LINEAR).target
    [kept] = kept_files(fresh)
    kept.unlink()
    kept.write_bytes(machine_code[: len(machine_code) // 2])
    program = """
        import jax.numpy as jnp
        from paged_jax.kernels.native import library
        print(library.load(library.NativeKernel("linear", jnp.dtype("float32"))).target)
    """
    assert run_on_devices(program, num_devices=1).strip() == target
    assert kept.read_bytes() == machine_code


@pytest.fixture
def newer_interface(fresh, monkeypatch) -> Path:
    """Headers of a later version of XLA's foreign function interface."""
    headers = Path(shutil.copytree(jax.ffi.include_dir(), fresh / "include"))
    path = headers / "xla/ffi/api/c_api.h"
    changed = re.sub(r"(#define XLA_FFI_API_MINOR) \d+", r"\1 99", path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    return headers


def test_load_with_an_unsupported_interface_leaves_the_work_to_xla(
    fresh, unregistered, newer_interface, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(newer_interface))
    with caplog.at_level(logging.WARNING, "paged_jax"):
        assert "custom_call" not in run_fresh(30)
        library.load(library.NativeKernel("decode", F32))
    [record] = caplog.records
    assert "XLA does not accept a kernel: " in record.getMessage() and "0.99" in record.getMessage()
    assert not kept_files(fresh)


def test_load_compiles_an_undamaged_kernel_again_if_it_cannot_be_loaded(
    fresh, unregistered, newer_interface, caplog
) -> None:
    """Containers with different operating systems may share the cache folder."""
    command = library._command(LINEAR)
    target = library._target(LINEAR, command)
    own, other = f"-I{jax.ffi.include_dir()}", f"-I{newer_interface}"
    compile_library([other if x == own else x for x in command], fresh / "other.so")
    folder = library.user_cache.cache_folder("kernels")
    for content in ((fresh / "other.so").read_bytes(), b"of another system"):
        (folder / library._cached_name(target, content)).write_bytes(content)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        assert target in run_fresh(32)
    assert not caplog.records
    assert len(kept_files(fresh)) == 3


def refuse(*args: object, **kwargs: object) -> None:
    raise FileNotFoundError("No usable temporary directory found in ['/tmp']")


def test_load_needs_a_temporary_folder_only_to_compile(fresh, monkeypatch) -> None:
    """A container with a read-only root has none. The compiler's temporary files also go there."""
    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.delenv("TMPDIR", raising=False)
    seen, run = [], compiler.subprocess.run

    def watch(command: list[str], env: dict[str, str], **kwargs: object) -> object:
        seen.append(Path(env["TMPDIR"]))
        return run(command, env=env, **kwargs)

    monkeypatch.setattr(compiler.subprocess, "run", watch)
    assert library.load(LINEAR).target
    [kept] = kept_files(fresh)
    assert kept.suffix == ".so" and [x.parent for x in seen] == [kept.parent]

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    library._load.cache_clear()
    assert library.load(LINEAR).target and len(seen) == 1

    kept.unlink()
    library._load.cache_clear()
    why_not = library.load(LINEAR).reason
    assert why_not == "there is no folder to compile in: make /tmp writable, or set TMPDIR"


@pytest.mark.parametrize(
    "noexec",
    [
        pytest.param("temporary folder", marks=pytest.mark.slow),
        pytest.param("cache folder", marks=pytest.mark.slow),
        "both",
    ],
)
def test_load_works_if_one_folder_forbids_execution(
    fresh, unregistered, monkeypatch, caplog, noexec
) -> None:
    """Hardened systems mount /tmp or /home with noexec."""
    load, folder = ctypes.CDLL, str(library.user_cache.cache_folder("kernels"))

    def refuse_to_map(path: str) -> ctypes.CDLL:
        is_cache = path.startswith(folder)
        if noexec == "both" or (noexec == "cache folder") == is_cache:
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refuse_to_map)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        loaded = library.load(LINEAR)
        library.load(library.NativeKernel("decode", F32))
    if noexec == "both":
        assert loaded.reason is not None and "failed to map segment" in loaded.reason
        assert len(caplog.records) == 1 and not kept_files(fresh)
    else:
        assert loaded.target and not caplog.records
        assert [path.suffix for path in kept_files(fresh)] == [".so", ".so"]


def test_load_works_if_the_cache_folder_accepts_no_file(fresh, compiled, monkeypatch) -> None:
    """The disk is full or read-only."""
    monkeypatch.setattr(os, "replace", refuse)
    for _ in range(2):
        library._load.cache_clear()
        assert library.load(LINEAR).target
    assert len(compiled) == 2 and not kept_files(fresh)


def test_kernels_are_compiled_in_the_background(fresh, unregistered, compiled, monkeypatch) -> None:
    run, threads = compiler._run, []

    def record(command: list[str], path: Path) -> None:
        threads.append(threading.current_thread().name)
        run(command, path)

    monkeypatch.setattr(compiler, "_run", record)
    library.load_soon([LINEAR])
    assert len(compiler._JOBS) == 1
    assert library.load(LINEAR).target and not compiler._JOBS
    assert len(threads) == 1 and threads[0].startswith("paged_jax compiler")
    library.load_soon([LINEAR])  # it is loaded
    monkeypatch.setattr(library, "_REGISTERED", set())
    library.load_soon([LINEAR])  # it is in the cache
    assert not compiler._JOBS


def test_load_reports_why_the_compiler_failed_in_the_background(
    fresh, unregistered, monkeypatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    for _ in range(2):  # a failed kernel is not compiled again
        library.load_soon([LINEAR])
        assert library.load(LINEAR).reason.startswith("false says: ")
        assert not compiler._JOBS


def test_the_end_of_a_process_waits_only_for_running_compilers() -> None:
    program = """
        import threading, time
        from paged_jax.kernels.native import compiler

        compiler._limit = lambda limit=threading.Semaphore(): limit
        compiler._run = lambda command, path: (time.sleep(1), print(command[0]))
        for i in range(9):
            compiler.compile_in_background([str(i)], None)
    """
    assert run_on_devices(program, num_devices=1) in ("", "0\n")


@pytest.mark.slow
def test_engines_compile_the_kernels_that_they_need_in_the_background() -> None:
    program = """
        from paged_jax import LLM, SamplingParams
        from paged_jax.kernels.native import library

        soon, loaded = [], []
        load_soon, load = library.load_soon, library._load
        library.load_soon = lambda kernels: (soon.extend(kernels), load_soon(kernels))
        library._load = lambda kernel: (loaded.append(kernel), load(kernel))[1]
        LLM(dtype="int8").generate(["A text"], SamplingParams(max_tokens=2))
        print(*soon, sep="; ")
        print(*(kernel for kernel in dict.fromkeys(loaded) if kernel in soon), sep="; ")
        print(*(kernel.op for kernel in dict.fromkeys(loaded) if kernel not in soon))
    """
    soon, loaded, others = run_on_devices(program, num_devices=1).splitlines()
    assert soon == loaded  # in the same order
    assert others == "linear"  # `sum_rows` uses this kernel
