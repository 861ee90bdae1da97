"""Helpers for tests of the scheduler with a fake device."""

from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler
from tests.support.fake_memory import VOCABULARY, FakeEngine, draw, make_request

C = 4


def make_engine(
    num_slots: int = 4,
    num_blocks: int = 20,
    *,
    budget: int = 100,
    max_chunk: int = 100,
    max_steps: int = 1,
    **options,
) -> FakeEngine:
    scheduler = Scheduler(
        num_slots,
        num_blocks,
        C,
        max_num_batched_tokens=budget,
        max_chunk=max_chunk,
        max_steps=max_steps,
        **options,
    )
    scheduler.lookahead.is_used = False  # the fake engine reads all tokens before it plans
    return FakeEngine(scheduler, num_slots, eos=None)


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt. Prompts of different numbers share no block."""
    return [1 + (number + 3 * position) % (VOCABULARY - 1) for position in range(length)]


def add(
    engine: FakeEngine,
    number: int,
    length: int,
    max_tokens: int = 3,
    *,
    num_samples: int = 1,
    prompt: list[int] | None = None,
    priority: int = 0,
    deadline: float | None = None,
    salt: str = "",
) -> list[Sequence]:
    """Queue a request with this arrival number, and return its sequences."""
    request = make_request(
        number,
        prompt or prompt_of(number, length),
        max_tokens=max_tokens,
        num_samples=num_samples,
        salt=salt,
        priority=priority,
        deadline=deadline,
    )
    engine.scheduler.add(request.sequences)
    return request.sequences


def check_outputs(engine: FakeEngine) -> None:
    """Check that all sequences finished with the right tokens and all blocks are free."""
    assert not engine.scheduler.has_unfinished
    assert engine.memory.num_free == engine.scheduler.num_blocks
    for s in engine.finished:
        prompt, token_ids = s.token_ids[: s.num_prompt_tokens], list(s.token_ids)
        while len(prompt) < s.max_length:
            prompt.append(draw(prompt, s.index, engine.window))
        assert token_ids == prompt
