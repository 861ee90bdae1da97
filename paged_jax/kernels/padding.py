# pyright: strict
"""Padding of the last dimensions of pools of KV blocks and of recurrent states, for TPUs."""

# Number of lanes of a TPU register. A TPU moves this number of elements of the last dimension at a
# time.
LANES = 128
# Number of sublanes of a TPU register. A sublane is a row of 128 lanes with 32 bits each.
SUBLANES = 8


def round_up_to_lanes(head_dim: int) -> int:
    """Return the head dimension rounded up to a multiple of 128, the lanes of a TPU register."""
    return -(-head_dim // LANES) * LANES


def padded_head_dim(head_dim: int, platform: str) -> int:
    """Return the last dimension of a pool: the head dimension, padded on TPUs.

    On TPUs, it is a multiple of 128. The padding costs no memory there, because XLA stores arrays
    in tiles of 128 lanes. XLA may give an unpadded pool another layout, and would then copy the
    whole pool before each kernel.

    Example:
      >>> padded_head_dim(64, "cuda"), padded_head_dim(64, "tpu")
      (64, 128)
    """
    return round_up_to_lanes(head_dim) if platform == "tpu" else head_dim


def padded_state_shape(shape: tuple[int, ...], platform: str) -> tuple[int, ...]:
    """Return the shape of a recurrent state in its pool; on TPUs, matrices are padded to tiles.

    Like the padding of `padded_head_dim`, this prevents copies: for unpadded matrices, XLA may use
    different layouts in the pool and in a step, and then copies the whole pool twice. States that
    are vectors are not padded.

    Example:
      >>> padded_state_shape((30, 96, 192), "tpu"), padded_state_shape((30, 96, 192), "gpu")
      ((30, 96, 256), (30, 96, 192))
    """
    if platform != "tpu" or len(shape) < 2:
        return shape
    *first, rows, lanes = shape
    return *first, -(-rows // SUBLANES) * SUBLANES, round_up_to_lanes(lanes)
