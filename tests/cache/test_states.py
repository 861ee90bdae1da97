"""A cache with all four kinds of groups: random histories, compared with a plain model.

The K of each token is its number. The state of a layer is a number that depends on every token and
on their order. It is wrong if a token is applied twice or skipped, or if the state comes from
another sequence.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule

from paged_jax.cache import PagedCache, paged_cache
from paged_jax.cache.blocks import check_invariants
from paged_jax.cache.groups import StateGroup
from paged_jax.cache.sequence_blocks import max_blocks_in_window
from paged_jax.kernels.rows import set_states, take_states
from paged_jax.kernels.state_rows import StateRows
from tests.support.block_tables import as_arrays, check_states, contents_of, i32, publish
from tests.support.cache_histories import (
    JIT,
    MAX_TOKENS,
    SETTINGS,
    C,
    CacheMachine,
    CacheOperations,
    M,
    S,
    check_tokens,
    make_groups,
    slots_of,
    swap,
    write_tokens,
)
from tests.support.entries_model import EntriesModel

L = 2
# All kinds of groups: full, latent, with a window, and recurrent.
WINDOWS = [None, None, 9]
LATENT = 1
NUM_BLOCKS = [18, 18, min(18, S * max_blocks_in_window(9, MAX_TOKENS, C))]
# One entry more than slots: snapshots often have to go.
NUM_ENTRIES = S + 1


def make_cache() -> PagedCache:
    """Return a cache with NaN as states: a state that was not written must not be read."""
    groups = make_groups(WINDOWS, NUM_BLOCKS, LATENT)
    assert groups[LATENT].pools.v is None
    arrays = [[(L, (1,), jnp.float32), (L, (2,), jnp.bfloat16)]]
    group = StateGroup.create(
        arrays,
        num_entries=NUM_ENTRIES,
        num_slots=S,
        block_size=C,
    )
    poison = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), group.pools)
    layers = (0, 0), (1, 0), (2, 0), None, None
    recurrent = None, None, None, (len(groups), 0, 0), (len(groups), 0, 1)
    return PagedCache((*groups, replace(group, pools=poison)), layers, recurrent)


def advance(value, token):
    """Return the state after a token. States are integers, so that tests can compare exactly."""
    return (31 * value + token + 1) % 8191


def expected_state(tokens: list[int], layer: int) -> tuple[float, list[float]]:
    """Return the state of a layer after some tokens: a number, and the last two tokens."""
    value = 0
    for token in tokens:
        value = advance(value, token + layer)
    return float(value), [float(token % 100) for token in ([0, 0] + tokens)[-2:]]


def write(cache: PagedCache, starts: jax.Array, tokens_SN: jax.Array) -> PagedCache:
    """Write the K of tokens, and advance the states of all slots over them; -1 is no token."""
    cache = write_tokens(cache, starts, tokens_SN)
    *groups, states = cache.groups
    tables, pools = states.tables, states.pools[0]
    is_written = tokens_SN[:, 0] >= 0
    reads = jnp.where(is_written, tables.sources, NUM_ENTRIES)
    writes = jnp.where(is_written, tables.entries, NUM_ENTRIES)
    for layer in range(L):
        rows = [StateRows(pool, layer, reads, writes) for pool in pools]
        value, last = map(take_states, rows)
        for step in range(tokens_SN.shape[1]):
            token = tokens_SN[:, step : step + 1]
            value = jnp.where(token < 0, value, advance(value, token + layer))
            new = jnp.concatenate([last[:, 1:], (token % 100).astype(last.dtype)], axis=1)
            last = jnp.where(token < 0, last, new)
        pools = tuple(map(set_states, rows, (value, last)))
    return cache.replace_groups([*groups, states.replace_pools((pools,))])


class Operations(CacheOperations):
    """Compiled operations with fixed shapes."""

    def __init__(self, wrap: Callable[..., Any] = JIT):
        super().__init__(write, wrap)
        self.swap = wrap(swap)
        self.attach = wrap(paged_cache.attach_prefix)


class StatesMachine(CacheMachine):
    """Random histories, compared with the models after each operation."""

    windows, num_blocks = WINDOWS, NUM_BLOCKS
    operations = Operations()

    @initialize()
    def start(self):
        super().start()
        self.model = EntriesModel(NUM_ENTRIES, S)
        self.counts = {"found": 0, "lacking": 0, "refused": 0, "forgotten": 0}

    def make_cache(self) -> PagedCache:
        return make_cache()

    def reserve(self, new: list[list[int]]) -> bool:
        ok, _ = self.blocks.reserve(new, MAX_TOKENS)
        if ok:
            num_cached = len(self.model.cached)
            self.model.reserve([slot for slot, tokens in enumerate(new) if tokens])
            self.counts["forgotten"] += num_cached - len(self.model.cached)
        self.counts["refused"] += not ok
        return ok

    @rule(slot=st.integers(0, S - 1), publishes=st.booleans())
    def append_to_the_next_block(self, slot, publishes):
        count = C - len(self.blocks.tokens[slot]) % C
        self.append([count * (s == slot) for s in range(S)], alike=True)
        if publishes:
            self.publish_all()

    @precondition(lambda self: any(self.blocks.tokens) and not all(self.blocks.tokens))
    @rule(data=st.data())
    def fork(self, data):
        running = [slot for slot, tokens in enumerate(self.blocks.tokens) if tokens]
        choices = st.sampled_from([-1, *running])
        parents = [-1 if tokens else data.draw(choices) for tokens in self.blocks.tokens]
        assert self.blocks.fork(parents)
        self.model.follow(parents)
        self.cache, ok = self.operations.fork(self.cache, i32(parents))
        assert ok

    @rule(parents=slots_of(st.integers(-1, S)))
    def reorder(self, parents):
        expected = self.blocks.reorder(parents)
        if expected:
            self.model.follow(parents)
        self.cache, ok = self.operations.reorder(self.cache, i32(parents))
        assert bool(ok) == expected

    @rule(mask=slots_of(st.booleans()))
    def release(self, mask):
        self.blocks.release(mask)
        self.model.release(mask)
        self.cache = self.operations.release(self.cache, jnp.array(mask))

    @rule(source=st.integers(0, S - 1), goal=st.integers(0, S - 1))
    def swap(self, source, goal):
        tokens = list(self.blocks.tokens[source])
        self.blocks.release([s == source for s in range(S)])
        self.model.release([s == source for s in range(S)])
        expected, _ = self.blocks.restore([tokens if s == goal else [] for s in range(S)], M * C)
        if expected and tokens:
            self.model.reserve([goal])
        self.cache, ok = self.operations.swap(self.cache, i32(source), i32(goal))
        assert bool(ok) == expected

    @rule(places=st.lists(st.tuples(st.integers(0, S - 1), st.integers(0, M - 1)), max_size=M))
    def publish(self, places):
        """Publish blocks, and ask for a snapshot with each of them."""
        entries = self.entries_of(places)
        for slot, column, content in entries:
            tokens = self.blocks.tokens[slot]
            if len(tokens) >= (column + 1) * C:
                self.model.publish(slot, content, tokens[: (column + 1) * C], len(tokens))
        self.blocks.publish(entries)
        with_snapshots = partial(self.operations.publish, is_snapshot=jnp.ones(S * M, bool))
        self.cache = publish(self.cache, entries, with_snapshots, S * M)

    def attach_to(self, slot, tokens, empties):
        if empties:
            self.release([s == slot for s in range(S)])
        known = contents_of(tokens)
        before = copy.deepcopy(self.blocks)
        possible = before.attach(slot, known)
        # The prefix ends where there is a snapshot, and the other groups have their blocks.
        best, entry = 0, None
        for count in range(possible, 0, -1):
            entry = self.model.find(known[count - 1])
            if (
                entry is not None
                and copy.deepcopy(self.blocks).attach(slot, known[:count]) == count
            ):
                best = count
                break
        if best:
            assert entry is not None
            self.blocks.attach(slot, known[:best])
            self.model.attach(slot, entry)
        digests, token_ids = as_arrays(known, M)
        self.cache, num_found, num_possible = self.operations.attach(
            self.cache, i32(slot), digests, token_ids, i32(len(known))
        )
        assert (int(num_found), int(num_possible)) == (best, possible)
        self.counts["found"] += best
        self.counts["lacking"] += possible - best

    @precondition(lambda self: len(self.model.cached) > 1)
    @rule()
    def forget(self):
        self.blocks.forget()
        self.model.forget()
        self.cache = self.operations.forget(self.cache)

    @invariant()
    def agrees_with_the_model(self):
        cache = jax.device_get(self.cache)
        *groups, states = cache.groups
        for group in groups:
            check_invariants(group.tables)
        tables, [[values, last]] = states.tables, states.pools
        check_states(tables, cache.lengths)
        check_tokens(cache, self.blocks)
        pool, model = tables.pool, self.model
        assert cache.lengths.tolist() == [len(tokens) for tokens in self.blocks.tokens]
        held = [NUM_ENTRIES if entry is None else entry for entry in model.entries]
        assert tables.entries.tolist() == held
        assert pool.ref_counts.tolist() == list(model.refs.values())
        ring = (int(pool.head) + np.arange(int(pool.num_free))) % NUM_ENTRIES
        assert pool.free_queue[ring].tolist() == list(model.free)
        assert np.flatnonzero(pool.is_cached).tolist() == sorted(model.cached)
        contents = [(entry, tokens) for entry, (_, tokens) in model.cached.items()]
        contents += [(e, t) for e, t in zip(held, self.blocks.tokens, strict=True) if t]
        for entry, tokens in contents:
            for layer in range(L):
                found = values[layer, entry, 0], last[layer, entry].astype(np.float32).tolist()
                assert found == expected_state(tokens, layer)


TestHistories = pytest.mark.slow(StatesMachine.TestCase)
TestHistories.settings = SETTINGS


def run_engine(machine: StatesMachine, num_steps: int) -> dict[str, int]:
    """Attach, append, publish, fork, swap and release sequences in full pools."""
    rng = np.random.default_rng(0)
    machine.start()
    for _ in range(num_steps):
        slot = int(rng.integers(S))
        if machine.blocks.tokens[slot] and rng.random() < 0.5:
            machine.release([s == slot for s in range(S)])
        if not machine.blocks.tokens[slot] and machine.published:
            tokens = machine.published[rng.integers(len(machine.published))]
            machine.attach_to(slot, tokens, False)
        machine.append_to_the_next_block(slot, bool(rng.random() < 0.8))
        if rng.random() < 0.3:
            machine.append_planned([int(bool(t)) for t in machine.blocks.tokens], 1)
        if rng.random() < 0.2:
            machine.reorder([int(parent) for parent in rng.integers(-1, S, size=S)])
        if rng.random() < 0.2:
            machine.swap(slot, slot)
        machine.agrees_with_the_model()
    return machine.counts


@pytest.mark.slow
def test_histories_like_an_engine_match_the_model():
    counts = run_engine(StatesMachine(), 150)
    assert counts.pop("refused") and min(counts.values()) > 10, counts


@pytest.mark.slow
def test_histories_match_the_model_outside_of_jit():
    machine = StatesMachine()
    machine.operations = Operations(wrap=lambda operation: operation)
    assert run_engine(machine, 25)["found"]
