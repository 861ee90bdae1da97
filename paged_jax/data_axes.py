# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Data parallelism: a function of independent rows on the devices of a mesh.

    rows of all devices   | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11 |
    device                    0       1       2        3
    first_row                 0       3       6        9

The random numbers of a row depend on its index among the rows of all devices, so any number of
devices draws the same samples. Code inside `jax.shard_map` sees only the rows of its device, and
cannot know whether the other devices have the same rows (tensor parallelism) or others (data
parallelism). So the caller names the axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

T = TypeVar("T")


def map_rows(
    function: str,
    compute: Callable[[Any, Any, jax.Array], T],
    model: Any,
    rows: Any,
    axis_name: str | Sequence[str] | None,
) -> T:
    """Call `compute` with each device's share of the rows.

    Args:
      function: name of the function, for error messages.
      compute: called with `model`, this device's rows and ``first_row``, an i32[], the index of its
        first row among the rows of all devices. It returns arrays with a leading dimension that is
        a multiple of the number of its rows.
      model: a pytree of arrays that every device needs.
      rows: a pytree of arrays with the same leading dimension. The first one decides which axes
        divide the rows if `axis_name` is None.
      axis_name: the mesh axes that divide the rows, see `paged_jax.rollout`.

    Raises:
      ValueError: `axis_name` is missing in `jax.shard_map`, does not fit the mesh, or the rows
        cannot be divided equally.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        return compute(model, rows, _first_row_of_device(function, names, manual, rows))
    mesh, first = _mesh_of((model, rows)), jax.tree.leaves(rows)[0]
    is_explicit = AxisType.Explicit in mesh.axis_types
    if names is None:
        names = _axes(jax.typeof(first).sharding.spec[0]) if is_explicit else ()
    _check_axes(function, names, mesh.axis_names, "the mesh of the arrays")
    if not names and not is_explicit:
        return compute(model, rows, jnp.int32(0))
    num_rows, num_shares = first.shape[0], math.prod(mesh.shape[name] for name in names)
    if num_rows % num_shares:
        raise ValueError(
            f"{function}: the number of prompts must be a multiple of {num_shares}, the number of "
            f"devices along axis_name {tuple(names)}, got {num_rows}. Add prompts."
        )

    def compute_share(model: Any, rows: Any) -> T:
        # All axes are manual, also those that do not divide rows: kernels cannot be partitioned.
        return compute(model, rows, _first_row_of_device(function, names, names, rows))

    divided, replicated = PartitionSpec(tuple(names)), PartitionSpec()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit_spec = PartitionSpec(tuple(name for name in names if kinds[name] == AxisType.Explicit))

    def divide(model: Any, rows: Any) -> T:
        if is_explicit:  # `jax.shard_map` divides arrays over automatic axes only
            model = jax.sharding.reshard(model, NamedSharding(mesh, replicated))
            rows = jax.sharding.reshard(rows, NamedSharding(mesh, explicit_spec))
        return jax.shard_map(
            compute_share,
            mesh=mesh,
            in_specs=(replicated, divided),
            out_specs=divided,
            check_vma=False,
        )(model, rows)

    return jax.jit(divide)(model, rows)  # `jax.shard_map` needs `jit` for functions with gradients


def _first_row_of_device(
    function: str, names: Sequence[str] | None, manual: Sequence[str], rows: Any
) -> jax.Array:
    """Return the index of this device's first row. Call it inside `jax.shard_map`.

    Args:
      function: name of the function, for error messages.
      names: the axes that divide the rows.
      manual: the manual axes of the mesh.
      rows: this device's rows.
    """
    if names is None:
        raise ValueError(
            f"{function}: axis_name must be given inside jax.shard_map over the axes "
            f"{tuple(manual)}, got None. Name the axes that divide the prompts, such as "
            f"axis_name={manual[0]!r}, so that devices draw different samples. Pass () if every "
            "device has the same prompts."
        )
    _check_axes(function, names, manual, "jax.shard_map")
    if not names:
        return jnp.int32(0)
    return lax.axis_index(tuple(names)) * jax.tree.leaves(rows)[0].shape[0]


def _check_axes(function: str, names: Sequence[str], valid_axes: Sequence[str], owner: str) -> None:
    unknown = [name for name in names if name not in valid_axes]
    if unknown:
        advice = (
            "Put the prompts or the weights on a mesh, or call it in jax.set_mesh(mesh)."
            if not valid_axes
            else "Name the axes that divide the prompts."
        )
        raise ValueError(
            f"{function}: axis_name must be axes of {owner}, {tuple(valid_axes)}, got "
            f"{unknown[0]!r}. {advice}"
        )


def _mesh_of(arrays: Any) -> Any:
    """Return the mesh of the first array that is on one, or else the mesh of `jax.set_mesh`."""
    meshes = (jax.typeof(array).sharding.mesh for array in jax.tree.leaves(arrays))
    default = jax.sharding.get_abstract_mesh()
    return next((mesh for mesh in meshes if not mesh.empty), default)


def _axes(spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes in an entry of a `PartitionSpec`."""
    if spec is None:
        return ()
    return (spec,) if isinstance(spec, str) else spec
