"""Sequences in the slots of a decode state, and compiled decode steps, for tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.cache import contents, paged_cache
from paged_jax.cache.blocks import check_invariants
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.kernels import Pools
from paged_jax.models.decoder import Decoder
from paged_jax.runner import decode_state
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps, verify_steps
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.sample import sample
from paged_jax.sampling.state import Assignment, SlotSampling, slot_row, write_rows
from tests.support.tiny_model import BOS, CONFIG

V = CONFIG.vocab_size
# All tests share these sizes, and so their compiled programs.
S, N, C = 4, 8, 4
WIDTH = 8  # of a block table
P = 16  # fewer blocks than the slots could use
NUM_TOP = 3
PROMPT = 12  # tokens at most
LENGTH = 32  # tokens in a sequence at most

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1)
FILTERED = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01)
PENALISED = SamplingParams(
    temperature=0.9, presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.3
)
# Token 5 would always be drawn if `min_tokens` did not exclude it.
BIASED = SamplingParams(
    temperature=1, logit_bias={5: 99.0, 9: 3.0}, stop_token_ids=[5], min_tokens=N + 1
)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filtered": FILTERED,
    "penalised": PENALISED,
    "biased": BIASED,
}
PROMPTS = [[BOS, 5, 6, 7, 8, 9], [BOS, 20, 3], [BOS], [BOS, 4, 11, 4, 30, 12, 9]]

RUN = jax.jit(decode_steps, donate_argnames="state", static_argnames=("max_steps", "num_top"))
VERIFY = jax.jit(verify_steps, donate_argnames="state", static_argnames="num_top")
PREFILL = jax.jit(Decoder.prefill, donate_argnames="cache")
FORK = jax.jit(paged_cache.fork, donate_argnames="cache")
RESERVE = jax.jit(
    functools.partial(paged_cache.reserve, max_tokens=WIDTH * C), donate_argnames="cache"
)
RELEASE = jax.jit(paged_cache.release, donate_argnames="cache")
PLAIN = jax.jit(Decoder.__call__)
SAMPLE = jax.jit(sample)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence of a test: its known tokens, and its sampling parameters."""

    token_ids: list[int]
    params: SamplingParams = GREEDY
    seed: int = 0
    sample_index: int = 0
    max_length: int = LENGTH
    eos_token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int | None = None

    def assign(self, state: DecodeState, slot: int) -> DecodeState:
        return decode_state.assign(state, [self.assignment(slot)])

    def assignment(self, slot: int) -> Assignment:
        return Assignment(
            slot,
            self.params,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens or len(self.token_ids),
            seed=self.seed,
            sample_index=self.sample_index,
            eos_token_ids=self.eos_token_ids,
            max_length=self.max_length,
        )


def empty_cache(model) -> PagedCache:
    return model.create_cache(num_slots=S, max_length=WIDTH * C, num_blocks=P, block_size=C)


def start(model: Decoder, sequences: list[Sequence]) -> DecodeState:
    """Return a state with each sequence in its slot; unwritten tokens in the pools are NaN."""
    cache = empty_cache(model)
    nan = jnp.full_like(cache.k, jnp.nan)
    cache = cache.replace_pools(Pools(nan, nan + 0))
    token_ids, num_tokens = np.zeros((S, PROMPT), np.int32), np.zeros(S, np.int32)
    for slot, sequence in enumerate(sequences):
        num_tokens[slot] = len(sequence.token_ids) - 1
        token_ids[slot, : num_tokens[slot]] = sequence.token_ids[:-1]
    _, cache, ok = PREFILL(model, cache, token_ids, jnp.arange(S, dtype=jnp.int32), num_tokens)
    assert ok
    state = DecodeState.create(cache, V)
    for slot, sequence in enumerate(sequences):
        state = sequence.assign(state, slot)
    return state


def run(model, state, slots=range(S), *, num_steps=N, leave_on_stop=False, with_top=True):
    """Call `decode_steps` with rows padded to S, like the host does."""
    slots = jnp.array([*slots, *[-1] * (S - len(slots))], jnp.int32)
    limits = np.int32(num_steps), np.bool_(leave_on_stop), np.bool_(with_top)
    return RUN(model, state, slots, *limits, max_steps=N, num_top=NUM_TOP)


def drawn(tokens) -> list[list[int]]:
    return [tokens.token_ids[:n, row].tolist() for row, n in enumerate(tokens.num_new.tolist())]


def expected(model: Decoder, sequence: Sequence, num_tokens=N) -> list[int]:
    """Draw tokens in a loop on the host, from the plain forward over the whole sequence."""
    state = write_slot(
        SlotSampling.create(1, V),
        0,
        sequence.params,
        seed=sequence.seed,
        sample_index=sequence.sample_index,
        prompt_token_ids=sequence.token_ids,
        eos_token_ids=sequence.eos_token_ids,
    )
    token_ids = list(sequence.token_ids)
    for _ in range(num_tokens):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(token_ids)] = token_ids
        logits = PLAIN(model, padded)[:, len(token_ids) - 1]
        position = jnp.array([len(token_ids)], jnp.int32)
        draws, state = SAMPLE(logits, state, position, jnp.array([True]))
        token_ids.append(int(draws.token_ids[0]))
    return token_ids[len(sequence.token_ids) :]


def write_slot(
    state: SlotSampling,
    slot: int,
    params: SamplingParams,
    *,
    prompt_token_ids=(),
    output_token_ids=(),
    **options,
) -> SlotSampling:
    """Write the sampling parameters of a sequence to a slot, in one compiled program."""
    token_ids = [*prompt_token_ids, *output_token_ids]
    assignment = Assignment(
        slot, params, token_ids, len(prompt_token_ids), max_length=LENGTH, **options
    )
    return _write_rows(state, jax.tree.map(lambda x: x[None], slot_row(state, assignment)))


_write_rows = jax.jit(write_rows, donate_argnums=0)


def assert_same(a, b) -> None:
    """Check that arrays have equal bits; NaN equals itself."""
    for (path, left), right in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=jax.tree_util.keystr(path))


def mixed() -> list[Sequence]:
    """Return four sequences with different sampling parameters."""
    params = (GREEDY, SEEDED, FILTERED, PENALISED)
    return [
        Sequence(prompt, params, seed=7, sample_index=index)
        for index, (prompt, params) in enumerate(zip(PROMPTS, params, strict=True))
    ]


@functools.cache
def free_run(model) -> list[list[int]]:
    return drawn(run(model, start(model, mixed()))[0])


def cut(ids: list[int], stop: int) -> list[int]:
    return ids[: ids.index(stop) + 1] if stop in ids else ids


def start_short_of_blocks(model) -> DecodeState:
    """Return a state with three sequences and 8 free blocks; another slot holds the rest."""
    state = start(model, mixed()[:3])
    cache, ok = RESERVE(state.cache, jnp.array([0, 0, 0, WIDTH * C], jnp.int32))
    assert ok
    return dataclasses.replace(state, cache=cache)


T = 3


def drafts_of(free: list[int], kind: str) -> tuple[list[int], int]:
    """Return drafts and their numbers. Drafts past the number are right, but must not be used."""
    right, wrong = free[:T], [(token_id + 1) % V for token_id in free[:T]]
    return {
        "right": (right, T),
        "wrong": (wrong, T),
        "partly": ([right[0], *wrong[1:]], T),
        "mended": ([right[0], wrong[1], *right[2:]], T),
        "short": (right, 1),
        "none": (right, 0),
    }[kind]


NUM_ACCEPTED = {"right": 3, "wrong": 0, "partly": 1, "mended": 1, "short": 1, "none": 0}


def verify(model, state, drafts: list[tuple[list[int], int]], slots=range(S), with_top=True):
    """Call `verify_steps` with rows padded to S, like the host does."""
    padded, num_drafts = np.zeros((S, T), np.int32), np.zeros(S, np.int32)
    for row, (draft, num_used) in enumerate(drafts):
        padded[row], num_drafts[row] = draft, num_used
    slots = np.array([*slots, *[-1] * (S - len(slots))], np.int32)
    return VERIFY(model, state, padded, num_drafts, slots, np.bool_(with_top), num_top=NUM_TOP)


def step_each(model, state, num_new: list[int]) -> DecodeState:
    """Run the given number of decode steps for each slot, without drafts."""
    for i in range(max(num_new)):
        _, state = run(
            model, state, [s if i < n else -1 for s, n in enumerate(num_new)], num_steps=1
        )
    return state


def assert_as_if_stepped(state: DecodeState, plain: DecodeState) -> None:
    """Check that states are equal except for block ids, unused bytes, and rounding."""
    check_invariants(state.cache.tables)
    assert_same(state.sampling, plain.sampling)
    assert state.token_ids.tolist() == plain.token_ids.tolist()
    assert state.cache.lengths.tolist() == plain.cache.lengths.tolist()
    assert int(state.cache.tables.pool.num_free) == int(plain.cache.tables.pool.num_free)
    for slot in range(S):
        for ours, theirs in zip(
            contents.gather(state.cache, slot, layer=1),
            contents.gather(plain.cache, slot, layer=1),
            strict=True,
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
