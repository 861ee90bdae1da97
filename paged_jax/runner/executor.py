"""`Executor`: holds the weights and the state on the device, and runs all programs."""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.runner import decode_state
from paged_jax.runner.call_thread import CallThread
from paged_jax.runner.compiler import jit_for
from paged_jax.runner.decode_state import DecodeState, TokenMasks, empty_state
from paged_jax.runner.devices import compiles_on_device, waits_for_loops
from paged_jax.runner.freed_memory import give_back_freed_memory
from paged_jax.runner.programs import (
    Call,
    ProgramKey,
    compile_calls,
    list_calls,
    list_programs,
    shapes_of,
)
from paged_jax.runner.sizes import Sizes
from paged_jax.runner.stored_programs import FirstPrograms, StoredPrograms
from paged_jax.runner.weights import Division, ReplicaError, Weights
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.sampling.state import Assignment

_ASSIGNMENT = "choice of tokens"
_TOKEN_MASKS = "choice of tokens by grammars"
# Maximum time in seconds that `Executor.read` waits until `CallThread` has made the next call. A
# call needs the GIL for 0.15 to 0.35 ms. If the thread that reads takes the GIL first, the call may
# be delayed by 5 ms, and the device is idle. Measured with `python -m benchmarks.host` on 2 busy
# cores and a device with 4.5 ms per step: the device is idle for 0.6 to 1.8 ms per dispatch without
# this wait, and for 0.5 to 0.6 ms with it.
_HEAD_START = 3e-4


class QueuedResult(NamedTuple):
    """Result of a queued program that the host has not read; see `Executor.read`.

    Attributes:
      result: the program's result, or a future for it if a `CallThread` calls the program.
    """

    result: Any


class Executor:
    """Runs programs; each program gets the state that the previous program returned.

    All methods must be called from the same thread. `queue_ahead` makes its calls in a `CallThread`
    if `calls_wait` is True, or if it must write token masks of grammars. Methods that need the
    state wait for that thread.

    Args:
      weights: the weights, and their division over devices.
      sizes: sizes that the programs depend on.
      num_blocks: P, number of blocks in the pool of the first group of layers.
      cache_dtype: dtype of K and V.
      cascade: whether decoding uses cascade attention, see `PagedModel.decode`.
      backend: backend of the attention, see `paged_attention`.
      on_compile: function that is called with a line of text before a program is compiled.
      first_programs: programs that were read from files while the model was loaded, or None.

    Attributes:
      sizes: sizes that the programs depend on.
      vocab_size: V, size of the vocabulary.
      num_blocks: P, number of blocks in the pool of the first group of layers.
      cache_dtype: dtype of K and V.
      groups: the groups of layers in the cache. The first group keeps the most tokens.
      pool_sizes: number of blocks or states of each group.
      programs: the jitted programs of the engine.
      weights: the weights; `Weights.replace` replaces them.
      is_asleep: whether the engine sleeps; `reset` then frees the state and creates no new one.
      compile_seconds: total seconds of compilation.
      is_compiling: whether a program is being compiled; other threads may read it.
      wait_seconds: total seconds that the host has waited in `check`.
      calls_wait: whether the call of a program with a loop returns only after the loop has ended.
    """

    def __init__(
        self,
        weights: Weights,
        sizes: Sizes,
        num_blocks: int,
        *,
        cache_dtype: DTypeLike,
        cascade: bool,
        backend: str | None,
        on_compile: Callable[[str], None] | None = None,
        first_programs: FirstPrograms | None = None,
    ):
        self.weights = weights
        self._device = weights.device
        self._program_key = ProgramKey(
            weights.graphdef,
            weights.treedef,
            cascade,
            backend,
            weights.division,
            self._device.platform,
            getattr(weights.layout_model, "scan_layers", False),
        )
        self.sizes = sizes
        self.num_blocks = num_blocks
        self.vocab_size = weights.config.vocab_size
        num_top = min(MAX_LOGPROBS, self.vocab_size)
        self.groups = weights.config.cache_groups
        self.programs = list_programs(
            self._program_key, sizes, num_top, num_groups=len(self.groups)
        )
        self._stored = StoredPrograms(
            self._program_key, weights.layout_model, self._device, first_programs
        )
        self.cache_dtype = jnp.dtype(cache_dtype)
        self._on_compile = on_compile
        self._compiled: set[str] = set()
        self.compile_seconds = 0.0
        self.is_compiling = False
        self.wait_seconds = 0.0
        self._state: DecodeState | None = None
        self.is_asleep = False
        self.calls_wait = waits_for_loops(self._device.platform)
        # If XLA needs memory of the device to compile, programs are compiled before the pool is
        # allocated.
        self._compiles_without_state = compiles_on_device(self._device.platform)
        self._call_thread = CallThread()
        # Future of the calls that the `CallThread` makes for the most recent `queue_ahead`; None if
        # they are known to have returned.
        self._ahead: concurrent.futures.Future[Any] | None = None
        # The latest result that contains `free_blocks`, or None if a later program may have changed
        # the free blocks.
        self._latest: QueuedResult | None = None
        give_back_freed_memory()  # Loading the weights has freed memory.
        self.reset()

    def reset(self) -> None:
        """Discard the state, and create an empty one unless the engine sleeps."""
        self._settle()  # Wait for the calls that are queued ahead, because they use the old state.
        self._state = None  # Free the old state before the new state is allocated.
        if not self.is_asleep:
            self._state = self._new_state()
            pools = [group.tables.pool for group in self._state.cache.groups]
            self.pool_sizes = [pool.num_blocks for pool in pools]
        self._is_new = True
        self._free_blocks: list[int] | None = self.pool_sizes
        # One bool array per `run_unchecked` call since the last `check`: whether the program had
        # enough free blocks.
        self._oks: list[jax.Array] = []

    def _new_state(self) -> DecodeState:
        division, platform = self.weights.division, self._device.platform
        shape = self.weights.config, self.sizes, self.num_blocks, self.cache_dtype, platform
        if division is None:
            names = ("config", "sizes", "num_blocks", "cache_dtype", "platform")
            make = jit_for(platform, empty_state, static_argnames=names)
            static = dict(zip(names, shape, strict=True))
            with jax.default_device(self._device):
                make = self._stored.find("empty state", make, (), **static)
                return jax.device_put(make(), self._device)
        # Create each shard on its device, because the whole state might not fit on one device.
        make = functools.partial(empty_state, *shape)
        shardings = division.shardings(jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)()

    @property
    def state(self) -> DecodeState:
        """The current state. The next program donates it, so copy arrays that you want to keep."""
        self._join()
        assert self._state is not None
        return self._state

    def update_weights(self, update: Callable[[list[jax.Array]], list[jax.Array]]) -> None:
        """Replace the weights by ``update(old_weights)``, which may donate the old weights.

        The old and the new weights are lists of arrays in the model layout, see `Weights`.
        """
        self._join()  # Wait for the calls that are queued ahead, because they need the old weights.
        self.weights.replace(update(self.weights.originals))

    @property
    def free_blocks(self) -> list[int]:
        """Number of free blocks of each group. With recurrent layers, free states come last.

        Cached blocks that no slot uses count as free.
        """
        if self._free_blocks is None:
            self.check()
            self._free_blocks = [int(num_free) for num_free in self.state.cache.num_free_blocks]
        return self._free_blocks

    def run(self, call: Call) -> Any:
        """Queue a program; return its result, which the device may not have computed yet."""
        self._join()
        self._free_blocks = self._latest = None
        return self._call(call)

    def run_unchecked(self, call: Call) -> None:
        """Queue a program that allocates blocks; the next `check` tests if there were enough."""
        self._oks.append(self.run(call))

    def queue(self, call: Call) -> QueuedResult:
        """Queue a program that returns `free_blocks`; `read` returns its whole result later."""
        self._latest = QueuedResult(self.run(call))
        return self._latest

    def queue_ahead(self, calls: list[Call], masks: TokenMasks | None = None) -> QueuedResult:
        """Queue programs without waiting for running programs, and return the last result.

        Args:
          calls: the calls of the programs.
          masks: if not None, write these masks of grammars before the calls.
        """
        if not self.calls_wait and masks is None:
            for call in calls[:-1]:
                self.run(call)
            return self.queue(calls[-1])

        def make_calls() -> Any:
            # Write the masks in this thread, not in the main thread, which would block: on CPUs,
            # JAX runs such small programs synchronously, after the programs that already run.
            if masks is not None:
                self._write_token_masks(masks)
            return [self._call(call) for call in calls][-1]

        self._ahead = self._call_thread.submit(make_calls)
        self._free_blocks, self._latest = None, QueuedResult(self._ahead)
        return self._latest

    def read(self, pending: QueuedResult) -> Any:
        """Wait for a queued result, and copy it to the host."""
        # While `check` waits, the device stays busy, because the next call is already queued.
        self.check()
        result = pending.result
        if isinstance(result, concurrent.futures.Future):
            result = result.result()
            if self._ahead is not None and self._latest is not pending:
                concurrent.futures.wait([self._ahead], timeout=_HEAD_START)
            result = jax.device_get(result)
        else:
            result = jax.device_get(result)
            if self._ahead is not None:
                concurrent.futures.wait([self._ahead], timeout=_HEAD_START)
        if self._ahead is pending.result:
            self._ahead = None
        if self._latest is pending:
            self._free_blocks = [int(num_free) for num_free in result.free_blocks]
        return result

    def fetch(self, call: Call) -> Any:
        """Run a program that returns `free_blocks`, and copy its whole result to the host."""
        return self.read(self.queue(call))

    def _call(self, call: Call) -> Any:
        weights = self.weights.arrays
        assert self._state is not None
        self._is_new = False
        with self._compiling(call.name), jax.profiler.TraceAnnotation(call.name):
            call = self._stored.resolve(call, weights, self._state)
            self._state, result = call.program(weights, self._state, *call.args, **call.static)
        division = self.weights.division
        return result if division is None else _check_replicas(division, call.name, result)

    def _join(self) -> None:
        """Wait until the calls of `queue_ahead` have been made; raise if one of them failed."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None

    def _settle(self) -> None:
        """Wait until the calls of `queue_ahead` have been made or have failed."""
        if self._ahead is not None:
            concurrent.futures.wait([self._ahead])
            self._ahead = None

    def check(self) -> None:
        """Wait for the programs of `run_unchecked`, and check that there were enough blocks.

        Raises:
          RuntimeError: there were too few blocks. The state on the device then differs from the
            state that the host assumes.
        """
        if not self._oks:
            return
        start, oks = time.perf_counter(), self._oks
        self._oks = []
        require_blocks(*jax.device_get(oks))
        self.wait_seconds += time.perf_counter() - start

    def assign(self, assignments: list[Assignment]) -> None:
        """Assign sequences to slots, see `decode_state.assign`."""
        self._join()
        self._is_new = False
        with self._compiling(_ASSIGNMENT):
            self._state = decode_state.assign(self.state, assignments, self._stored.find)

    def write_token_masks(self, masks: TokenMasks) -> None:
        """Write masks of the tokens that grammars allow next."""
        self._join()
        self._write_token_masks(masks)

    def _write_token_masks(self, masks: TokenMasks) -> None:
        self._is_new = False
        assert self._state is not None
        with self._compiling(_TOKEN_MASKS):
            self._state = decode_state.write_token_masks(self._state, masks)

    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile the programs of `list_calls`, and call each new program once.

        All slots must be empty.

        Args:
          report: function that is called after each program with the number of compiled programs,
            the total number of programs, and the name of the program.
        """
        start, compiled = time.perf_counter(), self.compile_seconds
        for call in self.compile_all(report):
            self.run(call)
        # Mark these two programs as compiled, so that their compilation below is not reported.
        self._compiled |= {_ASSIGNMENT, _TOKEN_MASKS}
        self.write_token_masks(TokenMasks.create(self.sizes, self.vocab_size))
        # Compile the program that assigns one row and the program that assigns several rows. They
        # need a slot to write to, so use slot 0.
        first = Assignment(0, SamplingParams(), [0], num_prompt_tokens=1, seed=0, max_length=2)
        for count in (1, 2):
            self.assign([first] * count)
        jax.block_until_ready(self.state)
        self.compile_seconds = compiled + time.perf_counter() - start

    def compile_all(self, report: Callable[[int, int, str], None] | None = None) -> list[Call]:
        """Compile all programs of `list_calls` that are not compiled yet; return their calls.

        Args:
          report: see `warmup`.
        """
        start = time.perf_counter()
        # The programs for swapping are compiled only if all arrays belong to this process, because
        # arrays of several processes cannot be copied to the host.
        has_swap = all(x.is_fully_addressable for x in self.weights.arrays)
        with self._state_to_compile_for() as state:
            calls = list_calls(self.programs, self.sizes, state.cache, has_swap=has_swap)
            new = [call for call in calls if call.name not in self._compiled]
            weights, resolve = self.weights.arrays, self._stored.resolve
            compile_calls(new, weights, state, resolve, report or (lambda *args: None))
        give_back_freed_memory()
        self._compiled |= {call.name for call in new}
        self.compile_seconds += time.perf_counter() - start
        return new

    @contextlib.contextmanager
    def _state_to_compile_for(self) -> Iterator[DecodeState]:
        """Return a context manager that yields the state, or its shapes, for compilation.

        It yields the shapes on GPUs, if no program has run on the state yet. In this case, it frees
        the state first, so that the compiler can use its memory, and creates it again at the end.
        """
        if not (self._compiles_without_state and self._is_new):
            yield self.state
            return
        shapes, self._state = shapes_of(self.state), None
        try:
            yield shapes
        finally:
            self._state = self._new_state()

    @contextlib.contextmanager
    def showing_compilation(self, show: Callable[[str], None]) -> Iterator[None]:
        """Return a context manager that sets `on_compile` to `show` if `on_compile` is None."""
        if self._on_compile is not None:
            yield
            return
        self._on_compile = show
        try:
            yield
        finally:
            self._on_compile = None

    @contextlib.contextmanager
    def _compiling(self, program: str) -> Iterator[None]:
        """Return a context manager for calls of `program` that reports and measures compilation."""
        if program in self._compiled:
            yield
            return
        if self._on_compile is not None:
            self._on_compile(f"compiling {program}")
        start = time.perf_counter()
        self.is_compiling = True
        try:
            yield
        finally:
            self.is_compiling = False
        give_back_freed_memory()
        self._compiled.add(program)
        self.compile_seconds += time.perf_counter() - start


# Compile the whole function with `jit`. Otherwise, JAX would compile and keep a separate program
# for each array.
def _check_replicas(division: Division, program: str, result: Any) -> Any:
    """Check that all devices computed equal results, and return the result of the program."""
    if not division.checks_replicas:
        return result
    result, ok = result
    if not ok:
        raise ReplicaError(
            f"Engine: all {division.mesh.size} devices must have the same tokens and tables after "
            f"{program}, but they differ. A device is defective, or a program is not "
            "deterministic."
        )
    return result


def require_blocks(*oks: Any) -> None:
    """Raise RuntimeError unless all `oks` (bool[] results of programs) are True."""
    if not all(oks):
        raise RuntimeError(
            "Executor: queued programs must have enough free blocks, but there were too few. This "
            "is a bug in the scheduler. No request is lost."
        )
