"""Tests of `tests.support.aot_store`, with programs that the CPU's compiler compiles."""

import contextlib
import hashlib
import importlib.util
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir

from tests.support import aot_store
from tests.support.aot_store import Difference, Store
from tests.support.kernel_cases import lower

NAMES = ("first", "second", "third")
SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


@pytest.fixture(autouse=True)
def without_locations() -> Iterator[None]:
    """Lower as after `aot_store.omit_locations`, which has no effect once JAX is imported."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """The file of the stores of a test; the variables of this process select no mode."""
    monkeypatch.delenv(aot_store.MODE, raising=False)
    return tmp_path / "aot.json"


def open_store(path: Path, mode: str = "stored", **changes: Any) -> Store:
    arguments = {"kind": "tpu", "target": "v5e", "names": NAMES, "sources": [__file__]}
    return Store(**(arguments | changes), mode=mode, path=path)


def program(factor: float = 2.0) -> jax.stages.Lowered:
    return jax.jit(lambda x: factor * x).lower(SHAPE)


def count_instructions(compiled: jax.stages.Compiled) -> dict[str, Any]:
    return {"instructions": compiled.as_text().count(" = "), "launches": [("a", 1), ("b", 2)]}


def must_not_compile(compiled: jax.stages.Compiled) -> dict[str, Any]:
    raise AssertionError("the program was compiled, although its result is stored")


def update(path: Path, name: str = "first", **changes: Any) -> dict[str, Any]:
    return open_store(path, "update", **changes).compile(name, program(), count_instructions)


def change(path: Path, **figures: Any) -> None:
    """Replace figures of all stored results, as if they came from another compilation."""
    document = aot_store.read_file(path)
    for entry in document["programs"].values():
        entry[1] = aot_store.pack(aot_store.unpack(entry[1]) | figures)
    aot_store.write_file(document, path)


def test_program_with_a_stored_result_is_not_compiled(path) -> None:
    written = update(path)
    assert written["instructions"] > 0 and written["launches"] == [["a", 1], ["b", 2]]
    for mode in ("stored", "update"):
        store = open_store(path, mode)
        assert store.compile("first", program(), must_not_compile) == written
        assert store.counts == {"stored": 1}


def test_order_of_kernels_is_no_part_of_a_result(path) -> None:
    kernels = [{"name": "a", "registers": 9}, {"name": "b", "registers": 5}]
    open_store(path, "update").compile("first", program(), lambda compiled: {"kernels": kernels})
    again = open_store(path, "verify").compile(
        "first", program(), lambda compiled: {"kernels": kernels[::-1]}
    )
    assert again == {"kernels": kernels}


def test_default_mode_and_failed_programs_write_nothing(path) -> None:
    open_store(path).compile("first", program(), count_instructions)
    store = open_store(path, "update")
    with pytest.raises(Exception, match="no_such_option"):
        store.compile("first", program(), count_instructions, options={"no_such_option": 1})
    with pytest.raises(ZeroDivisionError):
        store.compile("first", program(), lambda compiled: {"figure": 1 // 0})
    assert not path.exists()


@pytest.mark.parametrize(
    "changed", ["program", "options", "facts", "variable", "compiler", "code", "processor"]
)
def test_everything_that_determines_a_result_is_in_the_digest(
    path, tmp_path, monkeypatch, changed
) -> None:
    source = tmp_path / "source.py"
    source.write_text('"""Text."""\nx = 1  # the first\n')
    update(path, sources=[source])
    factor, options, facts = 2.0, {}, ()
    # Neither comments nor docstrings are code, and the environments of machines differ.
    source.write_text('"""Other text."""\n\n# Why.\nx = 1\n')
    for name in ("MOSAIC_GPU_RUNTIME_LIB_PATH", "HOME"):
        monkeypatch.setitem(aot_store.ENVIRONMENT, name, str(tmp_path))
    monkeypatch.setattr("jax._src.lib.cuda_path", str(tmp_path))
    store = open_store(path, sources=[source])
    assert store.compile("first", program(), must_not_compile)
    match changed:
        case "program":
            factor = 3.0
        case "options":
            options = {"xla_cpu_enable_fast_math": True}
        case "facts":
            facts = ("v5e:2x4",)
        case "variable":
            monkeypatch.setitem(aot_store.ENVIRONMENT, "XLA_FLAGS", "--xla_some_flag=true")
        case "compiler":
            monkeypatch.setattr(aot_store, "installed", lambda pattern: [f"{pattern} 99"])
        case "code":
            source.write_text("x = 2\n")
        case "processor":
            monkeypatch.setattr(aot_store.platform, "machine", lambda: "riscv64")
    store = open_store(path, sources=[source])
    result = store.compile(
        "first", program(factor), lambda compiled: {"figure": 7}, options=options, facts=facts
    )
    assert result == {"figure": 7} and store.counts == {"compiled": 1}


def test_comparison_compiles_and_names_the_program_and_figure_that_differ(path) -> None:
    update(path)
    store = open_store(path, "verify")
    assert store.compile("first", program(), count_instructions)["instructions"] > 0
    assert store.counts == {"verified": 1}
    change(path, instructions=12345)
    # Without a comparison, the stored result is believed.
    stored = open_store(path).compile("first", program(), must_not_compile)
    assert stored["instructions"] == 12345
    with pytest.raises(Difference, match="v5e: first.*\n.*instructions: stored 12345"):
        open_store(path, "verify").compile("first", program(), count_instructions)


def test_update_replaces_results_of_changed_and_removed_programs(path, monkeypatch) -> None:
    monkeypatch.setattr(aot_store, "oldest_version", lambda: "0.1")

    def keys() -> list[str]:
        return [*aot_store.read_file(path)["programs"]]

    def install(version: str) -> None:
        monkeypatch.setattr(aot_store.importlib.metadata, "version", lambda _: version)

    for version in ("0.1", "0.3"):
        install(version)
        update(path)
        update(path, "second")
    update(path, target="v6e")
    assert keys() == [
        "v5e: first; jax 0.1", "v5e: first; jax 0.3", "v5e: second; jax 0.1",
        "v5e: second; jax 0.3", "v6e: first; jax 0.3",
    ]  # fmt: skip
    # Another program with the same name has one result, and another name of a program has its own.
    store = open_store(path, "update")
    store.compile("second", program(3.0), lambda compiled: {"figure": 1})
    store.compile("third", program(3.0), must_not_compile)
    documents = aot_store.read_file(path)["programs"]
    second, third = (documents[f"v5e: {name}; jax 0.3"] for name in ("second", "third"))
    assert second == third and aot_store.unpack(second[1]) == {"figure": 1}
    # "second" changes again, to the program of "first".
    update(path, "second")
    documents = aot_store.read_file(path)["programs"]
    assert documents["v5e: second; jax 0.3"] == documents["v5e: first; jax 0.3"]
    # "second" is no name any more. A newer JAX replaces all versions but the oldest.
    for version in ("0.10", "0.9"):
        install(version)
        update(path, names=("first", "third"))
    versions = ["0.1", "0.10", "0.9"]
    assert keys() == [f"v5e: first; jax {version}" for version in versions]
    compilers = aot_store.read_file(path)["compilers"]
    assert [*compilers] == [f"tpu, jax {version}" for version in versions]


def test_processes_write_at_the_same_time(path) -> None:
    """Each writer reads the file again, and no reader sees a part of a file."""
    store = open_store(path, "update", names=[str(i) for i in range(40)])
    threads = [
        threading.Thread(target=lambda i=i: store._write(str(i), f"{i:032}", {"figure": i}))
        for i in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digests = {digest for digest, _ in aot_store.read_file(path)["programs"].values()}
    assert digests == {f"{i:032}" for i in range(40)}
    assert [x.name for x in path.parent.iterdir()] == ["aot.json"]


def test_compilers_that_are_not_from_packages_are_not_trusted(path, monkeypatch, capsys) -> None:
    tools = {"bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc"}
    monkeypatch.setattr(aot_store, "find_cuda", lambda name: name if name in tools else None)
    update(path, kind="gpu")
    tools.remove("bin/ptxas")
    store = open_store(path, kind="gpu")
    assert store.compile("first", program(), lambda compiled: {"figure": 7}) == {"figure": 7}
    assert "no result is read" in capsys.readouterr().err
    for mode in ("update", "verify"):
        with pytest.raises(ValueError, match="packages"):
            open_store(path, mode, kind="gpu")


def test_unknown_mode_is_refused(path) -> None:
    with pytest.raises(ValueError, match="must be one of stored, update, verify, got all"):
        open_store(path, "all")


# A kernel with a mask and a constant, in a function that is compiled.
KERNEL = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
{comment}
def kernel(x_ref, o_ref):
    x = x_ref[...]{comment}
    mask = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < {bound}
    o_ref[...] = jnp.where(mask, {factor} * x, 0.0)

def double(x):
    return pl.pallas_call(kernel, out_shape=x, compiler_params=params)(x) + {term}
"""
USUAL = {"comment": "", "bound": 5, "factor": 2.0, "term": 1.0}


@pytest.fixture(params=["cuda", "tpu"])
def text_of_kernel(request, tmp_path) -> Callable[..., str]:
    """Function that lowers `KERNEL` with changes, and returns what the digest covers."""
    if request.param == "cuda":
        from jax.experimental.pallas import triton as backend
    else:
        from jax.experimental.pallas import tpu as backend

    def lower_with(folder: str = "", **changes: Any) -> str:
        path = tmp_path / folder / "kernel.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(KERNEL.format(**(USUAL | changes)))
        spec = importlib.util.spec_from_file_location("kernel", path)
        assert spec and spec.loader
        module: Any = importlib.util.module_from_spec(spec)
        module.params = backend.CompilerParams()
        # Not from a file with bytecode, which may be as new as the text.
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        # jax 0.12 asks for a GPU.
        gpu = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100", 132, "gpu"))
        with use_abstract_mesh(gpu) if request.param == "cuda" else contextlib.nullcontext():
            lowered = lower(module.double, shape, platform=request.param)
        return aot_store.text_of(lowered.compiler_ir())

    return lower_with


def test_source_lines_and_folders_are_not_in_the_digest(text_of_kernel) -> None:
    usual = text_of_kernel()
    assert text_of_kernel(comment="\n\n# Why.\n") == usual
    assert text_of_kernel("another") == usual


@pytest.mark.parametrize(
    "change", [{"bound": 6}, {"factor": 3.0}, {"term": 2.0}], ids=["mask", "constant", "outside"]
)
def test_kernels_are_in_the_digest(text_of_kernel, change) -> None:
    assert text_of_kernel(**change) != text_of_kernel()


def test_stored_file_has_a_line_per_program_and_no_errors() -> None:
    text = aot_store.PATH.read_text()
    document = json.loads(text)
    programs = document["programs"]
    assert len(text.splitlines()) == 6 + len(programs) + len(document["compilers"])
    assert len(text) < 1_000_000
    assert [*programs] == sorted(programs) and programs
    for key, (digest, packed) in programs.items():
        assert len(digest) == 32 and "error" not in aot_store.unpack(packed), key


def test_text_of_a_mosaic_gpu_kernel_has_no_path() -> None:
    """Its module is stored as bytes with the paths of source files, and a digest of them."""

    def text(path: str, value: int) -> str:
        with mlir.make_ir_context():
            kernel = ir.Module.parse(
                f"module {{ func.func @f() -> i32 {{ %0 = arith.constant {value} : i32 loc(#a)\n"
                f'return %0 : i32 }} }}\n#a = loc("{path}":1:1)'
            )
            file = io.BytesIO()
            kernel.operation.write_bytecode(file)
            assert path.encode() in file.getvalue()
            program = ir.Module.parse(
                "module { func.func @main() { "
                '"stablehlo.custom_call"() {call_target_name = "mosaic"} : () -> () return } }'
            )
            [main] = program.body.operations
            config = {
                "kernel_hash": ir.StringAttr.get(hashlib.sha256(file.getvalue()).digest()),
                "module": ir.StringAttr.get(file.getvalue()),
            }
            call = main.body.blocks[0].operations[0]
            call.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
            return aot_store.text_of(program)

    assert text("/here/kernel.py", 1) == text("/there/kernel.py", 1)
    assert text("/here/kernel.py", 1) != text("/here/kernel.py", 2)
