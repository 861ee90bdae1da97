# pyright: strict, reportUnknownMemberType=false
"""Inspection of an engine's cache: the blocks of each sample, and changes between steps.

`snapshot` returns the current state, `changes` compares two states, and `block_text` returns the
content of a block. `dataclasses.asdict` converts the results to JSON types. Call these functions
between two steps, in the thread that runs the engine: with `AsyncEngine.call` or in `on_step`.
Beams of `LLM.beam_search` are not listed, because they are not requests of the engine.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import jax
import numpy as np

from paged_jax.cache.drawing import BlockMap, BlockRow, draw_html
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.engine.block_meter import GroupUse
from paged_jax.formatting import short_repr
from paged_jax.scheduler.outputs import WaitReason
from paged_jax.scheduler.request import Sequence

if TYPE_CHECKING:  # a type in annotations only
    from paged_jax.engine.engine import Engine


@short_repr
@dataclass(frozen=True)
class RunningSample:
    """A sample of a request that has a slot.

    Attributes:
      request_id, sample: id of the request, and index of the sample among the request's samples.
      num_samples: number of samples of the request, including finished samples.
      slot: index of the slot, which is the row of the sample in the block tables.
      priority: priority of the request; lower values are served first.
      num_prompt_tokens: number of tokens in the prompt.
      num_tokens: number of prompt tokens and generated tokens. It includes tokens that the device
        has generated and the host has not read yet, so it may exceed the tokens in outputs.
      num_computed: number of tokens with K and V in the cache.
      num_preemptions: number of times that the sample was preempted.
      is_fork: whether the slot was forked from the slot of another sample.
      block_ids: blocks of the sample, in the order of its tokens. Blocks that were freed because
        they left a sliding window are omitted.
      state: ``"prefill"`` while the prompt is computed, then ``"decode"``.
    """

    request_id: str
    sample: int
    num_samples: int
    slot: int
    priority: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    num_preemptions: int
    is_fork: bool
    block_ids: list[int]
    state: Literal["prefill", "decode"]


@dataclass(frozen=True)
class WaitingSample:
    """A sample that waits for a slot. The other attributes are as in `RunningSample`.

    Attributes:
      reason: why the sample waits, see `Wait`.
      is_swapped: whether the sample's blocks were swapped out to host memory.
    """

    request_id: str
    sample: int
    priority: int
    num_tokens: int
    num_preemptions: int
    reason: WaitReason
    is_swapped: bool


@short_repr
@dataclass(frozen=True)
class CacheMap:
    """State of the cache at one moment.

    If the cache has several groups of layers, all fields except `groups` describe the first group.

    Attributes:
      block_size: number of tokens in a block.
      num_blocks: number of blocks in the pool (P).
      ref_counts: number of samples that use each block.
      is_cached: whether the prefix cache can find each block.
      digests: digest of the content of each cached block, 16 hex digits; ``""`` if not cached.
      free_order: blocks that no sample uses. The block that will be allocated next is first.
      sequences: samples with a slot, by priority, and the oldest first within a priority.
      waiting: unfinished samples without a slot, in the same order.
      num_free: number of blocks that no sample uses.
      num_used: number of blocks that samples use.
      num_shared: number of blocks that several samples use.
      num_cached_only: number of cached blocks that no sample uses.
      num_preemptions: number of preemptions since the engine was built.
      num_queried_tokens: number of tokens looked up in the prefix cache since the engine was built.
      num_cached_tokens: number of the looked-up tokens that were found in the prefix cache.
      hit_rate: num_cached_tokens / num_queried_tokens, 0 to 1.
      num_cache_resets: number of times that the prefix cache was emptied.
      groups: numbers of blocks of each group of layers; empty if there is a single group.
    """

    block_size: int
    num_blocks: int
    ref_counts: list[int]
    is_cached: list[bool]
    digests: list[str]
    free_order: list[int]
    sequences: list[RunningSample]
    waiting: list[WaitingSample]
    num_free: int
    num_used: int
    num_shared: int
    num_cached_only: int
    num_preemptions: int
    num_queried_tokens: int
    num_cached_tokens: int
    hit_rate: float
    num_cache_resets: int
    groups: list[GroupUse]

    def _repr_html_(self) -> str:
        """Return the block map as HTML, which notebooks display."""
        rows = [BlockRow(_name(s), s.num_tokens, s.block_ids) for s in self.sequences]
        title = (
            f"{self.num_used} of {self.num_blocks} blocks of {self.block_size} tokens in use, "
            f"{self.num_cached_only} more in the prefix cache"
        )
        ref_counts, is_cached = np.array(self.ref_counts), np.array(self.is_cached)
        return draw_html(BlockMap(title, ref_counts, is_cached, rows))


@short_repr
@dataclass(frozen=True)
class BlockText:
    """Content of a block in a sample that uses it.

    Attributes:
      request_id, sample: id of the request and index of the sample. Both are None if the block is
        cached but no sample uses it.
      start: position of the block's first token in the sample; None if no sample uses the block.
      token_ids: tokens in the block. There are fewer than block_size tokens if the block is not
        full, or if the host has not read all of its tokens from the device.
      text: text of the tokens, including special tokens; ``""`` without a tokenizer.
      is_cached: whether the prefix cache can find the block.
    """

    request_id: str | None
    sample: int | None
    start: int | None
    token_ids: list[int]
    text: str
    is_cached: bool


@short_repr
@dataclass(frozen=True)
class CacheEvent:
    """Event between two states of the cache.

    Attributes:
      kind: ``"preempt"`` (a sample lost its slot), ``"admit"`` (a sample got a slot), ``"evict"``
        (cached blocks were reused for other tokens), ``"copy_on_write"`` (a sample got its own copy
        of a shared block before it wrote into it), ``"finish"`` (a sample finished).
      request_id: id of the sample's request. For ``"evict"``, the request that now has the blocks,
        or None if it is unknown.
      block_ids: blocks that were released, allocated or evicted. For ``"copy_on_write"``, the
        shared block (if it is known) and the copy.
      text: a sentence that describes the event.
    """

    kind: Literal["preempt", "admit", "evict", "copy_on_write", "finish"]
    request_id: str | None
    block_ids: list[int]
    text: str


def snapshot(engine: "Engine") -> CacheMap:
    """Return the current state of the cache, with running and waiting samples.

    The block tables and the digests of all blocks are copied from the device in one transfer.

    Example:
      >>> from paged_jax import Engine
      >>> engine = Engine(num_blocks=8, max_num_seqs=2)
      >>> cache_map = snapshot(engine)
      >>> cache_map.num_free, cache_map.ref_counts
      (8, [0, 0, 0, 0, 0, 0, 0, 0])
    """
    tables = engine.cache.tables
    pool = tables.pool
    ring = (pool.free_queue, pool.head)
    counts, is_cached, digests, rows, lengths, (queue, head) = jax.device_get(
        (pool.ref_counts, pool.is_cached, pool.digests, tables.block_tables, tables.lengths, ring)
    )
    names = np.ascontiguousarray(digests[:, :2], "<u4").tobytes().hex()
    stats = engine.stats

    def running(sequence: Sequence, slot: int) -> RunningSample:
        block_ids = rows[slot][rows[slot] < engine.num_blocks].tolist()
        return _running(sequence, block_ids, num_computed=int(lengths[slot]))

    return CacheMap(
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        ref_counts=counts.tolist(),
        is_cached=is_cached.tolist(),
        digests=[
            names[16 * block : 16 * block + 16] if is_block_cached else ""
            for block, is_block_cached in enumerate(is_cached.tolist())
        ],
        free_order=np.roll(queue, -head)[: (counts == 0).sum()].tolist(),
        sequences=[running(s, s.slot) for s in engine.sequences if s.slot is not None],
        waiting=[_waiting(s) for s in engine.sequences if s.slot is None],
        num_free=int((counts == 0).sum()),
        num_used=int((counts > 0).sum()),
        num_shared=int((counts > 1).sum()),
        num_cached_only=int(((counts == 0) & is_cached).sum()),
        num_preemptions=stats.num_preemptions,
        num_queried_tokens=stats.num_queried_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        hit_rate=stats.num_cached_tokens / max(1, stats.num_queried_tokens),
        num_cache_resets=engine.num_cache_resets,
        groups=groups if len(groups := engine.cache_groups) > 1 else [],
    )


def block_text(engine: "Engine", block_id: int) -> list[BlockText]:
    """Return the content of a block, with an entry for each sample that uses it.

    If no sample uses the block, there is one entry if it is cached, and no entry otherwise. Arrays
    are copied from the device in one transfer.

    Args:
      engine: the engine.
      block_id: index of the block in the pool.

    Raises:
      ValueError: `block_id` is out of range.

    Example:
      >>> from paged_jax import Engine
      >>> engine = Engine(max_num_seqs=2)
      >>> _ = engine.add_request({"prompt_token_ids": list(range(16))})
      >>> _ = engine.step()
      >>> [entry] = block_text(engine, 0)
      >>> entry.request_id, entry.start, entry.token_ids[-1]
      ('0', 0, 15)
    """
    if not 0 <= block_id < engine.num_blocks:
        raise ValueError(
            f"block_text: block_id must be in 0..{engine.num_blocks - 1}, got {block_id}."
        )
    tables = engine.cache.tables
    rows, all_cached, all_token_ids = jax.device_get(
        (tables.block_tables, tables.pool.is_cached, tables.pool.token_ids)
    )
    is_cached = bool(all_cached[block_id])
    entries = []
    for sequence in engine.sequences:
        if sequence.slot is None:
            continue
        for column in np.flatnonzero(rows[sequence.slot] == block_id).tolist():
            start = column * engine.block_size
            end = min(start + engine.block_size, sequence.num_computed)
            token_ids = sequence.token_ids[start:end]
            text = _decode(engine, token_ids, continues_text=start > 0)
            request_id = sequence.request.request_id
            entries.append(BlockText(request_id, sequence.index, start, token_ids, text, is_cached))
    if not entries and is_cached:
        token_ids = all_token_ids[block_id].tolist()
        text = _decode(engine, token_ids, continues_text=True)
        entries = [BlockText(None, None, None, token_ids, text, is_cached)]
    return entries


def changes(before: CacheMap, after: CacheMap) -> list[CacheEvent]:
    """Return the events that happened between two states of an engine's cache.

    They are ordered as in a step: preemptions, admissions, evictions, copies, finished samples.
    Events are found by comparing the states, so a sample that starts and finishes between them
    gives no event. Take a snapshot after each step to miss few events.

    Args:
      before: the earlier state.
      after: the later state.

    Example:
      >>> from paged_jax import Engine
      >>> engine = Engine(max_num_seqs=2)
      >>> before = snapshot(engine)
      >>> _ = engine.add_request("It is")
      >>> _ = engine.step()
      >>> [event.kind for event in changes(before, snapshot(engine))]
      ['admit']
    """
    comparison = _Comparison(before, after)
    events = comparison.preemptions() + comparison.admissions() + comparison.evictions()
    return events + comparison.copies_on_write() + comparison.ends()


_Sample = RunningSample | WaitingSample


def _running(sequence: Sequence, block_ids: list[int], num_computed: int) -> RunningSample:
    assert sequence.slot is not None
    request = sequence.request
    # Number of tokens that the device has generated and the host has not read yet.
    num_unread = num_computed - sequence.num_computed
    return RunningSample(
        request_id=request.request_id,
        sample=sequence.index,
        num_samples=len(request.sequences),
        slot=sequence.slot,
        priority=request.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=len(sequence.token_ids) + num_unread,
        num_computed=num_computed,
        num_preemptions=sequence.num_preemptions,
        is_fork=sequence.is_fork,
        block_ids=block_ids,
        state="prefill" if sequence.num_prefill else "decode",
    )


def _waiting(sequence: Sequence) -> WaitingSample:
    return WaitingSample(
        request_id=sequence.request.request_id,
        sample=sequence.index,
        priority=sequence.request.priority,
        num_tokens=len(sequence.token_ids),
        num_preemptions=sequence.num_preemptions,
        reason=sequence.waits_for,
        is_swapped=sequence.is_swapped,
    )


def _decode(engine: "Engine", token_ids: list[int], *, continues_text: bool) -> str:
    if engine.tokenizer is None:
        return ""
    return engine.tokenizer.decode(
        token_ids, skip_special_tokens=False, continues_text=continues_text
    )


class _Comparison:
    """Comparison of two states of the cache. Samples are matched by request id and index."""

    def __init__(self, before: CacheMap, after: CacheMap):
        self._before = before
        self._after = after
        self._old_running = {_key(s): s for s in before.sequences}
        self._old = {_key(s): s for s in (*before.sequences, *before.waiting)}
        self._new = {_key(s): s for s in (*after.sequences, *after.waiting)}

    def preemptions(self) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        for key, sample in self._new.items():
            is_waiting = isinstance(sample, WaitingSample)
            if self._is_preempted(sample) or (is_waiting and key in self._old_running):
                block_ids = self._old_blocks(key)
                text = f"{_name(sample)} lost its slot" + _insert_count(block_ids, " and {}")
                if is_waiting and sample.is_swapped and block_ids:
                    text += ", which went to host memory"
                events.append(CacheEvent("preempt", sample.request_id, block_ids, text))
        return events

    def admissions(self) -> list[CacheEvent]:
        def event(sample: RunningSample) -> CacheEvent:
            text = f"{_name(sample)} got slot {sample.slot}" + self._describe_origin(sample)
            return CacheEvent("admit", sample.request_id, sample.block_ids, text)

        return [event(sample) for sample in self._samples_with_new_slot()]

    def evictions(self) -> list[CacheEvent]:
        if self._before.num_cache_resets != self._after.num_cache_resets:
            return []
        owners = {b: s.request_id for s in self._after.sequences for b in s.block_ids}
        blocks_by_owner: dict[str | None, list[int]] = {}
        for block, digest in enumerate(self._before.digests):
            if digest and not self._is_kept(block):
                blocks_by_owner.setdefault(owners.get(block), []).append(block)
        events: list[CacheEvent] = []
        for request_id, block_ids in blocks_by_owner.items():
            suffix = "" if request_id is None else f" for request {request_id}"
            text = _insert_count(block_ids, "the cache evicted {}") + suffix
            events.append(CacheEvent("evict", request_id, block_ids, text))
        return events

    def copies_on_write(self) -> list[CacheEvent]:
        request_ids = dict.fromkeys(
            s.request_id for s in self._samples_with_new_slot() if s.is_fork
        )
        return [event for request_id in request_ids for event in self._copies_of(request_id)]

    def ends(self) -> list[CacheEvent]:
        def event(key: tuple[str, int], sample: _Sample) -> CacheEvent:
            block_ids = self._old_blocks(key)
            text = f"{_name(sample)} finished" + _insert_count(block_ids, " and released {}")
            return CacheEvent("finish", sample.request_id, block_ids, text)

        return [event(key, old) for key, old in self._old.items() if key not in self._new]

    def _describe_origin(self, sample: RunningSample) -> str:
        """Return the part of an event's text that says where an admitted sample's blocks are from.

        The blocks may be shared by a fork, swapped in from host memory, or found in the prefix
        cache. Returns "" if they are newly allocated.
        """
        old = self._old.get(_key(sample))
        if sample.is_fork:
            return " as a copy of another sample's"
        if isinstance(old, WaitingSample) and old.is_swapped:
            return ", with its blocks from host memory"
        cached_blocks = [block for block in sample.block_ids if self._is_kept(block)]
        return _insert_count(cached_blocks, " and found {} in the cache")

    def _copies_of(self, request_id: str) -> list[CacheEvent]:
        """Return the copy-on-write events of a request that was forked between the two states.

        After the fork, each sample writes the prompt's last token into the cache. If this token is
        not the first of its block, the block has earlier tokens, so all samples share it. The
        sample with the highest slot then writes to it, and each other sample to its own copy.
        """
        samples = [s for s in self._new.values() if s.request_id == request_id]
        active_samples = [s for s in samples if not self._is_preempted(s)]
        running = [s for s in active_samples if isinstance(s, RunningSample)]
        writers = sorted((s for s in running if s.is_fork or not s.sample), key=lambda s: s.slot)
        column, offset = divmod(writers[0].num_prompt_tokens - 1, self._after.block_size)
        if not offset:
            return []
        block_lists = [self._blocks_at(writer, column) for writer in writers]
        if not all(block_lists):  # a sample has already freed this block
            return []
        blocks = [block for [block] in block_lists]
        shared: list[int] = []
        if len(active_samples) == len(samples):
            old = self._old_running.get((request_id, 0))
            shared = [] if old is None else self._blocks_at(old, column)
            if not shared and len(samples) == writers[0].num_samples:
                shared = blocks[-1:]
        # All samples that do not hold the shared block got a copy. The sample that kept the
        # shared block may have finished.
        [shared_block] = shared or blocks[-1:]
        events: list[CacheEvent] = []
        for writer, block in zip(writers, blocks, strict=True):
            if block != shared_block:
                origin = f" of block {shared_block}" if shared else ""
                text = f"{_name(writer)} got a copy{origin} to write into, block {block}"
                events.append(CacheEvent("copy_on_write", request_id, [*shared, block], text))
        return events

    def _blocks_at(self, sample: RunningSample, column: int) -> list[int]:
        """Return a list with the block in a column of a sample's table; [] if it was freed."""
        num_blocks = num_blocks_needed(sample.num_computed, self._after.block_size)
        index = column - num_blocks + len(sample.block_ids)
        return sample.block_ids[index : index + 1] if index >= 0 else []

    def _samples_with_new_slot(self) -> list[RunningSample]:
        """Return the samples that got a slot between the two states."""
        return [
            sample
            for sample in self._after.sequences
            if _key(sample) not in self._old_running or self._is_preempted(sample)
        ]

    def _is_preempted(self, sample: _Sample) -> bool:
        old = self._old.get(_key(sample))
        return sample.num_preemptions > (0 if old is None else old.num_preemptions)

    def _is_kept(self, block: int) -> bool:
        """Return whether a block was cached before and is still cached with the same content."""
        digest = self._before.digests[block]
        return bool(digest) and self._after.digests[block] == digest

    def _old_blocks(self, key: tuple[str, int]) -> list[int]:
        old = self._old_running.get(key)
        return [] if old is None else old.block_ids


def _key(sample: _Sample) -> tuple[str, int]:
    return sample.request_id, sample.sample


def _name(sample: _Sample) -> str:
    return f"sample {sample.sample} of request {sample.request_id}"


def _insert_count(block_ids: list[int], text: str) -> str:
    """Return `text` with ``{}`` replaced by "1 block", "2 blocks" etc.; "" if there are none."""
    count = len(block_ids)
    return text.format(f"{count} block{'s' * (count > 1)}") if count else ""
