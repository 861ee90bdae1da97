"""A cache with several groups of layers: random histories, compared with a plain model.

The K of each token is its number. So the K read back through the tables must be the tokens of each
slot, as far as the group keeps them.
"""

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.cache import CacheGroup, PagedCache, contents, paged_cache
from paged_jax.cache.blocks import check_invariants
from paged_jax.cache.groups import locate
from paged_jax.cache.sequence_blocks import first_kept_column, max_blocks_in_window
from paged_jax.kernels import Pools
from tests.support.block_model import Content
from tests.support.block_tables import as_arrays, cached, contents_of, free_blocks, i32, publish
from tests.support.window_model import GroupsModel

S, M, C = 4, 8, 4
MAX_TOKENS, MAX_CUT = 6, 5
# Windows are not multiples of C. The second group is limited to the blocks of the first. The third
# has as many blocks as its slots can hold.
WINDOWS = [None, 9, 3]
P = 18
HELD = [M, *[max_blocks_in_window(window, MAX_TOKENS, C) for window in (9, 3)]]
NUM_BLOCKS = [P, *[min(P, S * held) for held in HELD[1:]]]
assert NUM_BLOCKS == [18, 18, 16]


def make_cache() -> PagedCache:
    groups = [
        CacheGroup.create(
            num_layers=1, num_blocks=count, num_kv_heads=1, block_size=C, head_dim=1, num_slots=S,
            max_blocks_per_slot=M, window=window,
        )
        for count, window in zip(NUM_BLOCKS, WINDOWS, strict=True)
    ]  # fmt: skip
    return PagedCache(tuple(groups), ((0, 0), (1, 0), (2, 0)))


def write(cache: PagedCache, starts: jax.Array, tokens_SN: jax.Array) -> PagedCache:
    """Write the K of tokens to the slots, from the given positions; -1 is no token."""
    slots = jnp.repeat(jnp.arange(S, dtype=jnp.int32), tokens_SN.shape[1])
    steps = jnp.arange(tokens_SN.shape[1], dtype=jnp.int32)
    positions = (starts[:, None] + steps[None]).reshape(-1)
    slots = jnp.where(tokens_SN.reshape(-1) < 0, -1, slots)

    def put(group: CacheGroup) -> CacheGroup:
        blocks, offsets = locate(group.tables, slots, positions)
        values = tokens_SN.reshape(-1).astype(jnp.float32)
        k = group.pools.k.at[0, blocks, 0, offsets, 0].set(values, mode="drop")
        return group.replace_pools(Pools(k, group.pools.v))

    return replace(cache, groups=tuple(map(put, cache.groups)))


def append(cache: PagedCache, counts: jax.Array, tokens_SN: jax.Array):
    starts = cache.lengths
    cache, ok = paged_cache.reserve(cache, counts, max_tokens=MAX_TOKENS)
    return write(cache, starts, jnp.where(ok, tokens_SN, -1)), ok


def append_planned(cache: PagedCache, limits: jax.Array, most: jax.Array, tokens_SN: jax.Array):
    """Append as many tokens as there are blocks for, up to `most` per slot."""
    starts = cache.lengths
    cache, planned = paged_cache.plan(cache, limits, most, max_tokens=MAX_TOKENS, backend=None)
    num_new = jnp.minimum(limits, planned[0].num_tokens)
    cache = paged_cache.commit(cache, planned, starts + num_new)
    is_new = jnp.arange(MAX_TOKENS, dtype=jnp.int32)[None] < num_new[:, None]
    return write(cache, starts, jnp.where(is_new, tokens_SN, -1)), planned[0].num_tokens


def swap(cache: PagedCache, source: jax.Array, target: jax.Array):
    """Read the blocks of a slot, release it, and restore them in another slot or the same."""
    num_tokens = cache.lengths[source]
    saved = [contents.read_blocks(cache, source, 0, width=M, group=group) for group in range(3)]
    slots = jnp.arange(S, dtype=jnp.int32)
    cache = paged_cache.release(cache, slots == source)
    counts = jnp.where(slots == target, num_tokens, 0)
    cache, ok = paged_cache.restore(cache, counts, max_tokens=M * C)
    target = jnp.where(ok & (num_tokens > 0), target, S)
    for group, values in enumerate(saved):
        cache = contents.write_blocks(cache, target, 0, values, group=group)
    return cache, ok


COMPILED = partial(jax.jit, donate_argnums=0)


class Operations:
    """Compiled operations with fixed shapes."""

    def __init__(self, wrap=COMPILED):
        self.append = wrap(append)
        self.append_planned = wrap(append_planned)
        self.swap = wrap(swap)
        self.fork = wrap(paged_cache.fork)
        self.release = wrap(paged_cache.release)
        self.reorder = wrap(paged_cache.reorder)
        self.truncate = wrap(partial(paged_cache.truncate, max_tokens=MAX_CUT))
        self.attach = wrap(paged_cache.attach)
        self.publish = wrap(paged_cache.publish)
        self.forget = wrap(paged_cache.forget)


slots_of = partial(st.lists, min_size=S, max_size=S)


class GroupsMachine(RuleBasedStateMachine):
    """Random histories, compared with the model after each operation."""

    operations = Operations()

    @initialize()
    def start(self):
        self.cache = make_cache()
        self.model = GroupsModel(WINDOWS, NUM_BLOCKS, S, M, C)
        self.num_written = 0
        self.published = []  # for each of the latest published blocks: all tokens up to its end
        self.num_refused = 0

    def new_tokens(self, counts: list[int], alike: bool) -> list[list[int]]:
        """Return new unique tokens or, if alike, tokens that depend only on the position."""
        self.num_written += 1000
        starts = [len(t) if alike else self.num_written + 100 * s
                  for s, t in enumerate(self.model.tokens)]  # fmt: skip
        return [[*range(a, a + n)] for a, n in zip(starts, counts, strict=True)]

    def as_array(self, new: list[list[int]]) -> jax.Array:
        return i32([(tokens + [-1] * MAX_TOKENS)[:MAX_TOKENS] for tokens in new])

    def note(self, results: list[bool]) -> None:
        """Check that no group runs out of blocks before the first: the scheduler relies on it."""
        assert all(results) == results[0]
        self.num_refused += not results[0]

    @rule(counts=slots_of(st.integers(0, MAX_TOKENS + 1)), alike=st.booleans())
    def append(self, counts, alike):
        new = self.new_tokens(counts, alike)
        expected, results = self.model.reserve(new, MAX_TOKENS)
        self.note(results)
        self.cache, ok = self.operations.append(self.cache, i32(counts), self.as_array(new))
        assert bool(ok) == expected

    @rule(count=st.integers(1, MAX_TOKENS), slot=st.integers(0, S - 1), publishes=st.booleans())
    def append_to_one(self, count, slot, publishes):
        self.append([count * (s == slot) for s in range(S)], alike=True)
        if publishes:
            self.publish_all()

    @rule(publishes=st.booleans())
    def append_to_all_that_hold_tokens(self, publishes):
        self.append([int(bool(t)) for t in self.model.tokens], alike=False)
        if publishes:
            self.publish_all()

    @rule(limits=slots_of(st.integers(0, MAX_TOKENS)), most=st.integers(0, MAX_TOKENS))
    def append_planned(self, limits, most):
        new = self.new_tokens(limits, alike=False)
        self.cache, num_tokens = self.operations.append_planned(
            self.cache, i32(limits), i32(most), self.as_array(new)
        )
        # Like `plan`, the model frees blocks even if there is no room.
        for count in range(most, -1, -1):
            for model in self.model.models:
                model.slide([slot for slot, limit in enumerate(limits) if limit])
            ok, results = self.model.reserve([tokens[:count] for tokens in new], MAX_TOKENS)
            assert all(results) == results[0]
            if ok:
                break
        assert int(num_tokens) == count

    @rule(parents=slots_of(st.integers(-2, S)))
    def fork_anything(self, parents):
        self.fork(parents)

    def fork(self, parents):
        expected = self.model.fork(parents)
        self.cache, ok = self.operations.fork(self.cache, i32(parents))
        assert bool(ok) == expected

    @precondition(lambda self: any(self.model.tokens) and not all(self.model.tokens))
    @rule(data=st.data())
    def fork_into_empty_slots(self, data):
        running = [slot for slot, tokens in enumerate(self.model.tokens) if tokens]
        choices = st.sampled_from([-1, *running])
        self.fork([-1 if tokens else data.draw(choices) for tokens in self.model.tokens])

    @rule(parents=slots_of(st.integers(-1, S - 1)))
    def reorder(self, parents):
        expected = self.model.reorder(parents)
        self.cache, ok = self.operations.reorder(self.cache, i32(parents))
        assert bool(ok) == expected

    @rule(mask=slots_of(st.booleans()))
    def release(self, mask):
        self.model.release(mask)
        self.cache = self.operations.release(self.cache, jnp.array(mask))

    @rule(lengths=slots_of(st.integers(-1, M * C + 1)))
    def truncate(self, lengths):
        self.model.truncate(lengths, MAX_CUT)
        self.cache = self.operations.truncate(self.cache, i32(lengths))

    @rule(cuts=slots_of(st.integers(0, MAX_CUT)))
    def cut(self, cuts):
        lengths = map(len, self.model.tokens)
        self.truncate([n - cut for n, cut in zip(lengths, cuts, strict=True)])

    @rule(source=st.integers(0, S - 1), goal=st.integers(0, S - 1))
    def swap(self, source, goal):
        tokens = list(self.model.tokens[source])
        self.model.release([s == source for s in range(S)])
        new = [tokens if s == goal else [] for s in range(S)]
        expected, results = self.model.restore(new, M * C)
        assert all(results) == results[0]
        self.cache, ok = self.operations.swap(self.cache, i32(source), i32(goal))
        assert bool(ok) == expected

    @rule(places=st.lists(st.tuples(st.integers(-1, S), st.integers(-1, M)), max_size=M))
    def publish(self, places):
        entries = []
        for slot, column in places:
            known = contents_of(self.model.tokens[slot]) if 0 <= slot < S else []
            if 0 <= column < len(known):
                self.published.append(self.model.tokens[slot][: (column + 1) * C])
            content = known[column] if 0 <= column < len(known) else Content((1,) * 8, [1] * C)
            entries.append((slot, column, content))
        self.published = self.published[-3 * P :]
        self.model.publish(entries)
        self.cache = publish(self.cache, entries, self.operations.publish, S * M)

    def publish_all(self):
        self.publish([(slot, column) for column in range(M) for slot in range(S)])

    @precondition(lambda self: self.published)
    @rule(data=st.data(), slot=st.integers(-1, S), empties=st.booleans())
    def attach(self, data, slot, empties):
        self.attach_to(slot, data.draw(st.sampled_from(self.published)), empties)

    def attach_to(self, slot, tokens, empties):
        if empties:
            self.release([s == slot for s in range(S)])
        known = contents_of(tokens)
        expected = self.model.attach(slot, known)
        digests, token_ids = as_arrays(known, M)
        self.cache, num_found = self.operations.attach(
            self.cache, i32(slot), digests, token_ids, i32(len(known))
        )
        assert int(num_found) == expected
        return expected

    @precondition(lambda self: len(self.model.first.cached) > P // 2)
    @rule()
    def forget(self):
        self.model.forget()
        self.cache = self.operations.forget(self.cache)

    @invariant()
    def agrees_with_the_model(self):
        cache = jax.device_get(self.cache)
        for group, model, most in zip(cache.groups, self.model.models, HELD, strict=True):
            tables = group.tables
            check_invariants(tables)
            assert tables.lengths.tolist() == [len(tokens) for tokens in model.tokens]
            assert tables.pool.ref_counts.tolist() == list(model.refs.values())
            assert free_blocks(tables) == list(model.free)
            assert cached(tables) == model.cached
            none = tables.num_blocks
            for row, blocks, tokens in zip(
                tables.block_tables.tolist(), model.blocks, model.tokens, strict=True
            ):
                padded = blocks + [None] * (M - len(blocks))
                assert row == [none if block is None else block for block in padded]
                held = [block for block in blocks if block is not None]
                assert len(held) <= most, "no more than a window and what was appended last"
                kept = group.pools.k[0, held, 0, :, 0].reshape(-1)
                first = blocks.count(None)
                assert kept.tolist()[: len(tokens) - first * C] == tokens[first * C :]
                if tables.window is not None:
                    assert first <= first_kept_column(len(tokens), tables.window, C)
        used = [count - len(model.free) for count, model in
                zip(NUM_BLOCKS, self.model.models, strict=True)]  # fmt: skip
        assert used[0] == max(used), "the first group has most blocks in use"


TestHistories = GroupsMachine.TestCase
TestHistories.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_histories_like_an_engine_match_the_model(seed):
    num_found, num_lost, num_refused = run_engine(GroupsMachine(), seed, 150)
    assert num_found > 20 and num_lost > 100 and num_refused > 5


@pytest.mark.slow
def test_histories_match_the_model_outside_of_jit():
    machine = GroupsMachine()
    machine.operations = Operations(wrap=lambda operation: operation)
    num_found, num_lost, _ = run_engine(machine, 0, 25)
    assert num_found and num_lost


def run_engine(machine: GroupsMachine, seed: int, num_steps: int) -> tuple[int, int, int]:
    """Attach, append, truncate, fork and release sequences in full pools.

    Returns:
      The number of blocks found, the number of columns with freed blocks, summed over steps, and
      the number of failed reservations.
    """
    rng = np.random.default_rng(seed)
    machine.start()
    num_found = num_lost = 0
    for _ in range(num_steps):
        slot = int(rng.integers(S))
        if machine.model.tokens[slot] and rng.random() < 0.5:
            machine.release([s == slot for s in range(S)])
        if not machine.model.tokens[slot] and machine.published:
            tokens = machine.published[rng.integers(len(machine.published))]
            num_found += machine.attach_to(slot, tokens, False)
        machine.append_to_one(int(rng.integers(1, MAX_TOKENS)), slot, bool(rng.random() < 0.8))
        machine.append_to_all_that_hold_tokens(bool(rng.random() < 0.5))
        machine.cut([int(rng.integers(0, 3)) for _ in range(S)])
        if rng.random() < 0.2:
            machine.reorder([int(parent) for parent in rng.integers(-1, S, size=S)])
        if rng.random() < 0.2:
            machine.swap(slot, slot)
        machine.agrees_with_the_model()
        num_lost += sum(row.count(None) for row in machine.model.models[1].blocks)
    return num_found, num_lost, machine.num_refused
