"""`ModelRunner`: runs programs for the sequences in the slots of the device.

The scheduler decides what runs. It only knows the interface `BlockMemory`, which the runner
implements. The runner converts sequences to padded arrays and calls the `Executor`, which holds the
weights, the state on the device and the programs. Blocks to publish and slots to release are
collected until the next program runs, so that a step needs few calls for them. `publish` decides
which full blocks enter the prefix cache, and which of them with a snapshot of the recurrent state.

The tokens of all sequences are on the host. So if a step is interrupted, `reset` discards all
slots, and the K and V of every sequence can be computed again from its tokens.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from paged_jax.cache.digests import digest_words
from paged_jax.runner.decode_state import DecodeState, TokenMasks, find_token_masks
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor, QueuedResult, require_blocks
from paged_jax.runner.programs import BeamTokens, Call, Scores
from paged_jax.runner.sizes import PUBLISH_WIDTH, no_slots, pack, row_bucket
from paged_jax.sampling.state import Assignment
from paged_jax.sampling.token_bias import NO_BIAS, TokenBias
from paged_jax.scheduler.block_budget import num_swapped_blocks
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.step_plan import StepPlan

# Maximum number of digests that the host keeps, per block of the pool. If there are more, the host
# reads the digests of cached blocks from the device and discards all others.
_MAX_PUBLISHED = 4


def slot_of(sequence: Sequence) -> int:
    """Return the slot of a running sequence."""
    assert sequence.slot is not None
    return sequence.slot


class _Publication(NamedTuple):
    """A full block to add to the prefix cache."""

    slot: int
    column: int  # Column of the block in the block table.
    digest: bytes
    token_ids: list[int]
    is_snapshot: bool  # Whether to also publish the recurrent state after the block's last token.


class ModelRunner:
    """Runs programs for sequences, and records which slots and cached blocks they use.

    Args:
      executor: executor that runs the programs.
      eos_token_ids: ids of the end-of-sequence tokens of the model.
      token_bias: biases that are added to the logits of every request.
      state_interval: see `Scheduler`.

    Attributes:
      executor: executor that runs the programs. Call `flush` before you use it directly.
      swap_seconds: total seconds spent on copies between device and host, without compilation.
      num_swapped_blocks: number of blocks that were copied in `swap_seconds`.
      num_resets: number of times that the whole prefix cache was discarded.
    """

    def __init__(
        self,
        executor: Executor,
        eos_token_ids: Iterable[int],
        token_bias: TokenBias = NO_BIAS,
        state_interval: int | None = None,
    ):
        self.executor = executor
        self._sizes = executor.sizes
        self._groups = executor.groups
        self._state_interval = state_interval
        self._eos_token_ids = sorted(eos_token_ids)
        self._token_bias = token_bias
        self.swap_seconds = 0.0
        self.num_swapped_blocks = 0
        self.num_resets = 0
        self._clear_records()

    def reset(self) -> None:
        """Discard the content of all slots and the prefix cache.

        If the engine sleeps, the memory of the state is freed.
        """
        self.executor.reset()
        self._clear_records()

    def _clear_records(self) -> None:
        self.num_resets += 1
        # For each slot: the sequence that is assigned to it, and the number of published blocks of
        # this sequence.
        self._owners: list[Sequence | None] = [None] * self._sizes.num_slots
        self._num_published = [0] * self._sizes.num_slots
        # Digests of all blocks in the prefix cache, and of some blocks that were evicted. A block
        # whose digest is not in this set is not cached.
        self._published: set[bytes] = set()
        # Updates that are collected until the next program runs, so that a step needs few calls for
        # them.
        self._to_publish: list[_Publication] = []
        self._to_release: list[int] = []

    # Called by the scheduler

    @property
    def num_free(self) -> int:
        """Number of free blocks of the first group of layers, including cached blocks."""
        return self.free_blocks[0]

    @property
    def free_blocks(self) -> list[int]:
        """Number of free blocks of each group of layers, including cached blocks."""
        if self._to_release:
            self.flush()
        return self.executor.free_blocks

    def attach(self, sequence: Sequence) -> int:
        """Fill the slot of a sequence with its cached prefix; return the prefix's token count.

        `num_known` of the sequence is set to the number of tokens that would have been found if
        recurrent layers had a snapshot at the end of every block.
        """
        C, M = self._sizes.block_size, self._sizes.max_blocks_per_slot
        self._drop_evicted()
        # The last token must be computed, so do not look up its block.
        count = (len(sequence.token_ids) - 1) // C
        cached_digests = self._may_be_cached(sequence.digests[:count])
        sequence.num_known = 0
        if not cached_digests:
            return 0
        count = len(cached_digests)
        digests, token_ids = np.zeros((M, 8), np.uint32), np.zeros((M, C), np.int32)
        digests[:count] = digest_words(cached_digests)
        token_ids[:count] = np.reshape(sequence.token_ids[: count * C], (count, C))
        slot, executor = slot_of(sequence), self.executor
        self.flush()
        call = executor.programs.attach.call(np.int32(slot), digests, token_ids, np.int32(count))
        num_cached, num_possible = np.asarray(executor.run(call)).tolist()
        self._num_published[slot] = num_cached
        sequence.num_known = num_possible * C
        return num_cached * C

    def _may_be_cached(self, digests: list[bytes]) -> list[bytes]:
        """Return the longest prefix of `digests` that may be cached on the device."""
        if not self._groups[0].retention.frees:
            return list(itertools.takewhile(self._published.__contains__, digests))
        # Layers with a window only need the last blocks of a prefix, so earlier blocks may be
        # missing in the cache. Remove only the digests after the last digest that may be cached.
        count = len(digests)
        while count and digests[count - 1] not in self._published:
            count -= 1
        return digests[:count]

    def _drop_evicted(self) -> None:
        """Discard the digests of evicted blocks if the host keeps too many digests.

        Only digests that are cached in the first group of layers are kept. Without a block in the
        first group, the corresponding blocks of other groups are useless.
        """
        if len(self._published) <= _MAX_PUBLISHED * self.executor.num_blocks:
            return
        self.flush()
        pool = self.executor.state.cache.tables.pool
        digests = np.asarray(pool.digests)[np.asarray(pool.is_cached)]
        self._published = {words.astype("<u4").tobytes() for words in digests}

    def num_held(self, sequences: list[Sequence]) -> int:
        """Return the number of blocks that become free if these sequences are released.

        This method waits for the device.
        """
        self.flush()
        tables = self.executor.state.cache.tables
        rows, ref_counts = jax.device_get((tables.block_tables, tables.pool.ref_counts))
        blocks = rows[[slot_of(sequence) for sequence in sequences]]
        counts = np.bincount(blocks[blocks < len(ref_counts)], minlength=len(ref_counts))
        return int(np.sum((counts > 0) & (counts == ref_counts)))

    def release(self, sequence: Sequence) -> None:
        """Release the slot of a sequence; its full blocks stay cached until they are reused."""
        self.publish(sequence)
        slot = slot_of(sequence)
        self._to_release.append(slot)
        self._owners[slot] = None
        self._num_published[slot] = 0

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks and the recurrent state of a sequence to the host; release its slot."""
        slot, executor = np.int32(slot_of(sequence)), self.executor
        with self._swapping(sequence):
            program = executor.programs.read_blocks
            sequence.host_blocks = [
                jax.device_get(executor.run(program.call(slot, first, group=group)))
                for group, first in self._swap_copies(sequence)
            ]
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Copy the blocks and the recurrent state of a sequence from the host into its slot."""
        slot, executor = np.int32(slot_of(sequence)), self.executor
        num_tokens = np.zeros(self._sizes.num_slots, np.int32)
        num_tokens[slot] = sequence.num_computed
        with self._swapping(sequence):
            executor.run_unchecked(executor.programs.reserve.call(num_tokens))
            copies = zip(self._swap_copies(sequence), sequence.host_blocks, strict=True)
            for (group, first), values in copies:
                write = executor.programs.write_blocks
                executor.run(write.call(slot, first, values, group=group))
        sequence.host_blocks = None

    @contextlib.contextmanager
    def _swapping(self, sequence: Sequence) -> Iterator[None]:
        """Return a context manager for a swap, which adds its time and blocks to the totals.

        Swaps that compiled a program are not counted.
        """
        self.flush()
        start, compiled = time.perf_counter(), self.executor.compile_seconds
        yield
        jax.block_until_ready(self.executor.state)
        if self.executor.compile_seconds == compiled:
            self.swap_seconds += time.perf_counter() - start
            C, num_tokens = self._sizes.block_size, sequence.num_computed
            self.num_swapped_blocks += num_swapped_blocks(num_tokens, C, self._groups)

    def _swap_copies(self, sequence: Sequence) -> list[tuple[int, np.int32]]:
        """List the calls of `read_blocks` or `write_blocks` that swap a sequence out or in.

        Each call is a pair ``(group, first)``: the group of layers, and the index of the first
        block that the call copies.
        """
        C, width = self._sizes.block_size, self._sizes.swap_width
        return [
            (number, np.int32(first))
            for number, group in enumerate(self._groups)
            for first in range(0, group.retention.num_kept(sequence.num_computed, C), width)
        ]

    @property
    def state(self) -> DecodeState:
        """The current state. The next program donates it, so copy arrays that you want to keep."""
        self.flush()
        return self.executor.state

    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile all programs, see `Executor.warmup`; all slots must be empty."""
        self.flush()
        self.executor.warmup(report)

    # Called by the engine

    def fork(self, forks: list[tuple[Sequence, list[Sequence]]]) -> None:
        """Copy the slots of parents to the slots of their children; the copies share all blocks.

        `forks` lists each parent with its children.
        """
        if not forks:
            return
        parents = no_slots(self._sizes.num_slots)
        for parent, children in forks:
            for child in children:
                parents[slot_of(child)] = slot_of(parent)
                self._num_published[slot_of(child)] = self._num_published[slot_of(parent)]
        self.flush()
        self.executor.run_unchecked(self.executor.programs.fork.call(parents))

    def assign(self, sequences: Iterable[Sequence]) -> None:
        """Copy the sampling state of new sequences to their slots on the device.

        Sequences that are already assigned to their slots are skipped.
        """
        new = [
            sequence for sequence in sequences if self._owners[slot_of(sequence)] is not sequence
        ]
        if not new:
            return
        self.flush()
        self.executor.assign([self._assignment(sequence) for sequence in new])
        for sequence in new:
            self._owners[slot_of(sequence)] = sequence

    def _assignment(self, sequence: Sequence) -> Assignment:
        request = sequence.request
        return Assignment(
            slot_of(sequence),
            request.params,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            seed=request.seed,
            sample_index=request.sample_offset + sequence.index,
            eos_token_ids=self._eos_token_ids,
            token_bias=self._token_bias,
            bad_word_ids=request.bad_word_ids,
            max_length=sequence.max_length,
        )

    def publish(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence to the prefix cache, at the next `flush`."""
        if sequence.chain is None:
            return
        C, slot = self._sizes.block_size, slot_of(sequence)
        # A slot holds only one recurrent state, the state after its last computed token. So only
        # the last block can get a snapshot.
        interval, last = self._state_interval, sequence.num_computed // C - 1
        is_point = interval and sequence.num_computed in sequence.snapshot_points(interval)
        # A decoding slot may also have a mark: its recurrent state after an earlier token, saved in
        # another pool entry, see `cache.blocks.state_tables`. The block that ends with this token
        # gets a snapshot as well.
        mark = (sequence.num_computed - 1) // interval * interval // C - 1 if interval else -1
        for column in range(self._num_published[slot], last + 1):
            token_ids = sequence.token_ids[column * C : (column + 1) * C]
            is_snapshot = (bool(is_point) and column == last) or column == mark
            digest = sequence.digests[column]
            self._to_publish.append(_Publication(slot, column, digest, token_ids, is_snapshot))
            self._published.add(digest)
            self._num_published[slot] = column + 1

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache."""
        self.num_resets += 1
        self.flush()
        self.executor.run(self.executor.programs.forget.call())
        self._published.clear()
        self._num_published = [0] * self._sizes.num_slots

    def flush(self) -> None:
        """Apply the collected updates: publish blocks, then release slots.

        Call it before every program.
        """
        for call in self.take_calls():
            self.executor.run(call)

    def take_calls(self) -> list[Call]:
        """Return the calls that `flush` would make; the caller must make them instead."""
        blocks, calls = self._to_publish, []
        for start in range(0, len(blocks), PUBLISH_WIDTH):
            calls.append(self._publication(blocks[start : start + PUBLISH_WIDTH]))
        if self._to_release:
            mask = np.zeros(self._sizes.num_slots, bool)
            mask[self._to_release] = True
            calls.append(self.executor.programs.release.call(mask))
        self._to_publish, self._to_release = [], []
        return calls

    def _publication(self, blocks: list["_Publication"]) -> Call:
        slots, columns = no_slots(PUBLISH_WIDTH), np.zeros(PUBLISH_WIDTH, np.int32)
        digests = np.zeros((PUBLISH_WIDTH, 8), np.uint32)
        token_ids = np.zeros((PUBLISH_WIDTH, self._sizes.block_size), np.int32)
        is_snapshot = np.zeros(PUBLISH_WIDTH, bool)
        for row, block in enumerate(blocks):
            slots[row], columns[row], token_ids[row] = block.slot, block.column, block.token_ids
            digests[row], is_snapshot[row] = digest_words([block.digest])[0], block.is_snapshot
        publish = self.executor.programs.publish
        return publish.call(slots, columns, digests, token_ids, is_snapshot)

    # Programs

    def prefill(self, chunks: Collection[tuple[Sequence, int]]) -> None:
        """Queue programs that prefill chunks.

        Each chunk is a sequence and the number of its next tokens to prefill.
        """
        chunks = list(chunks)
        for width, num_rows, indices in pack([count for _, count in chunks], self._sizes):
            token_ids = np.zeros((num_rows, width), np.int32)
            slots, num_tokens, row = no_slots(num_rows), np.zeros(num_rows, np.int32), 0
            for sequence, count in (chunks[index] for index in indices):
                start, end = sequence.num_computed, sequence.num_computed + count
                for first in range(start, end, width):
                    tokens = sequence.token_ids[first : min(first + width, end)]
                    token_ids[row, : len(tokens)] = tokens
                    slots[row], num_tokens[row] = slot_of(sequence), len(tokens)
                    row += 1
            self.flush()
            prefill = self.executor.programs.prefill
            self.executor.run_unchecked(prefill.call(token_ids, slots, num_tokens))

    def score(self, sequence: Sequence, count: int) -> Scores:
        """Prefill `count` tokens of a sequence, and return log-probabilities of prompt tokens.

        Row i of the result is for the token after token i of the chunk. The arrays are on the host
        and have `count` rows.
        """
        self.flush()
        width, end = self._sizes.score_width, sequence.num_computed + count
        slots, parts = np.array([slot_of(sequence)], np.int32), []
        for start in range(sequence.num_computed, end, width):
            size = min(width, end - start)
            token_ids, targets = np.zeros((1, width), np.int32), np.zeros(width, np.int32)
            token_ids[0, :size] = sequence.token_ids[start : start + size]
            targets[:size] = sequence.token_ids[start + 1 : start + size + 1]
            score, num_tokens = self.executor.programs.score, np.array([size], np.int32)
            call = score.call(token_ids, slots, num_tokens, targets)
            scores, ok = jax.device_get(self.executor.run(call))
            require_blocks(ok)
            parts.append(jax.tree.map(lambda x, n=size: x[:n], scores))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *parts)

    def decode(self, plan: StepPlan) -> QueuedResult:
        """Queue the decode steps of a plan; `Executor.read` returns their `StepTokens`.

        If the plan was made ahead, its steps are queued before the tokens of the previous call have
        been read. All its sequences must already have slots. Sequences that stopped in the previous
        call get no tokens.
        """
        slots = self._decode_slots(plan.decodes)
        masks = find_token_masks(plan.bound, plan.num_steps, self._sizes, self.executor.vocab_size)
        limits = np.int32(plan.num_steps), np.bool_(plan.leave_on_stop), _needs_top(plan)
        call = self.executor.programs.decode.call(slots, *limits)
        if plan.is_ahead:
            return self.executor.queue_ahead([*self.take_calls(), call], masks)
        self._write_masks(masks)
        self.flush()
        return self.executor.queue(call)

    def verify(self, plan: StepPlan, drafts: Collection[Collection[int]]) -> StepTokens:
        """Use drafts to sample the next tokens of a plan's sequences, and copy them to the host.

        `drafts` has the draft tokens of each sequence, see `decoding.verify_steps`.
        """
        verify = self.executor.programs.verify
        slots = self._decode_slots(plan.decodes)
        num_steps, vocab_size = 1 + max(map(len, drafts)), self.executor.vocab_size
        self._write_masks(find_token_masks(plan.bound, num_steps, self._sizes, vocab_size))
        self.flush()
        draft_ids = np.zeros((slots.size, self._sizes.num_drafts), np.int32)
        num_drafts = np.zeros(slots.size, np.int32)
        for row, draft in enumerate(drafts):
            draft_ids[row, : len(draft)], num_drafts[row] = list(draft), len(draft)
        return self.executor.fetch(verify.call(draft_ids, num_drafts, slots, _needs_top(plan)))

    def beam(
        self, beams: Iterable[tuple[int, int, int, int]], *, num_rows: int, num_top: int
    ) -> BeamTokens:
        """Append a token to each beam, and return its most probable next tokens on the host.

        Args:
          beams: ``(parent, slot, token_id, num_generated)`` of each beam. `slot` becomes a copy of
            the old content of slot `parent`, and `token_id` is appended. `num_generated` is the
            number of generated tokens, including `token_id` unless it is a prompt token.
          num_rows: number of rows to pad `beams` to; calls with the same number share a compiled
            program.
          num_top: number of most probable next tokens to return per beam.

        Raises:
          RuntimeError: there are too few free blocks.
        """
        size = row_bucket(num_rows, self._sizes.num_slots)
        parents, slots = no_slots(self._sizes.num_slots), no_slots(size)
        token_ids = np.zeros(size, np.int32)
        bias = self._token_bias
        bias_values = np.zeros((size, len(bias.all_ids)), np.float32)
        for row, (parent, slot, token_id, num_generated) in enumerate(beams):
            parents[slot], slots[row], token_ids[row] = parent, slot, token_id
            bias_values[row] = bias.values_at(num_generated)
        self.flush()
        beam = self.executor.programs.beam
        arrays = parents, token_ids, slots, np.array(bias.all_ids, np.int32), bias_values
        tokens = self.executor.fetch(beam.call(*arrays, num_top=num_top))
        require_blocks(tokens.ok)
        return tokens

    def _write_masks(self, masks: TokenMasks | None) -> None:
        if masks is not None:
            self.executor.write_token_masks(masks)

    def _decode_slots(self, sequences: Collection[Sequence]) -> np.ndarray:
        """Write the sampling states of new sequences to the device; return the sequences' slots.

        The result is padded with -1 to a batch size of the compiled programs, see `row_bucket`.
        """
        self.assign(sequences)
        slots = no_slots(row_bucket(len(sequences), self._sizes.num_slots))
        slots[: len(sequences)] = [slot_of(sequence) for sequence in sequences]
        return slots


def _needs_top(plan: StepPlan) -> np.bool_:
    """Return whether any request of the plan needs ranks and the most probable tokens."""
    return np.bool_(any(s.request.params.logprobs is not None for s in plan.decodes))
