"""Steps ready to be timed: the programs of an engine, on a separate executor.

These are the programs that `LLM`, `AsyncEngine` and the server run: the executor of an engine with
its programs for decode steps and prompt chunks, and donated state. Variants change one setting of
the same steps.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.step.cases import BLOCK_SIZE, MAX_MODEL_LEN, Case
from paged_jax.cache import paged_cache
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.engine import footprint
from paged_jax.engine.device_memory import device_memory
from paged_jax.engine.pool_size import choose_pool_size, resolve_kv_dtype
from paged_jax.kernels import op
from paged_jax.kernels.backend import Kernel
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op import BACKENDS
from paged_jax.kernels.triton import write as triton_write
from paged_jax.kernels.xla.rope import rope_then_write
from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.runner.compiler import COMPILER_OPTIONS
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call, Program, ProgramKey, list_programs
from paged_jax.runner.sizes import Sizes
from paged_jax.runner.weights import Weights
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.sampling.state import Assignment

ENGINE = "engine"

# Number of decode steps per dispatch, the default of an engine.
STEPS_PER_DISPATCH = 8
# Number of slots that get a chunk in a turn.
_NUM_CHUNKS = 4
# Fraction of an accelerator's memory for the pool and everything else.
_MEMORY_FRACTION = 0.9

_GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
_SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, ignore_eos=True, max_tokens=None, seed=0
)


class Variant(NamedTuple):
    """A change of the engine's default settings.

    Attributes:
      compiler_options: options of XLA that replace the engine's; None keeps them.
      backend: backend of attention.
      query_dtype: dtype of queries, instead of the dtype of the pool.
      is_apart: whether XLA rotates queries and keys, and another kernel writes them.
      steps_per_dispatch: number of decode steps per dispatch.
      sampling: sampling parameters.
      is_bare: whether to run only `Decoder.decode`, jitted with its cache donated: no loop, no
        sampling.
      is_for: whether the variant applies to a case, on a platform.
      is_hazardous: whether the variant may hang the device or crash the process. It runs only if
        it is requested by name.
    """

    compiler_options: dict[str, Any] | None = None
    backend: str | None = None
    query_dtype: str | None = None
    is_apart: bool = False
    steps_per_dispatch: int = STEPS_PER_DISPATCH
    sampling: SamplingParams = _GREEDY
    is_bare: bool = False
    is_for: Callable[[Case, str], bool] = lambda case, platform: True
    is_hazardous: bool = False


def _decodes(case: Case, platform: str) -> bool:
    return not case.chunk


def _on_gpu(case: Case, platform: str) -> bool:
    return platform == "gpu"


def _command_buffers(kinds: str) -> dict[str, Any]:
    return _on_gpus(xla_gpu_enable_command_buffer=kinds)


def _on_gpus(**options: Any) -> dict[str, Any]:
    return {**COMPILER_OPTIONS["gpu"], **options}


VARIANTS: dict[str, Variant] = {
    ENGINE: Variant(),
    "float32 queries": Variant(query_dtype="float32", is_for=lambda _, platform: platform != "cpu"),
    "rotation and write apart": Variant(is_apart=True, is_for=_on_gpu),
    "rematerialised": Variant(compiler_options={}, is_for=_on_gpu),
    "one step a dispatch": Variant(steps_per_dispatch=1, is_for=_decodes),
    "sampled, top-k and top-p": Variant(sampling=_SAMPLED, is_for=_decodes),
    "bare step": Variant(is_bare=True, is_for=_decodes),
    "without command buffers": Variant(compiler_options=_command_buffers(""), is_for=_on_gpu),
    "matmuls by cuBLAS": Variant(
        compiler_options=_on_gpus(xla_gpu_enable_triton_gemm=False), is_for=_on_gpu
    ),
    "matmuls tuned over all tiles": Variant(
        compiler_options=_on_gpus(xla_gpu_exhaustive_tiling_search=True), is_for=_on_gpu
    ),
    # Without them, the host reads the conditions of the decode loop and of sampling.
    "loops in command buffers": Variant(
        compiler_options=_command_buffers(
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
        ),
        is_for=lambda case, platform: platform == "gpu" and not case.chunk,
        is_hazardous=True,
    ),
    "xla's attention": Variant(backend="xla", is_for=lambda _, platform: platform != "cpu"),
}
"""The default settings of the engine and the variants, by name."""


def random_model(case: Case) -> Decoder:
    """Create a model with random weights on the default device."""
    key = jax.random.key(0)

    def make(name: str, shape: tuple[int, ...], _: np.dtype) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, case.dtype)
        nonlocal key
        key, own = jax.random.split(key)
        return _normal(own, shape, case.dtype, shape[-1] ** -0.5)

    is_tpu = jax.default_backend() == "tpu"  # like `Decoder.from_pretrained`
    return ModelSpec(Decoder, case.config, case.dtype, scan_layers=is_tpu).build(make)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str, deviation: float) -> jax.Array:
    return (deviation * jax.random.normal(key, shape, dtype)).astype(dtype)


class Bench:
    """An executor with random K and V in its slots, and the steps of a case.

    Args:
      case: the case to time.
      model: weights of the case's model.
      steps_per_turn: number of decode steps of a turn, a multiple of `STEPS_PER_DISPATCH`.
    """

    def __init__(self, case: Case, model: Decoder, steps_per_turn: int):
        self.case = case
        self.steps_per_turn = steps_per_turn
        self.num_slots = _NUM_CHUNKS if case.chunk else case.batch
        self.sizes = Sizes(
            block_size=BLOCK_SIZE,
            num_slots=self.num_slots,
            max_model_len=MAX_MODEL_LEN,
            max_chunk=max(case.chunk, 512),
            max_steps=STEPS_PER_DISPATCH,
            num_drafts=0,
            max_logit_bias=32,
            max_stop_ids=16,
        )
        self._platform = jax.default_backend()
        kv_dtype = resolve_kv_dtype(case.kv_dtype, case.dtype, self._platform)
        self._num_top = min(MAX_LOGPROBS, case.config.vocab_size)
        self._weights = Weights(model)
        self._executor = Executor(
            self._weights,
            self.sizes,
            self._num_blocks(kv_dtype),
            cache_dtype=kv_dtype,
            cascade=False,
            backend=None,
        )
        self._compiled: dict[str, Callable[[], Any]] = {}
        self._fill()

    def _num_blocks(self, kv_dtype: Any) -> int:
        """Return the number of blocks an engine would choose; on a CPU only used blocks."""
        case, sizes = self.case, self.sizes
        longest = case.context + max(case.chunk, self.steps_per_turn)
        num_used = self.num_slots * (num_blocks_needed(longest, BLOCK_SIZE) + 1)
        if self._platform == "cpu":
            return num_used
        needs = footprint.footprint(
            case.config,
            sizes,
            weights=footprint.weight_bytes(case.config, case.dtype),
            formats=MatrixFormats.of_dtype(case.dtype, case.config),
            kv_dtype=kv_dtype,
            platform=self._platform,
        )
        memory = device_memory(jax.devices()[0])
        pool = choose_pool_size(
            self._platform, memory, sizes, needs, memory_fraction=_MEMORY_FRACTION
        )
        return pool.num_blocks

    def _fill(self) -> None:
        """Write random K and V for the tokens of each slot, in blocks scattered over the pool."""
        call = Call("filling", _fill, (jax.random.key(0),), {"context": self.case.context})
        ok = self._executor.run(call)
        if not ok:
            raise RuntimeError(f"{self.case}: the pool is too small")
        self._choose_tokens(_GREEDY)

    def _choose_tokens(self, params: SamplingParams) -> None:
        self._executor.assign(
            [
                Assignment(slot, params, [1], 1, seed=slot, max_length=MAX_MODEL_LEN)
                for slot in range(self.num_slots)
            ]
        )

    @property
    def num_steps(self) -> int:
        """Number of steps of a turn."""
        return self.num_slots if self.case.chunk else self.steps_per_turn

    def compile(self, name: str) -> float:
        """Compile a variant and run one turn of it. Return the seconds."""
        variant, start = VARIANTS[name], time.monotonic()
        self._compiled[name] = self._turn(variant)
        with _traced_with(variant):
            self.time(name)
        return time.monotonic() - start

    def time(self, name: str) -> float:
        """Return the seconds of a step, in one turn of a variant.

        Raises:
          RuntimeError: it did not make the requested number of steps.
        """
        if VARIANTS[name].sampling is not _GREEDY:
            self._choose_tokens(VARIANTS[name].sampling)
        lengths = np.full(self.num_slots, self.case.context, np.int32)
        taken = max(self.case.chunk, self.steps_per_turn)
        self._executor.run(Call("rewinding", _rewind, (lengths,), {"max_tokens": taken}))
        jax.block_until_ready(self._executor.state)
        start = time.perf_counter()
        results = self._compiled[name]()
        jax.block_until_ready(self._executor.state)
        seconds = time.perf_counter() - start
        grown = np.asarray(self._executor.state.cache.lengths) - self.case.context
        if not all(bool(ok) for ok in jax.device_get(results)) or np.any(grown != taken):
            raise RuntimeError(f"{name}: must append {taken} tokens per slot, got {grown.tolist()}")
        if VARIANTS[name].sampling is not _GREEDY:
            self._choose_tokens(_GREEDY)
        return seconds / self.num_steps

    def _turn(self, variant: Variant) -> Callable[[], list[Any]]:
        """Return a function that queues the calls of a turn and returns their success flags."""
        calls, run = self._calls(variant), self._executor.run
        if self.case.chunk or variant.is_bare:
            return lambda: [run(call) for call in calls]
        return lambda: [run(call).ok for call in calls]

    def _calls(self, variant: Variant) -> list[Call]:
        """Return the calls of a turn."""
        key = ProgramKey(
            self._weights.graphdef,
            self._weights.treedef,
            cascade=False,
            backend=variant.backend,
            platform=self._platform,
        )
        programs = list_programs(key, self.sizes, self._num_top)
        if self.case.chunk:
            prefill = _changed(programs.prefill, variant)
            tokens = np.ones((1, self.case.chunk), np.int32)
            counts = np.full(1, self.case.chunk, np.int32)
            each = range(self.num_slots)
            return [prefill.call(tokens, np.full(1, slot, np.int32), counts) for slot in each]
        slots = np.arange(self.num_slots, dtype=np.int32)
        if variant.is_bare:
            options = COMPILER_OPTIONS.get(self._platform)
            step = functools.partial(_bare_step, key)
            program = jax.jit(step, donate_argnums=1, compiler_options=options)
            return [Call("bare step", program, (slots,), {})] * self.steps_per_turn
        decode = _changed(programs.decode, variant)
        call = decode.call(slots, np.int32(variant.steps_per_dispatch), np.False_, np.False_)
        return [call] * (self.steps_per_turn // variant.steps_per_dispatch)


def _bare_step(key: ProgramKey, weights: Any, state: Any, slots: jax.Array) -> Any:
    logits, cache, ok = key.model(weights).decode(state.cache, state.token_ids[slots], slots)
    # The result depends on all logits, as sampling does.
    return dataclasses.replace(state, cache=cache), ok & jnp.all(jnp.isfinite(logits))


def _changed(program: Program, variant: Variant) -> Program:
    """Return a program of the engine, or a new program if its tracing or compilation differs."""
    is_traced_otherwise = variant.query_dtype is not None or variant.is_apart
    if variant.compiler_options is None and not is_traced_otherwise:
        return program
    options = variant.compiler_options
    if options is None:
        options = COMPILER_OPTIONS.get(jax.default_backend())
    # A new function, because JAX would not trace the engine's function again.
    function = program.jitted.__wrapped__
    jitted = jax.jit(
        lambda *args, **static: function(*args, **static),
        donate_argnums=1,
        static_argnames=("max_steps", "num_top", "width"),
        compiler_options=options,
    )
    return dataclasses.replace(program, jitted=jitted)


_APART = Kernel(
    functools.partial(rope_then_write, write=triton_write.write),
    BACKENDS["triton"].kernels["write"].refusal,
)


@contextlib.contextmanager
def _traced_with(variant: Variant) -> Iterator[None]:
    """Return a context for tracing, for changes that no argument of a program can make."""
    with contextlib.ExitStack() as stack:
        if variant.is_apart:
            kernels = {"rope_write": _APART}
            stack.enter_context(mock.patch.dict(BACKENDS["triton"].kernels, kernels))
        if variant.query_dtype is not None:
            dtype = jnp.dtype(variant.query_dtype)
            stack.enter_context(mock.patch.object(KVDtype, "query_dtype", dtype))
        if variant.is_apart or variant.query_dtype is not None:
            # Clear JAX's traces before and after, because they do not have these changes.
            clear_rope_write = triton_write.rope_write.clear_cache  # pyright: ignore[reportAttributeAccessIssue]
            for clear in (op.differentiable.cache_clear, clear_rope_write):
                clear()
                stack.callback(clear)
        yield


@functools.partial(jax.jit, donate_argnums=1, static_argnames="context")
def _fill(weights: Any, state: Any, key: jax.Array, *, context: int) -> Any:
    cache, keys = state.cache, jax.random.split(key, 5)
    # Values of a quantised pool use the whole range of its dtype, times their scale.
    sizes = (1.0, 1.0, 1e-3, 1e-3)
    pools = [
        None if pool is None else _random_pool(pool, own, size)
        for pool, own, size in zip(cache.pools, keys[:4], sizes, strict=True)
    ]
    blocks = cache.tables.pool
    queue = jax.random.permutation(keys[4], blocks.free_queue)
    tables = dataclasses.replace(cache.tables, pool=dataclasses.replace(blocks, free_queue=queue))
    cache = cache.replace_pools(type(cache.pools)(*pools)).replace_tables([tables])
    lengths = jnp.full(cache.num_slots, context, jnp.int32)
    cache, ok = paged_cache.reserve(cache, lengths, max_tokens=max(context, 1))
    return dataclasses.replace(state, cache=cache), ok


def _random_pool(pool: jax.Array, key: jax.Array, size: float) -> jax.Array:
    """Fill a pool in place with random values (hardware may be faster on zeros)."""
    largest = KVDtype.of(pool.dtype).largest or size

    def fill_layer(layer: Any, pool: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, layer)
        numbers = largest * jax.random.uniform(own, pool.shape[1:], minval=-1.0)
        return pool.at[layer].set(numbers.astype(pool.dtype))

    return jax.lax.fori_loop(0, pool.shape[0], fill_layer, pool)


@functools.partial(jax.jit, donate_argnums=1, static_argnames="max_tokens")
def _rewind(weights: Any, state: Any, lengths: jax.Array, *, max_tokens: int) -> Any:
    cache = paged_cache.truncate(state.cache, lengths, max_tokens=max_tokens)
    return dataclasses.replace(state, cache=cache), None
