"""`StepPlan`: what an engine step runs.

`plan_builder` and `admission` fill a plan, and `lookahead` makes plans ahead. The plan is all that
the runner gets from the scheduler.
"""

from dataclasses import dataclass, field

from paged_jax.scheduler.request import Sequence


@dataclass
class StepPlan:
    """Plan of an engine step. The engine runs `chunks`, then `forks`, then `decodes`.

    Attributes:
      expired: sequences with a deadline that has passed. The scheduler has already removed them.
      chunks: sequences to prefill, each with the number of tokens to prefill. Before the next plan,
        the engine publishes the blocks that a chunk fills, because other sequences may wait for
        them.
      computed: sequences that generate no tokens, and are complete after their chunk.
      forks: pairs ``(leader, forks)``: a sequence, and sequences that get copies of its slot.
      decodes: sequences that decode. There are enough free blocks for the first decode step,
        including copies of shared blocks.
      bound: the sequences in `decodes` that need a new token mask, because they have a grammar. The
        host knows all their tokens so far, and the engine writes their masks before they decode.
        They decode the tokens that the grammar forces, and one more token. Then they wait for the
        next mask, while the other sequences continue.
      num_steps: maximum number of decode steps; 0 if no sequence decodes.
      leave_on_stop: whether decoding ends as soon as any sequence is complete, because other
        sequences wait for a slot.
      is_ahead: whether the plan was made before the tokens of the previous plan were known. Some of
        its sequences may already be complete, or may lack free blocks. The device samples no tokens
        for them. If only the host knows that a sequence is complete, it ignores the tokens.
    """

    expired: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    computed: list[Sequence] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    bound: list[Sequence] = field(default_factory=list)
    num_steps: int = 0
    leave_on_stop: bool = False
    is_ahead: bool = False
