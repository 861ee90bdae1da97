"""The compiled programs of an engine, each ``(weights, state, ...) -> (state, result)``.

The state, a `DecodeState`, is donated. The weights come as a flat list of arrays:
flattening a Flax module, or hashing its graph, would cost more than a small model's step each time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paged_jax.cache import paged_cache
from paged_jax.cache.contents import read_blocks, write_blocks
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner import decoding
from paged_jax.runner.compiler import compiler_options
from paged_jax.runner.placement import OF_HEADS, WHOLE, Division
from paged_jax.runner.sizes import Sizes
from paged_jax.runner.weights import Graph
from paged_jax.sampling.sample import ranks, top_logprobs
from paged_jax.short_repr import short_repr


@short_repr
class Scores(NamedTuple):
    """How probable the tokens of a prompt are, one row for each: fetched in one transfer."""

    logprobs: jax.Array  # f32 [T]
    ranks: jax.Array  # i32 [T], 1 is the most probable token
    top_ids: jax.Array  # i32 [T, N], the N most probable tokens
    top_logprobs: jax.Array  # f32 [T, N]


@short_repr
class BeamTokens(NamedTuple):
    """What may follow each beam, fetched in one transfer."""

    top_ids: jax.Array  # i32 [B, N], the N most probable tokens, the most probable first
    top_logprobs: jax.Array  # f32 [B, N]
    num_free: jax.Array  # i32 [], free blocks in the pool
    ok: jax.Array  # bool [], false where blocks did not suffice
    others_free: tuple[jax.Array, ...] = ()  # i32 [], free blocks of each further group of layers


class Call(NamedTuple):
    """One program and all that it is called with after weights and state.

    Attributes:
      name: the program and the shape that it is compiled for, to be shown.
      program: the jitted function.
      args: arrays, on the host.
      static: arguments that the compiled program depends on.
    """

    name: str
    program: Any
    args: tuple[Any, ...]
    static: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """One entry of the list. It is compiled once for each shape of its arguments.

    Attributes:
      label: the name of a call, a format of its arguments.
      jitted: the function.
      static: the static arguments that are the same in all calls of an engine.
    """

    label: str
    jitted: Any
    static: dict[str, Any] = field(default_factory=dict)

    def call(self, *args: Any, **static: Any) -> Call:
        """Name a call with these arguments, for `Executor.run`."""
        return Call(self.label.format(*args, **static), self.jitted, args, self.static | static)


class Programs(NamedTuple):
    """The list of programs.

    Slots below 0 are padding. Arguments after weights and state, and the result:

    prefill: ``(token_ids i32[B, T], slots i32[B], num_tokens i32[B])`` to ``ok``.
    score: ``(token_ids i32[1, T], slots i32[1], num_tokens i32[1], targets i32[T])`` to
      ``(Scores, ok)``: as prefill, and how probable the tokens that come next, `targets`, are.
    decode: ``(slots i32[B], num_steps i32[], leave_on_stop bool[], with_top bool[])`` to
      `StepTokens`, see `decoding.decode_steps`.
    verify: ``(drafts i32[B, T], num_drafts i32[B], slots i32[B], with_top bool[])`` to
      `StepTokens`, see `decoding.verify_steps`.
    beam: ``(parents i32[S], token_ids i32[B], slots i32[B], bias_ids i32[K], bias_values
      f32[B, K], num_top=)`` to `BeamTokens`: slots become what their parents were, see
      `cache.reorder`, then take one token each. Biases are added to the log-probabilities.
    fork: ``(parents i32[S])`` to ``ok``.
    release: ``(mask bool[S])`` to None.
    reserve: ``(num_tokens i32[S])`` to ``ok``.
    attach: ``(slot i32[], digests u32[M, 8], token_ids i32[M, C], num_blocks i32[])`` to the number
      of blocks found.
    publish: ``(slots i32[N], columns i32[N], digests u32[N, 8], token_ids i32[N, C])`` to None.
    forget: ``()`` to None.
    read_blocks: ``(slot i32[], first i32[], group=)`` to their K and V, see `cache.read_blocks`.
    write_blocks: ``(slot i32[], first i32[], values, group=)`` to None.
    """

    prefill: Program
    score: Program
    decode: Program
    verify: Program
    beam: Program
    fork: Program
    release: Program
    reserve: Program
    attach: Program
    publish: Program
    forget: Program
    read_blocks: Program
    write_blocks: Program


class Structure(NamedTuple):
    """What a program depends on besides the shapes of its arguments.

    Attributes:
      graphdef, treedef: the structure of the model's module, see `Graph.key`, and that of its
        weights.
      cascade: whether decoding reads shared blocks once, see `PagedModel.decode`.
      backend: the backend of the attention, see `paged_attention`.
      division: how programs run on several devices; None for one.
      platform: `jax.Device.platform` of the devices.
      is_scanned: whether the layers are a loop, so that most of what decodes is the choice of
        tokens.
    """

    graphdef: Any
    treedef: Any
    cascade: bool
    backend: str | None
    division: Division | None = None
    platform: str = "cpu"
    is_scanned: bool = False

    def model(self, weights: list[jax.Array]) -> PagedModel:
        """The model over some weights."""
        return Graph.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


def list_programs(
    structure: Structure, sizes: Sizes, num_top: int, *, num_groups: int = 1
) -> Programs:
    """The programs of an engine, shared with all engines that have the same structure.

    Args:
      structure: structure that the programs of a model depend on besides shapes.
      sizes: sizes that shape the programs of this engine.
      num_top: number of most probable tokens that are reported where a request asks for them.
      num_groups: groups of layers that keep the same tokens; blocks of each are moved apart.
    """
    blocks = "blocks" if num_groups == 1 else "blocks of group {group}"
    jit = functools.partial(_jit, structure)
    steps, top = {"max_steps": sizes.dispatch_capacity}, {"num_top": num_top}
    width = {"width": sizes.swap_width}
    return Programs(
        prefill=Program("prefill of {0.shape[0]} x {0.shape[1]} tokens", jit(_prefill)),
        score=Program("score of {3.size} tokens", jit(_score), top),
        decode=Program("decode of {0.size} samples", jit(_decode), steps | top),
        verify=Program("verification of {2.size} samples", jit(_verify), top),
        beam=Program("beam search of {2.size} beams with {num_top} candidates", jit(_beam)),
        fork=Program("fork of samples", jit(_fork)),
        release=Program("release of slots", jit(_release)),
        reserve=Program("reservation of blocks", jit(_reserve)),
        attach=Program("look-up of cached blocks", jit(_attach)),
        publish=Program("registration of cached blocks", jit(_publish)),
        forget=Program("emptying of the prefix cache", jit(_forget)),
        read_blocks=Program(
            f"copy of {blocks} to the host", jit(_read_blocks, result=OF_HEADS), width
        ),
        write_blocks=Program(f"copy of {blocks} from the host", jit(_write_blocks, last=OF_HEADS)),
    )


# Room for the programs of 16 models.
@functools.lru_cache(maxsize=16 * len(Programs._fields))
def _jit(
    structure: Structure,
    function: Callable[..., Any],
    *,
    last: PartitionSpec = WHOLE,
    result: PartitionSpec = WHOLE,
) -> Any:
    division = structure.division

    def program(weights, state, *args, **static):
        run = functools.partial(function, structure, **static)
        if division is not None:
            run = division.divide(run, last=last, result=result)
        return run(weights, state, *args)

    program.__name__ = function.__name__.strip("_")
    return jax.jit(
        program,
        donate_argnums=1,
        static_argnames=("max_steps", "num_top", "width", "group"),
        compiler_options=compiler_options(structure.platform, is_unrolled=not structure.is_scanned),
    )


def _prefill(structure, weights, state, token_ids, slots, num_tokens):
    # The logits are not used, so that the compiled program has no output head.
    _, cache, ok = structure.model(weights).prefill(
        state.cache, token_ids, slots, num_tokens, backend=structure.backend
    )
    return replace(state, cache=cache), ok


def _score(structure, weights, state, token_ids, slots, num_tokens, targets, *, num_top):
    logits, cache, ok = structure.model(weights).score(
        state.cache, token_ids, slots, num_tokens, backend=structure.backend
    )
    return replace(state, cache=cache), (_scores(logits[0], targets, num_top), ok)


def _scores(logits: jax.Array, targets: jax.Array, num_top: int) -> Scores:
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)
    logprobs_of_top, top_ids = top_logprobs(logits, num_top)
    return Scores(
        logprobs=chosen[:, 0] - jax.nn.logsumexp(logits, axis=-1),
        ranks=ranks(logits, targets),
        top_ids=top_ids,
        top_logprobs=logprobs_of_top,
    )


def _decode(
    structure, weights, state, slots, num_steps, leave_on_stop, with_top, *, max_steps, num_top
):
    tokens, state = decoding.decode_steps(
        structure.model(weights), state, slots, num_steps, leave_on_stop, with_top,
        max_steps=max_steps, num_top=num_top, cascade=structure.cascade, backend=structure.backend,
    )  # fmt: skip
    return state, tokens


def _verify(structure, weights, state, drafts, num_drafts, slots, with_top, *, num_top):
    tokens, state = decoding.verify_steps(
        structure.model(weights), state, drafts, num_drafts, slots, with_top,
        num_top=num_top, backend=structure.backend,
    )  # fmt: skip
    return state, tokens


def _beam(structure, weights, state, parents, token_ids, slots, bias_ids, bias_values, *, num_top):
    cache, are_slots = paged_cache.reorder(state.cache, parents)
    logits, cache, ok = structure.model(weights).decode(
        cache, token_ids, slots, cascade=structure.cascade, backend=structure.backend
    )
    bias = (bias_ids, bias_values) if bias_ids.size else None
    logprobs_of_top, top_ids = top_logprobs(logits, num_top, bias)
    num_free = cache.tables.pool.num_free
    others = decoding.num_free_in_others(cache)
    tokens = BeamTokens(top_ids, logprobs_of_top, num_free, ok & are_slots, others)
    return replace(state, cache=cache), tokens


def _fork(structure, weights, state, parents):
    cache, ok = paged_cache.fork(state.cache, parents)
    return replace(state, cache=cache), ok


def _release(structure, weights, state, mask):
    return replace(state, cache=paged_cache.release(state.cache, mask)), None


def _reserve(structure, weights, state, num_tokens):
    cache = state.cache
    capacity = cache.tables.max_blocks_per_slot * cache.block_size
    cache, ok = paged_cache.restore(
        cache, num_tokens, max_tokens=capacity, backend=structure.backend
    )
    return replace(state, cache=cache), ok


def _attach(structure, weights, state, slot, digests, token_ids, num_blocks):
    cache, num_found = paged_cache.attach(state.cache, slot, digests, token_ids, num_blocks)
    return replace(state, cache=cache), num_found


def _publish(structure, weights, state, slots, columns, digests, token_ids):
    cache = paged_cache.publish(state.cache, slots, columns, digests, token_ids)
    return replace(state, cache=cache), None


def _forget(structure, weights, state):
    return replace(state, cache=paged_cache.forget(state.cache)), None


def _read_blocks(structure, weights, state, slot, first, *, width, group):
    return state, read_blocks(state.cache, slot, first, width=width, group=group)


def _write_blocks(structure, weights, state, slot, first, values, *, group):
    cache = write_blocks(state.cache, slot, first, values, group=group)
    return replace(state, cache=cache), None
