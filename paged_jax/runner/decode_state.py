"""All that the device knows about running sequences, and how sequences get there."""

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.cache import paged_cache
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.runner.compiler import jit_for
from paged_jax.runner.sizes import Sizes, no_slots
from paged_jax.sampling.filters import Constraints, num_words
from paged_jax.sampling.params import NO_BIAS, SamplingParams, TokenBias
from paged_jax.sampling.state import SlotSampling, fold_in, slot_row, write_rows
from paged_jax.scheduler.request import Sequence


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The device state: all that it knows about running sequences. Donate it as a whole.

    Attributes:
      cache: K and V of each sequence's tokens, all but the last.
      sampling: how the next token of each slot is drawn.
      token_ids: i32[S], the last known token of each slot, the next one to be fed.
      stop_ids: i32[S, X], tokens that end the slot's sequence, filled up with V, which is no token.
      max_lengths: i32[S], known tokens (prompt and generated) at which a sequence is complete.
      constraints: what grammars allow next in each slot.

    Example:
      >>> cache = PagedCache.create(num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4,
      ...                           head_dim=8, num_slots=3, max_blocks_per_slot=4)
      >>> state = DecodeState.create(cache, vocab_size=32)
      >>> one = Assignment(1, SamplingParams(temperature=0), token_ids=[3, 7, 5],
      ...                  num_prompt_tokens=3, seed=0, max_length=9)
      >>> state = assign(state, [one])
      >>> state.token_ids.tolist(), state.max_lengths.tolist()
      ([0, 5, 0], [0, 9, 0])
    """

    cache: PagedCache
    sampling: SlotSampling
    token_ids: jax.Array
    stop_ids: jax.Array
    max_lengths: jax.Array
    constraints: Constraints

    @classmethod
    def create(
        cls,
        cache: PagedCache,
        vocab_size: int,
        *,
        max_stop_ids: int = 16,
        max_logit_bias: int = 32,
        max_forced: int = 8,
    ) -> "DecodeState":
        """Return the state of slots that no sequence has been assigned to.

        Args:
          cache: the cache, which becomes part of the state.
          vocab_size: V.
          max_stop_ids: X; also the most that a request with ``min_tokens`` may have.
          max_logit_bias: see `SlotSampling.create`.
          max_forced: see `Constraints.create`.

        Raises:
          ValueError: a size is out of range.
        """
        S = cache.num_slots
        return cls(
            cache=cache,
            sampling=SlotSampling.create(
                S, vocab_size, max_logit_bias=max_logit_bias, max_stop_ids=max_stop_ids
            ),
            token_ids=jnp.zeros(S, jnp.int32),
            stop_ids=jnp.full((S, max_stop_ids), vocab_size, jnp.int32),
            max_lengths=jnp.zeros(S, jnp.int32),
            constraints=Constraints.create(S, vocab_size, max_forced),
        )

    @property
    def num_slots(self) -> int:
        """S, the number of slots."""
        return self.cache.num_slots

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.sampling.output_counts.shape[1]


class Assignment(NamedTuple):
    """A sequence that gets a slot.

    Attributes:
      slot: the row to write, 0 <= slot < S.
      params: sampling parameters of the request.
      token_ids: all known tokens, the prompt's and, of a sequence that comes back, those generated.
      num_prompt_tokens: how many of them are the prompt's.
      seed, sample_index: what the random draws depend on, see `sampling.slot_row`.
      max_length: number of known tokens at which the sequence is complete.
      eos_token_ids: the model's end tokens; ignored with ``params.ignore_eos``.
      token_bias: biases in addition to the `logit_bias` of ``params``.
    """

    slot: int
    params: SamplingParams
    token_ids: list[int] | np.ndarray
    num_prompt_tokens: int
    seed: int
    max_length: int
    sample_index: int = 0
    eos_token_ids: Iterable[int] = ()
    token_bias: TokenBias = NO_BIAS


def assign(state: DecodeState, assignments: list[Assignment]) -> DecodeState:
    """Give slots to sequences. Called from the host; the caller changes the cache.

    Args:
      state: the state to change; all but its cache is donated.
      assignments: which sequences, and how their tokens are drawn.

    Returns:
      The new state. The end tokens come first among a slot's `stop_ids`, then
      ``params.stop_token_ids``; those for which there is no room do not end the sequence on the
      device, so a caller that lets them through looks for them in what it gets, as it does for
      stop strings.

    Raises:
      ValueError: a number is out of range, or there are more biases or held-back stop tokens than
        the state has room for.

    Cost: copies 5 * V bytes to the device for each row of a call, which has one or `_WIDTH`. Two
    compiled programs serve all slots, numbers and lengths.
    """
    # Made before the first is written: on CPUs, a small program makes its caller wait for what
    # runs, and for as long as rows are made it can run.
    rows = [_row(state, each) for each in assignments]
    parts = _Parts(
        state.sampling, state.token_ids, state.stop_ids, state.max_lengths, state.constraints.starts
    )
    platform = next(iter(state.token_ids.devices())).platform
    write = jit_for(platform, _write_rows, donate_argnums=0)
    for start in range(0, len(rows), _WIDTH):
        parts = write(parts, _stacked(rows[start : start + _WIDTH], state.num_slots))
    return DecodeState(
        cache=state.cache,
        sampling=parts.sampling,
        token_ids=parts.token_ids,
        stop_ids=parts.stop_ids,
        max_lengths=parts.max_lengths,
        constraints=dataclasses.replace(state.constraints, starts=parts.starts),
    )


# Most sequences that one program gives slots to. 64 that come at once wait for 8 calls, not 64: a
# call takes 0.1 ms of a CPU, in which the device has nothing to do.
_WIDTH = 8


class _Parts(NamedTuple):
    """What of a state an assignment writes; of a row, the values, each without the first axis."""

    sampling: Any
    token_ids: Any
    stop_ids: Any
    max_lengths: Any
    starts: Any


def _row(state: DecodeState, assignment: Assignment) -> _Parts:
    params, token_ids = assignment.params, assignment.token_ids
    num_tokens, num_prompt_tokens = len(token_ids), assignment.num_prompt_tokens
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise ValueError(
            f"assign: num_prompt_tokens must be in [1, {num_tokens}], the number of token_ids, "
            f"got {num_prompt_tokens}. Pass the whole sequence."
        )
    if not num_tokens < assignment.max_length < 2**31:
        raise ValueError(
            f"assign: max_length must be above the {num_tokens} tokens that are known, and below "
            f"2**31, got {assignment.max_length}. A sequence that is complete needs no slot."
        )
    eos_token_ids = () if params.ignore_eos else tuple(assignment.eos_token_ids)
    row = slot_row(
        state.sampling,
        assignment.slot,
        params,
        seed=assignment.seed,
        sample_index=assignment.sample_index,
        prompt_token_ids=token_ids[:num_prompt_tokens],
        output_token_ids=token_ids[num_prompt_tokens:],
        eos_token_ids=eos_token_ids,
        token_bias=assignment.token_bias,
    )
    room = state.stop_ids.shape[1]
    stop_ids = np.full(room, state.vocab_size, np.int32)
    wanted = (*eos_token_ids, *(params.stop_token_ids or ()))[:room]
    stop_ids[: len(wanted)] = wanted
    last, max_length = np.int32(token_ids[-1]), np.int32(assignment.max_length)
    return _Parts(row, last, stop_ids, max_length, np.int32(-1))


def _stacked(rows: list[_Parts], num_slots: int) -> _Parts:
    """Rows with a first axis, one or `_WIDTH` of them: others write to a slot that there is not."""
    if len(rows) > 1:
        nothing = rows[0]._replace(sampling=rows[0].sampling._replace(slot=np.int32(num_slots)))
        rows = rows + [nothing] * (_WIDTH - len(rows))
    return jax.tree.map(lambda *values: np.stack(values), *rows)


def _write_rows(parts: _Parts, rows: _Parts) -> _Parts:
    slots = rows.sampling.slot
    others = jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), parts[1:], rows[1:])
    return _Parts(write_rows(parts.sampling, rows.sampling), *others)


def write_token_masks(state: DecodeState, masks: "TokenMasks") -> DecodeState:
    """Write which tokens grammars allow next in some slots. Called from the host.

    Args:
      state: the state to change; its constraints are donated.
      masks: the slots and their masks.
    """
    return dataclasses.replace(
        state, constraints=_write_constraints(state.constraints, tuple(masks))
    )


@functools.partial(jax.jit, donate_argnums=0)
def _write_constraints(constraints: Constraints, rows: Any) -> Constraints:
    return constraints.write(*rows)


def fork(
    state: DecodeState, parents: jax.Array, sample_indices: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Make empty slots into copies of running ones, which continue from there in other ways.

    For tree search: blocks are shared until one of them writes, see `paged_jax.blocks.fork`. Pure;
    donate the state.

    Args:
      state: the state to change.
      parents: i32[S], the slot that each slot becomes a copy of; -1 leaves a slot alone.
      sample_indices: i32[S], the sample index of each child, by which its random draws differ from
        its parent's and its siblings'. (Greedy ones do not differ.)

    Returns:
      `(state, ok)`. Where `ok`, bool[], is False the state is unchanged.

    Raises:
      ValueError: `parents` or `sample_indices` is not i32[S].
    """
    bind("fork", parents=(parents, "S"), sample_indices=(sample_indices, "S"))
    cache, ok = paged_cache.fork(state.cache, parents)
    is_child = ok & (parents >= 0)
    source = jnp.where(is_child, parents, jnp.arange(state.num_slots, dtype=jnp.int32))
    rows = (state.sampling, state.token_ids, state.stop_ids, state.max_lengths)
    drawn, token_ids, stop_ids, max_lengths = jax.tree.map(lambda x: x[source], rows)
    keys = jax.vmap(fold_in)(drawn.keys, sample_indices)
    drawn = dataclasses.replace(drawn, keys=jnp.where(is_child[:, None], keys, drawn.keys))
    starts = jnp.where(is_child, -1, state.constraints.starts)
    constraints = dataclasses.replace(state.constraints, starts=starts)
    return DecodeState(cache, drawn, token_ids, stop_ids, max_lengths, constraints), ok


class TokenMasks(NamedTuple):
    """Rows for `Constraints.write`, one for each slot of the engine; those of slots -1 are empty.

    Attributes:
      slots: i32[S], the slots that are bound.
      starts: i32[S], positions of their next tokens.
      num_forced: i32[S], tokens from there on that are known.
      forced_ids: i32[S, N], those tokens.
      masks: i32[S, V / 32], rounded up: bits of the tokens that may follow.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_forced: np.ndarray
    forced_ids: np.ndarray
    masks: np.ndarray

    @classmethod
    def create(cls, sizes: Sizes, vocab_size: int) -> "TokenMasks":
        """No slot is bound."""
        S = sizes.num_slots
        return cls(
            slots=no_slots(S),
            starts=np.zeros(S, np.int32),
            num_forced=np.zeros(S, np.int32),
            forced_ids=np.zeros((S, sizes.max_forced), np.int32),
            masks=np.zeros((S, num_words(vocab_size)), np.int32),
        )


def find_token_masks(
    sequences: Collection[Sequence], num_steps: int, sizes: Sizes, vocab_size: int
) -> TokenMasks | None:
    """What the grammars of some sequences allow in the next dispatch; None if none has one.

    Args:
      sequences: the sequences that decode.
      num_steps: most tokens that the dispatch draws for each.
      sizes: sizes of the engine's programs.
      vocab_size: V.
    """
    grammars = [(s, grammar) for s in sequences if (grammar := s.active_grammar()) is not None]
    if not grammars:
        return None
    masks = TokenMasks.create(sizes, vocab_size)
    for row, (sequence, grammar) in enumerate(grammars):
        forced = grammar.forced[: sizes.max_forced]
        assert sequence.slot is not None
        masks.slots[row], masks.starts[row] = sequence.slot, len(sequence.token_ids)
        masks.num_forced[row], masks.forced_ids[row, : len(forced)] = len(forced), forced
        # What follows an end is no grammar's any more: the row stands until the slot has another
        # sequence, and must let everything through.
        if len(grammar.forced) < num_steps or grammar.ends:
            grammar.write_mask(masks.masks[row])
    return masks
