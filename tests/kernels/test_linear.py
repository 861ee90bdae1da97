"""`linear` and `grouped_linear` on all their backends.

In the problems for `grouped_linear`, the weights of groups without rows are NaN, and so are rows of
no group, because no backend may read them.
"""

import functools
import itertools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from paged_jax.kernels import op as kernel_op
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.linear import Stack, Weight, grouped_linear, linear
from paged_jax.kernels.mosaic_tpu.jax_kernels import choose_grouped_tiling
from paged_jax.kernels.triton import linear as triton_kernel
from paged_jax.kernels.weight_formats import WeightArrays
from tests.support.compiler import needs_compiler
from tests.support.covering import all_pairs, once_in_core
from tests.support.families import interpreted_triton
from tests.support.kernel_cases import lower

# Sizes of groups, and number of rows after them that belong to no group. In the last case each row
# has its own tile, which is the maximum number of tiles. In the other cases a group is empty.
SIZES = {
    "one row": ((0, 1, 0), 0),
    "few": ((3, 0, 7, 1, 0), 2),
    "nobody": ((0, 0), 3),
    "many": ((70, 1, 0, 16, 33, 0, 17), 11),
    "a row each": ((1, 1), 1),
}
FORMS = {
    "default": {},
    "xla": {"backend": "xla"},
    "triton": {"backend": "triton", "interpret": jax.default_backend() != "gpu"},
    "mosaic_tpu": {"backend": "mosaic_tpu", "interpret": True},
}
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("dtype", "shape", "out_features"),
    once_in_core(
        row.values()
        for row in all_pairs(
            {
                "dtype": ["float32", "bfloat16", "float16"],
                "shape": [(1,), (2,), (3,), (16,), (17,), (100,), (1, 1), (2, 5)],
                "out_features": [6, 7],
            }
        )
    ),
)
def test_linear_matches_float64(dtype, shape, out_features) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*shape, 24)).astype(np.float32)
    w = jnp.asarray(rng.normal(size=(out_features, 24)), dtype)
    out = jax.jit(linear)(x, w)
    assert out.dtype == jnp.float32
    assert out.shape == (*shape, out_features)
    # Only the inputs may be rounded, to the dtype of the weights.
    scale = np.abs(x.astype(np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    error = np.abs(np.asarray(out) - x.astype(np.float64) @ np.asarray(w, np.float64).T)
    assert (error <= TOLERANCE[dtype] * scale).all()


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4])
def test_linear_is_differentiable(dtype, rows) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(6, 8)), dtype)
    dx, dw = jax.jit(jax.grad(lambda x, w: linear(x, w).sum(), argnums=(0, 1)))(x, w)
    for slope, other in ((dx, w), (dw, x)):
        terms = np.asarray(other, np.float64)
        error = np.abs(np.asarray(slope, np.float64) - terms.sum(0))
        assert (error <= TOLERANCE[dtype] * np.abs(terms).sum(0)).all()


@pytest.mark.optimised
@pytest.mark.slow
def test_linear_does_not_crash_at_its_limits() -> None:
    """Run in a child process, because a read out of bounds in XLA's library may kill it."""
    code = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from paged_jax.kernels.linear import linear

        def chain(x, ws):
            for w in ws:
                y = linear(x, w)
                x = x * (1 + 1e-6 * y.mean())
            return y

        run = jax.jit(chain)
        for out_features, inputs in ((576, 1536), (4096, 1536), (49152, 576)):
            ws = [jnp.ones((out_features, inputs)) for _ in range(6)]
            for rows in (2, 7, 16):
                for _ in range(20):
                    run(jnp.ones((rows, inputs)), ws).block_until_ready()
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def problem(sizes, num_inputs, num_outputs, dtype):
    """Return rows, weights and sizes of groups. Values that must not be read are NaN."""
    rng = np.random.default_rng(0)
    sizes, others = sizes
    x = rng.normal(size=(sum(sizes) + others, num_inputs)).astype(np.float32)
    x[1::5] = 0  # like padding, which some backends skip
    x[sum(sizes) :] = np.nan
    w = rng.normal(size=(len(sizes), num_outputs, num_inputs))
    w[np.array(sizes) == 0] = np.nan
    return x, jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


def oracle(x, w, sizes):
    """Return the result in float64, and the sums of the magnitudes of its terms."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    out, scale = np.zeros((2, len(x), w.shape[1]))
    for row, owner in enumerate(owners):
        out[row], scale[row] = w[owner] @ x[row], np.abs(w[owner]) @ np.abs(x[row])
    return out, scale


@pytest.mark.parametrize(
    ("sizes", "shape", "form", "dtype"),
    once_in_core(
        row.values()
        for row in all_pairs(
            {
                "sizes": list(SIZES),
                "shape": [(7, 5), (64, 33), (130, 72)],
                "form": list(FORMS),
                "dtype": list(TOLERANCE),
            }
        )
        if (row["form"], row["dtype"]) != ("mosaic_tpu", "float16")  # not supported
    ),
)
def test_grouped_linear_matches_float64(sizes, shape, form, dtype) -> None:
    x, w, group_sizes = problem(SIZES[sizes], *shape, dtype)
    out = jax.jit(functools.partial(grouped_linear, **FORMS[form]))(x, w, group_sizes)
    assert out.dtype == jnp.float32
    want, scale = oracle(x, w, group_sizes)
    assert (np.abs(np.asarray(out) - want) <= TOLERANCE[dtype] * scale).all()


def test_grouped_linear_interprets_kernels_of_an_interpreted_backend(monkeypatch) -> None:
    """Attention does the same, so that a CPU can run the step of a model as on a GPU."""
    x, w, group_sizes = problem(SIZES["few"], 64, 33, "float32")
    want, scale = oracle(x, w, group_sizes)
    calls = []
    backends = {**kernel_op.BACKENDS, "triton": interpreted_triton(calls)}
    monkeypatch.setattr(kernel_op, "BACKENDS", backends)
    for backend in (None, "xla", "triton"):
        calls.clear()
        out = jax.jit(functools.partial(grouped_linear, backend=backend))(x, w, group_sizes)
        assert (np.abs(np.asarray(out) - want) <= TOLERANCE["float32"] * scale).all()
        assert (True in calls) == (backend == "triton")


def test_an_interpreted_backend_of_another_platform_runs_here(monkeypatch) -> None:
    x, w, group_sizes = problem(SIZES["few"], 64, 33, "float32")
    triton = kernel_op.BACKENDS["triton"]
    for backend, is_chosen_later in ((triton, True), (triton.interpreted(), False)):
        monkeypatch.setattr(kernel_op, "BACKENDS", {**kernel_op.BACKENDS, "triton": backend})
        multiply = functools.partial(grouped_linear, backend="triton")
        program = str(jax.make_jaxpr(multiply)(x, w, group_sizes))
        assert ("platform_index" in program) == is_chosen_later


@pytest.mark.parametrize("sizes", SIZES)
def test_find_tile_assigns_each_row_to_one_tile(sizes) -> None:
    """The interpreter would overwrite a row that a tile wrongly took from the next group."""
    group_sizes, _ = SIZES[sizes]
    padded = jnp.asarray([*group_sizes, *[0] * (8 - len(group_sizes))], jnp.int32)
    found = []
    for tile in range(sum(group_sizes) // 16 + len(group_sizes) + 1):
        is_there, group, rows, is_row = triton_kernel.find_tile(padded, jnp.int32(tile), 16)
        if is_there:
            found += [(int(group), row) for row in rows[is_row].tolist()]
        else:
            assert not is_row.any()
    owners = np.repeat(np.arange(len(group_sizes)), group_sizes)
    assert found == [(owner, row) for row, owner in enumerate(owners)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", [(2880, 5760), (2048, 768), (4096, 28672)])
def test_kernel_for_tpus_fetches_each_weight_with_rows_once(sizes, shape) -> None:
    """Megablox does not fetch a block again if the next grid step needs the same block."""
    sizes, others = SIZES[sizes]
    num_rows = sum(sizes) + others
    rows, inputs, outputs = choose_grouped_tiling(num_rows, *shape, jnp.bfloat16)
    assert 2 * 2 * inputs * (rows + outputs) + 3 * 4 * rows * outputs < 16 << 20, "bytes of VMEM"
    (_, groups, _), num_steps = make_group_metadata(
        group_sizes=jnp.asarray(sizes, jnp.int32),
        m=-(-num_rows // rows) * rows,
        tm=rows,
        start_group=jnp.int32(0),
        num_nonzero_groups=len(sizes),
        visit_empty_groups=False,
    )
    steps = [(int(group), k) for group in groups[:num_steps] for k in range(-(-shape[0] // inputs))]
    fetched = [step for step, _ in itertools.groupby(steps)]
    assert fetched == [(group, 0) for group, size in enumerate(sizes) if size]


@pytest.mark.parametrize("form", ["default", "triton"])
def test_grouped_linear_is_differentiable(form) -> None:
    """Values that must not be read are NaN, and their gradients are 0."""
    x, w, group_sizes = problem(SIZES["few"], 9, 6, "float32")
    weights = np.random.default_rng(1).normal(size=(x.shape[0], 6))

    def loss(x, w):
        return jnp.sum(grouped_linear(x, w, group_sizes, **FORMS[form]) * weights)

    dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    owners = np.repeat(np.arange(len(group_sizes)), group_sizes)
    want_dx, want_dw = np.zeros(x.shape), np.zeros(w.shape)
    for row, owner in enumerate(owners):
        want_dx[row] = weights[row] @ np.asarray(w[owner], np.float64)
        want_dw[owner] += np.outer(weights[row], x[row])
    np.testing.assert_allclose(dx, want_dx, atol=1e-5)
    np.testing.assert_allclose(dw, want_dw, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_linear_on_cpu_does_not_depend_on_other_rows(dtype) -> None:
    x, w, group_sizes = problem(SIZES["many"], 130, 72, dtype)
    together = np.asarray(jax.jit(grouped_linear)(x, w, group_sizes))
    alone = jax.jit(grouped_linear)
    for row, group in ((0, 0), (69, 0), (70, 1), (100, 4)):
        one = alone(x[row : row + 1], w, jnp.zeros_like(group_sizes).at[group].set(1))
        np.testing.assert_array_equal(one[0], together[row])


@needs_compiler
def test_grouped_linear_on_cpu_reads_weights_from_the_stack() -> None:
    x, w, group_sizes = problem(SIZES["few"], 64, 33, "float32")
    stack = jnp.stack([jnp.full_like(w, jnp.nan), w])

    @jax.jit
    def product(x, stack, layer):
        whole = Stack(WeightArrays(stack), layer)
        return grouped_linear(x, Weight(stack[layer], stack=whole), group_sizes)

    compiled = product.lower(x, stack, jnp.int32(1)).compile()
    want = jax.jit(grouped_linear)(x, w, group_sizes)
    np.testing.assert_array_equal(compiled(x, stack, jnp.int32(1)), want)
    assert compiled.memory_analysis().temp_size_in_bytes < w.nbytes / 2


@pytest.mark.parametrize("form", ["default", "xla", "gradients"])
def test_grouped_linear_multiplies_only_by_weights_of_the_group(form) -> None:
    """XLA counts the operations of a loop step: a tile of rows times a single weight."""
    sizes = jax.ShapeDtypeStruct((32,), jnp.int32)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (32, 128, 64)))

    def loss(x, w, sizes):
        return jnp.sum(grouped_linear(x, w, sizes) ** 2)

    is_gradient = form == "gradients"
    op = jax.grad(loss, (0, 1)) if is_gradient else functools.partial(grouped_linear, **FORMS[form])
    compiled = jax.jit(op).lower(x, w, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32 * 128 * 64 * 4 / 4
    assert compiled.cost_analysis().get("flops", 0) < 2 * 32 * 128 * 64 * 4


@pytest.mark.parametrize(
    ("x", "w", "sizes", "message"),
    [
        ((3, 4), (2, 5, 6), (2,), "x must be"),
        ((0, 4), (2, 5, 4), (2,), "R > 0"),
        ((3, 4), (2, 5, 4), (3,), "group_sizes must have shape"),
    ],
)
def test_grouped_linear_rejects_mismatched_shapes(x, w, sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_linear(jnp.ones(x), jnp.ones(w), jnp.ones(sizes, jnp.int32))


def test_grouped_linear_rejects_int8() -> None:
    with pytest.raises(ValueError, match="got int8"):
        grouped_linear(jnp.ones((3, 4)), jnp.ones((2, 5, 4), jnp.int8), jnp.ones(2, jnp.int32))


@pytest.mark.parametrize(
    ("gpu", "is_kernel"),
    [(GpuInfo("Tesla T4", 40, (7, 5)), False), (GpuInfo("NVIDIA A100", 108, (8, 0)), True)],
)
def test_grouped_linear_uses_xla_on_gpus_that_triton_does_not_support(gpu, is_kernel) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((33, 64), (4, 128, 64))]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    text = lower(lambda *x: grouped_linear(*x), *shapes, sizes, platform="cuda", gpu=gpu).as_text()
    assert ("gpu.triton" in text) == is_kernel
