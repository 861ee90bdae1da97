"""Benchmark of host time: steps of an engine with a simulated device.

    python -m benchmarks.host [--json host.json]

Scheduler, runner, detokenizer, stop strings and outputs belong to a real engine. Only the programs
are replaced: an empty program is called with as many arrays as a model of 32 layers has, and the
generated tokens come from a prepared text. The time of a step is therefore the time of the host.
The simulated device runs on the same cores.

A second measurement simulates a device that takes `--step-ms` for each decode step (4.5: an 8B
model on an H200; 0.5: a 135M model), and that blocks the caller until the loop has ended, as GPUs
do. The result is the fraction of the time in which the device is idle.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

import paged_jax
from benchmarks import harness
from benchmarks.harness import Column, Goal
from paged_jax import Engine, Llama, LlamaConfig, SamplingParams, Tokenizer
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call
from paged_jax.sampling.state import Assignment

NUM_SEQUENCES = (16, 64, 256)
STEPS_PER_DISPATCH = (1, 8)
STEP_MS = (4.5, 0.5)
PROMPT_TOKENS = 64
# Number of weight arrays of a model of 32 layers, and of arrays of the state.
NUM_WEIGHTS, NUM_STATE = 291, 24
# A stop string that never occurs, but parts of it do.
STOP = ["\n\n\n###", "the end of it"]
TEXT = " ".join(str(part.__doc__) for part in (paged_jax, Engine, SamplingParams, Tokenizer))


class InstantDevice(Executor):
    """Device that runs no program, and answers with the next tokens of a text for every row.

    Attributes:
      text: i32[N], the tokens to generate in order.
      step_seconds: seconds that a decode step takes.
      waited: seconds in which the device was idle, and the time at which it last became idle.
    """

    text: np.ndarray

    def __init__(self, *args: Any, **options: Any):
        self.step_seconds, self.waited = 0.0, (0.0, 0.0)
        device = jax.devices()[0]
        self._arrays = [jax.device_put(np.zeros(1, np.float32), device)] * NUM_WEIGHTS
        self._carry = [jax.device_put(np.zeros(1, np.float32), device) for _ in range(NUM_STATE)]
        self._nothing = jax.jit(lambda arrays, carry, slots: carry, donate_argnums=1)
        super().__init__(*args, **options)
        self.calls_wait = True

    def reset(self) -> None:
        super().reset()
        self._lengths = np.zeros(self.sizes.num_slots, np.int64)
        self._drawn = 0

    @property
    def free_blocks(self) -> list[int]:
        """Number of free blocks in the pool, of the only group."""
        self._join()
        return [self.num_blocks - int((-(-self._lengths // self.sizes.block_size)).sum())]

    def _call(self, call: Call) -> Any:
        """Return the result of a program without running it."""
        self._carry = self._nothing(self._arrays, self._carry, call.args[0])
        program = call.program.__name__
        if program == "decode":
            return self._decode(*call.args)
        if program in ("prefill", "prefill_tiles"):
            _, slots, num_tokens = call.args
            np.add.at(self._lengths, slots[slots >= 0], num_tokens[slots >= 0])
            return np.True_
        if program == "release":
            self._lengths[call.args[0]] = 0
        return None

    def assign(self, assignments: list[Assignment]) -> None:
        """Do nothing: no state is written."""

    def _decode(self, slots: np.ndarray, num_steps: Any, *_: Any) -> StepTokens:
        start = time.perf_counter()
        idle_seconds, end = self.waited
        idle_seconds += start - end
        B, N, steps = slots.size, self.sizes.dispatch_capacity, int(num_steps)
        is_row = slots >= 0
        self._lengths[slots[is_row]] += steps
        places = self._drawn + 37 * np.arange(B) + np.arange(N)[:, None]
        self._drawn += steps
        num_held = (-(-self._lengths // self.sizes.block_size)).sum()
        drawn = np.zeros((N, B, 3 + 2 * 20), np.int32)
        drawn[..., 0] = self.text[places % self.text.size]
        drawn[..., 1] = np.float32(-1).view(np.int32)  # the log-probabilities
        arrays: dict[str, Any] = {  # NumPy arrays, as the host gets them
            "packed_draws": drawn,
            "num_new": np.where(is_row, steps, 0).astype(np.int32),
            "num_steps": np.int32(steps),
            "free_blocks": (np.int32(self.num_blocks - num_held),),
            "ok": np.True_,
        }
        while (left := start + steps * self.step_seconds - time.perf_counter()) > 0:
            time.sleep(left)
        # assign in one statement, because other threads read it
        self.waited = (idle_seconds, time.perf_counter())
        return StepTokens(**arrays)


def make_engine(num_sequences: int, steps_per_dispatch: int, num_tokens: int) -> Engine:
    """Create an engine with an `InstantDevice`."""
    tokenizer = Tokenizer.from_folder(bundled_folder())
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=num_tokens,
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    text = np.array(tokenizer.encode(TEXT), np.int32)
    with (
        mock.patch("paged_jax.engine.core.Executor", InstantDevice),
        mock.patch.object(InstantDevice, "text", text, create=True),
    ):
        engine = Engine(
            model,
            tokenizer=tokenizer,
            max_num_seqs=num_sequences,
            steps_per_dispatch=steps_per_dispatch,
        )
    device = engine.core.executor
    assert isinstance(device, InstantDevice)
    device.text = text
    return engine


def fill(engine: Engine, text: np.ndarray) -> None:
    """Add a request for each slot, and run until all of them decode."""
    for number in range(engine.max_num_seqs):
        prompt = np.roll(text, -number)[:PROMPT_TOKENS].tolist()
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, stop=STOP)
        engine.add_request({"prompt_token_ids": prompt}, params)
    while any(sequence.num_generated == 0 for sequence in engine.sequences):
        engine.step()


def measure(num_sequences: int, steps: int, num_dispatches: int, step_ms: list[float]) -> Any:
    """Return the host times for one number of sequences, in microseconds."""
    num_calls = (2 + len(step_ms)) * (num_dispatches + 2) + 10
    engine = make_engine(num_sequences, steps, PROMPT_TOKENS + 1 + steps * num_calls)
    device = engine.core.executor
    assert isinstance(device, InstantDevice)
    fill(engine, device.text)
    before, start = engine.stats, time.perf_counter()
    advance = [harness.elapsed(engine.advance) for _ in range(num_dispatches)]
    wall, after = time.perf_counter() - start, engine.stats
    step = [harness.elapsed(engine.step) for _ in range(num_dispatches)]
    num_tokens = after.num_generated_tokens - before.num_generated_tokens
    num_steps = num_tokens / num_sequences / num_dispatches
    schedule = after.schedule_seconds - before.schedule_seconds
    postprocess = after.postprocess_seconds - before.postprocess_seconds
    parts = {
        "schedule": schedule,
        "run": wall - schedule - postprocess,
        "postprocess": postprocess,
    }
    dispatch = 1e6 * statistics.median(advance)
    outputs = 1e6 * statistics.median(step) - dispatch
    return {
        "num_sequences": num_sequences,
        "steps_per_dispatch": steps,
        "num_steps": num_steps,
        "dispatch_us": dispatch,
        "token_step_us": dispatch / num_steps,
        "parts_us": {name: 1e6 * x / num_dispatches for name, x in parts.items()},
        "outputs_us": outputs,
        "idle": {f"{ms:g} ms": _idle(engine, device, ms, num_dispatches) for ms in step_ms},
    }


def _idle(engine: Engine, device: InstantDevice, step_ms: float, num_dispatches: int) -> float:
    """Return the fraction of the time in which a device with these steps is idle."""
    device.step_seconds = step_ms / 1e3
    for _ in range(2):
        engine.step()
    idle, start = device.waited
    for _ in range(num_dispatches):
        engine.step()
    # The device may be ahead of the steps of the engine, so divide by the time that it measured.
    idle_later, end = device.waited
    return (idle_later - idle) / (end - start)


def _name(row: dict[str, Any]) -> str:
    return f"{row['num_sequences']} x {row['steps_per_dispatch']}"


def _part(name: str) -> Callable[[Any], float]:
    return lambda row: row["parts_us"][name]


COLUMNS = (
    Column("sequences x steps", 18, _name),
    Column("token step", 14, "token_step_us", "{:.0f}"),
    Column("dispatch", 12, "dispatch_us", "{:.0f}"),
    Column("schedule", 10, _part("schedule"), "{:.0f}"),
    Column("run", 8, _part("run"), "{:.0f}"),
    Column("postprocess", 13, _part("postprocess"), "{:.0f}"),
    Column("outputs", 9, "outputs_us", "{:.0f}"),
    Column(
        "  device idle",
        -13,
        lambda row: ", ".join(f"{idle:.1%} at {name}" for name, idle in row["idle"].items()),
        "  {}",
    ),
)

GOALS = [
    Goal(
        f"{n} sequences: a device with 4.5 ms per step is idle for at most 3% of the time",
        lambda report, n=n: {
            _name(row): row["idle"]["4.5 ms"]
            for row in report["rows"]
            if row["num_sequences"] == n and "4.5 ms" in row["idle"]
        },
        high=0.03,
    )
    for n in (16, 64)
]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = harness.command_line("Time the host's work in a step of the engine.")
    parser.add_argument("--sequences", type=int, nargs="+", default=list(NUM_SEQUENCES))
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS_PER_DISPATCH))
    parser.add_argument("--step-ms", type=float, nargs="*", default=list(STEP_MS))
    parser.add_argument(
        "--dispatches", type=int, default=40, help="number of timed dispatches for each size"
    )
    args = parser.parse_args(argv)
    cases = itertools.product(args.sequences, args.steps)
    rows = [measure(n, steps, args.dispatches, args.step_ms) for n, steps in cases]
    report = {**harness.environment(), "rows": rows}
    print("Microseconds. dispatch: host time of a dispatch, without its outputs; token step: the")
    print("same divided by the number of its decode steps.")
    harness.finish(
        args, report, [*harness.table(COLUMNS, rows), *harness.goal_lines(GOALS, report)]
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
