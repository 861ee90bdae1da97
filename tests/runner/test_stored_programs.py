"""Compiled programs on disk are found again, and never used for another program."""

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, Llama, SamplingParams, user_cache
from paged_jax.kernels.native import library
from paged_jax.runner import stored_programs
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call
from paged_jax.runner.stored_programs import FirstPrograms, StoredPrograms
from tests.support.compiler import needs_compiler
from tests.support.tiny_model import BOS, SIZES
from tests.support.workload import finish


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return the folder of stored programs: a temporary folder of the test."""
    home = Path(os.environ["XDG_CACHE_HOME"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if (kernels := home / "paged_jax" / "kernels").is_dir():
        shutil.copytree(kernels, user_cache.cache_folder("kernels"), dirs_exist_ok=True)
    monkeypatch.setattr(user_cache, "folder_beside_programs", user_cache.cache_folder)
    monkeypatch.setattr(library, "_MISSING", {})
    monkeypatch.setattr(
        stored_programs, "_IMPORTED", time.time()
    )  # files of this working tree may be new
    stored_programs._source.cache_clear()
    yield tmp_path / "paged_jax" / "executables"
    stored_programs._source.cache_clear()


@pytest.fixture
def no_lowering(monkeypatch) -> Callable[[], None]:
    """Return a function; after its call, every lowering of a program fails."""

    def refuse(source: Any, *args: Any) -> Any:
        pytest.fail(f"{source.function.__name__} is lowered")

    return lambda: monkeypatch.setattr(stored_programs, "_lower", refuse)


def generate(engine: Engine) -> dict[str, list[int]]:
    for seed in range(2):
        prompt = {"prompt_token_ids": [BOS, *range(5, 12 + 6 * seed)]}
        engine.add_request(prompt, SamplingParams(seed=seed, max_tokens=9, ignore_eos=True))
    return finish(engine)


def release(executor: Executor) -> Call:
    """Return the call of a small program that changes nothing."""
    return executor.programs.release.call(np.zeros(executor.sizes.num_slots, bool))


def read(executor: Executor, call: Call, path: Path) -> Any:
    program = stored_programs._read(path.parent, path.name, executor.weights.device)
    arguments = executor.weights.arrays, executor.state, *call.args
    assert program is None or program.in_tree == jax.tree.structure((arguments, {}))
    return program


def resolve(executor: Executor, call: Call) -> Call:
    programs = StoredPrograms(
        executor._program_key, executor.weights.layout_model, executor.weights.device
    )
    return programs.resolve(call, executor.weights.arrays, executor.state)


@pytest.fixture
def executor(tiny_model, folder) -> Executor:
    executor = Engine(tiny_model, **SIZES).core.executor
    for path in folder.iterdir():  # the program that makes the empty state
        path.unlink()
    return executor


@pytest.mark.slow
def test_next_process_lowers_nothing_and_draws_the_same_tokens(
    tiny_model, monkeypatch, folder, no_lowering
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(user_cache, "folder_beside_programs", lambda name: None)
        expected = generate(Engine(tiny_model, **SIZES))
    assert not folder.exists()
    assert generate(Engine(tiny_model, **SIZES)) == expected
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) > 4
    no_lowering()
    names, read_file = [], stored_programs._read

    def watch(folder: Path, key: str, *args: Any) -> Any:
        names.append(key)
        return read_file(folder, key, *args)

    monkeypatch.setattr(stored_programs, "_read", watch)
    assert generate(Engine(tiny_model, **SIZES)) == expected
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
    # Each file is read once, also the one that is read ahead.
    assert sorted(names) == sorted(kept)


def test_stored_program_donates_the_state(executor) -> None:
    """The compiled program has the same arguments, layouts and memory."""
    call = release(executor)
    arrays = executor.weights.arrays, executor.state
    usual = call.program.lower(*arrays, *call.args, **call.static).compile().memory_analysis()
    kept, found = (resolve(executor, call).program.memory_analysis() for _ in range(2))
    assert usual.alias_size_in_bytes > 10_000
    for kind in ("alias", "argument", "output", "temp"):
        sizes = [getattr(each, f"{kind}_size_in_bytes") for each in (usual, kept, found)]
        assert sizes == sizes[:1] * 3, kind


@pytest.mark.parametrize("harm", ["truncated", "empty", "a bit", "of another program", "of others"])
def test_resolve_replaces_a_broken_file(executor, folder, monkeypatch, caplog, harm) -> None:
    call = release(executor)
    resolve(executor, call)
    [path] = folder.iterdir()
    right = path.read_bytes()
    if harm == "of others":
        monkeypatch.setattr(user_cache, "_is_private", lambda path: path.is_dir())
    elif harm == "of another program":
        resolve(executor, executor.programs.forget.call())
        [other] = set(folder.iterdir()) - {path}
        path.write_bytes(other.read_bytes())
    else:
        bit = bytes([right[-9] ^ 1])
        wrong = {"truncated": right[:-1], "empty": b"", "a bit": right[:-9] + bit + right[-8:]}
        path.write_bytes(wrong[harm])
    num_lowered, lower = 0, stored_programs._lower

    def count(*args: Any) -> Any:
        nonlocal num_lowered
        num_lowered += 1
        return lower(*args)

    monkeypatch.setattr(stored_programs, "_lower", count)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        resolve(executor, call)
    assert num_lowered == 1 and not caplog.records
    if harm != "of others":
        assert read(executor, call, path) is not None


def test_resolve_works_with_a_read_only_folder(executor, folder, monkeypatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    call = resolve(executor, release(executor))
    assert call.program is not release(executor).program
    call.program(executor.weights.arrays, executor.state, *call.args)
    assert not list(folder.iterdir()), "no partial file is left"


def keys(executor: Executor, call: Call | None = None, **changes: Any) -> str:
    key, device = executor._program_key._replace(**changes), executor.weights.device
    name, program, args, static = call or release(executor)
    arguments = executor.weights.arrays, executor.state, *args
    source = stored_programs._Source(program, arguments, static, 1, None)
    return stored_programs._key(key, device, name, source)


def test_key_depends_on_everything_that_affects_a_program(executor, monkeypatch) -> None:
    call = release(executor)
    wide, other = np.zeros(8, bool), np.zeros(call.args[0].shape, np.int32)
    found = [
        keys(executor),
        keys(executor, cascade=not executor._program_key.cascade),
        keys(executor, backend="xla"),
        keys(executor, call._replace(args=(wide,))),
        keys(executor, call._replace(args=(other,))),
        keys(executor, call._replace(static={"width": 3})),
        keys(executor, call._replace(static={"width": 4})),
        keys(executor, call._replace(name="another")),
    ]
    with jax.default_matmul_precision("highest"):
        found.append(keys(executor))
    for variable in (library.SWITCH, "XLA_FLAGS"):
        monkeypatch.setenv(variable, "0")
        found.append(keys(executor))
    monkeypatch.setattr(library, "processor", lambda: "another")
    found.append(keys(executor))
    assert len(set(found)) == len(found)


def test_key_depends_on_every_field_of_the_model_config(tiny_model, executor) -> None:
    """Configs that give the same shapes of weights and arguments have different keys."""
    config, found = executor.weights.config, {keys(executor)}
    # The other fields are derived from these.
    fields = [field for field in dataclasses.fields(config) if field.init]
    for field in fields:
        changed = object.__new__(type(config))
        values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        for name, value in {**values, field.name: "changed"}.items():
            object.__setattr__(changed, name, value)
        text = repr(executor._program_key)
        assert repr(config) in text
        found.add(keys(executor, graphdef=text.replace(repr(config), repr(changed))))
    assert len(found) == 1 + len(fields)


def test_key_depends_on_the_source_of_the_package(executor, tmp_path, monkeypatch) -> None:
    copy = tmp_path / "copy"
    names = shutil.ignore_patterns("__pycache__", "bundled")
    shutil.copytree(stored_programs._PACKAGE, copy, ignore=names)
    monkeypatch.setattr(stored_programs, "_PACKAGE", copy)
    monkeypatch.setattr(stored_programs, "_IMPORTED", time.time() + 60)

    def key() -> str:
        stored_programs._source.cache_clear()
        return keys(executor)

    found = [key()]
    assert key() == found[0]
    for name in ("cache/blocks/tables.py", "kernels/triton/tuning.json", "models/rope.py"):
        path = copy / name
        path.write_text(path.read_text() + "\n")
        found.append(key())
    (copy / "models/rope.py").rename(copy / "models/ropes.py")
    found.append(key())
    for module in (jax, stored_programs.jaxlib.version, stored_programs.flax, np):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", "0")
            found.append(key())
    assert len(set(found)) == len(found)


def test_resolve_stores_nothing_if_the_source_is_newer(
    executor, folder, monkeypatch, caplog
) -> None:
    newest = max(path.stat().st_ctime for path in stored_programs._PACKAGE.rglob("*.py"))
    monkeypatch.setattr(stored_programs, "_IMPORTED", newest - 1)
    stored_programs._source.cache_clear()
    call = release(executor)
    with caplog.at_level(logging.INFO, "paged_jax"):
        assert resolve(executor, call) is call
    assert not list(folder.glob("*"))
    [record] = caplog.records
    assert "Programs are not stored, because " in record.getMessage()


class Outside(Llama):
    """A model that is defined outside of the package."""


def test_resolve_stores_nothing_for_foreign_modules(executor, tiny_model, folder) -> None:
    call, model = release(executor), Outside(tiny_model.config, rngs=nnx.Rngs(0))
    device = executor.weights.device
    arrays = executor.weights.arrays, executor.state
    assert StoredPrograms(executor._program_key, model, device).resolve(call, *arrays) is call
    for changes in ({"platform": "gpu"}, {"division": "any"}):
        key = executor._program_key._replace(**changes)
        programs = StoredPrograms(key, tiny_model, device)
        assert programs.resolve(call, *arrays) is call
    assert not list(folder.glob("*"))


def decode_with_kernels(executor):
    """Return a call of the decode program, and the target of one of its C++ kernels."""
    target, why_not = library.load(library.NativeKernel("linear", np.dtype(np.float32)))
    assert target is not None, why_not
    slots = np.full(executor.sizes.num_slots, -1, np.int32)
    call = executor.programs.decode.call(slots, np.int32(0), np.bool_(False), np.bool_(False))
    return call, target


@needs_compiler
def test_stored_program_depends_on_its_kernels(executor, folder, monkeypatch) -> None:
    """A program is not stored if a kernel is missing, and not used if a kernel has changed."""
    call, _ = decode_with_kernels(executor)
    library._MISSING[library.NativeKernel("decode", np.dtype(np.float32))] = "the test removes it"
    assert resolve(executor, call) is not call and not list(folder.iterdir())
    library._MISSING.clear()
    resolve(executor, call)
    assert len(list(folder.iterdir())) == 1
    [path] = folder.iterdir()
    assert read(executor, call, path) is not None
    monkeypatch.setattr(library, "load", lambda kernel: library.LoadedKernel("another", None))
    assert read(executor, call, path) is None


@needs_compiler
def test_stored_program_loads_its_kernels(executor, folder, monkeypatch) -> None:
    call, target = decode_with_kernels(executor)
    arrays = executor.weights.arrays, executor.state
    text = call.program.lower(*arrays, *call.args, **call.static).as_text()
    resolve(executor, call)
    [path] = folder.iterdir()
    loaded: list[str] = []
    monkeypatch.setattr(library, "load_target", lambda x: not loaded.append(x))
    assert read(executor, call, path) is not None
    assert target in loaded and set(loaded) == library.find_targets(text.encode())


def test_programs_of_separate_layers_are_stored(tiny_model, folder) -> None:
    model = Llama(tiny_model.config, scan_layers=False, rngs=nnx.Rngs(0))
    executor = Engine(model, **SIZES).core.executor
    call = release(executor)
    assert resolve(executor, call) is not call
    assert len(list(folder.iterdir())) == 2  # also the program that makes the empty state


def start(executor: Executor) -> None:
    """Find the first programs of an engine."""
    first = FirstPrograms({"model": "folder", "on_compile": object()})
    programs = StoredPrograms(
        executor._program_key, executor.weights.layout_model, executor.weights.device, first
    )
    zeros = np.zeros(executor.sizes.num_slots, bool)
    for name in "abcde":
        call = executor.programs.release.call(zeros)._replace(name=name)
        programs.resolve(call, executor.weights.arrays, executor.state)


def test_first_programs_are_read_before_the_model_is_loaded(
    executor, folder, monkeypatch, no_lowering
) -> None:
    start(executor)
    no_lowering()
    read_file, read_keys = stored_programs._read, []

    def watch(folder: Path, key: str, device: Any) -> Any:
        read_keys.append(key)
        return read_file(folder, key, device)

    monkeypatch.setattr(stored_programs, "_read", watch)
    first = FirstPrograms({"model": "folder", "on_compile": object()})
    found = [reading.result() for reading in first._reading.values()]
    assert len(read_keys) == 4 and all(found), "the program e is not listed"
    start(executor)
    assert len(set(read_keys)) == 5 and len(read_keys) == 4 + 5, "each engine reads each file once"
    assert not FirstPrograms({"model": "another"})._reading


@pytest.mark.parametrize("content", [b"", b"wrong", b"\xff\n../a", "listed"])
def test_first_programs_may_be_listed_wrongly(executor, folder, no_lowering, content) -> None:
    start(executor)
    no_lowering()
    [path] = (folder.parent / "starts").iterdir()
    right = path.read_bytes()
    if content == "listed":  # the file of a listed program is damaged
        content = right
        (folder / right.decode().split()[0]).write_bytes(b"")
        with pytest.raises(pytest.fail.Exception, match="is lowered"):
            start(executor)
    else:
        path.write_bytes(content)
        start(executor)
    assert path.read_bytes() == right
