"""Compiled programs of an engine, each ``(weights, state, ...) -> (state, result)``.

The state, a `DecodeState`, is donated. The weights are a flat list of arrays, because flattening a
Flax module or hashing its graph in each call would take longer than a step of a small model.

The number of rows B and the number of tokens per row T are padded to a few sizes, so that
`list_calls` can list all programs, to compile them before the first request:

    prefill          T: powers of two from 16, and max_chunk
                     B: 1, 4, 16, ..., with B * T <= max_chunk, or max_chunk / 2 for B >= 16
                     On CPUs with the C++ kernels, T is 8, and a chunk takes several rows;
                     B * T: powers of two from 16 below max_chunk, and max_chunk * 9 / 8
    score            T: min(128, max_chunk)     B: 1     (log-probabilities of prompts)
    decode, verify   B: 1, 4, 8, 16, ... up to the number of slots
    all others       one shape each

Programs of beam search depend on the beam width, so they are compiled when they are first used.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from paged_jax.cache import paged_cache
from paged_jax.cache.contents import read_blocks, write_blocks
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.formatting import short_repr
from paged_jax.kernels.op import is_exact
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner import decoding
from paged_jax.runner.compiler import compiler_options
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.sizes import (
    PUBLISH_WIDTH,
    Sizes,
    chunk_buckets,
    no_slots,
    prefill_rows,
    row_buckets,
    tile_buckets,
)
from paged_jax.runner.weights import OF_HEADS, WHOLE, Division, Graph
from paged_jax.sampling.sample import log_sum_exp, ranks, top_logprobs


@short_repr
class Scores(NamedTuple):
    """Log-probabilities of prompt tokens, with a row per token.

    Attributes:
      logprobs: f32[T], the log-probability of each token, in nats.
      ranks: i32[T], the rank of each token; 1 is the most probable token.
      top_ids: i32[T, N], the N most probable tokens at the position of each token.
      top_logprobs: f32[T, N], the log-probabilities of `top_ids`.
    """

    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@short_repr
class BeamTokens(NamedTuple):
    """The most probable next tokens of each beam, with a row per beam.

    Attributes:
      top_ids: i32[B, N], the N most probable next tokens, the most probable first.
      top_logprobs: f32[B, N], the log-probabilities of `top_ids`.
      free_blocks: i32[] for each group of layers, the number of free blocks after the step.
      ok: bool[], False if there were too few free blocks.
    """

    top_ids: jax.Array
    top_logprobs: jax.Array
    free_blocks: tuple[jax.Array, ...]
    ok: jax.Array


class Call(NamedTuple):
    """A call of a program, without the first two arguments (weights and state).

    Attributes:
      name: description of the program and its shape, which is shown while it is compiled.
      program: the jitted function.
      args: the other arguments, arrays on the host.
      static: static arguments of the jitted function.
    """

    name: str
    program: Any
    args: tuple[Any, ...]
    static: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A jitted function of an engine, which is compiled once per shape of its arguments.

    Attributes:
      label: format string for the names of calls, with the arguments as fields.
      jitted: the jitted function.
      static: static arguments that are the same in all calls of an engine.
    """

    label: str
    jitted: Any
    static: dict[str, Any] = field(default_factory=dict)

    def call(self, *args: Any, **static: Any) -> Call:
        """Return a `Call` of this program, to pass it to `Executor.run`.

        Args:
          *args: the arguments after the weights and the state.
          **static: further static arguments.
        """
        return Call(self.label.format(*args, **static), self.jitted, args, self.static | static)


class Programs(NamedTuple):
    """All programs of an engine.

    Each entry below lists the arguments after weights and state, and then the result. Negative
    slots are padding. The result ``ok``, bool[], is False if the program changed nothing, for
    example because there were too few free blocks.

    prefill: ``(token_ids i32[B, T], slots i32[B], num_tokens i32[B])`` to ``ok``. If `Sizes.tile`
      is set, consecutive rows may have the same slot, see `PagedModel.prefill_tiles`.
    score: ``(token_ids i32[1, T], slots i32[1], num_tokens i32[1], targets i32[T])`` to
      ``(Scores, ok)``: prefill, and the log-probabilities of `targets`, the tokens that follow.
    decode: ``(slots i32[B], num_steps i32[], leave_on_stop bool[], with_top bool[])`` to
      `StepTokens`, see `decoding.decode_steps`.
    verify: ``(drafts i32[B, T], num_drafts i32[B], slots i32[B], with_top bool[])`` to
      `StepTokens`, see `decoding.verify_steps`.
    beam: ``(parents i32[S], token_ids i32[B], slots i32[B], bias_ids i32[K], bias_values
      f32[B, K], num_top=)`` to `BeamTokens`: each slot becomes a copy of its parent, see
      `cache.reorder`, and a token is appended to it. Biases are added to the log-probabilities.
    fork: ``(parents i32[S])`` to ``ok``.
    release: ``(mask bool[S])`` to None.
    reserve: ``(num_tokens i32[S])`` to ``ok``.
    attach: ``(slot i32[], digests u32[M, 8], token_ids i32[M, C], num_blocks i32[])`` to the number
      of blocks found, and the number that would be found if recurrent layers had a snapshot of
      their state after every block, i32[2].
    publish: ``(slots i32[N], columns i32[N], digests u32[N, 8], token_ids i32[N, C], is_snapshot
      bool[N])`` to None, see `cache.publish`.
    forget: ``()`` to None.
    read_blocks: ``(slot i32[], first i32[], group=)`` to copies of blocks, or of a recurrent state,
      see `cache.read_blocks`.
    write_blocks: ``(slot i32[], first i32[], values, group=)`` to None.
    """

    prefill: Program
    score: Program
    decode: Program
    verify: Program
    beam: Program
    fork: Program
    release: Program
    reserve: Program
    attach: Program
    publish: Program
    forget: Program
    read_blocks: Program
    write_blocks: Program


class ProgramKey(NamedTuple):
    """Key of compiled programs: everything they depend on, except their arguments' shapes.

    Attributes:
      graphdef: structure of the model's module, see `Graph.key`.
      treedef: tree structure of the module's state, whose leaves are the weights.
      cascade: whether decoding uses cascade attention, see `PagedModel.decode`.
      backend: backend of the attention, see `paged_attention`.
      division: execution on several devices; None for a single device.
      platform: `jax.Device.platform` of the devices.
      is_scanned: whether the model loops over its layers instead of unrolling them, see
        `compiler_options`.
    """

    graphdef: Any
    treedef: Any
    cascade: bool
    backend: str | None
    division: Division | None = None
    platform: str = "cpu"
    is_scanned: bool = False

    def model(self, weights: list[jax.Array]) -> PagedModel:
        """Return the model with the arrays `weights` as its weights."""
        return Graph.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


def list_programs(key: ProgramKey, sizes: Sizes, num_top: int, *, num_groups: int = 1) -> Programs:
    """Return the programs of an engine; engines with equal keys share compiled programs.

    Args:
      key: see `ProgramKey`.
      sizes: sizes that the programs of this engine depend on.
      num_top: maximum number of most probable tokens that a request can get.
      num_groups: number of groups of layers; each group's blocks or states are copied separately.
    """
    blocks = "blocks" if num_groups == 1 else "blocks of group {group}"
    jit = functools.partial(_jit, key)
    steps, top = {"max_steps": sizes.dispatch_capacity}, {"num_top": num_top}
    width = {"width": sizes.swap_width}
    return Programs(
        prefill=(
            Program("prefill of {0.shape[0]} x {0.shape[1]} tokens", jit(_prefill))
            if sizes.tile is None
            else Program("prefill of {0.size} tokens", jit(_prefill_tiles))
        ),
        score=Program("score of {3.size} tokens", jit(_score), top),
        decode=Program("decode of {0.size} samples", jit(_decode), steps | top),
        verify=Program("verification of {2.size} samples", jit(_verify), top),
        beam=Program("beam search of {2.size} beams with {num_top} candidates", jit(_beam)),
        fork=Program("fork of samples", jit(_fork)),
        release=Program("release of slots", jit(_release)),
        reserve=Program("reservation of blocks", jit(_reserve)),
        attach=Program("look-up of cached blocks", jit(_attach)),
        publish=Program("registration of cached blocks", jit(_publish)),
        forget=Program("emptying of the prefix cache", jit(_forget)),
        read_blocks=Program(
            f"copy of {blocks} to the host", jit(_read_blocks, result=OF_HEADS), width
        ),
        write_blocks=Program(f"copy of {blocks} from the host", jit(_write_blocks, last=OF_HEADS)),
    )


# Cache the programs of up to 16 models.
@functools.lru_cache(maxsize=16 * len(Programs._fields))
def _jit(
    key: ProgramKey,
    function: Callable[..., Any],
    *,
    last: PartitionSpec = WHOLE,
    result: PartitionSpec = WHOLE,
) -> Any:
    division = key.division

    def program(weights, state, *args, **static):
        run = functools.partial(function, key, **static)
        if division is not None:
            run = division.divide(run, last=last, result=result)
        return run(weights, state, *args)

    program.__name__ = function.__name__.strip("_")
    return jax.jit(
        program,
        donate_argnums=1,
        static_argnames=("max_steps", "num_top", "width", "group"),
        compiler_options=compiler_options(key.platform, is_unrolled=not key.is_scanned),
    )


def _prefill(key, weights, state, token_ids, slots, num_tokens):
    # The logits are not used, so XLA removes the output head from the program.
    _, cache, ok = key.model(weights).prefill(
        state.cache, token_ids, slots, num_tokens, backend=key.backend
    )
    return replace(state, cache=cache), ok


def _prefill_tiles(key, weights, state, token_ids, slots, num_tokens):
    _, cache, ok = key.model(weights).prefill_tiles(
        state.cache, token_ids, slots, num_tokens, backend=key.backend
    )
    return replace(state, cache=cache), ok


def _score(key, weights, state, token_ids, slots, num_tokens, targets, *, num_top):
    logits, cache, ok = key.model(weights).score(
        state.cache, token_ids, slots, num_tokens, backend=key.backend
    )
    backend = key.model(weights).resolve_backend(key.backend)
    return replace(state, cache=cache), (_scores(logits[0], targets, num_top, backend), ok)


def _scores(logits: jax.Array, targets: jax.Array, num_top: int, backend: str | None) -> Scores:
    logits = logits.astype(jnp.float32)
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)
    logprobs_of_top, top_ids = top_logprobs(logits, num_top, backend=backend)
    target_logits = target_logits[:, 0]
    if is_exact(backend):
        denominators = log_sum_exp(logits, backend=backend)[:, 0]
    else:
        denominators = jax.nn.logsumexp(logits, axis=-1)
    return Scores(
        logprobs=target_logits - denominators,
        ranks=ranks(logits, targets),
        top_ids=top_ids,
        top_logprobs=logprobs_of_top,
    )


def _decode(key, weights, state, slots, num_steps, leave_on_stop, with_top, *, max_steps, num_top):
    tokens, state = decoding.decode_steps(
        key.model(weights), state, slots, num_steps, leave_on_stop, with_top,
        max_steps=max_steps, num_top=num_top, cascade=key.cascade, backend=key.backend,
    )  # fmt: skip
    return state, tokens


def _verify(key, weights, state, drafts, num_drafts, slots, with_top, *, num_top):
    tokens, state = decoding.verify_steps(
        key.model(weights), state, drafts, num_drafts, slots, with_top,
        num_top=num_top, backend=key.backend,
    )  # fmt: skip
    return state, tokens


def _beam(key, weights, state, parents, token_ids, slots, bias_ids, bias_values, *, num_top):
    cache, are_slots = paged_cache.reorder(state.cache, parents)
    logits, cache, ok = key.model(weights).decode(
        cache, token_ids, slots, cascade=key.cascade, backend=key.backend
    )
    bias = (bias_ids, bias_values) if bias_ids.size else None
    logprobs_of_top, top_ids = top_logprobs(logits, num_top, bias)
    tokens = BeamTokens(top_ids, logprobs_of_top, cache.num_free_blocks, ok & are_slots)
    return replace(state, cache=cache), tokens


def _fork(key, weights, state, parents):
    cache, ok = paged_cache.fork(state.cache, parents)
    return replace(state, cache=cache), ok


def _release(key, weights, state, mask):
    return replace(state, cache=paged_cache.release(state.cache, mask)), None


def _reserve(key, weights, state, num_tokens):
    cache = state.cache
    capacity = cache.tables.max_blocks_per_slot * cache.block_size
    cache, ok = paged_cache.restore(cache, num_tokens, max_tokens=capacity, backend=key.backend)
    return replace(state, cache=cache), ok


def _attach(key, weights, state, slot, digests, token_ids, num_blocks):
    cache, num_cached, num_possible = paged_cache.attach_prefix(
        state.cache, slot, digests, token_ids, num_blocks
    )
    return replace(state, cache=cache), jnp.stack([num_cached, num_possible])


def _publish(key, weights, state, slots, columns, digests, token_ids, is_snapshot):
    cache = paged_cache.publish(state.cache, slots, columns, digests, token_ids, is_snapshot)
    return replace(state, cache=cache), None


def _forget(key, weights, state):
    return replace(state, cache=paged_cache.forget(state.cache)), None


def _read_blocks(key, weights, state, slot, first, *, width, group):
    return state, read_blocks(state.cache, slot, first, width=width, group=group)


def _write_blocks(key, weights, state, slot, first, values, *, group):
    cache = write_blocks(state.cache, slot, first, values, group=group)
    return replace(state, cache=cache), None


_MAX_COMPILERS = 8


def list_calls(
    programs: Programs, sizes: Sizes, cache: PagedCache, *, has_swap: bool = True
) -> list[Call]:
    """Return a call for each shape of each program, except for beam search.

    The arguments are padding, so the calls change nothing if all slots and the cache are empty.
    """
    S, C, M, W = sizes.num_slots, sizes.block_size, sizes.max_blocks_per_slot, PUBLISH_WIDTH
    zero = np.int32(0)
    return [
        *_prefill_calls(programs, sizes),
        programs.score.call(
            _zeros(1, sizes.score_width), no_slots(1), _zeros(1), _zeros(sizes.score_width)
        ),
        *_decode_calls(programs, sizes),
        programs.fork.call(no_slots(S)),
        programs.release.call(np.zeros(S, bool)),
        programs.reserve.call(_zeros(S)),
        programs.attach.call(zero, np.zeros((M, 8), np.uint32), _zeros(M, C), zero),
        programs.publish.call(
            no_slots(W), _zeros(W), np.zeros((W, 8), np.uint32), _zeros(W, C), np.zeros(W, bool)
        ),
        programs.forget.call(),
        *(_swap_calls(programs, sizes, cache) if has_swap else []),
    ]


def _prefill_calls(programs: Programs, sizes: Sizes) -> list[Call]:
    if sizes.tile is not None:
        shapes = [(B, sizes.tile) for B in tile_buckets(sizes)]
    else:
        shapes = [
            (B, T)
            for T in chunk_buckets(sizes.max_chunk)
            for B in prefill_rows(T, sizes.max_chunk, sizes.num_slots)
        ]
    return [programs.prefill.call(_zeros(B, T), no_slots(B), _zeros(B)) for B, T in shapes]


def _decode_calls(programs: Programs, sizes: Sizes) -> list[Call]:
    calls, false = [], np.bool_(False)
    for B in row_buckets(sizes.num_slots):
        calls.append(programs.decode.call(no_slots(B), np.int32(0), false, false))
        if T := sizes.num_drafts:
            calls.append(programs.verify.call(_zeros(B, T), _zeros(B), no_slots(B), false))
    return calls


def _swap_calls(programs: Programs, sizes: Sizes, cache: PagedCache) -> list[Call]:
    zero, calls = np.int32(0), []
    for group, cache_group in enumerate(cache.groups):
        shapes = jax.eval_shape(lambda group: group.read(zero, zero, sizes.swap_width), cache_group)
        piece = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        calls.append(programs.read_blocks.call(zero, zero, group=group))
        calls.append(programs.write_blocks.call(zero, zero, piece, group=group))
    return calls


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def shapes_of(state: DecodeState) -> Any:
    """Return the shapes, dtypes and shardings of a state, to compile programs without it."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def compile_calls(
    calls: list[Call],
    weights: list[jax.Array],
    state: DecodeState,
    resolve: Callable[[Call, list[jax.Array], DecodeState], Call],
    report: Callable[[int, int, str], None],
) -> None:
    """Compile the programs of `calls` in several threads; later calls do not compile again.

    Args:
      calls: calls that determine the programs and the shapes to compile them for.
      weights: the weights; only their shapes and dtypes matter.
      state: the state or its shapes; no program runs.
      resolve: `StoredPrograms.resolve`, which may replace the program of a call.
      report: function that is called after each program with the number of compiled programs, the
        total number of programs, and the name of the program.
    """
    # Compilation releases the GIL, so threads can use several cores. Each compilation needs about
    # 100 MB of memory for a model with 30 layers.
    num_threads = min(os.cpu_count() or 1, _MAX_COMPILERS)

    def compile_call(call: Call) -> None:
        call = resolve(call, weights, state)
        if not isinstance(call.program, jax.stages.Compiled):
            # JAX caches the executable. A later call with the same shapes does not compile again.
            call.program.lower(weights, state, *call.args, **call.static).compile()

    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        compiling = {threads.submit(compile_call, call): call for call in calls}
        for count, future in enumerate(concurrent.futures.as_completed(compiling), 1):
            future.result()
            report(count, len(calls), compiling[future].name)
