"""Where the arrays of a runner lie: the weights as they came, everything else beside them."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding


def in_auto_mode(sharding: Sharding) -> Sharding:
    """The same devices, where `jit` chooses how products are divided, whatever the mesh's mode."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    names = sharding.mesh.axis_names
    auto = (AxisType.Auto,) * len(names)
    mesh = Mesh(np.asarray(sharding.mesh.devices), names, axis_types=auto)
    return NamedSharding(mesh, sharding.spec)


def placement_beside(weights: list[jax.Array]) -> Sharding | None:
    """Where all but the weights go: whole on each of their devices. None if that is one device.

    Raises:
      ValueError: the weights are on different devices, or on several and not by a NamedSharding.
    """
    first = weights[0].sharding
    if any(x.sharding.device_set != first.device_set for x in weights):
        raise ValueError(
            "placement_beside: weights must all be on the same devices, got different ones. "
            "Replicate those that the sharding does not divide."
        )
    if len(first.device_set) == 1:
        return None
    if not isinstance(first, NamedSharding):
        raise ValueError(
            "placement_beside: weights on more than one device must have a NamedSharding, got "
            f"{type(first).__name__}. Pass a sharding of a jax.sharding.Mesh."
        )
    return NamedSharding(first.mesh, PartitionSpec())
