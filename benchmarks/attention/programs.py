"""Programs that time an attention op: compiled, checked, and run many times."""

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention.cases import Inputs
from benchmarks.common.device_time import Program, Rates, chained, median_seconds
from benchmarks.harness import PeerUnavailable, reason
from paged_jax.kernels import paged_attention, paged_prefill_attention

# Maximum relative error of a correct result. Rounding to bfloat16 causes errors of 0.003 to 0.01.
TOLERANCE = 0.02

# Minimum number of calls in the body of a loop.
_UNROLL = 8

# A variant that is slower than the fastest variant of its kernel by this factor is not timed
# further.
_HOPELESS = 1.3

_Key = TypeVar("_Key", bound=Hashable)


class Sizes(Protocol):
    """Sizes of a case that determine the number of calls of a program."""

    @property
    def num_layers(self) -> int:
        """Number of layers in the pools."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that a call must move."""
        ...

    @property
    def flops(self) -> int:
        """Operations of the matrix multiplications of a call."""
        ...


class Prepared(NamedTuple):
    """A compiled op.

    Attributes:
      once: returns the result of a call for layer 0.
      program: the program to time.
    """

    once: Callable[[], Any]
    program: Program


class Plan(NamedTuple):
    """Number of calls of a program.

    Attributes:
      num_calls: total number of calls, a multiple of `unroll`.
      unroll: number of calls in the body of its loop.
    """

    num_calls: int
    unroll: int


def plan_calls(case: Sizes, rates: Rates, turn_seconds: float) -> Plan:
    """Return a plan with as many calls as the device could make in `turn_seconds` at its rates."""
    bound = case.num_bytes / rates.memory / 1e9 + case.flops / rates.matmul / 1e12
    # XLA launches loop bodies with several calls as one CUDA graph. On a CPU unrolling has no
    # effect.
    is_cpu = jax.devices()[0].platform == "cpu"
    unroll = 1 if is_cpu else case.num_layers * -(-_UNROLL // case.num_layers)
    # Two kernel launches take at least about 5 us.
    return Plan(unroll * max(round(turn_seconds / max(bound, 5e-6) / unroll), 1), unroll)


class JaxCall(NamedTuple):
    """A JAX op: ``op(q, layer, arrays)`` returns the result of `paged_attention`.

    For an op that updates pools, `q` and the result are pools. The layer is a Python number on a
    GPU, and may be traced on a CPU.
    """

    op: Callable[[Any, Any, Any], Any]
    arrays: Any

    def prepare(self, case: Sizes, q: Any, plan: Plan) -> Prepared:
        """Compile one call and the program. Several threads may call this at the same time."""
        chain = chained(self.op, plan.num_calls, case.num_layers, plan.unroll)
        many = jax.jit(chain).lower(q, self.arrays).compile()
        first = jax.jit(lambda q, arrays: self.op(q, 0, arrays))
        once = first.lower(q, self.arrays).compile()
        return Prepared(
            lambda: jax.block_until_ready(once(q, self.arrays)),
            Program(lambda: jax.block_until_ready(many(q, self.arrays)), plan.num_calls),
        )


class TorchCall(NamedTuple):
    """A PyTorch op: ``op(layer)`` enqueues a call and returns the result of `paged_attention`."""

    op: Callable[[int], Any]

    def prepare(self, case: Sizes, q: Any, plan: Plan) -> Prepared:
        """Record calls over all layers in a CUDA graph, so that host time does not count."""
        torch = torch_on_gpu()
        for _ in range(3):  # the first calls choose and load kernels
            self.op(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        calls_per_graph = case.num_layers * -(-plan.unroll // case.num_layers)
        # In the default mode, "global", calls of JAX's threads would end the recording.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for i in range(calls_per_graph):
                self.op(i % case.num_layers)
        num_graphs = -(-plan.num_calls // calls_per_graph)

        def run() -> None:
            for _ in range(num_graphs):
                graph.replay()
            torch.cuda.synchronize()

        return Prepared(
            lambda: self.op(0).float().cpu().numpy(), Program(run, num_graphs * calls_per_graph)
        )


def our_call(
    inputs: Inputs, backend: str | None = None, *, value_dim: int | None = None
) -> JaxCall:
    """Return a call of the public op, for decode or for a chunk, on one of its backends.

    `value_dim` is the number of elements of a value in latent attention, or None.
    """

    def op(q: jax.Array, layer: Any, inputs: Inputs) -> jax.Array:
        pools = inputs.pools
        arguments = (q, pools.k, pools.v, inputs.block_tables, inputs.context_lens)
        options: dict[str, Any] = {
            "layer": layer,
            "scale": 1.0,
            "k_scale": pools.k_scale,
            "v_scale": pools.v_scale,
            "backend": backend,
            "value_dim": value_dim,
        }
        if inputs.query_lens is None:
            return pad_to_queries(paged_attention(*arguments, **options), q)
        return pad_to_queries(paged_prefill_attention(*arguments, inputs.query_lens, **options), q)

    return JaxCall(op, inputs)


def pad_to_queries(out: jax.Array, q: jax.Array) -> jax.Array:
    """Pad the output of latent attention with zeros to the size of the queries.

    In a timed program, the output of a call is the queries of the next call.
    """
    missing = q.shape[-1] - out.shape[-1]
    return jnp.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, missing)]) if missing else out


def expected_result(inputs: Inputs) -> jax.Array:
    """Return the expected result for layer 0, computed by the XLA backend."""
    return jax.jit(our_call(inputs, backend="xla").op)(inputs.q, 0, inputs)


def prepare_all(
    calls: Mapping[_Key, JaxCall | TorchCall], case: Sizes, q: Any, plan: Plan
) -> tuple[dict[_Key, Prepared], dict[_Key, str]]:
    """Compile and run all calls once.

    Returns:
      ``(prepared, failures)``: the calls that work, and the reasons why others fail.
    """
    with ThreadPoolExecutor() as pool:
        futures = {
            key: pool.submit(call.prepare, case, q, plan)
            for key, call in calls.items()
            if isinstance(call, JaxCall)
        }
    prepared: dict[_Key, Prepared] = {}
    failures: dict[_Key, str] = {}
    for key, call in calls.items():
        try:
            # This records a CUDA graph, while no other thread uses the device.
            ready = futures[key].result() if key in futures else call.prepare(case, q, plan)
            ready.program.run()  # the first run loads kernels and allocates memory
            prepared[key] = ready
        except Exception as error:  # the other kernels are still measured
            failures[key] = reason(error)
    return prepared, failures


def fastest_settings(prepared: dict[tuple[str, str], Prepared]) -> dict[str, str]:
    """Choose the fastest variant of each kernel; close variants get three more turns."""
    fastest = {}
    for name in dict.fromkeys(name for name, _ in prepared):
        programs = {s: ready.program for (n, s), ready in prepared.items() if n == name}
        if len(programs) > 1:
            first = median_seconds(programs, 1)
            most = _HOPELESS * min(first.values())
            seconds = median_seconds({s: p for s, p in programs.items() if first[s] <= most}, 3)
            programs = {min(seconds, key=seconds.__getitem__): None}
        fastest[name] = next(iter(programs))
    return fastest


def drop_different(
    prepared: dict[tuple[str, str], Prepared], error: Callable[[Any], float]
) -> dict[tuple[str, str], str]:
    """Drop the kernels whose result for layer 0 has an error above `TOLERANCE`.

    Args:
      prepared: the kernels, from which some are dropped.
      error: returns the relative error of a result.

    Returns:
      The reason for each dropped kernel.
    """
    errors = {key: error(ready.once()) for key, ready in prepared.items()}
    different = {key: error for key, error in errors.items() if not error <= TOLERANCE}
    for key in different:
        del prepared[key]
    return {
        key: f"the result has a relative error of {error:.3g}" for key, error in different.items()
    }


def relative_error(actual: Any, expected: Any) -> float:
    """Return the relative Euclidean norm of the difference; NaN if any value is NaN."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def torch_on_gpu() -> Any:
    """Return the torch module.

    Raises:
      PeerUnavailable: PyTorch is not installed, or has no GPU.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PeerUnavailable("torch is not installed") from error
    if not torch.cuda.is_available():
        raise PeerUnavailable("torch sees no GPU")
    return torch
