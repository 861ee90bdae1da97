"""The last axis of the pools: the head dimension, padded where the platform wants it."""

# TPUs move 128 lanes at a time, so pools for them are padded to a multiple of that.
LANES = 128


def in_whole_lanes(head_dim: int) -> int:
    """The head dimension rounded up to whole registers of a TPU."""
    return -(-head_dim // LANES) * LANES


def padded_head_dim(head_dim: int, platform: str) -> int:
    """The last axis of a pool for a platform: D, padded on TPUs to whole registers of 128 lanes.

    The padding costs no memory there: XLA stores an array in tiles of 128 lanes anyway, or lays it
    out in another order, and would then copy all of it before every kernel.

    Example:
      >>> padded_head_dim(64, "cuda"), padded_head_dim(64, "tpu")
      (64, 128)
    """
    return in_whole_lanes(head_dim) if platform == "tpu" else head_dim
