"""Numbers of 4 bits with a scale for each block of 32, as the experts of gpt-oss are stored.

MXFP4 of the OCP Microscaling Formats (MX) Specification, version 1.0 (sections 5.2, 5.3.3 and
5.4.1)::

    a byte    s e e m | s e e m     two numbers of E2M1, the first one in the low bits
    a scale   e e e e e e e e       E8M0: 2 ** (e - 127), or not a number where all bits are set

A number is its E2M1 value, one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, times the scale
of its block. All of them but the largest, which overflow, are numbers of bfloat16.
"""

import numpy as np

BLOCK = 32  # numbers that share a scale
BLOCK_BYTES = BLOCK // 2
_BIAS = 127
_NOT_A_NUMBER = 0xFF

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_BYTES = np.arange(256)
# The two numbers of each byte.
_PAIRS = np.stack([_E2M1[_BYTES & 0xF], _E2M1[_BYTES >> 4]], axis=1)


def expand(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers as float32, exactly; infinite or not a number where a scale says so.

    Args:
      blocks: uint8 ``[..., num_blocks, 16]``.
      scales: uint8 ``[..., num_blocks]``.

    Returns:
      float32 ``[..., 32 * num_blocks]``.

    Example:
      >>> expand(np.array([[0x72, *[0] * 15]], np.uint8), np.array([128], np.uint8))[:3].tolist()
      [2.0, 12.0, 0.0]
    """
    factors = np.ldexp(
        np.float32(1), np.minimum(scales, _NOT_A_NUMBER - 1).astype(np.int32) - _BIAS
    )
    factors = np.where(scales == _NOT_A_NUMBER, np.float32(np.nan), factors)
    with np.errstate(over="ignore"):  # who reads weights says which are not finite
        numbers = _PAIRS[blocks].reshape(*scales.shape, BLOCK) * factors[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)
