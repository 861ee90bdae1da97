"""Which sequence has which slot, on the device: the `BlockMemory` that the scheduler drives.

Nothing here decides what runs. Tokens of sequences are the host's; should an engine step be cut
short, `reset` forgets all slots, and every sequence can be computed again from its tokens.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from paged_jax.cache.sequence_blocks import digest_words, num_kept_blocks
from paged_jax.runner.decode_state import Assignment
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call
from paged_jax.runner.sizes import PUBLISH_WIDTH, no_slots
from paged_jax.sampling.params import NO_BIAS, TokenBias
from paged_jax.scheduler.block_budget import num_swapped_blocks
from paged_jax.scheduler.request import Sequence

# Digests that the host remembers, for each block of the pool: the device is asked which of them are
# still cached when they are more.
_MAX_PUBLISHED = 4


def slot_of(sequence: Sequence) -> int:
    """The slot of a running sequence."""
    assert sequence.slot is not None
    return sequence.slot


class Slots:
    """The slots of the device, and the blocks that other sequences can find there.

    Args:
      executor: runs the programs.
      eos_token_ids: the model's end tokens.
      token_bias: biases that apply to every request.

    Attributes:
      swap_seconds: time that moves between device and host have taken, compilation left out.
      num_swapped_blocks: blocks of all layers that were moved in that time.
      num_resets: times that all cached blocks were lost at once.
    """

    def __init__(
        self,
        executor: Executor,
        eos_token_ids: Iterable[int],
        token_bias: TokenBias = NO_BIAS,
    ):
        self._executor = executor
        self._sizes = executor.sizes
        self._groups = executor.groups
        self._eos_token_ids = sorted(eos_token_ids)
        self._token_bias = token_bias
        self.swap_seconds = 0.0
        self.num_swapped_blocks = 0
        self.num_resets = 0
        self.reset()

    def reset(self) -> None:
        """Begin with a new state of the executor, in which no slot is taken and nothing cached."""
        self.num_resets += 1
        # By slot: the sequence that was assigned to it, and how many of its blocks can be found.
        self._owners: list[Sequence | None] = [None] * self._sizes.num_slots
        self._num_published = [0] * self._sizes.num_slots
        # All digests that are cached, and some that no longer are: others need no look-up.
        self._published: set[bytes] = set()
        # Gathered for the next program: what a step publishes and releases costs few calls.
        self._to_publish: list[tuple[int, int, bytes, list[int]]] = []
        self._to_release: list[int] = []

    # What the scheduler asks for

    @property
    def num_free(self) -> int:
        """Free blocks, those that are cached included."""
        if self._to_release:
            self.flush()
        return self._executor.num_free

    @property
    def others_free(self) -> list[int]:
        """Free blocks of each group of layers but the first, as of the last `num_free`."""
        return self._executor.others_free

    def attach(self, sequence: Sequence) -> int:
        """Begin the sequence's slot with the blocks of its tokens that are cached."""
        C, M = self._sizes.block_size, self._sizes.max_blocks_per_slot
        self._drop_evicted()
        count = (len(sequence.token_ids) - 1) // C  # its last token is always computed
        known = self._may_be_cached(sequence.digests[:count])
        if not known:
            return 0
        count = len(known)
        digests, token_ids = np.zeros((M, 8), np.uint32), np.zeros((M, C), np.int32)
        digests[:count] = digest_words(known)
        token_ids[:count] = np.reshape(sequence.token_ids[: count * C], (count, C))
        slot, executor = slot_of(sequence), self._executor
        self.flush()
        call = executor.programs.attach.call(np.int32(slot), digests, token_ids, np.int32(count))
        num_found = int(executor.run(call))
        self._num_published[slot] = num_found
        return num_found * C

    def _may_be_cached(self, digests: list[bytes]) -> list[bytes]:
        """Those that the device is asked for: up to the first that is cached for certain not."""
        if self._groups[0].sliding_window is None:
            return list(itertools.takewhile(self._published.__contains__, digests))
        # What windows need are the last blocks of a prefix: up to the last that may be cached.
        count = len(digests)
        while count and digests[count - 1] not in self._published:
            count -= 1
        return digests[:count]

    def _drop_evicted(self) -> None:
        """Bound the digests that the host knows: of many, keep those that the device still has.

        In the first group of layers, which keeps most: without them, others are of no use.
        """
        if len(self._published) <= _MAX_PUBLISHED * self._executor.num_blocks:
            return
        self.flush()
        pool = self._executor.state.cache.tables.pool
        digests = np.asarray(pool.digests)[np.asarray(pool.is_cached)]
        self._published = {words.astype("<u4").tobytes() for words in digests}

    def num_held(self, sequences: list[Sequence]) -> int:
        """Blocks that only these sequences hold. Waits for the device."""
        self.flush()
        tables = self._executor.state.cache.tables
        rows, ref_counts = jax.device_get((tables.block_tables, tables.pool.ref_counts))
        held = rows[[slot_of(sequence) for sequence in sequences]]
        counts = np.bincount(held[held < len(ref_counts)], minlength=len(ref_counts))
        return int(np.sum((counts > 0) & (counts == ref_counts)))

    def release(self, sequence: Sequence) -> None:
        """Give the blocks of the sequence's slot back; full ones stay cached until reused."""
        self.publish(sequence)
        slot = slot_of(sequence)
        self._to_release.append(slot)
        self._owners[slot] = None
        self._num_published[slot] = 0

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks of the sequence to the host, and release them."""
        slot, executor = np.int32(slot_of(sequence)), self._executor
        with self._swapping(sequence):
            read = executor.programs.read_blocks
            sequence.host_blocks = [
                jax.device_get(executor.run(read.call(slot, first, group=group)))
                for group, first in self._pieces(sequence)
            ]
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring the blocks of the sequence back into its slot."""
        slot, executor = np.int32(slot_of(sequence)), self._executor
        num_tokens = np.zeros(self._sizes.num_slots, np.int32)
        num_tokens[slot] = sequence.num_computed
        with self._swapping(sequence):
            executor.run_unchecked(executor.programs.reserve.call(num_tokens))
            pieces = zip(self._pieces(sequence), sequence.host_blocks, strict=True)
            for (group, first), piece in pieces:
                write = executor.programs.write_blocks
                executor.run(write.call(slot, first, piece, group=group))
        sequence.host_blocks = None

    @contextlib.contextmanager
    def _swapping(self, sequence: Sequence) -> Iterator[None]:
        """Measure what it takes to move the blocks of a sequence one way, unless it compiles."""
        self.flush()
        start, compiled = time.perf_counter(), self._executor.compile_seconds
        yield
        jax.block_until_ready(self._executor.state)
        if self._executor.compile_seconds == compiled:
            self.swap_seconds += time.perf_counter() - start
            C, num_tokens = self._sizes.block_size, sequence.num_computed
            self.num_swapped_blocks += num_swapped_blocks(num_tokens, C, self._groups)

    def _pieces(self, sequence: Sequence) -> list[tuple[int, np.int32]]:
        """The pieces in which a sequence's blocks are moved: group of layers, and first block."""
        C, width = self._sizes.block_size, self._sizes.swap_width
        return [
            (number, np.int32(first))
            for number, group in enumerate(self._groups)
            for first in range(
                0, num_kept_blocks(sequence.num_computed, group.sliding_window, C), width
            )
        ]

    # What the engine asks for

    def fork(self, forks: list[tuple[Sequence, list[Sequence]]]) -> None:
        """Make the slots of children into copies of their parents' slots: blocks are shared."""
        if not forks:
            return
        parents = no_slots(self._sizes.num_slots)
        for parent, children in forks:
            for child in children:
                parents[slot_of(child)] = slot_of(parent)
                self._num_published[slot_of(child)] = self._num_published[slot_of(parent)]
        self.flush()
        self._executor.run_unchecked(self._executor.programs.fork.call(parents))

    def assign(self, sequences: Iterable[Sequence]) -> None:
        """Write to the device how the tokens of sequences are drawn, where it does not know yet."""
        new = [each for each in sequences if self._owners[slot_of(each)] is not each]
        if not new:
            return
        self.flush()
        self._executor.assign([self._assignment(sequence) for sequence in new])
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
            max_length=sequence.max_length,
        )

    def publish(self, sequence: Sequence) -> None:
        """Let other sequences find the full blocks of this one."""
        if sequence.chain is None:
            return
        C, slot = self._sizes.block_size, slot_of(sequence)
        for column in range(self._num_published[slot], sequence.num_computed // C):
            token_ids = sequence.token_ids[column * C : (column + 1) * C]
            self._to_publish.append((slot, column, sequence.digests[column], token_ids))
            self._published.add(sequence.digests[column])
            self._num_published[slot] = column + 1

    def reset_prefix_cache(self) -> None:
        """Make all cached blocks unfindable."""
        self.num_resets += 1
        self.flush()
        self._executor.run(self._executor.programs.forget.call())
        self._published.clear()
        self._num_published = [0] * self._sizes.num_slots

    def flush(self) -> None:
        """Publish and release what was gathered, in this order. Comes before every program."""
        for call in self.take_calls():
            self._executor.run(call)

    def take_calls(self) -> list[Call]:
        """The calls that `flush` makes, which the caller makes in its place."""
        blocks, calls = self._to_publish, []
        for start in range(0, len(blocks), PUBLISH_WIDTH):
            calls.append(self._publication(blocks[start : start + PUBLISH_WIDTH]))
        if self._to_release:
            mask = np.zeros(self._sizes.num_slots, bool)
            mask[self._to_release] = True
            calls.append(self._executor.programs.release.call(mask))
        self._to_publish, self._to_release = [], []
        return calls

    def _publication(self, blocks: list[tuple[int, int, bytes, list[int]]]) -> Call:
        slots, columns = no_slots(PUBLISH_WIDTH), np.zeros(PUBLISH_WIDTH, np.int32)
        digests = np.zeros((PUBLISH_WIDTH, 8), np.uint32)
        token_ids = np.zeros((PUBLISH_WIDTH, self._sizes.block_size), np.int32)
        for row, (slot, column, digest, tokens) in enumerate(blocks):
            slots[row], columns[row], token_ids[row] = slot, column, tokens
            digests[row] = digest_words([digest])[0]
        return self._executor.programs.publish.call(slots, columns, digests, token_ids)
