"""Benchmark of whole steps: decode steps and prompt chunks, compared with their bounds.

    python -m benchmarks.step --goals --json step.json      # the goals for this device
    python -m benchmarks.step --quick                       # a run of seconds
    python -m benchmarks.step --models 8B --batches 64 --variants "float32 queries" rematerialised

It times the programs that `LLM`, `AsyncEngine` and the server run: the decode program with its loop
over 8 steps and sampling, and the program of prompt chunks, with donated state. Weights and the
pool are random, and blocks are scattered over the pool. On a GPU or TPU the pool is as large as an
engine would make it.

Each case reports the bytes that a step must read and write, and its operations. The bound is the
time for these at the rates of a large copy and of a dense bfloat16 matrix multiplication in the
same run. The report shows the bound as a fraction of the step's time. Variants change one setting:
a compiler option, the dtype of the queries, the steps per dispatch, or the sampling. They run in
turns with the default. A variant that does not make all its steps is an error.

Cases of goals come first, then their variants, then other cases. Results are saved after every
figure, and `--budget` ends the run in time.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.common.device_time import Rates, device_report, measure_rates
from benchmarks.common.shapes import SHAPES
from benchmarks.harness import Budget, Figure, Goal, Report
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
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.runner.compiler import COMPILER_OPTIONS
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call, Program, ProgramKey, list_programs
from paged_jax.runner.sizes import Sizes
from paged_jax.runner.weights import Weights
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.sampling.state import Assignment

Record = dict[str, Any]


# Steps to time: models, sizes, and the bytes and operations that a step needs.

# Number of tokens of a prompt chunk.
CHUNK = 2048
# Maximum number of tokens of a sequence, which determines block tables and splits of long contexts.
MAX_MODEL_LEN = 8192
BLOCK_SIZE = 16

MODELS: dict[str, ModelConfig] = {
    # Two layers of stories15M, for a run of seconds.
    "quick": LlamaConfig.from_dict({**SHAPES["15M"], "num_hidden_layers": 2}),
    # SmolLM2.
    "135M": LlamaConfig.from_dict(SHAPES["135M"]),
    # Llama 3.2.
    "1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
    # Llama 3.
    "8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
}
"""Configurations by name."""


@dataclass(frozen=True)
class Case:
    """A kind of step.

    Attributes:
      model: a key of `MODELS`.
      batch: number of sequences of a decode step.
      context: number of cached tokens of each sequence before the step.
      chunk: number of prompt tokens of a sequence; 0 for a decode step.
      dtype: dtype of the weights.
      kv_dtype: dtype of K and V, as in `Engine`.
    """

    model: str
    batch: int = 1
    context: int = 128
    chunk: int = 0
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return MODELS[self.model]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads, each once; only a few rows of embeddings."""
        num_read = self._num_layer_weights
        if not self.chunk:  # chunks are not scored
            num_read += self.config.vocab_size * self.config.hidden_size
        return num_read * jnp.dtype(self.dtype).itemsize

    def kv_bytes(self, platform: str, num_steps: int = 1) -> int:
        """Return the bytes of K and V that a step reads and writes, averaged over some steps.

        Args:
          platform: determines the dtype of ``kv_dtype="auto"``.
          num_steps: number of decode steps; each has one token more than the previous step.
        """
        kv_dtype = resolve_kv_dtype(self.kv_dtype, self.dtype, platform)
        token = footprint.block_bytes(self.config, 1, kv_dtype, platform)
        if self.chunk:
            return (self.context + self.chunk) * token
        return round(self.batch * (self.context + (num_steps + 1) / 2) * token)

    def flops(self, num_steps: int = 1) -> int:
        """Operations of all matrix multiplications, for pairs that are not masked."""
        config = self.config
        pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        if self.chunk:
            pairs = self.chunk * self.context + self.chunk * (self.chunk + 1) // 2
            return 2 * self._num_layer_weights * self.chunk + pair * pairs
        head = config.vocab_size * config.hidden_size
        pairs = round(self.batch * (self.context + (num_steps + 1) / 2))
        return 2 * (self._num_layer_weights + head) * self.batch + pair * pairs

    @property
    def _num_layer_weights(self) -> int:
        config = self.config
        tables = 1 if config.tie_word_embeddings else 2
        num_all = footprint.num_parameters(config)
        return num_all - tables * config.vocab_size * config.hidden_size

    def __str__(self) -> str:
        what = f"chunk of {self.chunk}" if self.chunk else f"decode, batch {self.batch}"
        kinds = self.dtype if self.kv_dtype == "auto" else f"{self.dtype}, {self.kv_dtype} pools"
        return f"{self.model}, {what} at {self.context} ({kinds})"


def goal_cases() -> list[Case]:
    """Return the cases of the goals, which are timed first."""
    return [
        Case("8B", batch=64),
        Case("8B", batch=1),
        Case("8B", chunk=CHUNK, context=0),
        Case("135M", batch=1),
    ]


def gpu_cases() -> list[Case]:
    """Return the cases for a GPU or TPU, the most informative first."""
    models = ("8B", "135M", "1B")
    long = Case("8B", batch=16, context=4096)
    cases = [
        *goal_cases(),
        *(Case(model, batch=batch) for batch in (64, 1, 16) for model in models),
        *(Case(model, chunk=CHUNK, context=0) for model in models),
        *(replace(long, kv_dtype=kv_dtype) for kv_dtype in ("auto", "int8", "fp8")),
    ]
    return _unique(cases)


def cpu_cases() -> list[Case]:
    """Return the cases for a CPU: the small model."""
    base = Case("135M", dtype="float32")
    return [base, replace(base, batch=16), replace(base, chunk=256, context=0)]


def quick_cases(dtype: str) -> list[Case]:
    """Return a few small steps, for a run of seconds."""
    base = Case("quick", batch=2, context=32, dtype=dtype)
    return [base, replace(base, batch=1, chunk=64, context=0)]


def _unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))


# Steps ready to be timed.

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


@partial(jax.jit, static_argnums=(1, 2, 3))
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
            step = partial(_bare_step, key)
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
    partial(rope_then_write, write=triton_write.write),
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


@partial(jax.jit, donate_argnums=1, static_argnames="context")
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


@partial(jax.jit, donate_argnums=1, static_argnames="max_tokens")
def _rewind(weights: Any, state: Any, lengths: jax.Array, *, max_tokens: int) -> Any:
    cache = paged_cache.truncate(state.cache, lengths, max_tokens=max_tokens)
    return dataclasses.replace(state, cache=cache), None


# Times of the kernels of a step, read from a profile of JAX.

# XLA numbers kernels of the same kind: ``loop_add_fusion_7``, ``gemm_fusion_dot_12_0``.
_NUMBERS = re.compile(r"(_\d+)+(?=$|_)")


class KernelTime(NamedTuple):
    """Kernels of the same kind in a step.

    Attributes:
      name: name of the kernels without their numbers.
      launches: number of launches in a step.
      microseconds: time of all launches in a step.
    """

    name: str
    launches: float
    microseconds: float


def kernel_times(folder: Path, num_steps: int) -> list[KernelTime]:
    """Return the kernels in a profile, with the slowest first. Empty if no device was profiled.

    Args:
      folder: folder that was passed to `jax.profiler.trace`.
      num_steps: number of steps in the profile.
    """
    launches: collections.Counter[str] = collections.Counter()
    nanoseconds: collections.Counter[str] = collections.Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:"):
                continue
            # Other lines repeat the same times, by module and by operation.
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    name = _NUMBERS.sub("", event.name)
                    launches[name] += 1
                    nanoseconds[name] += event.duration_ns
    return [
        KernelTime(name, launches[name] / num_steps, taken / num_steps / 1e3)
        for name, taken in nanoseconds.most_common()
    ]


def kernel_lines(times: list[KernelTime], num_lines: int = 12) -> list[str]:
    """Return the lines of a table of the slowest kernels."""
    shown = times[:num_lines]
    rest = times[num_lines:]
    if rest:
        launches, taken = sum(x.launches for x in rest), sum(x.microseconds for x in rest)
        shown = [*shown, KernelTime(f"{len(rest)} others", launches, taken)]
    return [f"  {x.microseconds:10.1f} us {x.launches:8.1f} launches  {x.name}" for x in shown]


# The report.


def record_line(record: Record) -> str:
    """Return one line: time, bound, and the times of variants relative to the engine's."""
    others = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in record["over_engine"].items())
    return (
        f"{record['name']:48s} {record['ms'][ENGINE]:9.3f} ms, {record['of_bound']:4.0%} of the "
        f"bound by {record['bound_by']} ({record['bound_ms']:.3f} ms)  {others}"
    )


def _of(model: str, figure: str, *, batch: int = 1, chunk: int = 0) -> Callable[..., Figure]:
    """Return a function that reads a figure of some cases from a report; see `Goal.figure`.

    It reads the cases in bfloat16 with this model, batch and chunk, from reports of accelerators.
    """

    def figures(report: dict[str, Any]) -> Figure:
        wanted = {"model": model, "batch": batch, "chunk": chunk, "dtype": "bfloat16"}
        records = report["results"] if report["accelerator"] else []
        return {
            record["name"]: record["ms"][ENGINE] if figure == "ms" else record[figure]
            for record in records
            # The goals do not apply to longer contexts or quantised pools.
            if record["case"] | wanted | {"kv_dtype": "auto"} == record["case"]
            and record["case"]["context"] <= 128
        }

    return figures


GOALS = (
    Goal(
        "8B, batch 1: 80% of (weights / copy rate), without K and V",
        _of("8B", "weights_of_memory_rate"),
        low=0.80,
    ),
    Goal(
        "8B, batch 64: 84% of (weights / copy rate), without K and V",
        _of("8B", "weights_of_memory_rate", batch=64),
        low=0.84,
    ),
    Goal("135M, batch 1: a step in 0.45 ms", _of("135M", "ms"), high=0.45),
    Goal(
        "8B, prompt chunks of 2K: 55% of the matmul rate",
        _of("8B", "of_matmul_rate", chunk=2048),
        low=0.55,
    ),
)
"""Goals for whole steps on an H200."""


def plot(pyplot: Any, report: Report) -> Any:
    """Draw the time of every case relative to its bound, and the variants."""
    records = report["results"]
    varied = [record for record in records if record["over_engine"]]
    height = 1.2 + 0.35 * max(len(records), sum(len(r["over_engine"]) + 1 for r in varied))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, height), layout="constrained")
    rows = range(len(records))
    left.barh(rows, [record["ms"][ENGINE] for record in records], label="a step")
    left.barh(rows, [record["bound_ms"] for record in records], 0.4, label="its bound")
    for row, record in zip(rows, records, strict=True):
        left.text(record["ms"][ENGINE], row, f" {record['of_bound']:.0%}", va="center", fontsize=8)
    left.set_yticks(rows, [record["name"] for record in records], fontsize=8)
    left.set(xscale="log", xlabel="ms", title="Steps, and their bounds by bytes and operations")
    left.set_xlim(
        min(record["bound_ms"] for record in records) / 2,
        max(record["ms"][ENGINE] for record in records) * 2,
    )
    left.invert_yaxis()
    left.legend(fontsize="small")
    bars = [
        (f"{record['name']}: {name}", ratio)
        for record in varied
        for name, ratio in record["over_engine"].items()
    ]
    drawn = right.barh(range(len(bars)), [ratio for _, ratio in bars], color="#b8b8b8")
    right.bar_label(drawn, fmt="{:.2f}", padding=3, fontsize=8)
    right.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    right.axvline(1, color="black", linewidth=1)
    right.set(xlabel="time relative to the engine's default", title="Variants")
    right.margins(x=0.1)
    right.invert_yaxis()
    device = report["accelerator"] or report["device"]
    figure.suptitle(f"Whole steps on {device}, jax {report['versions']['jax']}")
    return figure


# The run.


class Session:
    """Measures cases while the budget lasts. Keeps the weights of one model at a time.

    Args:
      rates: rates of the device.
      budget: seconds from now on.
      num_rounds: number of turns of each variant.
      num_dispatches: number of dispatches of 8 decode steps in a turn.
      save: called with each record when it changes.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        budget: float,
        num_rounds: int,
        num_dispatches: int,
        save: Callable[[dict[str, Any]], None],
    ):
        self._rates = rates
        self._budget = Budget(budget)
        self._num_rounds = num_rounds
        self._steps_per_turn = STEPS_PER_DISPATCH * num_dispatches
        self._save = save
        self._model: tuple[str, str, Any] | None = None

    def is_over(self) -> bool:
        """Whether no further measurement may start."""
        return self._budget.is_over()

    def measure(self, case: Case, variants: list[str], profile: Path | None = None) -> None:
        """Time variants of a case in turns with the default."""
        bench = Bench(case, self._weights(case), self._steps_per_turn)
        platform = jax.default_backend()
        compiled, failed, late, record = {}, {}, [], {}
        seconds: dict[str, list[float]] = {}
        for name in [ENGINE, *variants]:
            if name != ENGINE and self.is_over():
                late.append(name)
                continue
            try:
                compiled[name] = round(bench.compile(name), 1)
                # The default runs again, so that slow changes of the device affect both.
                for _ in range(self._num_rounds):
                    for each in {ENGINE: None, name: None}:
                        seconds.setdefault(each, []).append(bench.time(each))
            except RuntimeError as error:
                if name == ENGINE:
                    raise
                failed[name] = harness.reason(error)
            record = {
                **make_record(
                    case, self._rates, harness.medians(seconds), self._steps_per_turn, platform
                ),
                "compile_s": compiled,
                "failed": failed,
                "not reached": late,
            }
            self._save(record)
        if profile is not None:
            folder = profile / str(case).replace(" ", "_")
            with jax.profiler.trace(folder):
                bench.time(ENGINE)
            times = kernel_times(folder, bench.num_steps)
            print(*kernel_lines(times), sep="\n")
            self._save({**record, "kernels": [time._asdict() for time in times]})

    def _weights(self, case: Case) -> Any:
        kept = self._model
        if kept is None or kept[:2] != (case.model, case.dtype):
            self._model = kept = None
            gc.collect()
            self._model = kept = (case.model, case.dtype, random_model(case))
        return kept[2]


def make_record(
    case: Case, rates: Rates, seconds: dict[str, float], num_steps: int, platform: str
) -> dict[str, Any]:
    """Create the record of a case.

    Args:
      case: the case that was timed.
      rates: rates of the device.
      seconds: seconds of a step of each variant.
      num_steps: number of decode steps of a turn, during which the context grows.
      platform: platform of the device.
    """
    ours = seconds[ENGINE]
    kv_bytes, flops = case.kv_bytes(platform, num_steps), case.flops(num_steps)
    num_bytes = case.weight_bytes + kv_bytes
    reading, computing = num_bytes / rates.memory / 1e9, flops / rates.matmul / 1e12
    bound, kv_seconds = max(reading, computing), kv_bytes / rates.memory / 1e9
    weights_alone = case.weight_bytes / rates.memory / 1e9
    return {
        "name": str(case),
        "case": asdict(case),
        "op": "prefill" if case.chunk else "decode",
        "bytes": num_bytes,
        "weight_bytes": case.weight_bytes,
        "kv_bytes": kv_bytes,
        "flops": flops,
        "ms": {name: round(1e3 * taken, 4) for name, taken in seconds.items()},
        "bound_ms": round(1e3 * bound, 4),
        "bound_by": "operations" if computing > reading else "bytes",
        "of_bound": round(bound / ours, 3),
        # Without the time to read K and V at the rate of a copy. If attention takes longer, the
        # additional time counts as time of the step.
        "weights_of_memory_rate": round(weights_alone / max(ours - kv_seconds, 1e-9), 3),
        "of_matmul_rate": round(computing / ours, 3),
        "over_engine": {name: round(s / ours, 3) for name, s in seconds.items() if name != ENGINE},
    }


def run(
    jobs: list[tuple[Case, list[str]]],
    *,
    save: Callable[[Report], None],
    profile: Path | None = None,
    **options: Any,
) -> Report:
    """Measure jobs (cases with their variants) while the budget lasts, and print the results."""
    rates = measure_rates()
    report = device_report(rates) | {
        "programs": "those of an engine, on its executor",
        "skipped": {"not reached in time": [], "failed": []},
    }
    records: dict[str, Any] = {}

    def keep(record: dict[str, Any]) -> None:
        # If a case is measured twice, the second time includes its variants.
        records[record["name"]] = record
        report["results"] = list(records.values())
        print(record_line(record), flush=True)
        save(report)

    session = Session(rates, save=keep, **options)
    for case, variants in jobs:
        if session.is_over():
            report["skipped"]["not reached in time"].append(str(case))
            continue
        try:
            session.measure(case, variants, profile if variants else None)
        except Exception as error:  # the other cases are still measured
            why = f"{case}: {harness.reason(error)}"
            print(f"failed: {why}", flush=True)
            report["skipped"]["failed"].append(why)
        gc.collect()
    report["goals"] = harness.goal_lines(GOALS, report, report["accelerator"])
    report["rates_at_the_end"] = measure_rates()._asdict()
    save(report)
    return report


def make_jobs(
    cases: list[Case], names: list[str] | None, platform: str
) -> list[tuple[Case, list[str]]]:
    """Return jobs: the cases of goals alone, then the same with variants, then other cases.

    Args:
      cases: cases in order of importance.
      names: variants to measure; None for all that are not hazardous.
      platform: platform of the device, which excludes some variants.
    """
    if names is None:
        names = [name for name, variant in VARIANTS.items() if not variant.is_hazardous]
    wanted = [name for name in VARIANTS if name != ENGINE and name in names]
    first = [case for case in goal_cases() if case in cases]
    # If no case has a goal, the first case runs with variants.
    varied = {
        case: [name for name in wanted if VARIANTS[name].is_for(case, platform)]
        for case in first or cases[:1]
    }
    alone: list[tuple[Case, list[str]]] = [(case, []) for case in first]
    others: list[tuple[Case, list[str]]] = [(case, []) for case in cases if case not in varied]
    return alone + list(varied.items()) + others


def _parser() -> argparse.ArgumentParser:
    parser = harness.command_line(
        "Time whole steps of an engine on the device.", budget=420, rounds=5, goals=True, plot=True
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a few small cases")
    add("--models", nargs="+", choices=MODELS, help="measure only these")
    add("--batches", nargs="+", type=int, help="measure only decode steps of these sizes")
    add("--variants", nargs="*", choices=[*VARIANTS], metavar="NAME",
        help=f"measure only these variants: {', '.join(VARIANTS)}")  # fmt: skip
    add("--profile", type=Path, metavar="FOLDER",
        help="write JAX profiles of cases with variants, and print times of kernels")  # fmt: skip
    return parser


def _cases(options: argparse.Namespace, is_cpu: bool) -> Iterator[Case]:
    if options.quick:
        cases = quick_cases("float32" if is_cpu else "bfloat16")
    else:
        cases = cpu_cases() if is_cpu else gpu_cases()
    for case in cases:
        is_model = options.models is None or case.model in options.models
        is_batch = options.batches is None or not case.chunk and case.batch in options.batches
        if is_model and is_batch:
            yield case


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON and a plot."""
    options = _parser().parse_args(arguments)
    platform = jax.default_backend()
    cases = list(_cases(options, platform == "cpu"))
    if not cases:
        print("benchmarks.step: these options exclude all cases.", file=sys.stderr)
        return 2

    report = run(
        make_jobs(cases, options.variants, platform),
        save=partial(harness.write_json, options.json),
        profile=options.profile,
        budget=options.budget,
        num_rounds=2 if options.quick else options.rounds,
        num_dispatches=1 if platform == "cpu" else 8,
    )
    harness.finish(options, report, report["goals"] if options.goals else (), plot)
    return 1 if report["skipped"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
