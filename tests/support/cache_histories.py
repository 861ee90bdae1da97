"""Random histories of a cache with several groups, compared with a plain model of its blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paged_jax.cache import CacheGroup, PagedCache, contents, paged_cache
from paged_jax.cache.groups import locate
from paged_jax.kernels import Pools
from tests.support.block_model import Content
from tests.support.block_tables import contents_of, i32
from tests.support.window_model import GroupsModel

S, M, C = 4, 8, 4
MAX_TOKENS = 6
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

# Writes tokens `i32[S, MAX_TOKENS]` at positions `starts` of all slots; -1 is no token.
Write = Callable[[PagedCache, jax.Array, jax.Array], PagedCache]

JIT = partial(jax.jit, donate_argnums=0)

slots_of = partial(st.lists, min_size=S, max_size=S)


def make_groups(
    windows: list[int | None], num_blocks: list[int], latent: int | None = None
) -> tuple[CacheGroup, ...]:
    """Return empty groups. The group of index `latent` has latent vectors and no values."""
    return tuple(
        CacheGroup.create(
            num_layers=1, num_blocks=count, num_kv_heads=1, block_size=C,
            head_dim=3 if group == latent else 1, value_dim=0 if group == latent else None,
            num_slots=S, max_blocks_per_slot=M, window=window,
        )
        for group, (count, window) in enumerate(zip(num_blocks, windows, strict=True))
    )  # fmt: skip


def write_tokens(cache: PagedCache, starts: jax.Array, tokens_SN: jax.Array) -> PagedCache:
    """Write the K of tokens to the slots, from the given positions; -1 is no token.

    The first element of K is the number of the token.
    """
    slots = jnp.repeat(jnp.arange(S, dtype=jnp.int32), tokens_SN.shape[1])
    steps = jnp.arange(tokens_SN.shape[1], dtype=jnp.int32)
    positions = (starts[:, None] + steps[None]).reshape(-1)
    slots = jnp.where(tokens_SN.reshape(-1) < 0, -1, slots)

    def put(group: CacheGroup) -> CacheGroup:
        blocks, offsets = locate(group.tables, slots, positions)
        values = tokens_SN.reshape(-1).astype(jnp.float32)
        k = group.pools.k.at[0, blocks, 0, offsets, 0].set(values, mode="drop")
        return group.replace_pools(Pools(k, group.pools.v))

    groups = map(put, cache.block_groups)
    return cache.replace_groups([*groups, *cache.groups[len(cache.block_groups) :]])


def check_tokens(cache: PagedCache, blocks: GroupsModel) -> None:
    """Check the tokens of each slot in all groups, as far as the groups keep them."""
    for group, model in zip(cache.block_groups, blocks.models, strict=True):
        for row, tokens in zip(model.blocks, model.tokens, strict=True):
            held = [block for block in row if block is not None]
            kept = group.pools.k[0, held, 0, :, 0].reshape(-1)
            first = row.count(None)
            assert kept.tolist()[: len(tokens) - first * C] == tokens[first * C :]


def swap(cache: PagedCache, source: jax.Array, target: jax.Array):
    """Read everything of a slot, release it, and restore it in another slot or the same."""
    num_tokens, groups = cache.lengths[source], range(len(cache.groups))
    saved = [contents.read_blocks(cache, source, 0, width=M, group=group) for group in groups]
    slots = jnp.arange(S, dtype=jnp.int32)
    cache = paged_cache.release(cache, slots == source)
    counts = jnp.where(slots == target, num_tokens, 0)
    cache, ok = paged_cache.restore(cache, counts, max_tokens=M * C)
    target = jnp.where(ok & (num_tokens > 0), target, S)
    for group, values in enumerate(saved):
        cache = contents.write_blocks(cache, target, 0, values, group=group)
    return cache, ok


def append(write: Write, cache: PagedCache, counts: jax.Array, tokens_SN: jax.Array):
    starts = cache.lengths
    cache, ok = paged_cache.reserve(cache, counts, max_tokens=MAX_TOKENS)
    return write(cache, starts, jnp.where(ok, tokens_SN, -1)), ok


def append_planned(
    write: Write, cache: PagedCache, limits: jax.Array, most: jax.Array, tokens_SN: jax.Array
):
    """Append as many tokens as there are blocks for, up to `most` per slot."""
    starts = cache.lengths
    cache, planned = paged_cache.plan(cache, limits, most, max_tokens=MAX_TOKENS, backend=None)
    num_new = jnp.minimum(limits, planned[0].num_tokens)
    cache = paged_cache.commit(cache, planned, starts + num_new)
    is_new = jnp.arange(MAX_TOKENS, dtype=jnp.int32)[None] < num_new[:, None]
    return write(cache, starts, jnp.where(is_new, tokens_SN, -1)), planned[0].num_tokens


class CacheOperations:
    """Operations on a cache with fixed shapes. `wrap` compiles them."""

    def __init__(self, write: Write, wrap: Callable[..., Any]):
        self.append = wrap(partial(append, write))
        self.append_planned = wrap(partial(append_planned, write))
        self.fork = wrap(paged_cache.fork)
        self.release = wrap(paged_cache.release)
        self.reorder = wrap(paged_cache.reorder)
        self.publish = wrap(paged_cache.publish)
        self.forget = wrap(paged_cache.forget)


class CacheMachine(RuleBasedStateMachine):
    """Operations that add tokens to a cache and to the model of its blocks.

    A subclass has `windows`, `num_blocks` and `operations`, and defines `make_cache`, `reserve`,
    `publish` and `attach_to`.
    """

    windows: list[int | None]
    num_blocks: list[int]
    operations: Any

    @initialize()
    def start(self):
        self.cache = self.make_cache()
        self.blocks = GroupsModel(self.windows, self.num_blocks, S, M, C)
        self.num_written = 0
        self.published = []  # for each of the latest published blocks: all tokens up to its end

    def make_cache(self) -> PagedCache:
        raise NotImplementedError

    def reserve(self, new: list[list[int]]) -> bool:
        """Append tokens to the model, and return whether there were enough blocks."""
        raise NotImplementedError

    def publish(self, places: list[tuple[int, int]]) -> None:
        raise NotImplementedError

    def attach_to(self, slot: int, tokens: list[int], empties: bool) -> int:
        raise NotImplementedError

    def new_tokens(self, counts: list[int], alike: bool) -> list[list[int]]:
        """Return new unique tokens or, if alike, tokens that depend only on the position."""
        self.num_written += 1000
        starts = [len(t) if alike else self.num_written + 100 * s
                  for s, t in enumerate(self.blocks.tokens)]  # fmt: skip
        return [[*range(a, a + n)] for a, n in zip(starts, counts, strict=True)]

    def as_array(self, new: list[list[int]]) -> jax.Array:
        return i32([(tokens + [-1] * MAX_TOKENS)[:MAX_TOKENS] for tokens in new])

    @rule(counts=slots_of(st.integers(0, MAX_TOKENS + 1)), alike=st.booleans())
    def append(self, counts, alike):
        new = self.new_tokens(counts, alike)
        expected = self.reserve(new)
        self.cache, ok = self.operations.append(self.cache, i32(counts), self.as_array(new))
        assert bool(ok) == expected

    @rule(limits=slots_of(st.integers(0, MAX_TOKENS)), most=st.integers(0, MAX_TOKENS))
    def append_planned(self, limits, most):
        new = self.new_tokens(limits, alike=False)
        self.cache, num_tokens = self.operations.append_planned(
            self.cache, i32(limits), i32(most), self.as_array(new)
        )
        # Like `plan`, the model frees blocks even if there is no room.
        for count in range(most, -1, -1):
            for model in self.blocks.models:
                model.slide([slot for slot, limit in enumerate(limits) if limit])
            if self.reserve([tokens[:count] for tokens in new]):
                break
        assert int(num_tokens) == count

    def entries_of(self, places: list[tuple[int, int]]) -> list[tuple[int, int, Content]]:
        """Return the contents of blocks given by slot and column, and record what is published.

        A block that does not exist or is not full gets content that no block has.
        """
        entries = []
        for slot, column in places:
            tokens = self.blocks.tokens[slot] if 0 <= slot < S else []
            known = contents_of(tokens)
            is_full = 0 <= column < len(known)
            if is_full:
                self.published.append(tokens[: (column + 1) * C])
            content = known[column] if is_full else Content((1,) * 8, [1] * C)
            entries.append((slot, column, content))
        self.published = self.published[-3 * self.num_blocks[0] :]
        return entries

    @rule()
    def publish_all(self):
        self.publish([(slot, column) for column in range(M) for slot in range(S)])

    @precondition(lambda self: self.published)
    @rule(data=st.data(), slot=st.integers(-1, S), empties=st.booleans())
    def attach(self, data, slot, empties):
        self.attach_to(slot, data.draw(st.sampled_from(self.published)), empties)
