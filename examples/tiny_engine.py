"""A continuous-batching engine in one file: how paged attention serves a language model.

    python examples/tiny_engine.py                # six texts with the small bundled model, offline
    python examples/tiny_engine.py --trace        # also shows what happens to each block
    python examples/tiny_engine.py --prompt "It is" --prompt "She was" --num-tokens 30

Read it from top to bottom, in about an hour. `docs/paged-attention.md` has pictures of blocks, and
walks through a run of this file. `paged_jax.Engine` is the engine for real use. It has the same
parts, and its greedy tokens are the same: the tests compare them.

The idea
--------

In each layer, a model stores a key and a value vector (K and V) of each token that it has read. The
cache keeps them in BLOCKS of a fixed number of tokens. A running request has a SLOT, which is a row
of the block table. The row lists the blocks of the request in the order of its tokens::

    slot 0, 10 tokens   [ 4  7  1 ]        blocks of 4 tokens; the last block has room for 2 more
    slot 1,  9 tokens   [ 4  7  3 ]        blocks 4 and 7 are shared: the texts begin equally

A block can be anywhere in memory and in several rows. So no memory is reserved for tokens that do
not exist yet, and equal beginnings are stored and computed once.

The loop
--------

A step of the engine (`Engine.step`) goes once from left to right. Requests join and leave between
any two steps: this is continuous batching::

    waiting --> admit --> find prefix --> read a chunk --> fork samples --> decode --> new tokens
       ^        a slot    `attach`        `prefill`        `fork`           `decode`      |
       |                                     |                                 |          |
       +---- preempt the newest request, <---+------- too few free blocks -----+          |
             `publish`, `release`                                                         |
                                                         finished: `publish`, `release` <-+

- One request at a time reads its prompt, and it reads one chunk per step. So a long prompt delays
  the requests that decode by a chunk in each step. No request is admitted before its end.
- A request reads all tokens except the last, which is the first input of `decode`. So tokens are
  drawn in one place, whether a request is new, a copy of another one, or was preempted.

The life of a block
-------------------
::

    +------+  allocated  +----------------------+  shared  +--------------+
    | free | ----------> |      in one row      | -------> | in many rows |
    +------+ <---------- +----------------------+ <------- +--------------+
                freed      |       ^          ^      left
        freed, and         |       | found    | evicted, and
        has a name         v       |          | allocated
                         +----------------------+
                         | free, but has a name |
                         +----------------------+

- allocated: the next token of a request needs a new block (in `prefill` and `decode`).
- shared: a row begins with blocks of another row, because a prompt has several samples
  (`_fork_samples`), or because two texts begin equally (`_find_prefix`). This only increases a
  reference count. No K and V are copied or computed.
- copied: full blocks are never written again. So a copy is needed only if the last block of a row
  is in many rows and not full: in the first `decode` after a fork. All these rows but one leave the
  block, and get a copy in a newly allocated block.
- published: a full block gets a name, by which later requests find it (`_publish`). It stays where
  it is in the drawing: blocks in rows have names, too.
- left, freed: a request ends or is preempted (`_leave`). If other requests share the block, its
  reference count decreases, otherwise it is free. A free block with a name keeps its content.
- found: like shared, but the block was free (`_find_prefix`).
- evicted: a block is needed, and all free blocks have names. The block that became free first is
  allocated, and loses its name and content. Rows are freed from their end: beginnings stay longest.
"""

import argparse
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from paged_jax import BlockTables, Decoder, PagedCache, PagedModel, Tokenizer
from paged_jax import cache as paged

# ---------------------------------------------------------------------------------------- requests


@dataclass(eq=False)
class Request:
    """A text that the engine continues.

    Apart from its options, the tokens are the whole state of a request. K and V can be computed
    from them again, so a preemption costs time, but loses nothing.

    Attributes:
      id: number of the request. Older requests have lower numbers.
      token_ids: the prompt, then the generated tokens.
      max_length: number of tokens at which the text ends.
      temperature: 0 for the most likely token, above 0 for random draws.
      seed: chooses the random draws.
      samples: other continuations of the same prompt, which start when the prompt has been read.
      slot: row of the block table; -1 while the request waits.
      num_computed: number of tokens with K and V in the cache.
      num_reused: number of tokens that were in the cache when the request last got a slot.
      num_preemptions: number of times that the request lost its slot.
    """

    id: int
    token_ids: list[int]
    max_length: int
    temperature: float
    seed: int
    samples: list["Request"] = field(default_factory=list)
    slot: int = -1
    num_computed: int = 0
    num_reused: int = 0
    num_preemptions: int = 0

    @property
    def can_decode(self) -> bool:
        """Whether all tokens but the last are computed. The last is the input of `decode`."""
        return self.num_computed == len(self.token_ids) - 1


class Scheduler:
    """Decides which requests run. It knows slots and requests, but neither blocks nor arrays.

    First come, first served: the requests of `running`, followed by those of `waiting`, are always
    in the order of arrival. If too few blocks are free, the newest running request makes room. So
    the oldest request is never preempted, and it always finishes, because `Engine.add` accepts only
    requests that fit into the cache alone. Then another request is the oldest.
    """

    def __init__(self, num_slots: int):
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots = list(range(num_slots))
        self.is_full = False  # blocks ran out, and no request has finished since

    @property
    def reader(self) -> Request | None:
        """The request that reads its prompt. It is the newest: none is admitted while it reads."""
        return next((request for request in self.running if not request.can_decode), None)

    @property
    def decoding(self) -> list[Request]:
        """The requests that get a token in this step."""
        return [request for request in self.running if request.can_decode]

    def admit(self) -> Request | None:
        """Give a slot to the first waiting request, if there is a slot and its turn has come.

        No request is admitted after a preemption (see `preempt`), or while another one reads its
        prompt. Afterwards the blocks of that prompt have names, so equal prompts are computed once.
        """
        if not self.waiting or not self.free_slots or self.reader or self.is_full:
            return None
        request = self.waiting.popleft()
        self._start(request)
        return request

    def admit_samples(self, request: Request) -> list[Request]:
        """Give slots to the other samples of a request whose prompt has been read.

        Others wait at the front of the queue. They find the full blocks that are not evicted then.
        """
        num_started = min(len(request.samples), len(self.free_slots))
        started, others = request.samples[:num_started], request.samples[num_started:]
        request.samples = []
        for sample in started:
            self._start(sample)
            sample.num_computed = sample.num_reused = request.num_computed
        self.waiting.extendleft(reversed(others))
        return started

    def preempt(self, request: Request) -> None:
        """Take the slot from the newest running request, and put it at the front of the queue.

        No request is admitted until another one finishes. Otherwise this request would take back
        in the next step the blocks that the others need.
        """
        self._stop(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.is_full = True

    def finish(self, request: Request) -> None:
        """Take the slot from a request that has ended."""
        self._stop(request)
        self.is_full = False

    def _start(self, request: Request) -> None:
        request.slot = self.free_slots.pop(0)
        self.running.append(request)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.free_slots.append(request.slot)
        request.slot = -1


# ---------------------------------------------------------------------------------------- programs
#
# All work on the device is done by six compiled functions of the cache. Two of them run the model,
# and four change only `cache.tables`. These are the rows (`block_tables` and `lengths`), and a pool
# with the reference count of each block (the number of rows that it is in), its name, if it has one
# (`is_cached`), and a queue of the free blocks. No code outside of the cache counts blocks.
#
# - The cache is donated: JAX reuses its memory for the result, and deletes the old arrays. So K and
#   V are written in place. Otherwise each call would copy the whole cache.
# - Shapes are fixed: unused rows have the slot (or the parent) -1, and other padding is zeros after
#   a given number. So each function is compiled once, whatever requests run.
# - `prefill` and `decode` first allocate and copy the blocks that they need. If too few are free,
#   they change nothing, and return ok = False. The model runs all the same, so this costs time.
#
# Dimensions: S slots, T tokens in a chunk, C tokens in a block, M blocks in a row of the table.

compiled = functools.partial(jax.jit, donate_argnames="cache")


@compiled
def prefill(
    cache: PagedCache, model: PagedModel, *chunk: jax.Array
) -> tuple[PagedCache, jax.Array]:
    """Store K and V of a chunk of a prompt: tokens [1, T], slot [1], number of tokens [1].

    Nothing is drawn here, so the logits are not used, and the compiler omits them.
    """
    _, cache, ok = model.prefill(cache, *chunk)
    return cache, ok


@compiled
def decode(
    cache: PagedCache,
    model: PagedModel,
    token_ids: jax.Array,
    slots: jax.Array,
    temperatures: jax.Array,
    seeds: jax.Array,
) -> tuple[PagedCache, tuple[jax.Array, jax.Array]]:
    """Store K and V of the last token of each request, and draw the next token; all arrays are [S].

    If the last block of a row is full, a new one is allocated. If it is shared and not full, all
    rows that share it get a copy, except for the last one, which keeps it. Row i belongs to
    slot i, so the new lengths of the slots are the positions of the drawn tokens.
    """
    logits, cache, ok = model.decode(cache, token_ids, slots)
    return cache, (draw(logits, temperatures, seeds, cache.lengths), ok)


def draw(
    logits: jax.Array, temperatures: jax.Array, seeds: jax.Array, positions: jax.Array
) -> jax.Array:
    """Draw a token for each row.

    The random key depends only on seed and position, not on the batch or on preemptions. Logits
    differ by rounding. So the same token is drawn, unless two candidates are that close.
    """
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))
    scaled = logits / jnp.maximum(temperatures, 1e-6)[:, None]
    random = jax.vmap(jax.random.categorical)(keys(seeds, positions), scaled)
    return jnp.where(temperatures > 0, random, jnp.argmax(logits, axis=-1))


@compiled
def attach(cache: PagedCache, *prefix: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Start an empty slot with named blocks of its text, up to the first name that no block has.

    `prefix` is the slot, the names [M, 8], the tokens [M, C], and the number of names. The tokens
    are compared too, in case two texts have the same name. Return the number of blocks.
    """
    return paged.attach(cache, *prefix)


@compiled
def fork(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Make empty slots copies of their `parents` [S], -1 for the other slots. Return ok."""
    return paged.fork(cache, parents)


@compiled
def publish(cache: PagedCache, *blocks: jax.Array) -> tuple[PagedCache, None]:
    """Give names to full blocks: slots [M], columns of the table [M], names [M, 8], tokens [M, C].

    A block that has a name keeps it. If another block has the name, because two requests computed
    the same text, the block gets none.
    """
    return paged.publish(cache, *blocks), None


@compiled
def release(cache: PagedCache, mask: jax.Array) -> tuple[PagedCache, None]:
    """Empty slots, and free the blocks that no other slot uses."""
    return paged.release(cache, mask), None


def name_blocks(token_ids: list[int], tables: BlockTables) -> tuple[np.ndarray, np.ndarray]:
    """Name each full block of a text by a hash of its tokens and of the name of the block before.

    K and V of a token depend on all tokens before it. Equal names mean that two texts are equal up
    to the end of the block, so K and V are equal too. To be simple, each call names all blocks.

    Returns:
      The names u32 [M, 8], and the tokens of the blocks i32 [M, C], padded with zeros.
    """
    M, C = tables.max_blocks_per_slot, tables.block_size
    names, blocks = np.zeros((M, 8), np.uint32), np.zeros((M, C), np.int32)
    name = b""
    for column in range(len(token_ids) // C):
        blocks[column] = token_ids[column * C : (column + 1) * C]
        name = hashlib.sha256(name + blocks[column].tobytes()).digest()
        names[column] = np.frombuffer(name, np.uint32)
    return names, blocks


# ------------------------------------------------------------------------------------------- trace


class Event(NamedTuple):
    """Something that happened to a block, or the preemption of a request.

    Attributes:
      kind: "preempted", or a word of the list under the drawing.
      request: id of the request; None for "published" and "evicted".
      block: id of the block; None for "preempted".
      target: id of the new block, for "copied".
    """

    kind: str
    request: int | None = None
    block: int | None = None
    target: int | None = None

    def __str__(self) -> str:
        request = "" if self.request is None else f"request {self.request}"
        block = "" if self.block is None else f"block {self.block}"
        target = "" if self.target is None else f" to block {self.target}"
        return f"    {request:11} {self.kind:10} {block}{target}".rstrip()


def block_events(
    before: BlockTables, after: BlockTables, owners: dict[int, int]
) -> Iterator[Event]:
    """Compare the block tables before and after a program: the life of a block as code.

    The engine does not need it. `owners` has the id of the request in each slot.
    """
    old_pool, new_pool, no_block = before.pool, after.pool, after.num_blocks
    for block in np.flatnonzero(old_pool.is_cached & ~new_pool.is_cached).tolist():
        yield Event("evicted", block=block)
    for slot, column in np.argwhere(before.block_tables != after.block_tables).tolist():
        old, new = int(before.block_tables[slot, column]), int(after.block_tables[slot, column])
        request = owners[slot]
        if new == no_block:
            yield Event("left" if new_pool.ref_counts[old] > 0 else "freed", request, old)
        elif old != no_block:
            yield Event("copied", request, old, target=new)
        elif old_pool.ref_counts[new] > 0:
            yield Event("shared", request, new)
        elif old_pool.is_cached[new] and new_pool.is_cached[new]:
            yield Event("found", request, new)
        else:
            yield Event("allocated", request, new)
    for block in np.flatnonzero(new_pool.is_cached & ~old_pool.is_cached).tolist():
        yield Event("published", block=block)


# ------------------------------------------------------------------------------------------ engine


class Engine:
    """The loop, and the cache that it works on.

    Args:
      model: the model, for example `Decoder.from_pretrained()`.
      num_slots: maximum number of requests that run at the same time (S).
      num_blocks: number of blocks in the cache, shared by all slots.
      block_size: number of tokens in a block (C).
      chunk_size: maximum number of prompt tokens that a step reads (T).
      trace: called with each `Event`, if given.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        num_slots: int = 4,
        num_blocks: int = 64,
        block_size: int = 8,
        chunk_size: int = 16,
        trace: Callable[[Event], object] | None = None,
    ):
        if min(num_slots, num_blocks, block_size, chunk_size) < 1:
            raise ValueError(
                "Engine: num_slots, num_blocks, block_size and chunk_size must be at least 1, got "
                f"{num_slots}, {num_blocks}, {block_size} and {chunk_size}."
            )
        self.model, self.chunk_size, self.trace = model, chunk_size, trace
        self.max_length = min(model.config.max_position_embeddings, num_blocks * block_size)
        self.cache = model.create_cache(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_length=self.max_length,
        )
        self.scheduler = Scheduler(num_slots)
        self.ids = itertools.count()

    def add(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        *,
        num_samples: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Request]:
        """Queue a prompt. Return a request for each sample; each step appends to its tokens.

        Only the first sample is queued. `_fork_samples` starts the others. Sample i has seed + i.
        """
        if not prompt_ids or min(max_tokens, num_samples) < 1 or not temperature >= 0:
            raise ValueError(
                "add: a prompt must have tokens, max_tokens and num_samples must be at least 1, "
                f"and temperature at least 0, got {len(prompt_ids)} prompt tokens, {max_tokens=}, "
                f"{num_samples=} and {temperature=}."
            )
        last = self.model.config.vocab_size - 1
        if unknown := [token for token in prompt_ids if not 0 <= token <= last]:
            raise ValueError(f"add: prompt_ids must be from 0 to {last}, got {unknown[0]}.")
        if not 0 <= seed <= 2**31 - num_samples:
            raise ValueError(f"add: seed must be from 0 to 2**31 - num_samples, got {seed}.")
        max_length = len(prompt_ids) + max_tokens
        if max_length > self.max_length:
            raise ValueError(
                f"add: a prompt and its new tokens must have at most {self.max_length} tokens, the "
                f"length that the blocks and the model allow, got {max_length}."
            )
        requests = [
            Request(
                id=next(self.ids),
                token_ids=list(prompt_ids),
                max_length=max_length,
                temperature=temperature,
                seed=seed + sample,
            )
            for sample in range(num_samples)
        ]
        requests[0].samples = requests[1:]
        self.scheduler.waiting.append(requests[0])
        return requests

    @property
    def has_unfinished(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[tuple[Request, int]]:
        """Advance all requests, as drawn at the top of this file.

        Returns:
          The new tokens with their requests. The caller can show them at once: this is streaming.
        """
        if request := self.scheduler.admit():
            self._find_prefix(request)
        if request := self.scheduler.reader:
            self._read_chunk(request)
        for request in self.scheduler.decoding:  # only the newest can have samples to start
            self._fork_samples(request)
        return self._decode()

    def _find_prefix(self, request: Request) -> None:
        """Let a request share the published blocks at the beginning of its text.

        The last token is never looked up: it must be computed, so that the next one can be drawn.
        """
        token_ids, block_size = request.token_ids[:-1], self.cache.block_size
        names, blocks = name_blocks(token_ids, self.cache.tables)
        num_full = len(token_ids) // block_size
        num_found = self._run(attach, request.slot, names, blocks, num_full)
        request.num_computed = request.num_reused = int(num_found) * block_size

    def _read_chunk(self, request: Request) -> None:
        """Compute the next tokens of a prompt, or of a text that was preempted."""
        chunk = request.token_ids[request.num_computed : -1][: self.chunk_size]
        token_ids = np.zeros((1, self.chunk_size), np.int32)
        token_ids[0, : len(chunk)] = chunk
        slots, num_tokens = np.array([request.slot]), np.array([len(chunk)])
        if self._run(prefill, self.model, token_ids, slots, num_tokens):
            request.num_computed += len(chunk)
            self._publish(request)
        else:
            self._preempt_newest()  # this is the reader

    def _fork_samples(self, request: Request) -> None:
        """Let the other samples of a prompt, if any, share all blocks of the first one.

        This includes the last block. If it is not full, the next token of each request belongs into
        it. So `decode` gives a copy to all of them but one.
        """
        samples = self.scheduler.admit_samples(request)
        if samples:
            parents = np.full(self.cache.num_slots, -1, np.int32)
            parents[[sample.slot for sample in samples]] = request.slot
            ok = self._run(fork, parents)
            assert ok, "a fork needs no blocks, and the slots of the samples are empty"

    def _decode(self) -> list[tuple[Request, int]]:
        """Draw a token for each request. If too few blocks are free, make room and draw again."""
        requests = self.scheduler.decoding
        if not requests:
            return []
        num_slots = self.cache.num_slots
        token_ids, seeds = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        slots, temperatures = np.full(num_slots, -1, np.int32), np.zeros(num_slots, np.float32)
        for request in requests:
            row = request.slot
            slots[row], token_ids[row] = row, request.token_ids[-1]
            temperatures[row], seeds[row] = request.temperature, request.seed
        drawn, ok = self._run(decode, self.model, token_ids, slots, temperatures, seeds)
        if not ok:
            self._preempt_newest()
            return self._decode()
        tokens = np.asarray(drawn).tolist()
        return [(request, self._append(request, tokens[request.slot])) for request in requests]

    def _append(self, request: Request, token: int) -> int:
        """Append a drawn token to its request, which may end with it. Return the token."""
        request.num_computed += 1
        request.token_ids.append(token)
        is_end = token in self.model.config.eos_token_ids
        if is_end or len(request.token_ids) == request.max_length:
            self._leave(request)
            self.scheduler.finish(request)
        return token

    def _preempt_newest(self) -> None:
        """Take the blocks of the newest request, so that the others can continue.

        When it is admitted again, it finds its full blocks that were not evicted, and computes the
        rest from its tokens.
        """
        request = self.scheduler.running[-1]
        if self.trace:
            self.trace(Event("preempted", request=request.id))
        self._leave(request)
        self.scheduler.preempt(request)

    def _leave(self, request: Request) -> None:
        """Free the blocks of a request that ends or is preempted. Full blocks get names first."""
        self._publish(request)
        self._run(release, np.arange(self.cache.num_slots) == request.slot)

    def _publish(self, request: Request) -> None:
        """Give names to the full blocks of a request, so that `attach` finds them."""
        token_ids = request.token_ids[: request.num_computed]
        columns = np.arange(self.cache.tables.max_blocks_per_slot, dtype=np.int32)
        is_full = columns < len(token_ids) // self.cache.block_size
        slots = np.where(is_full, request.slot, -1).astype(np.int32)
        self._run(publish, slots, columns, *name_blocks(token_ids, self.cache.tables))

    def _run(self, program: Callable[..., tuple[PagedCache, Any]], *args: Any) -> Any:
        """Replace the cache by the result of a program, and trace the events of blocks.

        The cache changes only here.
        """
        if self.trace is None:
            self.cache, result = program(self.cache, *args)
            return result
        before = jax.tree.map(np.array, self.cache.tables)  # copies, because JAX deletes the arrays
        self.cache, result = program(self.cache, *args)
        after = jax.tree.map(np.array, self.cache.tables)
        owners = {request.slot: request.id for request in self.scheduler.running}
        for event in block_events(before, after, owners):
            self.trace(event)
        return result


# ------------------------------------------------------------------------------------ command line

PROMPTS = [
    "It is a truth universally acknowledged, that a single man must be in want of a wife.",
    "It is a truth universally acknowledged, that a single man was in the garden.",
    "Elizabeth was",
]


def main(arguments: list[str] | None = None) -> None:
    """Continue several prompts with the bundled model, and print the tokens of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", action="append", help="a text to continue; may be repeated")
    parser.add_argument("--num-tokens", type=int, default=24, help="tokens to generate per text")
    parser.add_argument("--num-samples", type=int, default=2, help="continuations per prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--num-blocks", type=int, default=14, help="blocks in the cache")
    parser.add_argument("--trace", action="store_true", help="print what happens to each block")
    args = parser.parse_args(arguments)

    model = Decoder.from_pretrained()
    tokenizer = Tokenizer.from_folder(Path(paged_jax.__file__).parent / "models" / "bundled")
    try:
        engine = Engine(model, num_blocks=args.num_blocks, trace=print if args.trace else None)
        requests = [
            request
            for seed, prompt in enumerate(args.prompt or PROMPTS)
            for request in engine.add(
                tokenizer.encode(prompt),
                args.num_tokens,
                num_samples=args.num_samples,
                temperature=args.temperature,
                seed=seed * args.num_samples,
            )
        ]
    except ValueError as error:
        parser.error(str(error))

    step = 0
    while engine.has_unfinished:
        print(f"step {step}")
        texts = [(each.id, tokenizer.decode([token])) for each, token in engine.step()]
        if texts:
            print("".join(f"  {id}: {text!r}" for id, text in texts), flush=True)
        step += 1
    for request in requests:
        print(
            f"\nrequest {request.id}: reused {request.num_reused} tokens, preempted "
            f"{request.num_preemptions} times\n{tokenizer.decode(request.token_ids)}"
        )


if __name__ == "__main__":
    main()
