"""Export of programs with the ops by `jax.export`, for one platform and for several.

Expected values come from the backend ``"reference"`` or from NumPy, on the same arrays.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from paged_jax import cache as paged
from paged_jax.kernels import (
    copy_blocks,
    grouped_linear,
    paged_attention,
    paged_prefill_attention,
    paged_write,
    ragged_paged_attention,
)

# The kernels of every platform support these sizes.
L, P, K, C, D, B, H = 2, 6, 2, 8, 128, 3, 4
RNG = np.random.default_rng(0)
POOLS = RNG.normal(size=(2, L, P, K, C, D)).astype(np.float32)
PAGES = RNG.normal(size=(P, C, 2 * K, D)).astype(np.float32)
TABLES, LENS = np.int32([[0, 1], [2, P], [P, P]]), np.int32([11, 3, 0])
Q, CHUNKS = (RNG.normal(size=(B, *T, H, D)).astype(np.float32) for T in ((), (4,)))
ROWS = RNG.normal(size=(9, H, D)).astype(np.float32)
NEW = RNG.normal(size=(3, K, D)).astype(np.float32)
BLOCKS, OFFSETS = np.int32([3, P, 0]), np.int32([3, 0, 1])
WEIGHTS = RNG.normal(size=(2, 128, D)).astype(np.float32)


def decode(q, *arrays, **options):
    return paged_attention(q, *arrays, layer=0, **options)


def gradient(q, *arrays, **options):
    return jax.grad(lambda q: jnp.sum(jnp.sin(decode(q, *arrays, **options))))(q)


def ragged(*arrays, **options):
    return ragged_paged_attention(*arrays, sm_scale=0.1, **options)


def plain_write(k, v, new, blocks, offsets):
    k, v = k.copy(), v.copy()
    for row in (0, 2):
        k[0, blocks[row], :, offsets[row]] = v[0, blocks[row], :, offsets[row]] = new[row]
    return k, v


def plain_copy(k, v, sources, targets):
    k, v = k.copy(), v.copy()
    for pool in (k, v):
        pool[:, targets[0]] = pool[:, sources[0]]
    return k, v


ATTENTION = Q, *POOLS, TABLES, LENS
RAGGED = ROWS, PAGES, LENS, TABLES, np.int32([0, 3, 5, 5]), np.int32([2])
# Function, arrays, and a function that returns the expected results.
PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "decode": (decode, ATTENTION, partial(decode, backend="reference")),
    "gradient": (gradient, ATTENTION, partial(gradient, backend="reference")),
    "prefill": (
        partial(paged_prefill_attention, layer=0),
        (CHUNKS, *POOLS, TABLES, LENS, np.int32([4, 2, 0])),
        partial(paged_prefill_attention, layer=0, backend="reference"),
    ),
    "ragged": (ragged, RAGGED, partial(ragged, backend="reference")),
    "write": (
        lambda k, v, new, *places: paged_write(k, v, new, new, *places, layer=0)[:2],
        (*POOLS, NEW, BLOCKS, OFFSETS),
        plain_write,
    ),
    "copy": (
        lambda *arrays: copy_blocks(*arrays)[:2],
        (*POOLS, np.int32([3, P]), np.int32([1, 0])),
        plain_copy,
    ),
    "grouped": (
        grouped_linear,
        (ROWS[:, 0], WEIGHTS, np.int32([4, 5])),
        lambda x, w, sizes: np.concatenate([x[:4] @ w[0].T, x[4:] @ w[1].T]),
    ),
}
TRITON = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")


def exported(function, arrays, platforms) -> export.Exported:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    program = export.export(jax.jit(function), platforms=platforms, disabled_checks=[TRITON])
    return program(*shapes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_export_of_an_op_for_all_platforms(name) -> None:
    """The module contains the kernels of GPUs and TPUs, and returns correct results on a CPU."""
    function, arrays, expected = PROGRAMS[name]
    module = exported(function, arrays, ("cpu", "cuda", "tpu"))
    calls = set(re.findall(r"custom_call @([\w$.]+)", module.mlir_module()))
    assert "__gpu$xla.gpu.triton" in calls
    assert ("tpu_custom_call" in calls) == (name != "copy")
    got = export.deserialize(module.serialize()).call(*arrays)
    want = expected(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_export_of_reserve_for_all_platforms() -> None:
    def grow(lengths):
        cache = paged.PagedCache.create(
            num_layers=L, num_blocks=P, num_kv_heads=K, block_size=C, head_dim=D,
            num_slots=B, max_blocks_per_slot=2,
        )  # fmt: skip
        cache, ok = paged.reserve(cache, lengths, max_tokens=16)
        return cache.block_tables, ok

    tables, ok = exported(grow, (LENS,), ("cpu", "cuda", "tpu")).call(LENS)
    assert ok and tables.tolist() == [[0, 1], [2, P], [P, P]]


def test_export_of_ragged_paged_attention_for_a_tpu() -> None:
    text = exported(ragged, RAGGED, ("tpu",)).mlir_module()
    assert "tpu_custom_call" in text and "triton" not in text


def test_export_with_symbolic_sizes_is_refused() -> None:
    """One sentence names the symbolic size. JAX would fail later, in a comparison of sizes."""
    sizes = export.symbolic_shape("b, t, n, p")
    b, t, n, p = sizes
    int32, pool = jnp.int32, jax.ShapeDtypeStruct(POOLS[0].shape, np.float32)
    of = jax.ShapeDtypeStruct
    cases = {
        "paged_attention: q": (
            decode, (of((b, H, D), Q.dtype), pool, pool, of((b, 2), int32), of((b,), int32)),
        ),
        "paged_prefill_attention: q": (
            partial(paged_prefill_attention, layer=0),
            (of((B, t, H, D), Q.dtype), pool, pool, TABLES, LENS, LENS),
        ),
        "ragged_paged_attention: kv_pages": (
            ragged, (ROWS, of((p, C, 2 * K, D), Q.dtype), *RAGGED[2:]),
        ),
        "paged_write: k": (
            partial(paged_write, layer=0),
            (*POOLS, of((n, K, D), Q.dtype), of((n, K, D), Q.dtype), n, n),
        ),
        "copy_blocks: k_pool": (
            copy_blocks, (of((L, p, K, C, D), Q.dtype),) * 2 + (BLOCKS, BLOCKS),
        ),
    }  # fmt: skip
    for name, (function, arrays) in cases.items():
        arrays = [of((x,), int32) if x is n else x for x in arrays]
        with pytest.raises(ValueError, match=f"{name} must have integer dimensions, got"):
            export.export(jax.jit(function))(*arrays)


@pytest.mark.parametrize("name", ["decode", "prefill", "ragged", "grouped"])
def test_second_derivative_is_refused(name) -> None:
    function, (x, *arrays), _ = PROGRAMS[name]

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(function(x, *arrays) ** 2))(x)

    message = "(paged.attention|grouped_linear): only the first derivative is implemented"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(gradient(x) ** 2)), x)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.jacfwd(gradient), x)
    jax.eval_shape(gradient, x)
