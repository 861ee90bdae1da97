"""Who runs next: which sequences get a slot, blocks and a share of the next step. Imports no jax.

The scheduler is policy. It knows requests, numbers of blocks and numbers of tokens, never arrays or
block ids; what it decides about memory it tells a `Memory`, at once. A step of the engine is

    plan = scheduler.schedule(memory, now)
    run plan.chunks, then plan.forks, then plan.decodes for up to plan.num_steps steps
    sequence.advance(...) for each chunk, sequence.append(...) for each decoded row
    scheduler.finish(memory, sequence) for those that stopped

Prefill fills the cache with all tokens of a sequence but the last, which is the first input of
decode. So a sequence with n known tokens decodes once n - 1 of them are in the cache, whether it is
new or comes back after a preemption, and at least one token is always computed.

    waiting --admit--> resident: prefill --> decode --finish-->
        ^------------- preempt ---'------------'

Progress: sequences are ranked by priority, then arrival. The most senior resident is never
preempted to make room, and a sequence that could not run even alone is refused when it arrives. So
the most senior one finishes, then the next, and so on.
"""

import bisect
import heapq
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paged_jax.scheduler.outputs import WaitReason
from paged_jax.scheduler.sequence import Request, Sequence

Preemption = Literal["auto", "recompute", "swap"]


class Memory(Protocol):
    """The mechanism: what the scheduler asks of the cache. All of it happens at once."""

    @property
    def num_free(self) -> int:
        """How many blocks are free, cached ones included."""
        ...

    def attach(self, sequence: Sequence) -> int:
        """Start the empty slot of a sequence with the longest cached prefix of its tokens.

        Of all tokens but the last: ``(len(token_ids) - 1) // C`` blocks are looked up. Returns the
        number of tokens found.
        """
        ...

    def num_held(self, sequences: list[Sequence]) -> int:
        """How many blocks come free if all of these residents are released, and nobody else."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of the sequence's slot back, its full ones findable where possible."""
        ...

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence to host memory, then release its slot."""
        ...

    def swap_in(self, sequence: Sequence) -> None:
        """Fill the empty slot of a sequence with its ``num_computed`` tokens from host memory."""
        ...


@dataclass
class PreemptionCosts:
    """What it costs to take a sequence's blocks away: the cheaper way is taken.

    Attributes:
      seconds_per_token: of computing a token again.
      seconds_per_block: of copying a block between device and host; a swap copies each twice.
      max_swapped_blocks: how many blocks fit host memory; None for any number.
    """

    seconds_per_token: float = 1e-4
    seconds_per_block: float = 1e-4
    max_swapped_blocks: int | None = None


@dataclass
class Plan:
    """What the engine runs in one step, in this order.

    Attributes:
      expired: sequences whose deadline has passed; they have left already.
      chunks: sequences and how many of their next tokens to prefill. Blocks that this fills should
        be published before the next plan, where others may wait for them.
      forks: sequences, and those whose empty slots become copies of theirs.
      decodes: sequences that decode. Free blocks suffice for their first step, copies included.
      num_steps: most steps to decode; 0 if nothing does.
      leave_on_stop: whether to stop as soon as one of them is complete, because others wait.
    """

    expired: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    num_steps: int = 0
    leave_on_stop: bool = False


@dataclass
class SchedulerStats:
    """Totals since the scheduler was made; sequences, where nothing else is said.

    Attributes:
      num_admitted: became resident for the first time.
      num_finished, num_aborted, num_expired: left.
      num_recompute_preemptions, num_swap_preemptions: times that blocks were taken away.
      num_recomputed_tokens: computed again after that.
      num_queried_tokens: looked up in the prefix cache.
      num_cached_tokens: found there.
      peak_residents: most residents at once.
    """

    num_admitted: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_expired: int = 0
    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    peak_residents: int = 0

    @property
    def num_preemptions(self) -> int:
        """Both ways."""
        return self.num_recompute_preemptions + self.num_swap_preemptions


@dataclass
class _Room:
    """What a step has left while it is planned.

    `num_promised` counts free blocks that residents will take later in this step or in the next:
    each is promised those of its remaining prefill and of its first decode.
    """

    num_tokens: int
    num_free: int
    num_promised: int

    def take(self, num_tokens: int, num_blocks: int) -> None:
        """Give blocks to a resident that were promised to it."""
        self.num_tokens -= num_tokens
        self.num_free -= num_blocks
        self.num_promised -= num_blocks


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing, priorities and preemption.

    Args:
      num_slots: S, most residents.
      num_blocks: P, blocks in the pool.
      block_size: C, tokens in a block.
      max_num_batched_tokens: most tokens in a step: those of chunks, and one for each sequence that
        decodes. At least num_slots.
      max_chunk: most tokens of one sequence that a step prefills.
      max_steps: most decode steps in one dispatch.
      enable_prefix_caching: look prompts up in the cache.
      preemption: how blocks are taken away: ``"recompute"`` forgets them, ``"swap"`` copies them to
        host memory, ``"auto"`` does what costs less.
      costs: of the two; may be changed at any time.

    Raises:
      ValueError: a size is not positive, or max_num_batched_tokens is below num_slots.
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        *,
        max_num_batched_tokens: int,
        max_chunk: int,
        max_steps: int = 1,
        enable_prefix_caching: bool = True,
        preemption: Preemption = "auto",
        costs: PreemptionCosts | None = None,
    ):
        _check_sizes(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk=max_chunk,
            max_steps=max_steps,
        )
        if max_num_batched_tokens < num_slots:
            raise ValueError(
                f"Scheduler: max_num_batched_tokens must be at least num_slots = {num_slots}, so "
                f"that all can decode, got {max_num_batched_tokens}. Use more tokens or fewer "
                "slots."
            )
        if preemption not in ("auto", "recompute", "swap"):
            raise ValueError(
                f"Scheduler: preemption must be auto, recompute or swap, got {preemption!r}."
            )
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk = max_chunk
        self.max_steps = max_steps
        self.enable_prefix_caching = enable_prefix_caching
        self.preemption = preemption
        self.costs = costs or PreemptionCosts()
        self.stats = SchedulerStats()
        # Most senior first, both of them.
        self.waiting: list[Sequence] = []
        self.residents: list[Sequence] = []
        # Popped from the end: slot 0 is taken first.
        self._free_slots = list(range(num_slots))[::-1]
        self._unfinished: dict[str, list[Sequence]] = {}
        self._deadlines: list[
            tuple[float, int, str]
        ] = []  # a heap; may name requests that are gone
        self._num_swapped_blocks = 0
        self._refused: list[Sequence] = []  # those that the last admission gave a reason to wait

    # Requests come and go

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the samples of a new request, which all have the same tokens so far.

        Only the first is admitted and prefilled; the others become forks of it.

        Raises:
          ValueError: one of them could not run even if it had all blocks to itself, there is
            nothing to generate, or the request_id is taken. Nothing is queued then.
        """
        leader, *siblings = sequences
        request = leader.request
        if request.request_id in self._unfinished:
            raise ValueError(
                f"Scheduler.add: request_id must be unique, got {request.request_id!r} again."
            )
        for sequence in sequences:
            self._check_fits(sequence)
            assert sequence.request is request and sequence.token_ids == leader.token_ids
        leader._siblings = siblings
        for sibling in siblings:
            self._wait(sibling, "fork")
        self._track(sequences)
        self._queue(leader)

    def finish(self, memory: Memory, sequence: Sequence) -> None:
        """Let a sequence go that is complete. Nothing, if its request was aborted before."""
        if sequence in self._unfinished.get(sequence.request.request_id, ()):
            self._leave(memory, sequence)
            self.stats.num_finished += 1

    def abort(self, memory: Memory, request: Request) -> list[Sequence]:
        """Let all sequences of a request go that have not finished, and return them."""
        sequences = list(self._unfinished.get(request.request_id, ()))
        for sequence in sequences:
            self._leave(memory, sequence)
        self.stats.num_aborted += len(sequences)
        return sequences

    def restart(self, sequences: list[Sequence]) -> None:
        """Begin again with these new sequences, which replace all others, and an empty memory.

        Whatever was resident, swapped or half planned is forgotten; stats stay.
        """
        self.waiting, self.residents, self._refused = [], [], []
        self._unfinished, self._deadlines = {}, []
        self._num_swapped_blocks = 0
        self._free_slots = list(range(self.num_slots))[::-1]
        self._track(sequences)
        for sequence in sequences:
            self._queue(sequence)

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not finished, the most senior first. Those with a slot are resident."""
        unfinished = [s for sequences in self._unfinished.values() for s in sequences]
        return sorted(unfinished, key=lambda s: s.seniority)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or is resident."""
        return bool(self._unfinished)

    # One step

    def schedule(self, memory: Memory, now: float = 0.0) -> Plan:
        """Decide what runs next, and bring memory into the state that it needs.

        Everything in the plan must be run before the next call.

        Args:
          memory: is told at once who gets and who loses blocks.
          now: in seconds, on the clock of the deadlines.
        """
        plan = Plan(expired=self._expire(memory, now))
        num_preemptions = self.stats.num_preemptions
        self._admit_urgent(memory)
        self._free_blocks_for_decode(memory)
        room = self._room(memory)
        is_calm = self.stats.num_preemptions == num_preemptions
        self._plan_decodes(plan, room)
        self._plan_chunks(plan, room)
        while self.residents and not plan.decodes and not plan.chunks:
            # All prefill, and none has a block left: the most senior gets those of another.
            cause = "no block was free for any of the prompts that were being computed"
            self._preempt(memory, self.residents[1:], cause)
            room, is_calm = self._room(memory), False
            self._plan_chunks(plan, room)
        # In a step that preempted nobody is admitted: it would take what was just made free.
        may_admit_next = self._admit(memory, plan, room) if is_calm else bool(self.waiting)
        plan.num_steps = self._num_steps(plan, may_admit_next)
        plan.leave_on_stop = bool(self.waiting)
        if plan.chunks:
            for sequence in self._refused:
                sequence._num_wanted = 0  # It may find more in the cache after this step.
        self.stats.peak_residents = max(self.stats.peak_residents, len(self.residents))
        return plan

    def _expire(self, memory: Memory, now: float) -> list[Sequence]:
        expired: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequences = self._unfinished.get(request_id, ())
            # Another request may have taken the id since.
            expired += [s for s in sequences if s.request.arrival == arrival]
        for sequence in expired:
            self._leave(memory, sequence)
        self.stats.num_expired += len(expired)
        return expired

    def _free_blocks_for_decode(self, memory: Memory) -> None:
        """Preempt until every resident that decodes can do one step.

        Decodes go before prefill: they are nearest to giving their blocks back.
        """
        while True:
            claims = [self._num_claimed(s) for s in self.residents if not s.num_prefill]
            num_wanted, num_free = sum(claims), memory.num_free
            if num_wanted <= num_free:
                return
            cause = (
                f"the next tokens of {_count(len(claims), 'sample')} wanted "
                f"{_count(num_wanted, 'more block')}, {num_free} were free"
            )
            self._preempt(memory, self.residents[1:], cause)

    def _plan_decodes(self, plan: Plan, room: _Room) -> None:
        ready = [s for s in self.residents if not s.num_prefill]
        for sequence in ready:
            room.take(1, self._num_claimed(sequence))
        plan.decodes += ready
        for sequence in ready:
            self._fork(plan, room, sequence)

    def _plan_chunks(self, plan: Plan, room: _Room) -> None:
        for sequence in self.residents:
            if sequence.num_prefill:
                self._plan_chunk(plan, room, sequence)

    def _plan_chunk(self, plan: Plan, room: _Room, sequence: Sequence) -> None:
        """Prefill as much of a resident as blocks and budget allow; it decodes if that is all."""
        start = sequence.num_computed
        num_held = self._num_blocks(start)
        fits = (num_held + room.num_free) * self.block_size - start
        num_tokens = min(sequence.num_prefill, self.max_chunk, room.num_tokens, fits)
        if num_tokens:
            plan.chunks.append((sequence, num_tokens))
            room.take(num_tokens, self._num_blocks(start + num_tokens) - num_held)
        if num_tokens == sequence.num_prefill:
            self._plan_first_decode(plan, room, sequence)

    def _plan_first_decode(self, plan: Plan, room: _Room, sequence: Sequence) -> None:
        """Decode in the step that ends the prefill, unless that has used up the step.

        In the next one it will be among those that decode before anybody prefills.
        """
        length = len(sequence.token_ids)
        num_new = self._num_blocks(length) - self._num_blocks(length - 1)
        num_children = min(len(sequence._siblings), len(self._free_slots))
        if room.num_tokens > num_children and room.num_free >= num_new:
            room.take(1, num_new)
            plan.decodes.append(sequence)
            self._fork(plan, room, sequence)

    def _fork(self, plan: Plan, room: _Room, leader: Sequence) -> None:
        """Start the other samples of a prompt, just before the first of them draws its first token.

        Each takes one block in that step: for its token, or for its copy of the block into which
        all of them write. (One of them need not copy; the leader counts as that one.) As all of
        them write in this step, no partly filled block is shared after it. A sample without a
        slot or blocks waits as a sequence of its own, and will find the prompt in the cache.
        """
        children: list[Sequence] = []
        for sibling in leader._siblings:
            if self._free_slots and self._spare(room) >= 1:
                sibling.num_computed = len(leader.token_ids) - 1
                sibling.is_fork = True
                self._take_slot(sibling)
                room.num_tokens -= 1
                room.num_free -= 1
                children.append(sibling)
            else:
                self._queue(sibling)
        leader._siblings = []
        if children:
            plan.forks.append((leader, children))
            plan.decodes += children

    # Admission

    def _admit(self, memory: Memory, plan: Plan, room: _Room) -> bool:
        """Admit in order of seniority, until one does not fit: nobody overtakes it, or a large one
        might wait forever. Only those are passed over that wait for a resident's prefix.

        Returns whether the next step could admit more, though nothing leaves in this one.
        """
        refused, self._refused = self._refused, []
        computing = self._prefixes_being_computed()
        passed = 0
        while passed < len(self.waiting):
            sequence = self.waiting[passed]
            reason = self._obstacle(memory, room, sequence, computing)
            if not reason:
                self._plan_chunk(plan, room, sequence)
                computing += self._next_prefix(sequence)
                continue
            self._wait(sequence, reason, room)
            self._refused.append(sequence)
            if reason != "same prefix":
                break
            passed += 1
        for sequence in set(refused) - set(self._refused):
            if sequence.waits_for:
                self._wait(sequence, "turn")
        is_brief = any(s.waits_for in ("budget", "same prefix") for s in self._refused)
        return is_brief and bool(self._free_slots)

    def _obstacle(
        self,
        memory: Memory,
        room: _Room,
        sequence: Sequence,
        computing: list[tuple[int, bytes]],
    ) -> WaitReason:
        """Make a sequence resident, or say what it has to wait for."""
        if self._is_being_computed(sequence, computing):
            return "same prefix"
        if not self._free_slots:
            return "slots"
        if not room.num_tokens:
            return "budget"
        if not self._enter(memory, room, sequence):
            return "blocks"
        return ""

    def _enter(self, memory: Memory, room: _Room, sequence: Sequence) -> bool:
        """Make a sequence resident if there are blocks for its whole prefill and first decode.

        What it finds in the cache is known only after it was attached. So that a sequence that
        waits does not try in every step, it remembers how many free blocks it wanted, and tries
        again when there are as many, when others have prefilled, or when nobody is resident.
        """
        spare = self._spare(room)
        if self.residents and sequence._num_wanted > spare:
            return False
        num_free = memory.num_free
        sequence.slot = self._free_slots[-1]
        is_looked_up = self._num_cacheable(sequence) > 0 and not sequence.is_swapped
        if is_looked_up:
            sequence.num_computed = memory.attach(sequence)
        num_attached = num_free - memory.num_free
        num_needed = self._num_blocks(len(sequence.token_ids))
        if not sequence.is_swapped:
            num_needed -= self._num_blocks(sequence.num_computed)
        sequence._num_wanted = num_attached + num_needed
        if sequence._num_wanted > spare:
            if is_looked_up:
                memory.release(sequence)
                sequence.num_computed = 0
            sequence.slot = None
            return False
        if sequence.is_swapped:
            memory.swap_in(sequence)
            self._mark_swapped(sequence, False)
            num_attached = num_free - memory.num_free
        else:
            self._count_lookup(sequence, is_looked_up)
        room.num_free -= num_attached
        room.num_promised += self._num_claimed(sequence)
        self.waiting.remove(sequence)
        self._take_slot(sequence)
        return True

    def _admit_urgent(self, memory: Memory) -> None:
        """Preempt residents of worse priority for whoever waits with a better one."""
        computing = self._prefixes_being_computed()
        passed = 0
        while passed < len(self.waiting):
            sequence = self.waiting[passed]
            priority = sequence.request.priority
            juniors = [r for r in self.residents if r.request.priority > priority]
            if not juniors:
                return
            if self._is_being_computed(sequence, computing):
                passed += 1
            elif self._preempt_for(memory, sequence, juniors):
                computing += self._next_prefix(sequence)
            else:
                return

    def _preempt_for(self, memory: Memory, sequence: Sequence, juniors: list[Sequence]) -> bool:
        """Make a sequence resident at the cost of `juniors`; False if even that is not enough."""
        while True:
            room = self._room(memory)
            if self._free_slots:
                if self._enter(memory, room, sequence):
                    return True
                # With them goes what they alone hold, what they will claim, and the block that is
                # kept back for each that grows.
                claims = sum(self._num_claimed(r) + self._needs_more(r) for r in juniors)
                most = self._spare(room) + memory.num_held(juniors) + claims
                if sequence._num_wanted > most:
                    return False
            if not juniors:
                return False
            request = sequence.request
            cause = f"request {request.request_id} came with the better priority {request.priority}"
            juniors.remove(self._preempt(memory, juniors, cause))

    def _prefixes_being_computed(self) -> list[tuple[int, bytes]]:
        """Number and digest of the block that each prefilling resident computes next.

        One is enough: a digest stands for all blocks before it, so a sequence that has any of the
        later blocks in common with the resident has this one too.
        """
        return [prefix for resident in self.residents for prefix in self._next_prefix(resident)]

    def _next_prefix(self, sequence: Sequence) -> list[tuple[int, bytes]]:
        column = sequence.num_computed // self.block_size
        if column >= self._num_cacheable(sequence):
            return []
        return [(column, sequence.digests[column])]

    def _is_being_computed(self, sequence: Sequence, computing: list[tuple[int, bytes]]) -> bool:
        if not computing or sequence.is_swapped:
            return False
        num_cacheable = self._num_cacheable(sequence)
        return any(
            column < num_cacheable and sequence.digests[column] == digest
            for column, digest in computing
        )

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache: the full ones of all tokens but the last."""
        if not self.enable_prefix_caching or sequence.chain is None:
            return 0
        return (len(sequence.token_ids) - 1) // self.block_size

    def _count_lookup(self, sequence: Sequence, is_looked_up: bool) -> None:
        if is_looked_up:
            self.stats.num_queried_tokens += len(sequence.token_ids) - 1
            self.stats.num_cached_tokens += sequence.num_computed
        num_found = min(sequence.num_computed, sequence._num_lost)
        self.stats.num_recomputed_tokens += sequence._num_lost - num_found

    # Preemption

    def _victim(self, candidates: list[Sequence]) -> Sequence:
        """Who loses its blocks: of the worst priority the one that loses least, then the newest."""
        return min(candidates, key=self._expendability)

    def _expendability(self, sequence: Sequence) -> tuple[int, bool, float, int, int]:
        """Ranks sequences: the smaller, the sooner it is preempted.

        One that came back and has not got any further since is left alone if another can be had:
        else the same two might push each other out again and again.
        """
        has_progressed = len(sequence.token_ids) > sequence._length_before
        priority, arrival, index = sequence.seniority
        return -priority, not has_progressed, self._cost(sequence), -arrival, -index

    def _preempt(self, memory: Memory, candidates: list[Sequence], cause: str) -> Sequence:
        """Take slot and blocks from the candidate that can best spare them, and return it."""
        sequence = self._victim(candidates)
        is_swapped = self._is_swap_better(sequence)
        if sequence.history is not None:
            kind = "swap" if is_swapped else "recompute"
            detail = f"{cause}; {self._describe_choice(sequence, candidates)}"
            sequence.history.preempt(sequence.index, kind, sequence.num_computed, detail)
        if is_swapped:
            memory.swap_out(sequence)
            self._mark_swapped(sequence, True)
            self.stats.num_swap_preemptions += 1
        else:
            memory.release(sequence)
            sequence._num_lost = sequence.num_computed
            sequence.num_computed = 0
            self.stats.num_recompute_preemptions += 1
        sequence.num_preemptions += 1
        sequence.is_fork = False
        sequence._length_before = len(sequence.token_ids)
        self._give_slot(sequence)
        self._queue(sequence, "preempted")
        return sequence

    def _is_swap_better(self, sequence: Sequence) -> bool:
        if self.preemption == "recompute" or not sequence.num_computed:
            return False
        if not self._fits_host(sequence):
            return False
        return self.preemption == "swap" or self._swap_cost(sequence) < self._recompute_cost(
            sequence
        )

    def _cost(self, sequence: Sequence) -> float:
        """Seconds that are lost if this sequence is preempted."""
        if self._is_swap_better(sequence):
            return self._swap_cost(sequence)
        return self._recompute_cost(sequence)

    def _recompute_cost(self, sequence: Sequence) -> float:
        # Less if the prefix cache still has some of it, which nobody knows beforehand.
        return sequence.num_computed * self.costs.seconds_per_token

    def _swap_cost(self, sequence: Sequence) -> float:
        return 2 * self._num_blocks(sequence.num_computed) * self.costs.seconds_per_block

    def _fits_host(self, sequence: Sequence) -> bool:
        most = self.costs.max_swapped_blocks
        num_blocks = self._num_blocks(sequence.num_computed)
        return most is None or self._num_swapped_blocks + num_blocks <= most

    def _mark_swapped(self, sequence: Sequence, is_swapped: bool) -> None:
        if sequence.is_swapped != is_swapped:
            num_blocks = self._num_blocks(sequence.num_computed)
            self._num_swapped_blocks += num_blocks if is_swapped else -num_blocks
            sequence.is_swapped = is_swapped

    # Reasons, for those who asked

    def _describe(self, reason: WaitReason, sequence: Sequence, room: _Room | None) -> str:
        """A reason to wait as a sentence, with the numbers of this moment."""
        match reason:
            case "turn":
                ahead = sum(s.seniority < sequence.seniority for s in self.waiting)
                if not ahead:
                    return "it was the first in the queue, for a step to take it in"
                return f"{_count(ahead, 'sample')} stood before it in the queue"
            case "slots":
                return f"no slot of {self.num_slots} was free"
            case "budget":
                return f"a step had no tokens left of {self.max_num_batched_tokens}"
            case "blocks":
                assert room is not None
                # Where nothing can be spared, nobody has looked up what it would find.
                most = _count(self._num_blocks(len(sequence.token_ids)), "block")
                is_known = sequence._num_wanted > 0
                wanted = _count(sequence._num_wanted, "block") if is_known else f"up to {most}"
                kept = min(room.num_free, room.num_free - self._spare(room))
                return (
                    f"it wanted {wanted}, {room.num_free} were free, {kept} of these kept for the "
                    "samples that run"
                )
            case "same prefix":
                return f"{self._describe_owner(sequence)} was computing the same prefix"
            case "fork":
                return "another sample of the request was to compute the prompt for all of them"
            case _:
                return "it had lost its blocks and waited for its return"

    def _describe_owner(self, sequence: Sequence) -> str:
        """The resident that is computing the prefix for which this sequence waits."""
        request = next(
            resident.request
            for resident in self.residents
            if self._is_being_computed(sequence, self._next_prefix(resident))
        )
        if request is sequence.request:
            return "another sample of the request"
        return f"request {request.request_id}"

    def _describe_choice(self, victim: Sequence, candidates: list[Sequence]) -> str:
        """Why the victim was preempted, rather than the one that would have been the next."""
        others = [s for s in candidates if s is not victim]
        if not others:
            return "no other could give way"
        other = self._victim(others)
        pairs = zip(self._expendability(victim), self._expendability(other), strict=True)
        decisive = next(index for index, (own, its) in enumerate(pairs) if own != its)
        why = (
            "had the worse priority",
            "had not just come back",
            "had less to lose",
            "was newer",
            "was the later sample",
        )[decisive]
        return f"it gave way before request {other.request.request_id} because it {why}"

    # Sizes

    def _num_steps(self, plan: Plan, may_admit_next: bool) -> int:
        """One step while anything but decoding could go on in the next; many if nothing can."""
        if not plan.decodes:
            return 0
        if may_admit_next or len(plan.decodes) < len(self.residents):
            return 1
        longest = max(s.max_length - len(s.token_ids) for s in plan.decodes)
        return min(self.max_steps, longest)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_claimed(self, sequence: Sequence) -> int:
        """Blocks that a resident takes until it has decoded once."""
        return self._num_blocks(len(sequence.token_ids)) - self._num_blocks(sequence.num_computed)

    def _room(self, memory: Memory) -> _Room:
        return _Room(
            num_tokens=self.max_num_batched_tokens,
            num_free=memory.num_free,
            num_promised=sum(self._num_claimed(s) for s in self.residents),
        )

    def _spare(self, room: _Room) -> int:
        """Blocks that a newcomer may claim.

        One is kept back for each resident that will ever need more: it does before it has decoded
        C tokens, so who is admitted with less is likely to be preempted soon.
        """
        growing = [s for s in self.residents if self._needs_more(s)]
        return room.num_free - room.num_promised - len(growing)

    def _needs_more(self, sequence: Sequence) -> bool:
        # The last token that is drawn is never written.
        most = self._num_blocks(sequence.max_length - 1)
        return most > self._num_blocks(len(sequence.token_ids))

    # States of a sequence

    def _check_fits(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.token_ids)
        if not 0 < num_tokens < sequence.max_length:
            raise ValueError(
                "Scheduler.add: token_ids must hold at least one token and fewer than max_length "
                f"= {sequence.max_length}, got {num_tokens}."
            )
        # The last token that is drawn is never written.
        needed = self._num_blocks(sequence.max_length - 1)
        if needed > self.num_blocks:
            raise ValueError(
                f"Scheduler.add: a sequence must fit the pool of {self.num_blocks} blocks of "
                f"{self.block_size} tokens, got {num_tokens} prompt tokens and "
                f"{sequence.max_length - num_tokens} new ones, which need {needed}. Use fewer "
                "tokens or more blocks."
            )

    def _track(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            request = sequence.request
            if request.request_id not in self._unfinished and request.deadline is not None:
                entry = (request.deadline, request.arrival, request.request_id)
                heapq.heappush(self._deadlines, entry)
            self._unfinished.setdefault(request.request_id, []).append(sequence)
        if len(self._deadlines) > 2 * len(self._unfinished):
            self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Drop those of requests that are gone, which may lie in a far future."""
        arrivals = {name: left[0].request.arrival for name, left in self._unfinished.items()}
        self._deadlines = [entry for entry in self._deadlines if arrivals.get(entry[2]) == entry[1]]
        heapq.heapify(self._deadlines)

    def _queue(self, sequence: Sequence, reason: WaitReason = "turn") -> None:
        sequence._num_wanted = 0
        bisect.insort(self.waiting, sequence, key=lambda s: s.seniority)
        self._wait(sequence, reason)

    def _wait(self, sequence: Sequence, reason: WaitReason, room: _Room | None = None) -> None:
        sequence.waits_for = reason
        if sequence.history is not None:
            sequence.history.wait(sequence.index, reason, self._describe(reason, sequence, room))

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        self._end_wait(sequence)
        self.stats.num_admitted += not sequence.num_preemptions
        bisect.insort(self.residents, sequence, key=lambda s: s.seniority)

    def _give_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.residents.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None

    def _end_wait(self, sequence: Sequence) -> None:
        sequence.waits_for = ""
        if sequence.history is not None:
            sequence.history.run(sequence.index)

    def _leave(self, memory: Memory, sequence: Sequence) -> None:
        if sequence.slot is not None:
            memory.release(sequence)
            self._give_slot(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        for sibling in sequence._siblings:
            self._queue(sibling)
        sequence._siblings = []
        self._mark_swapped(sequence, False)
        sequence.host_blocks = None
        self._end_wait(sequence)
        left = self._unfinished[sequence.request.request_id]
        left.remove(sequence)
        if not left:
            del self._unfinished[sequence.request.request_id]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"Scheduler: {name} must be a positive integer, got {size!r}. Pass at least 1."
            )
