"""Decode loop on the device: several decode steps per program, and verification of drafts.

If n tokens of a sequence are known, n - 1 of them are in the cache. The last token is the input of
the next decode step, which samples the token after it. `decode_steps` repeats this for a batch:

    plan blocks for the tokens of all steps, and copy shared blocks            (PagedCache)
    while decode steps are left and rows are running:
        logits = model.decode_rows(...)
        sample tokens, record them, and stop rows that are complete            (sampling)
    allocate the planned blocks that were used                                 (PagedCache)

`verify_steps` samples the same tokens with the help of drafts, which are guesses of the next
tokens. One pass of the model computes the logits after every draft token. Then tokens are sampled
one after another, as long as each sampled token equals its draft token.

Both functions are pure. A sampled token only depends on the logits, the seed, the index of the
sample and the position. So it does not depend on which of the two functions samples it, or on the
number of dispatches.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.arguments import check_positive
from paged_jax.cache import paged_cache
from paged_jax.cache.paged_cache import PagedCache, PlannedRows
from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.step_arrays import check_distinct_slots
from paged_jax.runner.decode_state import DecodeState
from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.sample import Draws, rows_of, sample
from paged_jax.sampling.state import SlotSampling


@short_repr
class StepTokens(NamedTuple):
    """Tokens that a dispatch sampled for B rows, up to N per row.

    The new tokens of row ``b`` are ``token_ids[:num_new[b], b]``. All arrays in `draws` have the
    leading dimensions [N, B]; their entries past `num_new` are 0.

    Attributes:
      packed_draws: i32[N, B, 3 + 2 * num_top], the sampled tokens, packed by `Draws.pack` so that
        the host fetches them in a single transfer.
      num_new: i32[B], the number of sampled tokens of each row.
      num_steps: i32[], the number of decode steps, which is the maximum of `num_new`.
      free_blocks: i32[] for each group of layers, the number of free blocks after the dispatch.
      ok: bool[], False if there were too few free blocks for all decode steps.
    """

    packed_draws: jax.Array
    num_new: jax.Array
    num_steps: jax.Array
    free_blocks: tuple[jax.Array, ...]
    ok: jax.Array

    @property
    def draws(self) -> Draws:
        """The sampled tokens with their log-probabilities, unpacked from `packed_draws`."""
        return Draws.unpack(self.packed_draws)

    @property
    def token_ids(self) -> jax.Array:
        """The sampled tokens, i32 [N, B]."""
        return self.draws.token_ids


def decode_steps(
    model: PagedModel,
    state: DecodeState,
    slots: jax.Array,
    num_steps: int | jax.Array,
    leave_on_stop: bool | jax.Array = False,
    with_top: bool | jax.Array = True,
    *,
    max_steps: int,
    num_top: int = 0,
    cascade: bool = False,
    backend: str | None = None,
) -> tuple[StepTokens, DecodeState]:
    """Sample up to `num_steps` tokens for each slot in `slots`, in a loop on the device.

    The function is pure; jit it with the state donated. Each slot in `slots` is a row. A row stops
    when its last token is one of its `stop_ids` or when it reaches its `max_lengths`. A stopped row
    keeps its blocks, and no tokens are sampled for it in later calls. So the host may queue a call
    before it has read the tokens of the previous call. A row with a grammar waits at the first
    position for which the host has not written a mask yet, see `Constraints`; the other rows
    continue.

    Before the loop, blocks are planned for all steps together, as if no row stopped. The loop ends
    after `num_steps` decode steps. It ends earlier if there are too few free blocks, if all rows
    have stopped or, with `leave_on_stop`, if any row has stopped. Planned blocks that are not used
    stay free.

    Args:
      model: the model.
      state: the device state. All known tokens of each slot except the last must be in the cache.
      slots: i32[B], the distinct slots of the rows; negative for padding.
      num_steps: i32[], maximum number of decode steps, at most `max_steps`.
      leave_on_stop: bool[], whether the loop ends as soon as any row stops. Use it if a request
        waits for a free slot.
      with_top: bool[], whether to find the `num_top` most probable tokens; if it is False, they are
        0 in the result.
      max_steps: N, the maximum number of decode steps that the result has room for (static).
      num_top: number of most probable tokens to return per sampled token (static). With 0, the
        ranks of the sampled tokens are not computed either.
      cascade: whether to use cascade attention, which reads blocks shared by all rows only once
        (static), see `PagedModel.decode`.
      backend: backend of the attention, see `paged_attention`.

    Returns:
      `(tokens, state)`: the `StepTokens` and the new state. If a slot does not exist, no step is
      made and `ok` is False.

    Raises:
      ValueError: `max_steps` is not positive, `num_top` is out of range, `slots` is not i32[B] or,
        outside of `jit`, contains a slot twice.

    Each decode step is a pass of the model. Pools and sampling state are updated in place.

    Example:
      >>> from flax import nnx
      >>> from paged_jax import Llama, LlamaConfig
      >>> from paged_jax.runner.decode_state import assign
      >>> from paged_jax.sampling.params import SamplingParams
      >>> from paged_jax.sampling.state import Assignment
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> cache = PagedCache.create(num_layers=1, num_blocks=8, num_kv_heads=1, block_size=4,
      ...                           head_dim=8, num_slots=2, max_blocks_per_slot=4)
      >>> state = DecodeState.create(cache, config.vocab_size)
      >>> first = Assignment(1, SamplingParams(temperature=0), token_ids=[3], num_prompt_tokens=1,
      ...                    seed=0, max_length=6)
      >>> state = assign(state, [first])
      >>> run = jax.jit(decode_steps, donate_argnames="state", static_argnames="max_steps")
      >>> tokens, state = run(model, state, jnp.array([1, -1]), 8, max_steps=8)
      >>> tokens.num_new.tolist(), state.cache.lengths.tolist()
      ([5, 0], [0, 5])
    """
    check_positive("decode_steps", max_steps=max_steps)
    slots = _as_slots("decode_steps", slots)
    num_steps = jnp.minimum(jnp.asarray(num_steps, jnp.int32), max_steps)
    leave_on_stop = jnp.asarray(leave_on_stop, jnp.bool_)
    with_top = jnp.asarray(with_top, jnp.bool_)
    is_row = slots >= 0

    def wants_more(batch: _Batch) -> jax.Array:
        has_stopped = jnp.any(is_row & (batch.status == _COMPLETE))
        return jnp.any(batch.is_running) & ~(leave_on_stop & has_stopped)

    first = _Batch.take(state, slots, max_steps, num_top)
    num_requested = jnp.where(wants_more(first), num_steps, 0)
    cache, plans = _plan_steps(state.cache, first, num_requested, max_steps, backend)
    num_possible = plans[0].num_tokens
    rows = PlannedRows.take(cache, plans, first.slots)

    def decode_step(carry: tuple[Any, _Batch, jax.Array]) -> tuple[Any, _Batch, jax.Array]:
        pools, batch, _ = carry
        # The barrier prevents XLA from moving operations on weights out of the loop. On CPUs, every
        # dispatch would otherwise first convert all bfloat16 weights to float32.
        weights, status = lax.optimization_barrier((model, batch.status))
        metadata = rows.at_step(batch.num_steps, status == _RUNNING, batch.lengths)
        logits, pools = weights.decode_at(
            pools, batch.token_ids, metadata, cascade=cascade, backend=backend
        )
        batch = batch.draw(logits, with_top, weights.resolve_backend(backend))
        return pools, batch, wants_more(batch) & (batch.num_steps < num_possible)

    # Compute the loop condition in the loop body and carry its value. If the condition function
    # computed it, the host would launch additional kernels in each iteration and wait for them.
    carry = cache.group_pools, first, num_possible > 0
    pools, batch, _ = lax.while_loop(lambda carry: carry[2], decode_step, carry)
    lengths = batch.lengths_in(cache)
    cache = paged_cache.commit(cache.replace_group_pools(pools), plans, lengths)
    ok = (num_possible == num_requested) | ~wants_more(batch)
    return batch.put_back(state, cache, ok)


def verify_steps(
    model: PagedModel,
    state: DecodeState,
    drafts: jax.Array,
    num_drafts: jax.Array,
    slots: jax.Array,
    with_top: bool | jax.Array = True,
    *,
    num_top: int = 0,
    backend: str | None = None,
) -> tuple[StepTokens, DecodeState]:
    """Sample the same tokens as `decode_steps`, in one pass of the model over draft tokens.

    This is exact speculative decoding for any sampling parameters. The model computes the logits
    for all draft tokens in one pass, and the token at each position is sampled as in a decode step.
    A draft token is confirmed if the sampled token equals it. Each row gets its confirmed draft
    tokens and the next sampled token. All later draft tokens are removed from the cache.

    Args:
      model: the model.
      state: the device state, see `decode_steps`.
      drafts: i32[B, T], the draft tokens of each row, which are guesses of its next tokens.
      num_drafts: i32[B], the number of draft tokens of each row; a row with 0 makes an ordinary
        decode step. With recurrent layers, draft tokens past the next multiple of `state_interval`
        tokens are ignored.
      slots: see `decode_steps`.
      with_top: see `decode_steps`.
      num_top: see `decode_steps`.
      backend: see `decode_steps`.

    Returns:
      `(tokens, state)` as from `decode_steps`, with N = T + 1. If there are too few blocks for all
      draft tokens, `ok` is False and the state is unchanged.

    Raises:
      ValueError: `num_top` is out of range, or the shapes of the arrays do not match.

    The cost is a pass over B * (T + 1) tokens with logits f32[B, T + 1, V]. In addition, sampling
    runs for all rows as many times as the number of tokens of the row that gets the most tokens.
    """
    slots = _as_slots("verify_steps", slots)
    sizes = bind(
        "verify_steps", drafts=(drafts, "BT"), num_drafts=(num_drafts, "B"), slots=(slots, "B")
    )
    T = sizes["T"]
    with_top = jnp.asarray(with_top, jnp.bool_)
    first = _Batch.take(state, slots, T + 1, num_top)
    starts = first.lengths
    # A sequence is complete when it has `max_lengths` tokens. It already has `starts + 1` tokens:
    # `starts` in the cache, and the last token. One more is sampled after the confirmed draft
    # tokens. So at most `max_lengths - starts - 2` draft tokens are useful.
    max_drafts = first.max_lengths - starts - 2
    max_drafts = paged_cache.max_drafts(state.cache, starts, max_drafts)
    num_drafts = jnp.clip(num_drafts, 0, jnp.clip(max_drafts, 0, T))
    input_ids = jnp.concatenate([first.token_ids[:, None], drafts.astype(jnp.int32)], axis=1)
    logits, cache, ok, states = model.score_drafts(
        state.cache, input_ids, slots, num_drafts + 1, backend=backend
    )
    # The loop also compares the token that is sampled after the last draft token. Pad the draft
    # tokens with -1, which no sampled token equals.
    drafts = jnp.pad(drafts.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=-1)

    def draw_next(batch: _Batch) -> _Batch:
        i = batch.num_steps
        sampled = batch.draw(logits[:, i], with_top, model.resolve_backend(backend))
        is_confirmed = (sampled.token_ids == drafts[:, i]) & (i < num_drafts)
        return dataclasses.replace(
            sampled, status=jnp.where(is_confirmed, sampled.status, _WAITING)
        )

    first = dataclasses.replace(first, status=jnp.where(ok, first.status, _WAITING))
    batch = lax.while_loop(lambda batch: jnp.any(batch.is_running), draw_next, first)
    pools = states.advance(cache.group_pools, batch.lengths - starts)
    cache = cache.replace_group_pools(pools)
    cache = paged_cache.accept_drafts(cache, batch.lengths_in(cache), max_tokens=T)
    return batch.put_back(state, cache, ok)


def _plan_steps(
    cache: PagedCache, batch: "_Batch", num_steps: jax.Array, max_steps: int, backend: str | None
) -> tuple[PagedCache, tuple[Any, ...]]:
    """Plan blocks for `num_steps` i32[] decode steps, or for fewer if blocks are scarce.

    All steps are planned together, so that a decode step allocates no blocks. Allocation in each
    step would launch dozens of small kernels on GPUs, or copy the arrays of the allocator.
    """
    limits = jnp.where(batch.is_running, batch.limits - 1 - batch.lengths, 0)
    num_slots = cache.num_slots
    limits = jnp.zeros(num_slots, jnp.int32).at[batch.slots].set(limits, mode="drop")
    # Check only running rows, because the slot of padding rows is always past the last slot.
    is_valid = jnp.all((batch.slots < num_slots) | ~batch.is_running)
    valid_steps = jnp.where(is_valid, num_steps, 0)
    return paged_cache.plan(cache, limits, valid_steps, max_tokens=max_steps, backend=backend)


# Values of `_Batch.status`: the row gets more tokens, waits for the host, or has stopped.
_RUNNING, _WAITING, _COMPLETE = np.int32(0), np.int32(1), np.int32(2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Batch:
    """The rows of a dispatch and their sampled tokens, which the decode loops carry.

    Attributes:
      sampling: sampling state of the rows, see `sampling.rows_of`.
      constraints: constraints of the rows by grammars; None if no slot can have constraints.
      slots: i32[B], the slot of each row; out of range for padding.
      token_ids: i32[B], the last known token of each row.
      stop_ids: i32[B, X], the tokens that stop each row, see `DecodeState`.
      max_lengths: i32[B], the maximum number of tokens of each row.
      limits: i32[B], the number of tokens at which each row is complete or waits for the host.
      lengths: i32[B], the number of tokens in the cache (all known tokens except the last).
      status: i32[B], `_RUNNING`, `_WAITING` or `_COMPLETE`.
      num_steps: i32[], the number of decode steps so far.
      packed_draws: i32[N, B, ...], the sampled tokens, packed by `Draws.pack`.
    """

    sampling: SlotSampling
    constraints: Constraints | None
    slots: jax.Array
    token_ids: jax.Array
    stop_ids: jax.Array
    max_lengths: jax.Array
    limits: jax.Array
    lengths: jax.Array
    status: jax.Array
    num_steps: jax.Array
    packed_draws: jax.Array

    @classmethod
    def take(cls, state: DecodeState, slots: jax.Array, max_steps: int, num_top: int) -> "_Batch":
        """Return a batch with the rows of `slots` i32[B]; negative slots are padding.

        No tokens are sampled yet.
        """
        rows = _drop(slots, state.cache)
        parts = (state.token_ids, state.stop_ids, state.max_lengths)
        token_ids, stop_ids, max_lengths = [x.at[rows].get(mode="clip") for x in parts]
        constraints = state.constraints.of_rows(rows) if state.constraints.can_bind else None
        batch = cls(
            rows_of(state.sampling, rows),
            constraints,
            rows,
            token_ids,
            stop_ids,
            max_lengths,
            limits=max_lengths if constraints is None else constraints.limit(max_lengths),
            # An invalid slot gets length -1 and counts as a running row, so that `ok` becomes
            # False.
            lengths=state.cache.lengths.at[rows].get(mode="fill", fill_value=-1),
            status=jnp.where(slots >= 0, _RUNNING, _COMPLETE),
            num_steps=jnp.zeros((), jnp.int32),
            packed_draws=jnp.zeros((max_steps, slots.shape[0], 3 + 2 * num_top), jnp.int32),
        )
        return batch._stop_rows(batch.token_ids)

    def draw(self, logits: jax.Array, with_top: jax.Array, backend: str | None) -> "_Batch":
        """Sample a token for each running row from logits f32[B, V], and stop complete rows."""
        positions = self.lengths + 1
        draws, new_sampling = sample(
            logits, self.sampling, positions, self.is_running, self.slots, with_top,
            self.constraints, num_top=(self.packed_draws.shape[2] - 3) // 2, backend=backend,
        )  # fmt: skip
        ids = draws.token_ids
        batch = dataclasses.replace(
            self,
            sampling=new_sampling,
            token_ids=jnp.where(self.is_running, ids, self.token_ids),
            lengths=self.lengths + self.is_running.astype(jnp.int32),
            num_steps=self.num_steps + 1,
            packed_draws=self.packed_draws.at[self.num_steps].set(draws.pack()),
        )
        return batch._stop_rows(ids)

    @property
    def is_running(self) -> jax.Array:
        """Whether each row gets more tokens, bool[B]."""
        return self.status == _RUNNING

    def _stop_rows(self, last: jax.Array) -> "_Batch":
        """Return a batch with a new status for rows that are complete or must wait for the host.

        `last` i32[B] are the last tokens of the running rows.
        """
        is_waiting = (self.lengths + 1 >= self.limits) & (self.lengths >= 0)
        status = jnp.where(is_waiting, _WAITING, _RUNNING)
        status = jnp.where(self._is_stop(last), _COMPLETE, status)
        return dataclasses.replace(self, status=jnp.where(self.is_running, status, self.status))

    def _is_stop(self, last: jax.Array) -> jax.Array:
        """Return, for each row, whether its token in `last` i32[B] ends the sequence, bool[B]."""
        is_stop = jnp.any(last[:, None] == self.stop_ids, axis=1)
        # Ignore stop tokens before the position `held_until`. Their logits are -inf there. But if
        # all logits of a row are -inf, token 0 is sampled, which may be a stop token. Positions in
        # the prompt are also below `held_until`, so a row does not stop if its last prompt token is
        # a stop token.
        is_stop &= self.lengths >= self.sampling.held_until
        return is_stop | ((self.lengths + 1 >= self.max_lengths) & (self.lengths >= 0))

    def lengths_in(self, cache: PagedCache) -> jax.Array:
        """Return the lengths of all slots, i32[S]: of `cache`, updated with this batch's rows."""
        return cache.lengths.at[self.slots].set(self.lengths, mode="drop")

    def put_back(
        self, state: DecodeState, cache: PagedCache, ok: jax.Array
    ) -> tuple[StepTokens, DecodeState]:
        """Return the `StepTokens`, and `state` with `cache` and the new values of the rows."""
        starts = state.cache.lengths.at[self.slots].get(mode="fill", fill_value=-1)
        sampling = dataclasses.replace(
            state.sampling,
            output_counts=self.sampling.output_counts,
            recent_ids=state.sampling.recent_ids.at[self.slots].set(
                self.sampling.recent_ids, mode="drop"
            ),
        )
        new_state = dataclasses.replace(
            state,
            cache=cache,
            sampling=sampling,
            token_ids=state.token_ids.at[self.slots].set(self.token_ids, mode="drop"),
        )
        num_new, free_blocks = self.lengths - starts, cache.num_free_blocks
        return StepTokens(self.packed_draws, num_new, self.num_steps, free_blocks, ok), new_state


def _drop(slots: jax.Array, cache: PagedCache) -> jax.Array:
    """Return `slots` as indices for scatters with ``mode="drop"``.

    Negative slots (padding) become S, which is out of bounds. The index -1 would be the last slot.
    """
    return jnp.where(slots >= 0, slots, cache.num_slots)


def _as_slots(function: str, slots: jax.Array) -> jax.Array:
    rows = jnp.asarray(slots)
    bind(function, slots=(rows, "B"))
    if rows.dtype != jnp.int32:
        raise ValueError(f"{function}: slots must be int32, got {rows.dtype}. Cast it.")
    check_distinct_slots(function, slots)
    return rows
