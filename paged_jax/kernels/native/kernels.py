"""Descriptions of the C++ kernels for CPUs: ops, dtypes, static parameters and self-tests.

A self-test runs a kernel on small arrays, and computes the expected result with NumPy. When
`library` compiles a kernel, it runs the self-test before programs call the kernel.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.native.layouts import InterleavedRows
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.weight_formats import CODES, FLOAT_CODES, num_bits
from paged_jax.kernels.weight_packing import SECTION_INPUTS, join_levels, pack

# Maps the dtypes of weights and pools to the names of the corresponding types in the C++ sources.
ELEMENTS: dict[Any, str] = {
    jnp.dtype(jnp.float32): "Float32",
    jnp.dtype(jnp.bfloat16): "Bfloat16",
    jnp.dtype(jnp.float16): "Float16",
    jnp.dtype(jnp.int8): "Int8",
    jnp.dtype(jnp.float8_e4m3fn): "Float8",
}

# Maps the codes of quantised weights to the names of the corresponding types in the C++ sources.
# All codes of packed values with the same number of bits share a kernel, see `kernel_code`.
_PACKED = {"packed4": "Packed<4>", "packed5": "Packed<5>"}
CODE_ELEMENTS = {"int8": "Int8", "float8_e4m3fn": "Float8", **_PACKED}
# Keys of `CODE_ELEMENTS` for which there is also a kernel that rounds the inputs to int8.
INT8_INPUT_CODES = ("int8", *_PACKED)

FloatOp = Literal[
    "decode", "prefill", "linear", "set_rows", "zeros",
    "recurrent_step", "convolution_step",
]  # fmt: skip
QuantisedOp = Literal["quantised_linear"]

# Float dtypes of weights and states.
FLOATS = tuple(dtype for dtype in ELEMENTS if dtype.itemsize > 1)
# Dtypes of the states that the kernels of recurrent layers advance. The kernels of other float ops
# exist for all of `ELEMENTS`.
STATE_DTYPES: dict[str, tuple[Any, ...]] = {
    "recurrent_step": (jnp.dtype(jnp.float32),),
    "convolution_step": FLOATS,
}
KernelOp = FloatOp | QuantisedOp


class NativeKernel(NamedTuple):
    """A C++ kernel, compiled for a dtype.

    Attributes:
      op: name of the op and of the C++ source.
      dtype: dtype of the pools or of the weights. If the weights are quantised, the dtype that the
        inputs are rounded to: float32, bfloat16, or int8 with scales.
      code: key of `CODE_ELEMENTS` if the weights are quantised, else None.
    """

    op: KernelOp
    dtype: Any
    code: str | None = None

    @property
    def input_dtype(self) -> Any:
        """Dtype of the inputs of a matmul kernel: bfloat16 for bfloat16 weights, else float32."""
        is_bfloat16 = self.op == "linear" and self.dtype == jnp.bfloat16
        return jnp.dtype(jnp.bfloat16 if is_bfloat16 else jnp.float32)


def kernel_code(code: str) -> str:
    """Return the key of `CODE_ELEMENTS` for a code of quantised weights.

    Example:
      >>> kernel_code("int8"), kernel_code("uint4"), kernel_code("int5")
      ('int8', 'packed4', 'packed5')
    """
    return f"packed{num_bits(code)}" if code in CODES else code


# Codes (see `weight_formats.CODES`) with numbers that bfloat16 cannot represent exactly.
_INEXACT_CODES = ("nf4", "fp4")


def matmul_kernel(code: str, dtype: DTypeLike) -> NativeKernel:
    """Return the kernel that multiplies by weights with a code, in a model with a float dtype.

    With quantised weights, the matmul is in bfloat16 if `dtype` is bfloat16 and the numbers of the
    code are exact in bfloat16. Otherwise, it is in float32.

    Args:
      code: code of the weights, see `WeightFormat`.
      dtype: float dtype of the model.
    """
    if code in FLOAT_CODES:
        return NativeKernel("linear", jnp.dtype(code))
    is_bfloat16 = jnp.dtype(dtype) == jnp.bfloat16 and code not in _INEXACT_CODES
    return NativeKernel(
        "quantised_linear",
        jnp.dtype(jnp.bfloat16 if is_bfloat16 else jnp.float32),
        kernel_code(code),
    )


def list_kernels(codes: Iterable[str], dtype: DTypeLike) -> list[NativeKernel]:
    """Return the kernels that an engine usually needs, in this order.

    With a quantised cache, with int8 activations or with recurrent layers, it needs others as well.

    Args:
      codes: codes of the model's matrices.
      dtype: float dtype of the model.
    """
    matmuls = dict.fromkeys(matmul_kernel(code, dtype) for code in codes)
    ops: tuple[FloatOp, ...] = ("set_rows", "zeros", "prefill", "decode")
    return [*matmuls, *(NativeKernel(op, jnp.dtype(dtype)) for op in ops)]


def attention_attributes(
    options: Options,
    has_scales: bool,
    has_sinks: bool,
    is_interleaved: bool,
    shares_values: bool = False,
    has_bfloat16_queries: bool = False,
) -> dict[str, np.generic]:
    """Return the static parameters of the attention kernels."""
    return {
        "scale": np.float32(options.scale),
        "sliding_window": np.int32(options.sliding_window or 0),
        "soft_cap": np.float32(options.soft_cap or 0),
        "has_scales": np.int32(has_scales),
        "has_sinks": np.int32(has_sinks),
        "is_interleaved": np.int32(is_interleaved),
        "shares_values": np.int32(shares_values),
        "has_bfloat16_queries": np.int32(has_bfloat16_queries),
    }


Results = tuple[np.ndarray, np.ndarray]  # the result of a kernel and the expected result


def _test_linear(target: str, kernel: NativeKernel) -> Results:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((7, 77), (2, 3, 13, 77)))
    operands = (x / 8).astype(kernel.input_dtype), w.astype(kernel.dtype), _SIZES, np.int32(1)
    return _test_groups(target, operands, w[1])


def _test_quantised_linear(target: str, kernel: NativeKernel) -> Results:
    """Test weights with and without interleaved rows, with float scales and two-level scales."""
    K, groups = (96, 3) if kernel.code in _PACKED else (77, 7)
    tests = [
        _test_quantised_groups(target, kernel, (37, K, groups), is_interleaved=False),
        _test_quantised_groups(target, kernel, (64, 96, 3), is_interleaved=True),
        _test_quantised_groups(target, kernel, (37, 512, 16), is_interleaved=False),
        _test_quantised_groups(target, kernel, (64, 512, 16), is_interleaved=True),
    ]
    got, want = (
        np.concatenate([x.reshape(-1) for x in arrays]) for arrays in zip(*tests, strict=True)
    )
    return got, want


def _test_quantised_groups(
    target: str, kernel: NativeKernel, sizes: tuple[int, int, int], *, is_interleaved: bool
) -> Results:
    """Test weights with `sizes`: numbers of outputs, inputs, and groups of inputs.

    The scales have two levels if there are at least `SECTION_INPUTS` inputs.
    """
    rng = np.random.default_rng(0)
    N, K, groups = sizes
    packed = {kernel_code(code): code for code in ("uint4", "int5")}
    table = CODES[packed[kernel.code]] if kernel.code in packed else np.zeros(16)
    x = rng.integers(-8, 8, (7, K)).astype(np.float32) / 8
    if kernel.dtype == jnp.int8:
        # Set the largest input of each segment to 127 / 8. Its scale is then 1 / 8, so that
        # rounding to int8 is exact.
        x[:, :: K // groups] = 127 / 8
    if kernel.code in packed:
        stored = rng.integers(0, len(table), (2, 3, N, K)).astype(np.uint8)
        values = table[stored]
        stored = pack(stored, num_bits(packed[kernel.code]))
    else:
        values = rng.integers(-8, 16, (2, 3, N, K))
        values[..., 0] = -128
        stored = values.astype(kernel.code)
    scales, mins = rng.integers(1, 8, (2, 2, 3, N, groups)) / np.float32(8)
    arrays = stored, scales, mins.astype(jnp.bfloat16)
    if num_sections := K // SECTION_INPUTS:
        levels = rng.integers(-7, 8, (2, 2, 3, N, groups)).astype(np.int8)
        factors = np.float32(1) / rng.choice([4, 8], (2, 2, 3, N, num_sections)).astype(np.float32)
        arrays = stored, *map(join_levels, levels, factors)
        scales, mins = levels * np.repeat(factors, groups // num_sections, axis=-1)
    w = values[1].reshape(3, N, groups, -1) * scales[1, ..., None] + mins[1, ..., None]
    if is_interleaved:
        arrays = tuple(map(InterleavedRows().prepare, arrays))
    operands = x, *arrays[:2], table.astype(np.float32), np.int32(1), arrays[2], _SIZES
    flags = {"has_mins": 1, "has_order": 0, "is_interleaved": is_interleaved}
    attributes = {name: np.int32(flag) for name, flag in flags.items()}
    return _test_groups(target, operands, w.reshape(3, N, K), **attributes)


# Number of rows in each of the three groups. `x` has 7 rows, so its last row is in no group.
_SIZES = np.array([1, 0, 5], np.int32)


def _test_groups(
    target: str, operands: Sequence[Any], w: np.ndarray, **attributes: np.generic
) -> Results:
    """Test the product of the 7 rows of ``operands[0]`` and the weights `w` of three groups."""
    x, N = operands[0], w.shape[1]
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((7, N), jnp.float32))
    got = np.asarray(jax.jit(lambda *args: call(*args, **attributes))(*operands))
    return got, np.concatenate([x[:1] @ w[0].T, x[1:6] @ w[2].T, np.zeros((1, N))])


def _test_attention(target: str, kernel: NativeKernel) -> Results:
    """Test a decode or prefill of a single sequence.

    A decode has the query of the last token, a prefill has the queries of the last 7 tokens. The
    softmax weights, divided by the largest, are powers of two. bfloat16 represents these weights
    and the queries exactly, so a prefill gives the same result for float32 and bfloat16 queries.
    """
    rng = np.random.default_rng(0)
    is_decode, dtype = kernel.op == "decode", kernel.dtype
    P, K, C, D, H, length, T = 4, 2, 8, 24, 6, 21, 1 if is_decode else 7
    q = rng.integers(-1, 2, (1, T, H, D)).astype(np.float32)
    k, v = (rng.integers(-7, 8, (1, P, K, C, D)).astype(np.float32) for _ in range(2))
    table, scales = np.array([[2, 0, 3]], np.int32), np.full((1, P, K, C), 0.25, np.float32)
    has_scales = KVDtype.of(dtype).has_scales
    factor = 0.25 if has_scales else 1.0
    scale = math.log(2) / factor
    queries = q[:, 0] if is_decode else q
    operands = [queries, k.astype(dtype), v.astype(dtype), table]
    operands += [np.array([length], np.int32), np.int32(0)]
    operands += [scales, scales] * has_scales
    operands += [np.array([T], np.int32)] * (not is_decode)
    shapes = queries.shape, queries.shape[:-1]
    call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(x, q.dtype) for x in shapes])
    attributes = attention_attributes(Options(scale), has_scales, False, False)

    def attend(has_bfloat16_queries: bool) -> np.ndarray:
        call_attributes = attributes | {"has_bfloat16_queries": np.int32(has_bfloat16_queries)}
        return np.asarray(jax.jit(lambda *args: call(*args, **call_attributes)[0])(*operands))

    got = np.stack([attend(False)] if is_decode else [attend(False), attend(True)])
    keys, values = (
        factor * pool[0, table[0]].transpose(1, 0, 2, 3).reshape(K, -1, D)[:, :length]
        for pool in (k, v)
    )
    scores = scale * np.einsum("tkgd,knd->tkgn", q.reshape(T, K, H // K, D), keys)
    is_later = np.arange(length) > length - T + np.arange(T)[:, None]
    scores = np.where(is_later[:, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("tkgn,knd->tkgd", weights, values).reshape(got.shape[1:])
    return got, np.broadcast_to(want, got.shape)


def _test_set_rows(target: str, kernel: NativeKernel) -> Results:
    rows = (np.arange(35, dtype=np.float32) % 16).reshape(5, 7)
    index, new = np.array([3, 5, 0, -1], np.int32), np.ones((4, 7), np.float32)
    call = jax.ffi.ffi_call(
        target, jax.ShapeDtypeStruct(rows.shape, kernel.dtype), input_output_aliases={0: 0}
    )
    got = jax.jit(call)(rows.astype(kernel.dtype), index, new.astype(kernel.dtype))
    rows[[3, 0]] = 1
    return np.asarray(got).astype(np.float32), rows


def _test_zeros(target: str, kernel: NativeKernel) -> Results:
    """Fill an array with zeros. The array initially contains 1, and has several memory pages."""
    ones = np.ones((5, 7919), kernel.dtype)
    shape = jax.ShapeDtypeStruct(ones.shape, ones.dtype)
    call = jax.ffi.ffi_call(target, shape, input_output_aliases={0: 0})
    return np.asarray(jax.jit(call)(ones)).astype(np.float32), np.zeros(ones.shape)


def _test_recurrent_step(target: str, kernel: NativeKernel) -> Results:
    """Test the delta rule with a decay per element of a key, and Mamba-2."""
    tests = _test_rule(target, kernel, 24, 43, True), _test_rule(target, kernel, 43, 5, False)
    got, want = (np.concatenate(arrays) for arrays in zip(*tests, strict=True))
    return got, want


def _test_rule(target: str, kernel: NativeKernel, D: int, U: int, is_delta_rule: bool) -> Results:
    q, k, v, log_decay, beta = _random(
        (3, 2, D), (3, 2, D), (3, 2, 2, U), (3, 2, 2, D if is_delta_rule else 1), (3, 2, 2)
    )
    log_decay = -np.abs(log_decay)

    def advance(state: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
        q_HD, k_HD = (np.repeat(x[row], 2, axis=0) for x in (q, k))
        change = v[row].reshape(4, U)
        old = np.exp(log_decay[row]).reshape(4, -1, 1)
        old = old * (state if is_delta_rule else state.swapaxes(1, 2))
        if is_delta_rule:
            change = beta[row].reshape(4, 1) * (change - np.einsum("hd,hdu->hu", k_HD, old))
        new = old + k_HD[..., None] * change[:, None]
        out = np.einsum("hd,hdu->hu", q_HD, new)
        return out, new if is_delta_rule else new.swapaxes(1, 2)

    arrays = (q, k, v, log_decay, beta) if is_delta_rule else (q, k, v, log_decay)
    shape = (4, D, U) if is_delta_rule else (4, U, D)
    return _test_step(target, kernel, shape, arrays, v.shape, advance)


def _test_convolution_step(target: str, kernel: NativeKernel) -> Results:
    F, width = 43, 4
    filters, bias = _random((width, F), (F,))
    x, num_tokens = np.arange(3 * F, dtype=np.float32).reshape(3, F) % 16, np.array([1, 1, 0])

    def advance(state: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.concatenate([state.reshape(width - 1, F), x[row : row + 1]])
        out = (inputs * filters).sum(0) + bias
        return out, (inputs[1:] if num_tokens[row] else inputs[:-1]).reshape(-1)

    arrays = x.astype(kernel.dtype), filters, bias, num_tokens.astype(np.int32)
    return _test_step(target, kernel, ((width - 1) * F,), arrays, (3, F), advance)


def _random(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _test_step(
    target: str,
    kernel: NativeKernel,
    shape: tuple[int, ...],
    arrays: Sequence[np.ndarray],
    out_shape: tuple[int, ...],
    advance: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]],
) -> Results:
    """Test one step of a recurrent layer on a batch of three rows.

    Rows 0 and 1 read their state from the same entry of the pool, and row 0 writes its new state to
    this entry. Row 2 starts from a state of zeros.
    """
    pool = np.random.default_rng(1).integers(-8, 8, (2, 4, *shape)).astype(np.float32)
    ids = np.array([1, 1, 4], np.int32), np.array([1, 3, 0], np.int32)
    outs = [jax.ShapeDtypeStruct(pool.shape, kernel.dtype)]
    outs.append(jax.ShapeDtypeStruct(out_shape, jnp.float32))
    call = jax.ffi.ffi_call(target, outs, input_output_aliases={0: 0})
    got = jax.jit(call)(pool.astype(kernel.dtype), np.int32(1), *ids, *arrays)
    befores = pool[1, 1].copy(), pool[1, 1].copy(), np.zeros(shape, np.float32)
    want = []
    for row, (entry, before) in enumerate(zip(ids[1], befores, strict=True)):
        out, pool[1, entry] = advance(before, row)
        want.append(out.reshape(-1))
    flat = np.concatenate([np.asarray(x).astype(np.float32).reshape(-1) for x in got])
    return flat, np.concatenate([pool.reshape(-1), *want])


SELF_TESTS: dict[str, Callable[[str, NativeKernel], Results]] = {
    "decode": _test_attention,
    "prefill": _test_attention,
    "linear": _test_linear,
    "quantised_linear": _test_quantised_linear,
    "set_rows": _test_set_rows,
    "zeros": _test_zeros,
    "recurrent_step": _test_recurrent_step,
    "convolution_step": _test_convolution_step,
}
