"""Tests that the types of the public names satisfy pyright's strict mode, as a user sees them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "paged_jax"

# A program of a user. Its last function has one mistake in each line.
PROGRAM = """\
# pyright: strict, reportUnknownMemberType=false
from typing import assert_type

import jax
import jax.numpy as jnp

import paged_jax
from paged_jax import LLM, PagedCache, RequestOutput, SamplingParams


def attend(q: jax.Array, cache: PagedCache) -> jax.Array:
    places = cache.block_tables, cache.lengths
    out = paged_jax.paged_attention(q, cache.k, cache.v, *places, layer=0, scale=0.5)
    assert_type(out, jax.Array)
    pair = paged_jax.paged_attention(q, cache.k, cache.v, *places, return_lse=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    chunk = paged_jax.paged_prefill_attention(q[None], cache.k, cache.v, *places, cache.lengths)
    assert_type(chunk, jax.Array)
    return out + paged_jax.cascade_attention(q, cache.k, cache.v, *places, jnp.int32(1))


def step(cache: PagedCache, k: jax.Array) -> PagedCache:
    cache, is_done = paged_jax.cache.reserve(cache, jnp.ones(2, jnp.int32), max_tokens=4)
    assert_type(is_done, jax.Array)
    needed = paged_jax.blocks.num_blocks_needed(17, 16)
    assert_type(needed, int)
    pools = paged_jax.paged_write(cache.k, cache.v, k, k, cache.lengths, cache.lengths)
    assert_type(pools.k, jax.Array)
    return paged_jax.cache.release(cache, is_done[None])


def complete(llm: LLM) -> list[str]:
    outputs = llm.generate(["It is"], SamplingParams(temperature=0, max_tokens=4))
    assert_type(outputs, list[RequestOutput])
    rollout = llm.rollout(jnp.ones((1, 2), jnp.int32), jnp.array([2]))
    print(rollout.token_ids.shape, llm.stats.num_generated_tokens)
    return [output.outputs[0].text for output in outputs]


def wrong(llm: LLM, cache: PagedCache) -> None:
    SamplingParams(max_tokens="4")
    llm.generate(3)
    paged_jax.paged_attention(cache.k, cache.k, cache.v, cache.lengths, cache.lengths, scale="1")
    PagedCache.create(num_layers="1")
"""


def public_modules() -> list[Path]:
    """Return the files that define the public names, and the two files that list them."""
    files: list[Path] = []
    for stub in (PACKAGE / "__init__.pyi", PACKAGE / "kernels" / "__init__.pyi"):
        files.append(stub)
        for module in re.findall(r"^from \.([\w.]+) import", stub.read_text(), re.MULTILINE):
            path = stub.parent.joinpath(*module.split("."))
            files.append(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        for package in re.findall(r"^from \. import (\w+)", stub.read_text(), re.MULTILINE):
            path = stub.parent / package
            options = path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py")
            files.append(next(each for each in options if each.exists()))
    return sorted(set(files))


@pytest.mark.parametrize("path", public_modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_of_public_names_are_checked_strictly(path: Path) -> None:
    # `make lint` runs pyright, which obeys this line.
    assert path.read_text().startswith("# pyright: strict")


@pytest.mark.peers
@pytest.mark.slow
def test_program_of_a_user_has_only_its_own_mistakes(tmp_path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = PROGRAM.splitlines()
    first = lines.index("def wrong(llm: LLM, cache: PagedCache) -> None:") + 1
    reported = {each["range"]["start"]["line"]: each["message"] for each in found}
    assert sorted(reported) == list(range(first, len(lines))), reported
