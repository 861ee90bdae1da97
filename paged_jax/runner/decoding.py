"""Several decode steps in one program: the loop over tokens runs on the device.

A sequence of n known tokens has n - 1 of them in the cache; the last one is fed to the next decode
step, which draws the token after it. `decode_steps` repeats that, for a batch of slots:

    plan the places of the tokens of all steps, copying shared blocks          (PagedCache)
    while decode steps are left and rows are running:
        logits = model.decode_at(...)
        draw, note the tokens, and let the rows stop that have to              (sampling)
    take the blocks of the places that were used                               (PagedCache)

`verify_steps` does it for drafts, which are guesses of these tokens: one pass of the model over all
of them, then the same draws one after another for as long as they confirm the drafts.

Both are pure. The token drawn at a position depends on the logits, the seed, the sample and the
position, so it is the same whichever of the two draws it, and in however many dispatches.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import check_positive
from paged_jax.cache import paged_cache
from paged_jax.cache.blocks import ReservePlan
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.models.batch_places import check_distinct_slots, next_places
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner.decode_state import DecodeState
from paged_jax.sampling.filters import Constraints
from paged_jax.sampling.sample import Draws, rows_of, sample
from paged_jax.sampling.state import SlotSampling


@short_repr
class StepTokens(NamedTuple):
    """What was drawn, N tokens a row at most: small, fetched by the host in one transfer.

    Row ``b`` drew ``token_ids[:num_new[b], b]``, and the other fields of `Draws` likewise, each
    with N for a first axis; the rest is 0.
    """

    drawn: jax.Array  # i32 [N, B, 3 + 2 * num_top], see `Draws.pack`
    num_new: jax.Array  # i32 [B], tokens drawn
    num_steps: jax.Array  # i32 [], decode steps made: the largest of num_new
    num_free: jax.Array  # i32 [], free blocks in the pool; in the first group's
    ok: jax.Array  # bool [], false where blocks were too few for a decode step, which was not made
    others_free: tuple[jax.Array, ...] = ()  # i32 [], free blocks of each further group of layers

    @property
    def draws(self) -> Draws:
        """All that was drawn. On the host these are views of one array."""
        return Draws.unpack(self.drawn)

    @property
    def token_ids(self) -> jax.Array:
        """i32 [N, B], the drawn tokens."""
        return self.draws.token_ids

    @property
    def logprobs(self) -> jax.Array:
        """f32 [N, B], their log-probabilities, see `sampling.sample`."""
        return self.draws.logprobs

    @property
    def ranks(self) -> jax.Array:
        """i32 [N, B], their ranks, 1 is the most probable; 0 if not asked for."""
        return self.draws.ranks

    @property
    def top_ids(self) -> jax.Array:
        """i32 [N, B, num_top], the most probable tokens."""
        return self.draws.top_ids

    @property
    def top_logprobs(self) -> jax.Array:
        """f32 [N, B, num_top], their log-probabilities."""
        return self.draws.top_logprobs


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
    """Draw up to `num_steps` tokens for each of some slots. Pure: jit it with the state donated.

    A row stops when it draws one of its `stop_ids` or reaches its `max_lengths`. From then on it
    takes no part, in later calls neither, and keeps its blocks: so a call may follow another one
    whose tokens nobody has looked at. The loop ends after `num_steps` decode steps, when every
    row has stopped, before a step for which blocks would not suffice if no row stopped, and, if
    `leave_on_stop`, when any row has stopped.

    Blocks are planned for all steps at once, as far as they suffice. Those that rows that stop
    leave unused are not taken.

    Args:
      model: the model.
      state: the device state; all known tokens of each slot but the last are in the cache.
      slots: i32[B], the distinct slots of the rows; a negative one leaves its row out.
      num_steps: i32[], the limit of decode steps; no more than `max_steps` are made.
      leave_on_stop: bool[], whether the loop ends as soon as any row stops, which is worth it where
        a request waits for the slot.
      with_top: bool[], whether the `num_top` most probable tokens are looked for; else 0 stands
        in their place.
      max_steps: N, the size of the result (static).
      num_top: how many of the most probable tokens to report, with the ranks of the drawn ones
        (static); 0 reports neither.
      cascade: whether blocks that all rows begin with are read once (static), see
        `PagedModel.decode`.
      backend: the backend of the attention, see `paged_attention`.

    Returns:
      The tokens and the new state. A slot that does not exist counts as blocks that do not suffice.

    Raises:
      ValueError: `max_steps` is not positive, `num_top` is out of range, `slots` is not i32[B] or,
        outside of `jit`, has one twice.

    Cost: a pass of the model for each decode step. Pools and sampling state are updated in place.

    Example:
      >>> from flax import nnx
      >>> from paged_jax.models.config import LlamaConfig
      >>> from paged_jax.models.llama import Llama
      >>> from paged_jax.runner.decode_state import Assignment, assign
      >>> from paged_jax.sampling.params import SamplingParams
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
        has_stopped = jnp.any(is_row & ~batch.is_running)
        return jnp.any(batch.is_running) & ~(leave_on_stop & has_stopped)

    first = _Batch.take(state, slots, max_steps, num_top)
    num_wanted = jnp.where(wants_more(first), num_steps, 0)
    cache, planned = _plan_steps(state.cache, first, num_wanted, max_steps, backend)
    num_possible = planned[0].num_tokens
    block_tables = [each.block_tables.at[first.slots].get(mode="clip") for each in planned]

    def decode_step(carry: tuple[Any, _Batch, jax.Array]) -> tuple[Any, _Batch, jax.Array]:
        pools, batch, _ = carry
        # The barrier ties the weights to this decode step. Else XLA moves what it does to them out
        # of the loop: on CPU the conversion of all bfloat16 weights to float32, at every dispatch.
        weights, active = lax.optimization_barrier((model, batch.is_running))
        places = next_places(cache, block_tables, batch.lengths, active)
        logits, pools = weights.decode_at(
            pools, batch.token_ids, places, cascade=cascade, backend=backend
        )
        batch = batch.draw(logits, with_top)
        return pools, batch, wants_more(batch) & (batch.num_steps < num_possible)

    # Whether it goes on is computed in a step, with the rest of it: its own kernels, in the
    # condition of the loop, would be launched between two answers that the host waits for.
    carry = cache.group_pools, first, num_possible > 0
    pools, batch, _ = lax.while_loop(lambda carry: carry[2], decode_step, carry)
    lengths = batch.lengths_in(cache)
    cache = paged_cache.commit(cache.replace_group_pools(pools), planned, lengths)
    ok = (num_possible == num_wanted) | ~wants_more(batch)
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
    """Draw the tokens that `decode_steps` would, as many as were guessed right, and one more.

    Speculative decoding, exact whatever the sampling: the model scores all drafts in one pass, the
    token of each position is drawn as in a decode step, and the first one that differs from its
    draft is the last. The tokens of the drafts after it leave the cache again.

    Args:
      model, state, slots, with_top, num_top, backend: see `decode_steps`.
      drafts: i32[B, T], guesses of each row's next tokens.
      num_drafts: i32[B], how many of them count; 0 makes it an ordinary decode step of the row.

    Returns:
      The tokens, N = T + 1, and the new state: as if `decode_steps` had drawn them. If blocks do
      not suffice for all drafts, `ok` is False and nothing has changed.

    Raises:
      ValueError: `num_top` is out of range, or the shapes do not fit together.

    Cost: one pass over B * (T + 1) tokens, whose logits f32[B, T + 1, V] are held, and one draw for
    each token of the row that draws most.
    """
    slots = _as_slots("verify_steps", slots)
    sizes = bind(
        "verify_steps", drafts=(drafts, "BT"), num_drafts=(num_drafts, "B"), slots=(slots, "B")
    )
    T = sizes["T"]
    with_top = jnp.asarray(with_top, jnp.bool_)
    first = _Batch.take(state, slots, T + 1, num_top)
    starts = first.lengths
    # Known now: starts + 1. Nothing past the last token but one will ever be in the cache.
    num_drafts = jnp.clip(num_drafts, 0, jnp.clip(first.max_lengths - starts - 2, 0, T))
    fed = jnp.concatenate([first.token_ids[:, None], drafts.astype(jnp.int32)], axis=1)
    logits, cache, ok = model.score(state.cache, fed, slots, num_drafts + 1, backend=backend)
    # The column after the last draft is never compared: no token is -1.
    drafts = jnp.pad(drafts.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=-1)

    def draw_next(batch: _Batch) -> _Batch:
        i = batch.num_steps
        drawn = batch.draw(logits[:, i], with_top)
        is_confirmed = (drawn.token_ids == drafts[:, i]) & (i < num_drafts)
        return dataclasses.replace(drawn, is_running=drawn.is_running & is_confirmed)

    first = dataclasses.replace(first, is_running=first.is_running & ok)
    batch = lax.while_loop(lambda batch: jnp.any(batch.is_running), draw_next, first)
    if T:
        cache = paged_cache.truncate(cache, batch.lengths_in(cache), max_tokens=T)
    return batch.put_back(state, cache, ok)


def _plan_steps(
    cache: PagedCache, batch: "_Batch", num_steps: jax.Array, max_steps: int, backend: str | None
) -> tuple[PagedCache, tuple[ReservePlan, ...]]:
    """Plan blocks for `num_steps` decode steps, i32[], or for as many as they suffice for.

    For all at once: a decode step then allocates nothing, which would be dozens of small kernels,
    or copies of the allocator's arrays.
    """
    limits = jnp.where(batch.is_running, batch.max_lengths - 1 - batch.lengths, 0)
    num_slots = cache.num_slots
    limits = jnp.zeros(num_slots, jnp.int32).at[batch.slots].set(limits, mode="drop")
    # Padding is one past the last slot, too: only rows that run would have to be slots.
    is_valid = jnp.all((batch.slots < num_slots) | ~batch.is_running)
    most = jnp.where(is_valid, num_steps, 0)
    return paged_cache.plan(cache, limits, most, max_tokens=max_steps, backend=backend)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Batch:
    """Running sequences as rows of a batch, and what they have drawn: the carry of the loops."""

    sampling: SlotSampling  # of the rows, see `sampling.rows_of`
    constraints: Constraints | None  # of the rows
    slots: jax.Array  # i32 [B], out of range where there is no row
    token_ids: jax.Array  # i32 [B], the last known token of each row
    stop_ids: jax.Array  # i32 [B, X]
    max_lengths: jax.Array  # i32 [B]
    lengths: jax.Array  # i32 [B], tokens in the cache, all that are known but the last
    is_running: jax.Array  # bool [B]
    num_steps: jax.Array  # i32 []
    drawn: jax.Array  # i32 [N, B, ...], what was drawn, see `Draws.pack`

    @classmethod
    def take(cls, state: DecodeState, slots: jax.Array, max_steps: int, num_top: int) -> "_Batch":
        """The rows of some slots, which have drawn nothing yet."""
        rows = _drop(slots, state.cache)
        parts = (state.token_ids, state.stop_ids, state.max_lengths)
        batch = cls(
            rows_of(state.sampling, rows),
            state.constraints.of_rows(rows) if state.constraints.can_bind else None,
            rows,
            *[x.at[rows].get(mode="clip") for x in parts],
            # A slot that does not exist has not stopped.
            lengths=state.cache.lengths.at[rows].get(mode="fill", fill_value=-1),
            is_running=slots >= 0,
            num_steps=jnp.zeros((), jnp.int32),
            drawn=jnp.zeros((max_steps, slots.shape[0], 3 + 2 * num_top), jnp.int32),
        )
        is_running = batch.is_running & ~batch._is_stop(batch.token_ids, batch.lengths)
        return dataclasses.replace(batch, is_running=is_running)

    def draw(self, logits: jax.Array, with_top: jax.Array) -> "_Batch":
        """Draw a token for each row that runs from f32 [B, V]; those that must stop run no more."""
        positions = self.lengths + 1
        draws, new_sampling = sample(
            logits, self.sampling, positions, self.is_running, self.slots, with_top,
            self.constraints, num_top=(self.drawn.shape[2] - 3) // 2,
        )  # fmt: skip
        ids = draws.token_ids
        return dataclasses.replace(
            self,
            sampling=new_sampling,
            token_ids=jnp.where(self.is_running, ids, self.token_ids),
            lengths=self.lengths + self.is_running.astype(jnp.int32),
            is_running=self.is_running & ~self._is_stop(ids, positions),
            num_steps=self.num_steps + 1,
            drawn=self.drawn.at[self.num_steps].set(draws.pack()),
        )

    def _is_stop(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Whether a token of each row, at these positions, ends its sequence."""
        is_stop = jnp.any(token_ids[:, None] == self.stop_ids, axis=1)
        # What may not appear yet cannot be a stop: a row of nothing but -inf yields token 0. Nor
        # can what a prompt ends with.
        is_stop &= positions >= self.sampling.held_until
        return is_stop | ((positions + 1 >= self.max_lengths) & (positions >= 0))

    def lengths_in(self, cache: PagedCache) -> jax.Array:
        """The lengths of all slots, i32[S], with those of the rows as they are now."""
        return cache.lengths.at[self.slots].set(self.lengths, mode="drop")

    def put_back(
        self, state: DecodeState, cache: PagedCache, ok: jax.Array
    ) -> tuple[StepTokens, DecodeState]:
        """What was drawn, and the state after it, of which the cache is given."""
        starts = state.cache.lengths.at[self.slots].get(mode="fill", fill_value=-1)
        new_state = dataclasses.replace(
            state,
            cache=cache,
            sampling=dataclasses.replace(state.sampling, output_counts=self.sampling.output_counts),
            token_ids=state.token_ids.at[self.slots].set(self.token_ids, mode="drop"),
        )
        num_free = cache.tables.pool.num_free
        num_new = self.lengths - starts
        others = num_free_in_others(cache)
        return StepTokens(self.drawn, num_new, self.num_steps, num_free, ok, others), new_state


def num_free_in_others(cache: PagedCache) -> tuple[jax.Array, ...]:
    """Free blocks of each group of layers but the first, i32 []; none where there is one group."""
    return tuple(group.tables.pool.num_free for group in cache.groups[1:])


def _drop(slots: jax.Array, cache: PagedCache) -> jax.Array:
    """Slots as indices, padding one past the last: a negative index would count from the end."""
    return jnp.where(slots >= 0, slots, cache.num_slots)


def _as_slots(function: str, slots: jax.Array) -> jax.Array:
    rows = jnp.asarray(slots)
    bind(function, slots=(rows, "B"))
    if rows.dtype != jnp.int32:
        raise ValueError(f"{function}: slots must be int32, got {rows.dtype}. Cast it.")
    check_distinct_slots(function, slots)
    return rows
