"""The device's side of the engine: weights, cache and slots, and the programs that change them.

This is the mechanism: the `Memory` that the scheduler drives, and what the engine runs its plans
with. Nothing here decides what runs. Tokens of sequences are the host's; should a step be cut
short, `reset` makes an empty state, and every sequence can be computed again from its tokens.

**The finite list of programs.** Sizes are padded to a few buckets, so that `warmup` can compile all
that will ever run:

    prefill          T: powers of two from 16 to max_chunk;  B: 1, 4, 16, ..., B * T <= max_chunk
    score            T: 128;  B: 1, for log-probabilities of prompts
    decode, verify   B: powers of two up to the number of slots; with candidates 1 and all slots
    all others       one shape each

Beam search is not on the list, because its programs depend on the width: `warmup` leaves them out.
"""

import concurrent.futures
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from paged_jax.cache.blocks import num_blocks_needed
from paged_jax.cache.digests import digest_words
from paged_jax.models.llama import Llama, create_cache
from paged_jax.runner import decoding, programs
from paged_jax.runner.buckets import (
    chunk_buckets,
    pack,
    prefill_rows,
    row_bucket,
    row_buckets,
)
from paged_jax.runner.decoding import DecodeState, StepTokens
from paged_jax.runner.sizes import Sizes
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.scheduler.sequence import Sequence

# Blocks that one call publishes: a call for each block would cost more than the padding.
_PUBLISH_WIDTH = 32
# Digests that the host remembers, for each block of the pool: the device is asked which of them are
# still cached when they are more.
_MAX_PUBLISHED = 4
_MAX_COMPILERS = 8
_ASSIGNMENT = "choice of tokens"


class Draw(NamedTuple):
    """How the tokens of a sequence are drawn, for `decoding.assign`."""

    params: SamplingParams
    seed: int
    sample_index: int


class ModelRunner:
    """Runs a model over a paged cache: chunks of prompts, forks, and steps of decoding.

    Args:
      model: the weights.
      sizes: what shapes the programs.
      num_blocks: P, blocks in the pool.
      cache_dtype: of K and V.
      cascade: whether decoding reads shared blocks once, see `Llama.decode`.
      backend: of the attention.
      eos_token_ids: the model's end tokens.
      draw_of: how the tokens of a sequence are drawn.
      on_compile: called with one line before a program is compiled.
    """

    def __init__(
        self,
        model: Llama,
        sizes: Sizes,
        num_blocks: int,
        *,
        cache_dtype: DTypeLike,
        cascade: bool,
        backend: str | None,
        eos_token_ids: frozenset[int],
        draw_of: Callable[[Sequence], Draw],
        on_compile: Callable[[str], None] | None = None,
    ):
        graphdef, weights = nnx.split(model)
        arrays, treedef = jax.tree.flatten(weights)
        self._graphdef, self._treedef = graphdef, treedef
        # Bound to where they are (nothing is copied), as everything that comes later will be: a
        # program is compiled once for arrays that are bound to a device and once for others.
        self._weights = [jax.device_put(x, _in_auto_mode(x.sharding)) for x in arrays]
        self._placement = _placement_beside(self._weights)
        self._programs = programs.programs(graphdef, treedef, cascade, backend, self._placement)
        self._device = next(iter(self._weights[0].devices()))
        self._config = model.config
        self._cache_dtype = cache_dtype
        self._eos_token_ids = sorted(eos_token_ids)
        self._draw_of = draw_of
        self._on_compile = on_compile or (lambda line: None)
        self._num_top = min(MAX_LOGPROBS, model.config.vocab_size)
        self._compiled: set[str] = set()
        self.sizes = sizes
        self.num_blocks = num_blocks
        self.compile_seconds = 0.0
        self.swap_seconds = 0.0
        self.num_swapped_blocks = 0
        self.num_resets = 0
        self.wait_seconds = 0.0  # in `check`
        self._state: DecodeState | None = None
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache: whatever was resident or cached is not there any more."""
        self.num_resets += 1
        self._state = None  # gives its memory back before as much is taken again
        if self._placement is None:
            with jax.default_device(self._device):
                self._state = jax.device_put(self._empty_state(), self._device)
        else:
            # One program: copies of what is made on one device would be held there beside it.
            self._state = jax.jit(self._empty_state, out_shardings=self._placement)()
        self._num_free: int | None = self.num_blocks
        # By slot: who was assigned to it, and how many of its blocks can be found.
        self._owners: list[Sequence | None] = [None] * self.sizes.num_slots
        self._num_published = [0] * self.sizes.num_slots
        # All digests that are cached, and some that are no more: others need no look-up.
        self._published: set[bytes] = set()
        # Gathered for the next program: what a step publishes and releases costs few calls.
        self._to_publish: list[tuple[int, int, bytes, list[int]]] = []
        self._to_release: list[int] = []
        # Whether blocks sufficed for the programs that were queued since the last fetch.
        self._oks: list[jax.Array] = []

    def _empty_state(self) -> DecodeState:
        cache = create_cache(
            self._config,
            num_slots=self.sizes.num_slots,
            max_length=self.sizes.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.sizes.block_size,
            dtype=self._cache_dtype,
            platform=self._device.platform,
        )
        return DecodeState.create(
            cache,
            self._config.vocab_size,
            max_logit_bias=self.sizes.max_logit_bias,
            max_stop_ids=self.sizes.max_stop_ids,
        )

    @property
    def state(self) -> DecodeState:
        """The device state as it is now. The next program donates it: copy what must be kept."""
        self._flush()
        assert self._state is not None
        return self._state

    # What the scheduler drives

    @property
    def num_free(self) -> int:
        """Free blocks, those that are cached included."""
        if self._num_free is None:
            self.check()
            self._num_free = int(self.state.cache.tables.pool.num_free)
        return self._num_free

    def attach(self, sequence: Sequence) -> int:
        """Begin the sequence's slot with the blocks of its tokens that are cached."""
        C, M = self.sizes.block_size, self.sizes.max_blocks_per_slot
        self._drop_evicted()
        count = (len(sequence.token_ids) - 1) // C  # its last token is always computed
        known = list(itertools.takewhile(self._published.__contains__, sequence.digests[:count]))
        if not known:
            return 0
        count = len(known)
        digests, token_ids = np.zeros((M, 8), np.uint32), np.zeros((M, C), np.int32)
        digests[:count] = digest_words(known)
        token_ids[:count] = np.reshape(sequence.token_ids[: count * C], (count, C))
        slot = slot_of(sequence)
        call = self._attach(np.int32(slot), digests, token_ids, np.int32(count))
        num_found = int(self._run(call))
        self._num_published[slot] = num_found
        return num_found * C

    def _drop_evicted(self) -> None:
        """Bound the digests that the host knows: of many, keep those that the device still has."""
        if len(self._published) <= _MAX_PUBLISHED * self.num_blocks:
            return
        pool = self.state.cache.tables.pool
        digests = np.asarray(pool.digests)[np.asarray(pool.is_cached)]
        self._published = {words.astype("<u4").tobytes() for words in digests}

    def num_held(self, sequences: list[Sequence]) -> int:
        """Blocks that nobody else holds. Waits for the device."""
        tables = self.state.cache.tables
        rows, ref_counts = jax.device_get((tables.block_tables, tables.pool.ref_counts))
        held = rows[[slot_of(sequence) for sequence in sequences]]
        counts = np.bincount(held[held < len(ref_counts)], minlength=len(ref_counts))
        return int(np.sum((counts > 0) & (counts == ref_counts)))

    def release(self, sequence: Sequence) -> None:
        """Give the blocks of the sequence's slot back; full ones stay cached until reused."""
        self.publish(sequence)
        slot = slot_of(sequence)
        self._to_release.append(slot)
        self._owners[slot] = None
        self._num_published[slot] = 0
        self._num_free = None

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks of the sequence to the host, and release them."""
        slot = np.int32(slot_of(sequence))
        with self._swapping(sequence):
            sequence.host_blocks = [
                jax.device_get(self._run(self._read_blocks(slot, first)))
                for first in self._pieces(sequence)
            ]
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring the blocks of the sequence back into its slot."""
        slot = np.int32(slot_of(sequence))
        num_tokens = np.zeros(self.sizes.num_slots, np.int32)
        num_tokens[slot] = sequence.num_computed
        with self._swapping(sequence):
            self._oks.append(self._run(self._reserve(num_tokens)))
            for first, piece in zip(self._pieces(sequence), sequence.host_blocks, strict=True):
                self._run(self._write_blocks(slot, first, piece))
        sequence.host_blocks = None

    @contextlib.contextmanager
    def _swapping(self, sequence: Sequence) -> Iterator[None]:
        """Measure what it takes to move the blocks of a sequence one way, unless it compiles."""
        self._flush()
        start, compiled = time.perf_counter(), self.compile_seconds
        yield
        jax.block_until_ready(self._state)
        if self.compile_seconds == compiled:
            self.swap_seconds += time.perf_counter() - start
            self.num_swapped_blocks += num_blocks_needed(
                sequence.num_computed, self.sizes.block_size
            )

    def _pieces(self, sequence: Sequence) -> list[np.int32]:
        """The first columns of the pieces in which a sequence's blocks are moved."""
        num_blocks = num_blocks_needed(sequence.num_computed, self.sizes.block_size)
        return [np.int32(first) for first in range(0, num_blocks, self.sizes.swap_width)]

    # What the engine runs

    def prefill(self, chunks: Rows[tuple[Sequence, int]]) -> None:
        """Compute the next tokens of some sequences: of each as many as are given."""
        counts = [count for _, count in chunks]
        for width, num_rows, indices in pack(counts, self.sizes.max_chunk, self.sizes.num_slots):
            token_ids = np.zeros((num_rows, width), np.int32)
            slots, num_tokens = _no_slots(num_rows), np.zeros(num_rows, np.int32)
            for row, index in enumerate(indices):
                sequence, count = chunks[index]
                start = sequence.num_computed
                token_ids[row, :count] = sequence.token_ids[start : start + count]
                slots[row], num_tokens[row] = slot_of(sequence), count
            self._oks.append(self._run(self._prefill(token_ids, slots, num_tokens)))

    def score(self, sequence: Sequence, count: int) -> programs.Scores:
        """As `prefill` of one sequence, and how probable each of the following tokens was."""
        width, end = self.sizes.score_width, sequence.num_computed + count
        slots, parts = np.array([slot_of(sequence)], np.int32), []
        for start in range(sequence.num_computed, end, width):
            size = min(width, end - start)
            token_ids, targets = np.zeros((1, width), np.int32), np.zeros(width, np.int32)
            token_ids[0, :size] = sequence.token_ids[start : start + size]
            targets[:size] = sequence.token_ids[start + 1 : start + size + 1]
            call = self._score(token_ids, slots, np.array([size], np.int32), targets)
            scores, ok = jax.device_get(self._run(call))
            _check(ok)
            parts.append(jax.tree.map(lambda x, n=size: x[:n], scores))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *parts)

    def fork(self, forks: Rows[tuple[Sequence, Rows[Sequence]]]) -> None:
        """Make the slots of children into copies of their parents' slots: blocks are shared."""
        if not forks:
            return
        parents = _no_slots(self.sizes.num_slots)
        for parent, children in forks:
            for child in children:
                parents[slot_of(child)] = slot_of(parent)
                self._num_published[slot_of(child)] = self._num_published[slot_of(parent)]
        self._oks.append(self._run(self._fork(parents)))

    def decode(
        self, sequences: Rows[Sequence], num_steps: int, *, leave_on_stop: bool, with_top: bool
    ) -> StepTokens:
        """Draw up to `num_steps` tokens for each sequence, a row each. On the host."""
        slots = self._decode_slots(sequences, with_top)
        leave = np.bool_(leave_on_stop)
        return self._fetch(self._decode(slots, np.int32(num_steps), leave, with_top))

    def verify(
        self, sequences: Rows[Sequence], drafts: Rows[Rows[int]], *, with_top: bool
    ) -> StepTokens:
        """As `decode`, for sequences whose next tokens somebody has guessed."""
        slots = self._decode_slots(sequences, with_top)
        guesses = np.zeros((slots.size, self.sizes.num_drafts), np.int32)
        num_drafts = np.zeros(slots.size, np.int32)
        for row, draft in enumerate(drafts):
            guesses[row, : len(draft)], num_drafts[row] = draft, len(draft)
        return self._fetch(self._verify(guesses, num_drafts, slots, with_top))

    def beam(
        self, beams: Rows[tuple[int, int, int]], *, num_rows: int, num_top: int
    ) -> programs.BeamTokens:
        """Let beams go on, and find the most probable tokens after each. On the host.

        Args:
          beams: ``(parent, slot, token_id)`` each: the slot becomes what the slot `parent` was
            before this call, and takes the token.
          num_rows: how many beams there may be; calls for as many share a compiled program.
          num_top: how many tokens to find.
        """
        size = row_bucket(num_rows, self.sizes.num_slots)
        parents, slots = _no_slots(self.sizes.num_slots), _no_slots(size)
        token_ids = np.zeros(size, np.int32)
        for row, (parent, slot, token_id) in enumerate(beams):
            parents[slot], slots[row], token_ids[row] = parent, slot, token_id
        tokens = jax.device_get(self._run(self._beam(parents, token_ids, slots, num_top)))
        self.check()
        _check(tokens.ok)
        self._num_free = int(tokens.num_free)
        return tokens

    def _fetch(self, call: "Call") -> StepTokens:
        tokens = self._run(call)
        self.check()  # after the call is queued, so that the device goes on with it
        tokens = jax.device_get(tokens)
        self._num_free = int(tokens.num_free)
        return tokens

    def check(self) -> None:
        """Wait for what is queued but the last call to decode, and see that blocks sufficed for it.

        Raises:
          RuntimeError: they did not, so that the state is not what the host takes it for.
        """
        start, oks = time.perf_counter(), self._oks
        self._oks = []
        _check(*jax.device_get(oks))
        self.wait_seconds += time.perf_counter() - start

    def _decode_slots(self, sequences: Rows[Sequence], with_top: bool) -> np.ndarray:
        """The slots of the sequences, padded with -1, and told to the device where it is new."""
        for sequence in sequences:
            if self._owners[slot_of(sequence)] is not sequence:
                self._assign(sequence)
        size = row_bucket(len(sequences), self.sizes.num_slots, with_top)
        slots = _no_slots(size)
        slots[: len(sequences)] = [slot_of(sequence) for sequence in sequences]
        return slots

    def publish(self, sequence: Sequence) -> None:
        """Let other sequences find the full blocks of this one."""
        if sequence.chain is None:
            return
        C, slot = self.sizes.block_size, slot_of(sequence)
        for column in range(self._num_published[slot], sequence.num_computed // C):
            token_ids = sequence.token_ids[column * C : (column + 1) * C]
            self._to_publish.append((slot, column, sequence.digests[column], token_ids))
            self._published.add(sequence.digests[column])
            self._num_published[slot] = column + 1

    def reset_prefix_cache(self) -> None:
        """Let no block be found any more."""
        self.num_resets += 1
        self._run(self._forget())
        self._published.clear()
        self._num_published = [0] * self.sizes.num_slots

    def replace_weights(self, weights: list[jax.Array]) -> None:
        """Go on with other weights of the same shapes. Everything cached belongs to the old."""
        self._weights = weights

    @property
    def model(self) -> Llama:
        """The model over the weights as they are now."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, self._weights))

    @property
    def weights(self) -> list[jax.Array]:
        """The arrays of the model, in the order of its flattened state."""
        return self._weights

    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile the programs of the list above. No slot may be in use.

        Args:
          report: called with the number of programs done, their total, and the name of one that is
            done.
        """
        new = [call for call in self.all_calls() if call.name not in self._compiled]
        start = time.perf_counter()
        # Compilers leave Python's lock alone, so that threads make use of several cores; each takes
        # some 100 MB for a model of 30 layers.
        num_threads = min(os.cpu_count() or 1, _MAX_COMPILERS)
        with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
            compiling = {threads.submit(self._compile, call): call for call in new}
            done = concurrent.futures.as_completed(compiling)
            for count, future in enumerate(done, 1):
                future.result()
                if report:
                    report(count, len(new), compiling[future].name)
        for call in new:
            self._compiled.add(call.name)
            self._call(call)
        # Not one program but two of `decoding.assign`, which no slot can be left out of.
        self._state = decoding.assign(
            self.state,
            0,
            SamplingParams(),
            token_ids=[0],
            num_prompt_tokens=1,
            seed=0,
            max_length=2,
        )
        self._compiled.add(_ASSIGNMENT)
        jax.block_until_ready(self.state)
        self.compile_seconds += time.perf_counter() - start

    def _compile(self, call: "Call") -> None:
        # What is lowered from the same shapes later finds the executable that belongs to it.
        call.program.lower(self._weights, self._state, *call.args, **call.static).compile()

    def all_calls(self) -> list["Call"]:
        """Each program once, in a call that leaves every row out and changes nothing."""
        S, C, M = self.sizes.num_slots, self.sizes.block_size, self.sizes.max_blocks_per_slot
        zero, nobody, no_tokens = np.int32(0), _no_slots(1), np.zeros(1, np.int32)
        calls = []
        for T in chunk_buckets(self.sizes.max_chunk):
            for B in prefill_rows(T, self.sizes.max_chunk, S):
                calls.append(
                    self._prefill(np.zeros((B, T), np.int32), _no_slots(B), np.zeros(B, np.int32))
                )
        row = np.zeros((1, self.sizes.score_width), np.int32)
        calls.append(self._score(row, nobody, no_tokens, row[0]))
        for with_top in (False, True):
            for B in row_buckets(S, with_top):
                calls.append(self._decode(_no_slots(B), zero, np.bool_(0), with_top))
                if self.sizes.num_drafts:
                    drafts = np.zeros((B, self.sizes.num_drafts), np.int32)
                    no_drafts = np.zeros(B, np.int32)
                    calls.append(self._verify(drafts, no_drafts, _no_slots(B), with_top))
        piece = jax.tree.map(
            lambda pool: np.zeros(
                (pool.shape[0], self.sizes.swap_width, *pool.shape[2:]), pool.dtype
            ),
            self.state.cache.pools,
        )
        return [
            *calls,
            self._fork(_no_slots(S)),
            self._release(np.zeros(S, bool)),
            self._reserve(np.zeros(S, np.int32)),
            self._attach(zero, np.zeros((M, 8), np.uint32), np.zeros((M, C), np.int32), zero),
            self._publish([]),
            self._forget(),
            self._read_blocks(zero, zero),
            self._write_blocks(zero, zero, piece),
        ]

    # The call of each program

    def _prefill(self, token_ids, slots, num_tokens) -> "Call":
        B, T = token_ids.shape
        program = self._programs.prefill
        return Call(f"prefill of {B} x {T} tokens", program, token_ids, slots, num_tokens)

    def _score(self, token_ids, slots, num_tokens, targets) -> "Call":
        name = f"score of {targets.size} tokens"
        args = token_ids, slots, num_tokens, targets
        return Call(name, self._programs.score, *args, num_top=self._num_top)

    def _decode(self, slots, num_steps, leave_on_stop, with_top) -> "Call":
        name = f"decode of {slots.size} samples" + _variant(with_top)
        args = slots, num_steps, leave_on_stop
        num_top = self._num_top if with_top else 0
        return Call(
            name,
            self._programs.decode,
            *args,
            max_steps=self.sizes.dispatch_capacity,
            num_top=num_top,
        )

    def _verify(self, drafts, num_drafts, slots, with_top) -> "Call":
        name = f"verification of {slots.size} samples" + _variant(with_top)
        num_top = self._num_top if with_top else 0
        return Call(name, self._programs.verify, drafts, num_drafts, slots, num_top=num_top)

    def _beam(self, parents, token_ids, slots, num_top) -> "Call":
        name = f"beam search of {slots.size} beams with {num_top} candidates"
        return Call(name, self._programs.beam, parents, token_ids, slots, num_top=num_top)

    def _fork(self, parents) -> "Call":
        return Call("fork of samples", self._programs.fork, parents)

    def _release(self, mask) -> "Call":
        return Call("release of slots", self._programs.release, mask)

    def _reserve(self, num_tokens) -> "Call":
        return Call("reservation of blocks", self._programs.reserve, num_tokens)

    def _attach(self, slot, digests, token_ids, num_blocks) -> "Call":
        args = slot, digests, token_ids, num_blocks
        return Call("look-up of cached blocks", self._programs.attach, *args)

    def _publish(self, blocks: Rows[tuple[int, int, bytes, list[int]]]) -> "Call":
        slots, columns = _no_slots(_PUBLISH_WIDTH), np.zeros(_PUBLISH_WIDTH, np.int32)
        digests = np.zeros((_PUBLISH_WIDTH, 8), np.uint32)
        token_ids = np.zeros((_PUBLISH_WIDTH, self.sizes.block_size), np.int32)
        for row, (slot, column, digest, tokens) in enumerate(blocks):
            slots[row], columns[row], token_ids[row] = slot, column, tokens
            digests[row] = digest_words([digest])[0]
        args = slots, columns, digests, token_ids
        return Call("registration of cached blocks", self._programs.publish, *args)

    def _forget(self) -> "Call":
        return Call("emptying of the prefix cache", self._programs.forget)

    def _read_blocks(self, slot, first) -> "Call":
        name, program = "copy of blocks to the host", self._programs.read_blocks
        return Call(name, program, slot, first, width=self.sizes.swap_width)

    def _write_blocks(self, slot, first, values) -> "Call":
        name, program = "copy of blocks from the host", self._programs.write_blocks
        return Call(name, program, slot, first, values)

    # Running them

    def _run(self, call: "Call") -> Any:
        """Run a program after all that was gathered before it, and return its result."""
        self._flush()
        return self._call(call)

    def _call(self, call: "Call") -> Any:
        self._num_free = None
        with self._compiling(call.name):
            self._state, result = call.program(
                self._weights, self._state, *call.args, **call.static
            )
        return result

    def _flush(self) -> None:
        """Publish and release what was gathered, in this order."""
        while self._to_publish:
            part = self._to_publish[:_PUBLISH_WIDTH]
            self._call(self._publish(part))
            del self._to_publish[: len(part)]
        if self._to_release:
            mask = np.zeros(self.sizes.num_slots, bool)
            mask[self._to_release] = True
            self._call(self._release(mask))
            self._to_release.clear()

    def _assign(self, sequence: Sequence) -> None:
        """Tell the device how the sequence that has this slot now is drawn."""
        draw, slot, state = self._draw_of(sequence), slot_of(sequence), self.state
        with self._compiling(_ASSIGNMENT):
            self._state = decoding.assign(
                state,
                slot,
                draw.params,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                seed=draw.seed,
                sample_index=draw.sample_index,
                eos_token_ids=self._eos_token_ids,
                max_length=sequence.max_length,
            )
        self._owners[slot] = sequence

    @contextlib.contextmanager
    def _compiling(self, program: str) -> Iterator[None]:
        """Around the call of a program: say so, and count the time, if it compiles here."""
        if program in self._compiled:
            yield
            return
        self._on_compile(f"compiling {program}")
        start = time.perf_counter()
        yield
        self._compiled.add(program)
        self.compile_seconds += time.perf_counter() - start


class Call:
    """A program of the list, and what it is called with after weights and state."""

    def __init__(self, name: str, program: Any, *args: Any, **static: Any):
        self.name = name
        self.program = program
        self.args = args
        self.static = static


def _no_slots(count: int) -> np.ndarray:
    return np.full(count, -1, np.int32)


def slot_of(sequence: Sequence) -> int:
    """The slot of a resident sequence."""
    assert sequence.slot is not None
    return sequence.slot


def _variant(with_top: bool) -> str:
    return " with candidates" if with_top else ""


def _in_auto_mode(sharding: Sharding) -> Sharding:
    """The same places, left to `jit` to divide products by, whatever the mode of the mesh."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    names = sharding.mesh.axis_names
    auto = (AxisType.Auto,) * len(names)
    mesh = Mesh(np.asarray(sharding.mesh.devices), names, axis_types=auto)
    return NamedSharding(mesh, sharding.spec)


def _placement_beside(weights: list[jax.Array]) -> Sharding | None:
    """Where all but weights go: whole on each of their devices. None if that is one device."""
    first = weights[0].sharding
    if any(x.sharding.device_set != first.device_set for x in weights):
        raise ValueError(
            "Engine: sharding must place all weights on the same devices, got different ones. "
            "Replicate those that are not divided."
        )
    if len(first.device_set) == 1:
        return None
    if not isinstance(first, NamedSharding):
        raise ValueError(
            "Engine: sharding must be a NamedSharding for more than one device, got "
            f"{type(first).__name__}."
        )
    return NamedSharding(first.mesh, PartitionSpec())


def _check(*oks: np.ndarray) -> None:
    if not all(oks):
        raise RuntimeError(
            "Engine: blocks must suffice for what the scheduler plans, got too few. This is a "
            "defect of the engine; no request is lost by it."
        )
