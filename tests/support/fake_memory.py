"""Cache of KV blocks in plain Python, and a runner of plans, to test the scheduler without arrays.

Blocks contain tokens instead of K and V. The runner computes each next token from the tokens that
it reads there, so wrong blocks lead to wrong tokens. `expected_tokens` returns the right tokens.
"""

import collections

from paged_jax.cache.digests import PrefixChain, root_digest
from paged_jax.cache.sequence_blocks import first_kept_column
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.explain import RequestHistory
from paged_jax.scheduler.outputs import RequestMetrics
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan

EOS = 0
NO_BLOCK = -1
VOCABULARY = 23


def make_request(
    number: int,
    prompt: list[int],
    *,
    max_tokens: int,
    num_samples: int = 1,
    block_size: int = 4,
    salt: str = "",
    client: str = "",
    priority: int = 0,
    deadline: float | None = None,
    request_id: str | None = None,
    history: RequestHistory | None = None,
) -> Request:
    """Create a request that arrives with this number, with a sequence for each sample."""
    params = SamplingParams(n=num_samples)
    request = Request(
        request_id=str(number) if request_id is None else request_id,
        arrival=number,
        prompt=None,
        prompt_token_ids=prompt,
        params=params,
        seed=0,
        max_tokens=max_tokens,
        metrics=RequestMetrics(arrival_time=0.0),
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
        client=client,
        history=history,
    )
    root, length = root_digest(b"weights", salt), len(prompt) + max_tokens
    request.sequences = [
        Sequence(request, i, list(prompt), length, Completion(params, None))
        for i in range(num_samples)
    ]
    for sequence in request.sequences:
        sequence.chain = PrefixChain(root, block_size)
    return request


def append(sequence: Sequence, token_ids: list[int]) -> None:
    """Append generated tokens."""
    sequence.token_ids += token_ids
    sequence.advance(len(token_ids))
    assert not sequence.num_prefill, "only a sequence with a computed prefix decodes"


def draw(token_ids: list[int], index: int, window: int | None = None) -> int:
    """Return the next token, which depends on all tokens (or the last ones) and on the sample."""
    first = 0 if window is None else max(0, len(token_ids) - window)
    total = sum((position + 1) * token for position, token in enumerate(token_ids[first:], first))
    return (total + 7 * index + len(token_ids)) % VOCABULARY


def expected_tokens(
    prompt: list[int], index: int, max_length: int, window: int | None = None
) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < max_length:
        token_ids.append(draw(token_ids, index, window))
        if token_ids[-1] == EOS:
            break
    return token_ids


class FakeMemory:
    """Blocks with reference counts, slots, and a prefix cache with LRU eviction.

    Attributes:
      tables: for each slot its blocks, with `NO_BLOCK` for freed blocks at the beginning.
      lengths: for each slot the number of its tokens.
      content: for each block its tokens.
      num_attempts: number of calls of `attach`.
    """

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, window: int | None = None):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.content: list[list[int]] = [[] for _ in range(num_blocks)]
        self.cached: dict[bytes, int] = {}
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.lengths = [0] * num_slots
        self.num_attempts = 0

    # Interface for the scheduler

    @property
    def num_free(self) -> int:
        return len(self.free)

    def attach(self, sequence: Sequence) -> int:
        self.num_attempts += 1
        slot = self._slot(sequence)
        assert not self.tables[slot], "only an empty slot can be attached"
        digests = sequence.digests[: (len(sequence.token_ids) - 1) // self.block_size]
        for num_found in range(len(digests), 0, -1):
            first = self._first_kept(num_found * self.block_size)
            if all(digest in self.cached for digest in digests[first:num_found]):
                for digest in digests[first:num_found]:
                    self._hold(self.cached[digest])
                found = [self.cached[digest] for digest in digests[first:num_found]]
                self.tables[slot] = [NO_BLOCK] * first + found
                break
        self.lengths[slot] = len(self.tables[slot]) * self.block_size
        return self.lengths[slot]

    def num_held(self, sequences: list[Sequence]) -> int:
        held = collections.Counter(b for s in sequences for b in self._held(self._slot(s)))
        return sum(self.refs[block] == count for block, count in held.items())

    def release(self, sequence: Sequence) -> None:
        self.publish(sequence)
        self.empty(self._slot(sequence))

    def swap_out(self, sequence: Sequence) -> None:
        assert sequence.host_blocks is None
        sequence.host_blocks = self.read(self._slot(sequence))
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        slot = self._slot(sequence)
        assert not self.tables[slot] and sequence.host_blocks is not None
        assert len(sequence.host_blocks) == sequence.num_computed
        first = self._first_kept(len(sequence.host_blocks))
        self.tables[slot], start = [NO_BLOCK] * first, first * self.block_size
        self.lengths[slot] = start
        num_tokens = len(sequence.host_blocks) - start
        assert self.reserve({slot: num_tokens}, gives_back=False), (
            "there must be enough blocks for the swap"
        )
        self.write(slot, start, sequence.host_blocks[start:])
        sequence.host_blocks = None

    # Operations of the device

    def publish(self, sequence: Sequence) -> None:
        slot = self._slot(sequence)
        num_full = self.lengths[slot] // self.block_size
        table = self.tables[slot][:num_full]
        for digest, block in zip(sequence.digests, table, strict=False):
            is_new = digest not in self.cached and block not in self.cached.values()
            if is_new and block != NO_BLOCK:
                self.cached[digest] = block

    def empty(self, slot: int) -> None:
        for block in reversed(self._held(slot)):
            self._drop(block)
        self.tables[slot], self.lengths[slot] = [], 0

    def fork(self, parent: int, child: int) -> None:
        assert not self.tables[child], "only an empty slot can become a copy"
        for block in self._held(parent):
            self._hold(block)
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]

    def reserve(self, num_tokens: dict[int, int], *, gives_back: bool = True) -> bool:
        """Make room for tokens in slots, with copy-on-write. Succeed or change nothing.

        Like a program, it first frees blocks outside the window.
        """
        if gives_back:
            for slot in num_tokens:
                self._give_back(slot)
        needs = {slot: self._num_new(slot, n) for slot, n in num_tokens.items()}
        copies = self._copies([slot for slot, n in num_tokens.items() if n])
        if sum(needs.values()) + len(copies) > len(self.free):
            return False
        for slot in copies:
            old, new = self.tables[slot][-1], self._take()
            self.content[new] = list(self.content[old])
            self.tables[slot][-1] = new
            self._drop(old)
        for slot, num_new in needs.items():
            self.tables[slot] += [self._take() for _ in range(num_new)]
            self.lengths[slot] += num_tokens[slot]
        return True

    def read(self, slot: int) -> list[int]:
        """Return the tokens of a slot; tokens in freed blocks are invalid values."""
        lost = [None] * self.block_size
        blocks = (lost if b == NO_BLOCK else self.content[b] for b in self.tables[slot])
        return [token for block in blocks for token in block][: self.lengths[slot]]

    def write(self, slot: int, start: int, token_ids: list[int]) -> None:
        for position, token in enumerate(token_ids, start):
            block = self.tables[slot][position // self.block_size]
            assert self.refs[block] == 1, "a shared block must not be written"
            offset = position % self.block_size
            self.content[block][offset:] = [token]

    def check(self) -> None:
        held = [block for slot in range(len(self.tables)) for block in self._held(slot)]
        assert [held.count(block) for block in range(self.num_blocks)] == self.refs
        assert sorted(self.free) == [b for b, refs in enumerate(self.refs) if not refs]
        for table, length in zip(self.tables, self.lengths, strict=True):
            assert len(table) == -(-length // self.block_size)
            first = table.count(NO_BLOCK)
            assert NO_BLOCK not in table[first:] and first <= self._first_kept(length)

    def _held(self, slot: int) -> list[int]:
        return [block for block in self.tables[slot] if block != NO_BLOCK]

    def _first_kept(self, num_tokens: int) -> int:
        if self.window is None:
            return 0
        return first_kept_column(num_tokens, self.window, self.block_size)

    def _give_back(self, slot: int) -> None:
        for column in reversed(range(self._first_kept(self.lengths[slot]))):
            if self.tables[slot][column] != NO_BLOCK:
                self._drop(self.tables[slot][column])
                self.tables[slot][column] = NO_BLOCK

    def _num_new(self, slot: int, num_tokens: int) -> int:
        return -(-(self.lengths[slot] + num_tokens) // self.block_size) - len(self.tables[slot])

    def _copies(self, writers: list[int]) -> list[int]:
        """Return the writers that copy their last block; the last holder keeps the original."""
        copies, refs = [], list(self.refs)
        for slot in writers:
            if self.lengths[slot] % self.block_size and refs[self.tables[slot][-1]] > 1:
                refs[self.tables[slot][-1]] -= 1
                copies.append(slot)
        return copies

    def _take(self) -> int:
        block = self.free.pop(0)
        self.cached = {digest: b for digest, b in self.cached.items() if b != block}
        self.refs[block], self.content[block] = 1, []
        return block

    def _hold(self, block: int) -> None:
        if not self.refs[block]:
            self.free.remove(block)
        self.refs[block] += 1

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            is_cached = block in self.cached.values()
            self.free.insert(len(self.free) if is_cached else 0, block)

    def _slot(self, sequence: Sequence) -> int:
        assert sequence.slot is not None
        return sequence.slot


class FakeEngine:
    """Runs the plans of the scheduler, and checks every plan against its rules."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_slots: int,
        *,
        eos: int | None = EOS,
        window: int | None = None,
    ):
        self.scheduler = scheduler
        self.eos = eos
        self.window = window
        self.memory = FakeMemory(num_slots, scheduler.num_blocks, scheduler.block_size, window)
        self.finished: list[Sequence] = []
        self.finished_requests: set[Request] = set()  # the scheduler no longer holds them
        self.num_prefilled = 0
        self.num_steps = 0

    def step(self, now: float = 0.0) -> StepPlan:
        plan = self.scheduler.schedule(self.memory, now)
        self.check(plan)
        self.num_steps += 1
        for sequence, num_tokens in plan.chunks:
            self.prefill(sequence, num_tokens)
        for parent, children in plan.forks:
            for child in children:
                self.memory.fork(_slot(parent), _slot(child))
        for sequence in plan.computed:
            assert not sequence.num_prefill and not sequence.draws_tokens
            self.end(sequence)
        self.decode(plan)
        self.memory.check()
        return plan

    def run(self, most_steps: int = 1000) -> None:
        """Run until all requests are finished."""
        while self.scheduler.has_unfinished:
            self.step()
            assert self.num_steps <= most_steps, "all requests must finish in time"

    def prefill(self, sequence: Sequence, num_tokens: int) -> None:
        slot, start = _slot(sequence), sequence.num_computed
        assert self.memory.lengths[slot] == start
        assert self.memory.reserve({slot: num_tokens}), "planned prefills must have enough blocks"
        self.memory.write(slot, start, sequence.token_ids[start : start + num_tokens])
        sequence.advance(num_tokens)
        self.memory.publish(sequence)
        self.num_prefilled += num_tokens

    def end(self, sequence: Sequence) -> None:
        self.finished_requests.add(sequence.request)
        self.scheduler.finish(self.memory, sequence)
        self.finished.append(sequence)

    def decode(self, plan: StepPlan) -> None:
        """Decode like the loop on the device, which ends early if blocks run out or a row stops."""
        running = list(plan.decodes)
        drawn: dict[Sequence, list[int]] = {sequence: [] for sequence in plan.decodes}
        for step in range(plan.num_steps):
            places = {_slot(s): 1 for s in running}
            if not running or not self.memory.reserve(places, gives_back=not step):
                assert step, "blocks must suffice for the first step"
                break
            stopped = [s for s in running if self.draw(s, drawn[s])]
            running = [s for s in running if s not in stopped]
            if stopped and plan.leave_on_stop:
                break
        for sequence, token_ids in drawn.items():
            append(sequence, token_ids)
            self.memory.publish(sequence)
            if self.is_complete(sequence.token_ids, sequence):
                self.end(sequence)

    def draw(self, sequence: Sequence, drawn: list[int]) -> bool:
        """Append one token computed from the blocks; return whether the sequence is complete."""
        known, slot = sequence.token_ids + drawn, _slot(sequence)
        self.memory.write(slot, len(known) - 1, known[-1:])
        drawn.append(draw(self.memory.read(slot), sequence.index, self.window))
        return self.is_complete(known + drawn[-1:], sequence)

    def is_complete(self, token_ids: list[int], sequence: Sequence) -> bool:
        return token_ids[-1] == self.eos or len(token_ids) >= sequence.max_length

    def check(self, plan: StepPlan) -> None:
        """Check the rules for every plan."""
        scheduler, memory = self.scheduler, self.memory
        memory.check()
        running = scheduler.running
        slots = [s.slot for s in running]
        assert None not in slots and len(set(slots)) == len(slots) <= len(memory.tables)
        assert not any(s.slot is not None or not s.waits_for for s in scheduler.waiting)
        assert not set(running) & set(scheduler.waiting)
        num_tokens = [n for _, n in plan.chunks]
        assert all(0 < n <= min(scheduler.max_chunk, s.num_prefill) for s, n in plan.chunks)
        assert sum(num_tokens) + len(plan.decodes) <= scheduler.max_num_batched_tokens
        chunks, decodes = dict(plan.chunks), set(plan.decodes)
        assert len(chunks) == len(plan.chunks) and len(decodes) == len(plan.decodes)
        assert all(s.num_prefill == chunks.get(s, 0) for s in decodes)
        for parent, children in plan.forks:
            assert {parent, *children} <= decodes, (
                "all forks of a block must decode in the same step"
            )
            assert all(not memory.tables[_slot(child)] for child in children)
        assert (plan.num_steps > 0) == bool(decodes)
        assert plan.num_steps <= scheduler.max_steps
        if plan.num_steps > 1:
            assert decodes == set(running), "several steps are only for all running sequences"
        assert not decodes & set(plan.computed)
        assert decodes or chunks or plan.computed or not scheduler.has_unfinished, "no progress"
        num_swapped = 0
        for sequence in scheduler.waiting:
            assert (sequence.host_blocks is not None) == sequence.is_swapped
            assert sequence.is_swapped or not sequence.num_computed
            num_tokens = len(sequence.host_blocks or ())
            num_swapped += -(-num_tokens // scheduler.block_size)
            num_swapped -= memory._first_kept(num_tokens)
        assert scheduler._queue.num_swapped_blocks == num_swapped
        self.check_blocks(plan)

    def check_blocks(self, plan: StepPlan) -> None:
        """Check that no shared block will be written, except by the forks of this plan."""
        forked = {s for parent, children in plan.forks for s in (parent, *children)}
        for sequence in set(plan.decodes) - forked:
            table = self.memory.tables[_slot(sequence)]
            is_writing_there = sequence.num_computed % self.scheduler.block_size
            assert not is_writing_there or not table or self.memory.refs[table[-1]] == 1


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
