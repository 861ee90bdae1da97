"""Stored lowered programs are found again, and never used for another program."""

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
from paged_jax.kernels.cpu import library
from paged_jax.runner import lowered
from paged_jax.runner.executor import Executor
from paged_jax.runner.lowered import LoweredPrograms
from paged_jax.runner.programs import Call
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
    monkeypatch.setattr(library, "_MISSING", set())
    monkeypatch.setattr(lowered, "_IMPORTED", time.time())  # files of this working tree may be new
    lowered._source.cache_clear()
    yield tmp_path / "paged_jax" / "lowered"
    lowered._source.cache_clear()


@pytest.fixture
def no_lowering(monkeypatch) -> Callable[[], None]:
    """Return a function; after its call, every lowering of a program fails."""

    def refuse(call: Call, *args: Any) -> Any:
        pytest.fail(f"{call.name} is lowered")

    return lambda: monkeypatch.setattr(lowered, "_lower", refuse)


def generate(engine: Engine) -> dict[str, list[int]]:
    for seed in range(2):
        prompt = {"prompt_token_ids": [BOS, *range(5, 12 + 6 * seed)]}
        engine.add_request(prompt, SamplingParams(seed=seed, max_tokens=9, ignore_eos=True))
    return finish(engine)


def release(executor: Executor) -> Call:
    """Return the call of a small program that changes nothing."""
    return executor.programs.release.call(np.zeros(executor.sizes.num_slots, bool))


def resolve(executor: Executor, call: Call) -> Call:
    programs = LoweredPrograms(executor._program_key, executor.weights.layout_model)
    return programs.resolve(call, executor.weights.arrays, executor.state)


@pytest.fixture
def executor(tiny_model) -> Executor:
    return Engine(tiny_model, **SIZES).core.executor


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
    assert generate(Engine(tiny_model, **SIZES)) == expected
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept


def test_stored_program_donates_the_state(executor) -> None:
    """The compiled program has the same arguments, layouts and memory."""
    call = release(executor)
    arrays = executor.weights.arrays, executor.state
    usual, kept, found = (
        each.program.lower(*arrays, *each.args, **each.static).compile().memory_analysis()
        for each in (call, resolve(executor, call), resolve(executor, call))
    )
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
        monkeypatch.setattr(user_cache, "_is_own", lambda path: path.is_dir())
    elif harm == "of another program":
        resolve(executor, executor.programs.forget.call())
        [other] = set(folder.iterdir()) - {path}
        path.write_bytes(other.read_bytes())
    else:
        bit = bytes([right[-9] ^ 1])
        wrong = {"truncated": right[:-1], "empty": b"", "a bit": right[:-9] + bit + right[-8:]}
        path.write_bytes(wrong[harm])
    num_lowered, lower = 0, lowered._lower

    def count(*args: Any) -> Any:
        nonlocal num_lowered
        num_lowered += 1
        return lower(*args)

    monkeypatch.setattr(lowered, "_lower", count)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        resolve(executor, call)
    assert num_lowered == 1 and not caplog.records
    if harm != "of others":
        assert lowered._read(folder, path.name) is not None


def test_resolve_works_with_a_read_only_folder(executor, folder, monkeypatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    call = resolve(executor, release(executor))
    assert call.program is not release(executor).program
    executor.run(call)
    assert not list(folder.iterdir()), "no partial file is left"


def keys(executor: Executor, call: Call | None = None, **changes: Any) -> str:
    key = executor._program_key._replace(**changes)
    arrays = executor.weights.arrays, executor.state
    return lowered._key(key, call or release(executor), *arrays)


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
    monkeypatch.setenv(library.SWITCH, "0")
    found.append(keys(executor))
    assert len(set(found)) == len(found)


def test_key_depends_on_every_field_of_the_model_config(tiny_model, executor) -> None:
    """Configs that give the same shapes of weights and arguments have different keys."""
    config, found = executor.weights.config, {keys(executor)}
    for field in dataclasses.fields(config):
        changed = object.__new__(type(config))
        values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        for name, value in {**values, field.name: "changed"}.items():
            object.__setattr__(changed, name, value)
        text = repr(executor._program_key)
        assert repr(config) in text
        found.add(keys(executor, graphdef=text.replace(repr(config), repr(changed))))
    assert len(found) == 1 + len(dataclasses.fields(config))


def test_key_depends_on_the_source_of_the_package(executor, tmp_path, monkeypatch) -> None:
    copy = tmp_path / "copy"
    names = shutil.ignore_patterns("__pycache__", "bundled")
    shutil.copytree(lowered._PACKAGE, copy, ignore=names)
    monkeypatch.setattr(lowered, "_PACKAGE", copy)
    monkeypatch.setattr(lowered, "_IMPORTED", time.time() + 60)

    def key() -> str:
        lowered._source.cache_clear()
        return keys(executor)

    found = [key()]
    assert key() == found[0]
    for name in ("cache/blocks/tables.py", "kernels/triton/tuning.json", "models/rope.py"):
        path = copy / name
        path.write_text(path.read_text() + "\n")
        found.append(key())
    (copy / "models/rope.py").rename(copy / "models/ropes.py")
    found.append(key())
    for module in (jax, lowered.jaxlib.version, lowered.flax, np):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", "0")
            found.append(key())
    assert len(set(found)) == len(found)


def test_resolve_stores_nothing_if_the_source_is_newer(executor, folder, monkeypatch) -> None:
    newest = max(path.stat().st_ctime for path in lowered._PACKAGE.rglob("*.py"))
    monkeypatch.setattr(lowered, "_IMPORTED", newest - 1)
    lowered._source.cache_clear()
    call = release(executor)
    assert resolve(executor, call) is call
    assert not list(folder.glob("*"))


class Outside(Llama):
    """A model that is defined outside of the package."""


def test_resolve_stores_nothing_for_foreign_modules(executor, tiny_model, folder) -> None:
    call, model = release(executor), Outside(tiny_model.config, rngs=nnx.Rngs(0))
    arrays = executor.weights.arrays, executor.state
    assert LoweredPrograms(executor._program_key, model).resolve(call, *arrays) is call
    for changes in ({"platform": "gpu"}, {"division": "any"}):
        programs = LoweredPrograms(executor._program_key._replace(**changes), tiny_model)
        assert programs.resolve(call, *arrays) is call
    assert not list(folder.glob("*"))


def test_stored_program_depends_on_its_kernels(executor, folder, monkeypatch) -> None:
    """A program is not stored if a kernel is missing, and not used if a kernel has changed."""
    [target] = (name for name in library.targets() if name.startswith("paged_jax_linear_float32_"))
    if not library.load_target(target):
        pytest.skip("no C++ compiler")
    sizes = executor.sizes.num_slots
    call = executor.programs.decode.call(
        np.full(sizes, -1, np.int32), np.int32(0), np.bool_(False), np.bool_(False)
    )
    library._MISSING.add(library.Kernel("decode", np.dtype(np.float32)))
    assert resolve(executor, call) is not call and not list(folder.iterdir())
    library._MISSING.clear()
    resolve(executor, call)
    assert len(list(folder.iterdir())) == 1
    [name] = [path.name for path in folder.iterdir()]
    exported = lowered._read(folder, name)
    assert exported is not None
    # The same number of kernel calls as in the program without storage.
    arrays = executor.weights.arrays, executor.state
    usual, kept = (
        each.program.lower(*arrays, *each.args, **each.static).as_text()
        for each in (call, resolve(executor, call))
    )
    names = library.find_targets(exported.mlir_module_serialized)
    assert target in names
    assert all(usual.count(name) == kept.count(name) > 0 for name in names)
    monkeypatch.setattr(library, "load", lambda kernel: library.LoadedKernel("another", None))
    assert lowered._read(folder, name) is None
