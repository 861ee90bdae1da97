"""Backend in plain JAX for CPUs whose results do not depend on the shapes of a call.

XLA's order of summation depends on shapes, so no op leaves a sum to XLA for a shape that depends on
the batch:

- Matmuls multiply tiles of ROWS rows. XLA gives a row the same bits at each place of a tile.
- Sums over rows are `add_halves`.
- Attention and the steps of recurrent layers are elementwise operations and `add_halves`.

Gradients are those of the backend ``"xla"``.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.backend import Backend, Kernel, spread
from paged_jax.kernels.op_args import GroupedLinearArgs, LinearArgs
from paged_jax.kernels.rounding import add_halves, round_product, round_to
from paged_jax.kernels.rows import set_states, take_states
from paged_jax.kernels.state_rows import ConvolutionStep, RecurrentStep, StateStep
from paged_jax.kernels.weight_formats import Weight, dequantise
from paged_jax.kernels.xla.exact_attention import attend_exactly
from paged_jax.kernels.xla.linear import GroupTiles, floats_of_group, linear

# Number of rows in a tile of a matmul. It is a multiple of the number of rows that XLA's matmul for
# CPUs multiplies together, so all rows of a tile are multiplied in the same way.
ROWS = 8


def _linear(x: jax.Array, w: Weight) -> jax.Array:
    """Multiply the last dimension of `x` by a weight, see `paged_jax.kernels.linear.linear`."""
    return _multiply(x, dataclasses.replace(w, stack=None))


@jax.custom_jvp
def _multiply(x: jax.Array, w: Weight) -> jax.Array:
    num_rows, inputs = math.prod(x.shape[:-1]), _round_inputs(x, w)
    arrays = w.plain.arrays.merge_outputs()._replace(order=None)
    # With the barrier, the floats have the same bits in every program.
    floats = lax.optimization_barrier(dequantise(arrays, w.format.code).astype(jnp.float32))
    rows = _pad(inputs.reshape(num_rows, -1))

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        tile = _multiply_tile(rows, index * ROWS, floats)
        return lax.dynamic_update_slice_in_dim(out, tile, index * ROWS, 0)

    # XLA must not know the number of tiles, because it would optimise a single tile differently.
    num_tiles = lax.optimization_barrier(jnp.int32(-(-num_rows // ROWS)))
    out = jnp.zeros((rows.shape[0], floats.shape[0]), jnp.float32)
    out = lax.fori_loop(0, num_tiles, step, out)
    return out[:num_rows].reshape(*x.shape[:-1], *w.shape[:-1])


@_multiply.defjvp
def _multiply_jvp(
    primals: tuple[jax.Array, Weight], tangents: tuple[jax.Array, Weight]
) -> tuple[jax.Array, jax.Array]:
    return _multiply(*primals), jax.jvp(linear, primals, tangents)[1]


def _grouped_linear(x: jax.Array, w: Weight, sizes: jax.Array) -> jax.Array:
    """Multiply rows by the weights of their groups, see `paged_jax.kernels.grouped_linear`."""
    rows, matrices = _pad(_round_inputs(x, w)), w.plain
    tiles = GroupTiles.divide(sizes, ROWS)

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        group, first = tiles.find(index)
        floats = floats_of_group(matrices, group).astype(jnp.float32)
        new = _multiply_tile(rows, first, lax.optimization_barrier(floats))
        old = lax.dynamic_slice_in_dim(out, first, ROWS)
        is_mine = first + jnp.arange(ROWS, dtype=jnp.int32) < tiles.begins[group] + sizes[group]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_mine[:, None], new, old), first, 0)

    out = jnp.zeros((rows.shape[0], w.shape[-2]), jnp.float32)
    return lax.fori_loop(0, tiles.ends[-1], step, out)[: x.shape[0]]


def _round_inputs(x: jax.Array, w: Weight) -> jax.Array:
    """Order inputs as the columns of a weight, and round them to its float dtype."""
    x = x if w.order is None else x[..., w.order]
    return round_to(x, w.values.dtype if w.scales is None else w.dtype)


def _pad(rows: jax.Array) -> jax.Array:
    """Add zeros, so that a tile may begin at each row of ``[R, in]``."""
    return jnp.pad(rows, ((0, ROWS), (0, 0)))


def _multiply_tile(rows: jax.Array, first: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply the tile of rows that begins at row `first` by a float32 weight ``[out, in]``."""
    # The barrier keeps the operands of the matmul apart from operations that XLA could merge into
    # it. `round_product` does the same for its result.
    tile, w = lax.optimization_barrier((lax.dynamic_slice_in_dim(rows, first, ROWS), w))
    dims = (((1,), (1,)), ((), ()))
    return round_product(lax.dot_general(tile, w, dims, precision="highest"))


@jax.custom_jvp
def _sum_rows(x: jax.Array) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, to ``[..., 1]``."""
    return add_halves(round_product(x), -1)


@_sum_rows.defjvp
def _sum_rows_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _sum_rows(*primals), jnp.sum(tangents[0], axis=-1, keepdims=True)


def _advance_rows(step: StateStep) -> tuple[jax.Array, jax.Array]:
    """Run a step of one token per row, see `paged_jax.kernels.xla.recurrent.advance_rows`."""
    states = take_states(step.rows, step.state_shape)
    if isinstance(step, ConvolutionStep):
        out, new = _convolve(step, states)
    else:
        out, new = _apply_recurrence(step, states.reshape(*step.v.shape[:3], *states.shape[2:]))
    return out, set_states(step.rows, new.reshape(states.shape))


def _convolve(step: ConvolutionStep, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Do the same as `paged_jax.kernels.xla.recurrent.convolve`."""
    B, F = step.x.shape
    x = round_to(step.x, state.dtype)
    inputs = jnp.concatenate([round_to(state, state.dtype).reshape(B, -1, F), x[:, None]], axis=1)
    products = round_product(inputs * step.weight.astype(jnp.float32).T[None])
    out = functools.reduce(operator.add, jnp.moveaxis(products, 1, 0))
    if step.bias is not None:
        out = out + step.bias.astype(jnp.float32)[None]
    is_token = (step.num_tokens > 0)[:, None, None]
    last = jnp.where(is_token, inputs[:, 1:], inputs[:, :-1])
    return out, last.reshape(state.shape).astype(state.dtype)


def _apply_recurrence(step: RecurrentStep, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Do the same as `paged_jax.kernels.xla.recurrent.apply_recurrence` for one token."""
    q, k, decay = step.q[:, :, None], step.k[:, :, None], jnp.exp(round_product(step.log_decay))
    if step.beta is None:
        new_UD = round_product(decay[..., None, :] * state)
        new_UD = new_UD + round_product(step.v[..., None] * k[..., None, :])
        return _dot(new_UD, q[..., None, :], -1)[..., 0], new_UD
    predicted = _dot((decay * k)[..., None], state, -2)[..., 0, :]
    from_state = _dot((decay * q)[..., None], state, -2)[..., 0, :]
    change = step.beta[..., None] * (round_product(step.v) - predicted)
    out = from_state + round_product(_dot(q, k, -1) * change)
    new_DU = round_product(decay[..., None] * state)
    return out, new_DU + round_product(k[..., None] * change[..., None, :])


def _dot(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Sum ``x * y`` over a dimension, whose size becomes 1."""
    return add_halves(round_product(x * y), axis)


def _int8_refusal(args: LinearArgs | GroupedLinearArgs) -> str | None:
    return "it does not round inputs to int8" if args.w.rounds_inputs else None


# Each row has the same bits in any program and batch.
XLA_EXACT = Backend(
    {
        "decode": Kernel(attend_exactly),
        "prefill": Kernel(attend_exactly),
        "linear": Kernel(
            spread(_linear), _int8_refusal, is_differentiable=True, runs_anywhere=True
        ),
        "sum_rows": Kernel(_sum_rows, is_differentiable=True, runs_anywhere=True),
        "grouped_linear": Kernel(spread(_grouped_linear), _int8_refusal),
        "advance_rows": Kernel(_advance_rows),
    },
    platform="cpu",
    is_exact=True,
)
