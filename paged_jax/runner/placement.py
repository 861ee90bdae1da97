"""Where the state of a runner lies on several devices, and how programs run there.

Each device runs the whole program on what it has (`jax.shard_map`): a part of the weights, K and V
of its heads, and all else. The allocator, the search for cached blocks and the choice of tokens are
so done by each of them, with the same result. What devices send each other is in the model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.models.tensor_parallel import AXIS
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.replicas import agree

# On each device all of it, or what belongs to its KV heads: of pools [L, P, K, C, D], of their
# scales [L, P, K, C], and of blocks in these shapes.
WHOLE = PartitionSpec()
OF_HEADS = PartitionSpec(None, None, AXIS)

Program = Callable[..., tuple[DecodeState, Any]]


class Division(NamedTuple):
    """How programs run on several devices; hashable.

    Attributes:
      mesh: the devices.
      weights: which part of each weight a device has, in the order of the model's flattened state.
      checks_replicas: whether programs compare what each device computes for itself.
    """

    mesh: Mesh
    weights: tuple[PartitionSpec, ...]
    checks_replicas: bool = False

    def divide(self, program: Program, *, last: PartitionSpec, result: PartitionSpec) -> Program:
        """A program ``(weights, state, *args) -> (state, result)`` of all devices from one of each.

        Args:
          program: what each device runs, on its parts.
          last: which part a device gets of the last of `args`; it gets all of the others.
          result: which part of the result a device has.

        Returns:
          The program. With `checks_replicas` its result is ``(result, ok)``: bool[], whether state,
          result and weights that are not divided are the same on all devices, where they should be.
        """
        results: Any = result
        if self.checks_replicas:
            has_parts = result != WHOLE
            program, results = _checked(program, self.weights, has_parts), (result, WHOLE)

        def divided(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
            places, parts = _parts(state), [WHOLE] * len(args)
            parts[-1:] = [last] * bool(args)
            return jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(list(self.weights), places, *parts),
                out_specs=(places, results),
                # JAX's check of what varies over the devices does not know our kernels.
                check_vma=False,
            )(weights, state, *args)

        return divided

    def shardings(self, state: DecodeState) -> DecodeState:
        """Where each array of a state goes."""
        return jax.tree.map(lambda part: NamedSharding(self.mesh, part), _parts(state))


def _checked(program: Program, parts: tuple[PartitionSpec, ...], has_parts: bool) -> Program:
    def checked(weights: list[jax.Array], state: DecodeState, *args: Any) -> Any:
        state, result = program(weights, state, *args)
        no_pools = jax.tree.map(lambda _: None, state.cache.group_pools)
        same = dataclasses.replace(state, cache=state.cache.replace_group_pools(no_pools))
        # The few weights that are not divided, such as those of norms.
        shared = [w for w, part in zip(weights, parts, strict=True) if part == WHOLE]
        return state, (result, agree((same, shared, None if has_parts else result), AXIS))

    return checked


def _parts(state: DecodeState) -> Any:
    parts = jax.tree.map(lambda _: WHOLE, state)
    pools = jax.tree.map(lambda _: OF_HEADS, state.cache.group_pools)
    return dataclasses.replace(parts, cache=parts.cache.replace_group_pools(pools))
