"""Model execution for the sequences of a plan: prefill, scores, decode steps and verification.

The `Executor` has the weights, the device state and the programs. `Slots` implements the
scheduler's interface to the KV cache, and collects updates of it. `ModelRunner` turns sequences
into padded arrays. Before every program it applies the updates that `Slots` has collected.
"""

from collections.abc import Callable, Collection, Iterable

import jax
import numpy as np

from paged_jax.runner.decode_state import DecodeState, TokenMasks, find_token_masks
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor, QueuedResult, require_blocks
from paged_jax.runner.programs import BeamTokens, Scores
from paged_jax.runner.sizes import no_slots, pack, row_bucket
from paged_jax.runner.slots import Slots, slot_of
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.step_plan import StepPlan


class ModelRunner:
    """Execution of programs for sequences.

    Args:
      executor: runs the programs.
      slots: the slots, the `BlockMemory` of the scheduler.

    Attributes:
      executor, slots: the arguments. Call `slots.flush` before programs of the executor.
    """

    def __init__(self, executor: Executor, slots: Slots):
        self.executor = executor
        self.slots = slots
        self._sizes = executor.sizes

    def reset(self) -> None:
        """Discard all slots and the prefix cache. If the engine sleeps, their memory is freed."""
        self.executor.reset()
        self.slots.reset()

    @property
    def state(self) -> DecodeState:
        """The current device state. The next program donates it: copy arrays to keep them."""
        self.slots.flush()
        return self.executor.state

    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile all programs, see `Executor.warmup`. No slot may be in use."""
        self.slots.flush()
        self.executor.warmup(report)

    def prefill(self, chunks: Collection[tuple[Sequence, int]]) -> None:
        """Prefill chunks: pairs of a sequence and the number of its next tokens to prefill."""
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
            self.slots.flush()
            prefill = self.executor.programs.prefill
            self.executor.run_unchecked(prefill.call(token_ids, slots, num_tokens))

    def score(self, sequence: Sequence, count: int) -> Scores:
        """Prefill `count` tokens of a sequence, and return the scores of the next tokens.

        The arrays of the result are on the host and have `count` rows.
        """
        self.slots.flush()
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
        """Queue the decode steps of a plan. `Executor.read` turns the result into tokens.

        The steps of a plan that was made ahead are queued before the tokens of the last call have
        been read. Its sequences must have their slots already. Sequences that stopped in that call
        draw nothing.
        """
        slots = self._decode_slots(plan.decodes)
        masks = find_token_masks(plan.bound, plan.num_steps, self._sizes, self.executor.vocab_size)
        limits = np.int32(plan.num_steps), np.bool_(plan.leave_on_stop), _with_top(plan)
        call = self.executor.programs.decode.call(slots, *limits)
        if plan.is_ahead:
            return self.executor.queue_ahead([*self.slots.take_calls(), call], masks)
        self._write_masks(masks)
        self.slots.flush()
        return self.executor.queue(call)

    def verify(self, plan: StepPlan, drafts: Collection[Collection[int]]) -> StepTokens:
        """Draw the next tokens of a plan's sequences, given drafts, and copy them to the host."""
        verify = self.executor.programs.verify
        slots = self._decode_slots(plan.decodes)
        num_steps, vocab_size = 1 + max(map(len, drafts)), self.executor.vocab_size
        self._write_masks(find_token_masks(plan.bound, num_steps, self._sizes, vocab_size))
        self.slots.flush()
        guesses = np.zeros((slots.size, self._sizes.num_drafts), np.int32)
        num_drafts = np.zeros(slots.size, np.int32)
        for row, draft in enumerate(drafts):
            guesses[row, : len(draft)], num_drafts[row] = list(draft), len(draft)
        return self.executor.fetch(verify.call(guesses, num_drafts, slots, _with_top(plan)))

    def beam(
        self, beams: Iterable[tuple[int, int, int, int]], *, num_rows: int, num_top: int
    ) -> BeamTokens:
        """Append a token to each beam, and copy its most probable next tokens to the host.

        Args:
          beams: ``(parent, slot, token_id, num_generated)`` of each beam. The slot becomes a copy
            of slot `parent` before this call, and `token_id` is appended. `num_generated` is the
            number of generated tokens, including `token_id` unless it is a prompt token.
          num_rows: maximum number of beams; calls with the same number share a compiled program.
          num_top: number of next tokens to find.
        """
        size = row_bucket(num_rows, self._sizes.num_slots)
        parents, slots = no_slots(self._sizes.num_slots), no_slots(size)
        token_ids = np.zeros(size, np.int32)
        bias = self.slots.token_bias
        bias_values = np.zeros((size, len(bias.all_ids)), np.float32)
        for row, (parent, slot, token_id, num_generated) in enumerate(beams):
            parents[slot], slots[row], token_ids[row] = parent, slot, token_id
            bias_values[row] = bias.values_at(num_generated)
        self.slots.flush()
        beam = self.executor.programs.beam
        arrays = parents, token_ids, slots, np.array(bias.all_ids, np.int32), bias_values
        tokens = self.executor.fetch(beam.call(*arrays, num_top=num_top))
        require_blocks(tokens.ok)
        return tokens

    def _write_masks(self, masks: TokenMasks | None) -> None:
        if masks is not None:
            self.executor.write_token_masks(masks)

    def _decode_slots(self, sequences: Collection[Sequence]) -> np.ndarray:
        """Assign new sequences to slots, and return the slots of all sequences, padded with -1."""
        self.slots.assign(sequences)
        slots = no_slots(row_bucket(len(sequences), self._sizes.num_slots))
        slots[: len(sequences)] = [slot_of(sequence) for sequence in sequences]
        return slots


def _with_top(plan: StepPlan) -> np.bool_:
    """Return whether any sequence reports its most probable tokens."""
    return np.bool_(any(s.request.params.logprobs is not None for s in plan.decodes))
