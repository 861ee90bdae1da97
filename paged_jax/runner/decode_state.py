"""State of the running sequences on the device, and assignment of sequences to slots."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.cache.paged_cache import PagedCache
from paged_jax.formatting import short_repr
from paged_jax.models.config import ModelConfig
from paged_jax.models.paged_model import create_cache
from paged_jax.runner.compiler import jit_for
from paged_jax.runner.sizes import Sizes, no_slots
from paged_jax.sampling.constraints import NEVER, Constraints
from paged_jax.sampling.state import (
    Assignment,
    SlotSampling,
    num_mask_words,
    slot_row,
    write_rows,
)
from paged_jax.scheduler.request import Sequence


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of all running sequences on the device; programs donate it as a whole.

    Attributes:
      cache: K and V of all tokens of each sequence except its last token.
      sampling: sampling parameters and state of each slot.
      token_ids: i32[S], the last known token of each slot, the input of the next decode step.
      stop_ids: i32[S, X], tokens that end the sequence, padded with V, which is not a token id.
      max_lengths: i32[S], maximum number of tokens of each sequence, prompt included.
      constraints: tokens that grammars allow next in each slot.

    Example:
      >>> cache = PagedCache.create(num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4,
      ...                           head_dim=8, num_slots=3, max_blocks_per_slot=4)
      >>> from paged_jax.sampling.params import SamplingParams
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
        """Return a state with empty slots.

        Args:
          cache: the cache, which becomes part of the state.
          vocab_size: V, size of the vocabulary.
          max_stop_ids: X, number of stop tokens per slot. Requests with ``min_tokens`` must not
            have more stop tokens.
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
        """Number of slots (S)."""
        return self.cache.num_slots

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary (V)."""
        return self.sampling.output_counts.shape[1]


def empty_state(
    config: ModelConfig, sizes: Sizes, num_blocks: int, cache_dtype: DTypeLike, platform: str
) -> DecodeState:
    """Return a state with empty slots and an empty cache.

    See `create_cache` and `DecodeState.create` for the arguments.
    """
    cache = create_cache(
        config,
        num_slots=sizes.num_slots,
        max_length=sizes.max_model_len,
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        max_tokens=sizes.max_step_tokens,
        dtype=cache_dtype,
        num_states=sizes.num_states or None,
        platform=platform,
    )
    return DecodeState.create(
        cache,
        config.vocab_size,
        max_logit_bias=sizes.max_logit_bias,
        max_stop_ids=sizes.max_stop_ids,
        max_forced=sizes.max_forced,
    )


# Type of `StoredPrograms.find`, without the keyword arguments.
FindProgram = Callable[[str, Any, tuple[Any, ...], int | None], Callable[..., Any]]


def _compile_when_called(
    name: str, jitted: Any, arguments: tuple[Any, ...], donated: int | None
) -> Callable[..., Any]:
    del name, arguments, donated
    return jitted


def assign(
    state: DecodeState, assignments: list[Assignment], find: FindProgram = _compile_when_called
) -> DecodeState:
    """Assign sequences to slots. Call this function from the host, not inside `jit`.

    The cache does not change: the caller must fill it with the K and V of the sequences.

    Args:
      state: the state; everything except its cache is donated.
      assignments: the sequences and their slots.
      find: function that returns the compiled program to call, such as `StoredPrograms.find`. By
        default, JAX compiles the program when it is called.

    Returns:
      The new state. The `stop_ids` of a slot are the end-of-sequence tokens, followed by
      ``params.stop_token_ids``. The state has room for X stop tokens per slot. If there are more,
      only the first X stop the sequence on the device; the caller must search the results for
      the others, as it does for stop strings.

    Raises:
      ValueError: a number is out of range, a request has too many biases for the state, or a
        request with ``min_tokens`` has more than X stop tokens.

    About 5 * V bytes are copied to the device for each sequence. Sequences are assigned one at a
    time or `_WIDTH` at a time, so there are two compiled programs.
    """
    # Prepare all rows before the first write. On CPUs, JAX runs small programs synchronously, so
    # the call of `write` blocks until the programs already running have finished. The host prepares
    # the rows in the meantime.
    rows = [_row(state, assignment) for assignment in assignments]
    parts = _AssignedArrays(
        state.sampling, state.token_ids, state.stop_ids, state.max_lengths, state.constraints.starts
    )
    platform = next(iter(state.token_ids.devices())).platform
    write = jit_for(platform, _write_rows, donate_argnums=0)
    for start in range(0, len(rows), _WIDTH):
        arguments = parts, _stacked(rows[start : start + _WIDTH], state.num_slots)
        name = f"assignment of {len(arguments[1].token_ids)}"
        parts = find(name, write, arguments, 0)(*arguments)
    return DecodeState(
        cache=state.cache,
        sampling=parts.sampling,
        token_ids=parts.token_ids,
        stop_ids=parts.stop_ids,
        max_lengths=parts.max_lengths,
        constraints=dataclasses.replace(state.constraints, starts=parts.starts),
    )


# Maximum number of sequences that a call of the compiled program assigns to slots. A call takes 0.1
# ms on the host, and the device is idle meanwhile, so several sequences share a call: 64 new
# sequences need 8 calls.
_WIDTH = 8


class _AssignedArrays(NamedTuple):
    """The arrays of a `DecodeState` that `assign` writes.

    The class is also used for the new values of a single assignment, without slot dimension.
    """

    sampling: Any
    token_ids: Any
    stop_ids: Any
    max_lengths: Any
    starts: Any


def _row(state: DecodeState, assignment: Assignment) -> _AssignedArrays:
    token_ids = assignment.token_ids
    num_tokens, num_prompt_tokens = len(token_ids), assignment.num_prompt_tokens
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise ValueError(
            f"assign: num_prompt_tokens must be in [1, {num_tokens}], the number of token_ids, "
            f"got {num_prompt_tokens}. Pass all tokens of the sequence."
        )
    if not num_tokens < assignment.max_length < 2**31:
        raise ValueError(
            f"assign: max_length must be above {num_tokens}, the number of token_ids, and below "
            f"2**31, got {assignment.max_length}. Do not assign complete sequences."
        )
    row = slot_row(state.sampling, assignment)
    max_stop_ids = state.stop_ids.shape[1]
    stop_ids = np.full(max_stop_ids, state.vocab_size, np.int32)
    ids = assignment.stop_ids[:max_stop_ids]
    stop_ids[: len(ids)] = ids
    last, max_length = np.int32(token_ids[-1]), np.int32(assignment.max_length)
    return _AssignedArrays(row, last, stop_ids, max_length, np.int32(-1))


def _stacked(rows: list[_AssignedArrays], num_slots: int) -> _AssignedArrays:
    """Stack the values of assignments. If there are several, pad them to `_WIDTH` rows.

    The slot index of padding rows is out of range, so these rows are not written.
    """
    if len(rows) > 1:
        padding_row = rows[0]._replace(sampling=rows[0].sampling._replace(slot=np.int32(num_slots)))
        rows = rows + [padding_row] * (_WIDTH - len(rows))
    return jax.tree.map(lambda *values: np.stack(values), *rows)


def _write_rows(parts: _AssignedArrays, rows: _AssignedArrays) -> _AssignedArrays:
    slots = rows.sampling.slot
    arrays = jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), parts[1:], rows[1:])
    return _AssignedArrays(write_rows(parts.sampling, rows.sampling), *arrays)


def write_token_masks(state: DecodeState, masks: "TokenMasks") -> DecodeState:
    """Update the tokens that grammars allow next. Call this from the host, not inside `jit`.

    Args:
      state: the state; its constraints are donated.
      masks: the slots to update, and the tokens that each of them may generate next.
    """
    return dataclasses.replace(
        state, constraints=_write_constraints(state.constraints, tuple(masks))
    )


@functools.partial(jax.jit, donate_argnums=0)
def _write_constraints(constraints: Constraints, rows: Any) -> Constraints:
    return constraints.write(*rows)


class TokenMasks(NamedTuple):
    """Tokens that grammars allow next: the arguments of `Constraints.write`.

    There is one row for each slot with a grammar, padded to S rows.

    Attributes:
      slots: i32[S], the slot of each row; -1 for padding.
      starts: i32[S], the position of the next token of the slot.
      num_forced: i32[S], the number of forced tokens, which are next tokens for which the grammar
        allows only one choice.
      waits_at: i32[S], the position at which the slot must wait for new masks from the host.
      forced_ids: i32[S, N], the ids of the forced tokens.
      masks: i32[S, ceil(V / 32)], one bit per token of the vocabulary: whether the token may follow
        the forced tokens.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_forced: np.ndarray
    waits_at: np.ndarray
    forced_ids: np.ndarray
    masks: np.ndarray

    @classmethod
    def create(cls, sizes: Sizes, vocab_size: int) -> "TokenMasks":
        """Return masks with only padding."""
        S = sizes.num_slots
        return cls(
            slots=no_slots(S),
            starts=np.zeros(S, np.int32),
            num_forced=np.zeros(S, np.int32),
            waits_at=np.zeros(S, np.int32),
            forced_ids=np.zeros((S, sizes.max_forced), np.int32),
            masks=np.zeros((S, num_mask_words(vocab_size)), np.int32),
        )


def find_token_masks(
    sequences: Collection[Sequence], num_steps: int, sizes: Sizes, vocab_size: int
) -> TokenMasks | None:
    """Return the token masks for the next dispatch; None if no sequence has a grammar.

    Args:
      sequences: the decoding sequences. The host must know all their tokens.
      num_steps: maximum number of tokens that the dispatch samples for each sequence.
      sizes: sizes of the programs.
      vocab_size: V, size of the vocabulary.
    """
    grammars = [(s, grammar) for s in sequences if (grammar := s.active_grammar()) is not None]
    if not grammars:
        return None
    masks = TokenMasks.create(sizes, vocab_size)
    for row, (sequence, grammar) in enumerate(grammars):
        forced_ids, start = grammar.forced[: sizes.max_forced], len(sequence.token_ids)
        assert sequence.slot is not None
        masks.slots[row], masks.starts[row] = sequence.slot, start
        masks.num_forced[row] = len(forced_ids)
        masks.forced_ids[row, : len(forced_ids)] = forced_ids
        masks.waits_at[row] = start + len(forced_ids)
        has_ended = grammar.ends and len(forced_ids) == len(grammar.forced)
        # The mask is needed only if the dispatch samples more tokens than the grammar forces.
        if has_ended or len(forced_ids) < num_steps:
            # After the end of the grammar, the mask allows every token.
            grammar.write_mask(masks.masks[row])
            masks.waits_at[row] = NEVER if has_ended else start + len(forced_ids) + 1
    return masks
