"""Pictures of the documentation, drawn from the real state of the library.

    python docs/make_pictures.py              # writes docs/pictures/*.png

A token is a word here, and its key contains its letters, so the words in the pools are read from
the pools. The steps come from an engine with a small random model.
"""

import argparse
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx

from paged_jax import Engine, Llama, LlamaConfig, PagedCache, RequestOutput, SamplingParams
from paged_jax.cache import paged_cache
from paged_jax.cache.blocks import num_blocks_needed
from paged_jax.cache.digests import PrefixChain, digest_words, root_digest
from paged_jax.cache.groups import locate
from paged_jax.kernels import paged_attention, paged_write

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402, after the choice of how to draw
from matplotlib.patches import Patch, Rectangle  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "pictures"

BLOCK_SIZE, NUM_BLOCKS = 4, 7
MOST_LETTERS = 12
COLORS = ("#4c8dd6", "#e5904a", "#57a773")
SHARED, CACHED, GRAY = "#9b6fc4", "#f3e3a3", "#b0b0b0"
WAITS, READS, DECODES = "#d9d9d9", "#4c8dd6", "#57a773"

_ROW = 0.3  # height of a word
_BLOCK = BLOCK_SIZE * _ROW
_GAP = 1.5  # between sequences and pool


class Panel(NamedTuple):
    """A moment of a cache: a description, and the names of its slots."""

    title: str
    cache: PagedCache
    names: Sequence[str]


def empty_cache() -> PagedCache:
    """Create a cache with one layer and one head. A key contains the letters of a word."""
    return PagedCache.create(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=1,
        block_size=BLOCK_SIZE,
        head_dim=MOST_LETTERS,
        num_slots=3,
        max_blocks_per_slot=4,
    )


def write(cache: PagedCache, slot: int, text: str) -> PagedCache:
    """Append words to a slot, as a model appends keys and values."""
    words = text.split()
    start = int(cache.lengths[slot])
    num_tokens = jnp.zeros(cache.num_slots, jnp.int32).at[slot].set(len(words))
    cache, ok = paged_cache.reserve(cache, num_tokens, max_tokens=16)
    assert ok
    positions = jnp.arange(start, start + len(words), dtype=jnp.int32)
    blocks, offsets = locate(cache.tables, jnp.full_like(positions, slot), positions)
    letters = [[*map(ord, word.ljust(MOST_LETTERS))] for word in words]
    keys = jnp.array(letters, jnp.float32)[:, None]
    return cache.replace_pools(paged_write(cache.k, cache.v, keys, keys, blocks, offsets))


def tables_panels() -> list[Panel]:
    """Return two sequences with alternating blocks."""
    cache = write(empty_cache(), 0, "paged attention reads keys and")
    cache = write(cache, 1, "a block table says where")
    cache = write(cache, 0, "values where they lie")
    return [Panel("Each sequence is a list of blocks, anywhere in the pool", cache, "AB")]


def sharing_panels() -> list[Panel]:
    """Return a fork that shares all blocks; the first writer gets a copy of the last block."""
    cache = write(empty_cache(), 0, "once upon a time there was")
    forked, ok = paged_cache.fork(cache, jnp.array([-1, 0, -1]))
    assert ok
    copied = write(forked, 1, "a cat")
    both = write(copied, 0, "nobody")
    return [
        Panel("1. Sharing: B is forked from A, and both tables have the same blocks", forked, "AB"),
        Panel("2. Copy-on-write: B writes, so its last block is copied first", copied, "AB"),
        Panel("3. A writes into a block with a single holder: nothing is copied", both, "AB"),
    ]


def prefix_panels() -> list[Panel]:
    """Return a sequence that ends, and the next sequence, which finds its blocks."""
    system = "you are a helpful assistant , be brief"
    first, second = f"{system} what is paging ? it", f"{system} why small blocks ?"
    published = publish(write(empty_cache(), 0, first), 0, first)
    digests = PrefixChain(root_digest(b"weights"), BLOCK_SIZE).digests(_token_ids(second))
    attached, num_found = paged_cache.attach(
        paged_cache.release(published, jnp.array([True, False, False])),
        1,
        jnp.asarray(digest_words(digests)),
        _full_blocks(second),
        len(digests),
    )
    rest = " ".join(second.split()[int(num_found) * BLOCK_SIZE :])
    complete = write(attached, 1, rest)
    return [
        Panel("1. A runs: its full blocks can be found by their tokens", published, "AB"),
        Panel("2. A has ended. B begins with the same words, and gets the blocks", attached, "AB"),
        Panel("3. Only the rest of B is computed, in a new block", complete, "AB"),
    ]


def _token_ids(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) >> 1 for word in text.split()]


def _full_blocks(text: str) -> jax.Array:
    ids = _token_ids(text)
    return jnp.array(ids[: len(ids) // BLOCK_SIZE * BLOCK_SIZE]).reshape(-1, BLOCK_SIZE)


def free_list_panels() -> list[Panel]:
    """Return allocations from the free list, and two sequences that free their blocks."""
    cache = write(empty_cache(), 0, "paged attention reads keys and values")
    cache = write(cache, 1, "a block table says where")
    ended = paged_cache.release(cache, jnp.array([True, False, False]))
    cached = paged_cache.release(publish(ended, 1, "a block table says where"), jnp.arange(3) == 1)
    new = write(cached, 2, "new sequences take blocks from the head of the list ,")
    return [
        Panel("1. All blocks are free, and the list holds their ids", empty_cache(), "ABC"),
        Panel("2. A and B took blocks from the head of the list", cache, "ABC"),
        Panel("3. A has ended: its blocks are at the head", ended, "ABC"),
        Panel("4. B has ended: block 2 can still be found, so it goes to the tail", cached, "ABC"),
        Panel("5. C took blocks from the head; block 2 remains in the cache", new, "ABC"),
    ]


def publish(cache: PagedCache, slot: int, text: str) -> PagedCache:
    """Register the full blocks of a slot, so that they can be found by their words."""
    digests = PrefixChain(root_digest(b"weights"), BLOCK_SIZE).digests(_token_ids(text))
    columns = jnp.arange(len(digests), dtype=jnp.int32)
    slots, words = jnp.full_like(columns, slot), jnp.asarray(digest_words(digests))
    return paged_cache.publish(cache, slots, columns, words, _full_blocks(text))


def draw_free_list(panels: Sequence[Panel]) -> Any:
    """Draw the pool of each panel, and below it the free list."""
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 1.75 * len(panels)), layout="constrained"
    )
    for each, panel in zip(axes, panels, strict=True):
        pool = panel.cache.tables.pool
        places = (int(pool.head) + np.arange(int(pool.num_free))) % pool.num_blocks
        queue = np.asarray(pool.free_queue)[places].tolist()
        for block in range(pool.num_blocks):
            _draw_square(each, 1.9 + 1.05 * block, 1.3, block, panel)
        for place, block in enumerate(queue):
            _draw_square(each, 1.9 + 1.05 * place, 0, block, panel)
        each.text(0, 1.65, "pool", fontsize=11, va="center")
        each.text(0, 0.35, "free list", fontsize=11, va="center")
        if queue:
            each.text(1.8, 0.35, "head", fontsize=9, ha="right", va="center", color="#707070")
        each.set_title(panel.title, fontsize=13, loc="left")
        each.set(xlim=(-0.1, 2 + 1.05 * pool.num_blocks), ylim=(-0.15, 2.1))
        each.axis("off")
    return figure


def _draw_square(axes: Any, x: float, y: float, block: int, panel: Panel) -> None:
    """Draw a block as a square with its number, and with the name of its sequence."""
    pool, tables = panel.cache.tables.pool, np.asarray(panel.cache.block_tables)
    label, color = f"{block}", GRAY
    if bool(pool.is_cached[block]):
        label, color = f"{block}, cached", CACHED
    elif pool.ref_counts[block]:
        [slot] = np.flatnonzero((tables == block).any(axis=1)).tolist()
        label, color = f"{block}: {panel.names[slot]}", COLORS[slot]
    axes.add_patch(Rectangle((x, y), 1, 0.7, facecolor=color, alpha=0.35, edgecolor=color))
    axes.text(x + 0.5, y + 0.35, label, fontsize=10, ha="center", va="center")


def draw_panels(panels: Sequence[Panel]) -> Any:
    """Draw the panels below each other."""
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 3.5 * len(panels)), squeeze=False, layout="constrained"
    )
    for each, panel in zip(axes[:, 0], panels, strict=True):
        _draw(each, panel)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    cache = panel.cache
    left = 0.0
    for slot in np.flatnonzero(cache.lengths).tolist():
        left += 1.2 + _draw_sequence(axes, cache, slot, panel.names[slot], left)
    for block in range(cache.num_blocks):
        _draw_pool_block(axes, cache, block)
    axes.set_title(panel.title, fontsize=13, loc="left")
    axes.set(xlim=(-0.15, _pool_x(cache.num_blocks)), ylim=(-0.85, 2 * _BLOCK + _GAP + 0.5))
    axes.axis("off")


def _pool_x(block: int) -> float:
    return 1.15 * block


def _draw_sequence(axes: Any, cache: PagedCache, slot: int, name: str, left: float) -> int:
    """Draw a slot's blocks in order, with arrows into the pool, and return their number."""
    color, length = COLORS[slot], int(cache.lengths[slot])
    row = np.asarray(cache.block_tables[slot])[: num_blocks_needed(length, BLOCK_SIZE)].tolist()
    top = _BLOCK + _GAP
    blocks = f"block{'s' * (len(row) > 1)} {', '.join(map(str, row))}"
    label = f"{name}: {length} tokens in {blocks}"
    axes.text(left, top + _BLOCK + 0.12, label, fontsize=11, color=color, weight="bold")
    for column, block in enumerate(row):
        words = _words(cache, block)[: length - column * BLOCK_SIZE]
        _draw_block(axes, left + column, top, words, color)
        axes.annotate(
            "",
            # Arrows of two slots to the same block end next to each other.
            xy=(_pool_x(block) + 0.44 + 0.12 * slot, _BLOCK + 0.02),
            xytext=(left + column + 0.5, top),
            arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6},
        )
    return len(row)


def _draw_pool_block(axes: Any, cache: PagedCache, block: int) -> None:
    count = int(cache.tables.pool.ref_counts[block])
    is_cached = bool(cache.tables.pool.is_cached[block])
    if count == 0:
        color, note = CACHED if is_cached else GRAY, "free"
    elif count == 1:
        [slot] = np.flatnonzero((np.asarray(cache.block_tables) == block).any(axis=1))
        color, note = COLORS[slot], "1 holder"
    else:
        color, note = SHARED, f"{count} holders"
    note += ",\ncan be found" if is_cached else ""
    x = _pool_x(block)
    _draw_block(axes, x, 0, _words(cache, block), color, is_held=count > 0)
    axes.text(x + 0.5, -0.1, f"block {block}\n{note}", ha="center", va="top", fontsize=9)


def _words(cache: PagedCache, block: int) -> list[str]:
    letters = np.asarray(cache.k[0, block, 0]).astype(int)
    return ["".join(map(chr, row)).strip(" \0") for row in letters]


def _draw_block(
    axes: Any, x: float, y: float, words: Sequence[str], color: str, is_held: bool = True
) -> None:
    """Draw a block of KV memory as a column of words, the first word on top."""
    alpha = 0.25 if is_held else 0.5 if color == CACHED else 0.12
    axes.add_patch(Rectangle((x, y), 1, _BLOCK, facecolor=color, alpha=alpha, linewidth=0))
    edge, line = (color, "-") if is_held else ("#808080", ":")
    frame = Rectangle((x, y), 1, _BLOCK, fill=False, linewidth=1.5, edgecolor=edge, linestyle=line)
    axes.add_patch(frame)
    for place, word in enumerate(words):
        height = y + _BLOCK - (place + 0.5) * _ROW
        tint = "black" if is_held else "#707070"
        axes.text(x + 0.5, height, word, ha="center", va="center", fontsize=10, color=tint)


PROMPT_LENS = (20, 6, 12, 20, 5)
NEW_LENS = (9, 4, 6, 5, 5)
ARRIVALS = (0, 0, 1, 3, 6)


class Trace(NamedTuple):
    """Record of the steps of an engine.

    Attributes:
      starts: start of each step, in seconds of `time.perf_counter`.
      num_tokens: for each step, number of tokens of each request, by its number.
      num_blocks: for each step, number of used blocks at its end.
      outputs: the last output of each request, by its number.
    """

    starts: list[float]
    num_tokens: list[dict[int, int]]
    num_blocks: list[int]
    outputs: dict[int, RequestOutput]


def run_engine() -> Trace:
    """Serve five requests, three at a time; the fourth begins like the first."""
    engine = _small_engine()
    prompts = [[(7 * i + 3 * n) % 31 + 1 for i in range(n)] for n in PROMPT_LENS]
    prompts[3] = [*prompts[0][:16], 9, 9, 9, 9]
    trace = Trace([], [], [], {})
    while len(trace.starts) <= max(ARRIVALS) or engine.has_unfinished:
        for number, arrival in enumerate(ARRIVALS):
            if arrival == len(trace.starts):
                params = SamplingParams(temperature=0, max_tokens=NEW_LENS[number], ignore_eos=True)
                prompt = {"prompt_token_ids": prompts[number]}
                engine.add_request(prompt, params, request_id=str(number))
        trace.starts.append(time.perf_counter())
        trace.num_tokens.append({})
        for output in engine.step():
            number = int(output.request_id)
            before = trace.outputs.get(number)
            num_before = len(before.outputs[0].token_ids) if before else 0
            trace.num_tokens[-1][number] = len(output.outputs[0].token_ids) - num_before
            trace.outputs[number] = output
        trace.num_blocks.append(round(engine.cache_use * engine.num_blocks))
    return trace


def _small_engine() -> Engine:
    # The model of the pages, so that tests of both share compiled programs.
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return Engine(
        Llama(config, rngs=nnx.Rngs(0)),
        block_size=4,
        num_blocks=24,
        max_num_seqs=3,
        max_chunk=8,
        max_num_batched_tokens=11,
        steps_per_dispatch=1,
        preemption="recompute",  # "auto" depends on how fast the machine is
    )


class SoftmaxStep(NamedTuple):
    """State of the online softmax after a block.

    Attributes:
      scores: scores of all tokens so far.
      peak: the running maximum.
      factor: factor of the earlier terms of the sums.
      total: the running denominator.
    """

    scores: np.ndarray
    peak: float
    factor: float
    total: float


def softmax_steps() -> list[SoftmaxStep]:
    """Attend to three blocks one after the other, and compare the result with the op."""
    table, length, head_dim = [2, 0, 3], 11, 16
    k_pool, v_pool = jax.random.normal(jax.random.key(0), (2, 1, 4, 1, BLOCK_SIZE, head_dim))
    q = jax.random.normal(jax.random.key(363), (1, 1, head_dim))  # the maximum grows twice
    steps, scores, peak, total = [], np.zeros(0), -np.inf, 0.0
    for column, block in enumerate(table):
        num_tokens = min(BLOCK_SIZE, length - column * BLOCK_SIZE)
        new = np.asarray(k_pool[0, block, 0] @ q[0, 0])[:num_tokens] * head_dim**-0.5
        scores, old_peak, peak = np.append(scores, new), peak, max(peak, float(new.max()))
        factor = float(np.exp(old_peak - peak))
        total = factor * total + float(np.exp(new - peak).sum())
        steps.append(SoftmaxStep(scores, peak, factor, total))
    _, lse = paged_attention(
        q, k_pool, v_pool, jnp.array([table]), jnp.array([length]), return_lse=True
    )
    assert np.isclose(peak + np.log(total), lse[0, 0], atol=1e-5)
    return steps


def draw_softmax(steps: Sequence[SoftmaxStep]) -> Any:
    """Draw scores and weights after each block."""
    figure, axes = pyplot.subplots(
        2, len(steps), figsize=(10, 4.8), sharex=True, sharey="row", layout="constrained"
    )
    num_tokens = len(steps[-1].scores)
    for number, step in enumerate(steps):
        (top, below), places = axes[:, number], np.arange(len(step.scores))
        colors = [COLORS[place // BLOCK_SIZE] for place in places]
        top.bar(places, step.scores, color=colors)
        top.axhline(step.peak, color="black", linewidth=1, linestyle="--")
        top.set_title(f"after block {number + 1}: maximum m = {step.peak:.2f}", fontsize=11)
        below.bar(places, np.exp(step.scores - step.peak), color=colors)
        sums = f"denominator l = {step.total:.2f}"
        if number:
            sums += f"\nearlier terms times {step.factor:.2f}"
        below.set_title(sums, fontsize=11)
        below.set(xlim=(-0.7, num_tokens - 0.3), xticks=range(num_tokens), xlabel="token")
        for each in (top, below):
            each.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("score s", fontsize=11)
    axes[1, 0].set_ylabel("weight exp(s - m)", fontsize=11)
    return figure


def draw_trace(trace: Trace) -> Any:
    """Draw a row for each request, with the used blocks below."""
    figure, (rows, use) = pyplot.subplots(
        2, 1, figsize=(10, 5.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for number, output in trace.outputs.items():
        _draw_request(rows, trace, number, output)
    names = [
        f"request {number + 1}\n{PROMPT_LENS[number]} prompt tokens"
        + (f",\n{output.num_cached_tokens} found in the cache" if output.num_cached_tokens else "")
        for number, output in sorted(trace.outputs.items())
    ]
    rows.set_yticks(range(len(names)), names, fontsize=10)
    rows.set_ylim(len(names) - 0.4, -0.6)
    kinds = {"waits": WAITS, "reads its prompt": READS, "gets a token": DECODES}
    handles = [Patch(color=color, label=label) for label, color in kinds.items()]
    rows.legend(handles=handles, loc="lower left", fontsize=10)
    rows.set_title("Three slots, five requests: the next request starts when one ends", loc="left")
    steps = range(len(trace.starts))
    use.bar(steps, trace.num_blocks, width=0.9, color=GRAY)
    use.set_ylabel("blocks held\n(of 24)", fontsize=10)
    use.set_xlabel("step", fontsize=11)
    use.set_xticks(list(steps))
    for each in (rows, use):
        each.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_request(axes: Any, trace: Trace, number: int, output: RequestOutput) -> None:
    first = output.metrics.first_scheduled_time
    assert first is not None and output.finished
    # The request was first scheduled in the last step that began before that time.
    scheduled = sum(start <= first for start in trace.starts) - 1
    counts = [step.get(number, 0) for step in trace.num_tokens]
    for step in range(ARRIVALS[number], max(np.flatnonzero(counts)) + 1):
        color = WAITS if step < scheduled else DECODES if counts[step] else READS
        axes.barh(number, 0.94, left=step - 0.47, height=0.7, color=color)


def figures() -> dict[str, Any]:
    """Return every picture, by the name of its file."""
    return {
        "block-tables.png": draw_panels(tables_panels()),
        "online-softmax.png": draw_softmax(softmax_steps()),
        "free-list.png": draw_free_list(free_list_panels()),
        "sharing.png": draw_panels(sharing_panels()),
        "prefix-cache.png": draw_panels(prefix_panels()),
        "continuous-batching.png": draw_trace(run_engine()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: docs/pictures)")
    folder = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures().items():
        # Without the version of matplotlib, which would change the file but not the picture.
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        pyplot.close(figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
