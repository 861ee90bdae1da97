"""Benchmark of text generation on a CPU: paged_jax, its memory bound, and other engines.

    python -m benchmarks.generate                         # everything: 15M and 135M, both dtypes
    python -m benchmarks.generate --shapes 135M --dtypes bfloat16 --json results.json

All engines read the same random weights and decode greedily. They run in turns of some steps, so
that slow changes of the machine affect all of them. Figures are medians, and ratios are computed
within the run. The bound of batch 1 is the time to read the weights once per step, at the read
bandwidth of the same run. Peak memory is measured in a separate process, without its imports.

"contiguous" is the decode step of paged_jax with contiguous K and V for each sequence, which shows
the cost of paging. An engine that is not installed is skipped with a message.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import harness
from benchmarks.common.bandwidth import read_bandwidth
from benchmarks.common.shapes import DTYPES, SHAPES, weight_bytes
from benchmarks.generate.peers import (
    PREFILL_LEN,
    TURN,
    LlamaCppPeer,
    PagedJax,
    Peer,
    TransformersPeer,
    prefill_rates,
    step_seconds,
)
from benchmarks.harness import PeerUnavailable
from benchmarks.serving import engines as serving_engines
from paged_jax import Llama, PagedCache
from paged_jax.cache import reserve

PROMPT_LEN = 64
BATCHES = (1, 4, 16)
# Number of turns of an engine.
NUM_TURNS = 4
OURS = "paged_jax"


class DecodeStep:
    """Decode step from a paged or contiguous cache with PROMPT_LEN tokens, without an engine.

    The contiguous cache requires a model with unstacked layers.
    """

    def __init__(self, model: Llama, *, batch: int, max_len: int, is_paged: bool):
        graphdef, state = nnx.split(model)
        self._weights, treedef = jax.tree.flatten(state)
        self._tokens = jnp.ones(batch, jnp.int32)
        decode = _decode_paged if is_paged else _decode_contiguous

        def step(weights, cache, tokens):
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
            return decode(model, cache, tokens)

        self._step = jax.jit(step, donate_argnums=1)
        make_cache = _paged_cache if is_paged else _contiguous_cache
        self._cache = make_cache(model, batch, max_len)

    def step(self) -> np.ndarray:
        """Decode one token for each sequence and return the tokens on the host, i32[B]."""
        self._tokens, self._cache = self._step(self._weights, self._cache, self._tokens)
        return np.asarray(self._tokens)


def _paged_cache(model: Llama, batch: int, max_len: int) -> PagedCache:
    cache = model.create_cache(num_slots=batch, max_length=max_len)
    lengths = jnp.full(batch, PROMPT_LEN, jnp.int32)
    return reserve(cache, lengths, max_tokens=PROMPT_LEN)[0]


def _decode_paged(model: Llama, cache: PagedCache, tokens: jax.Array) -> Any:
    logits, cache, _ = model.decode(cache, tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def _contiguous_cache(model: Llama, batch: int, max_len: int) -> Any:
    config = model.config
    shape = (batch, config.num_key_value_heads, max_len, config.head_dim)
    pools = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_hidden_layers)]
    return pools, jnp.full(batch, PROMPT_LEN, jnp.int32)


def _decode_contiguous(model: Llama, cache: Any, tokens: jax.Array) -> Any:
    """Run the same layers over contiguous K and V, attending to all positions."""
    pools, lengths = cache
    pools, lengths, tokens = serving_engines.decode(model, pools, lengths, tokens)
    return tokens, (pools, lengths)


def measure_decode(folder: Path, dtype: str, batch: int, peers: dict[str, Peer]) -> dict[str, Any]:
    """Return the tokens per second of every engine at one batch size, measured in turns."""
    num_steps = TURN * NUM_TURNS
    max_len = PROMPT_LEN + num_steps + 16
    ours = PagedJax(folder, dtype, batch=batch, max_len=max_len)
    engines: dict[str, Peer] = {OURS: ours, **peers}
    for engine in engines.values():
        engine.start(batch, PROMPT_LEN, num_steps)
    seconds = step_seconds(engines, NUM_TURNS)
    ours.close()

    model = Llama.from_pretrained(folder, dtype=dtype)
    # With stacked layers, a layer of a contiguous cache would be copied.
    unrolled = Llama.from_pretrained(folder, dtype=dtype, scan_layers=False)
    steps = {
        "paged step": DecodeStep(model, batch=batch, max_len=max_len, is_paged=True),
        "contiguous step": DecodeStep(unrolled, batch=batch, max_len=max_len, is_paged=False),
    }
    for step in steps.values():
        step.step()
    seconds |= step_seconds(steps, NUM_TURNS)
    del model, unrolled, steps
    gc.collect()
    return {
        "batch": batch,
        "tokens_per_s": {name: round(batch / s, 1) for name, s in seconds.items()},
        "paged_over_contiguous": round(seconds["paged step"] / seconds["contiguous step"], 3),
    }


def measure_prefill(folder: Path, dtype: str, peers: dict[str, Peer]) -> dict[str, float]:
    """Return the prompt tokens per second of every engine, measured in turns."""
    ours = PagedJax(folder, dtype, batch=1, max_len=PREFILL_LEN + 16)
    engines: dict[str, Peer] = {OURS: ours, **peers}
    rates = prefill_rates(engines, NUM_TURNS)
    ours.close()
    return rates


def measure_memory(folder: Path, dtype: str, batch: int) -> dict[str, float]:
    """Return the peak memory of this process without imports, relative to weights and pool."""
    from paged_jax import LLM  # noqa: F401, before the memory of imports is read

    before, _ = harness.resident_bytes()
    max_len = PROMPT_LEN + 32
    ours = PagedJax(folder, dtype, batch=batch, max_len=max_len)
    ours.start(batch, PROMPT_LEN, 16)
    for _ in range(15):
        ours.step()
    _, peak = harness.resident_bytes()
    needed = ours.weight_bytes + ours.cache_bytes
    return {
        "batch": batch,
        "imports_mb": before // 10**6,
        "peak_mb": peak // 10**6,
        "weights_and_pool_mb": needed // 10**6,
        "peak_over_weights_and_pool": round((peak - before) / needed, 2),
    }


def load_peers(folder: Path, dtype: str) -> dict[str, Peer]:
    """Return the engines that are installed."""
    makers = {
        "transformers": lambda: TransformersPeer(folder, dtype, "dynamic"),
        "llama.cpp": lambda: LlamaCppPeer(folder, dtype),
    }
    peers: dict[str, Peer] = {}
    for name, make in makers.items():
        try:
            peers[name] = make()
        except PeerUnavailable as error:
            print(f"left out: {error}", file=sys.stderr)
    transformers = peers.get("transformers")
    if isinstance(transformers, TransformersPeer):
        peers["transformers static"] = transformers.variant("static")
    return peers


def measure(shape: str, dtype: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """Measure one model in one dtype."""
    with harness.random_model_folder(shape, dtype) as folder:
        memory = [
            harness.measure_in_process(
                OURS, "benchmarks.generate", "--memory", folder, dtype, batch
            )
            for batch in batches
        ]
        bandwidth = read_bandwidth()
        peers = load_peers(folder, dtype)
        decode = [measure_decode(folder, dtype, batch, peers) for batch in batches]
        prefill = measure_prefill(folder, dtype, peers)
        for name, peer in peers.items():
            if name != "transformers static":  # it uses the weights of the other variant
                peer.close()
    return {
        "shape": shape,
        "dtype": dtype,
        "read_bandwidth_gb_s": round(bandwidth, 1),
        "bound_batch_1_tokens_per_s": round(bandwidth * 1e9 / weight_bytes(shape, dtype), 1),
        "decode": decode,
        "prefill_tokens_per_s": prefill,
        "memory": memory,
    }


def show(record: dict[str, Any]) -> None:
    """Print one record as a table."""
    print(
        f"\n{record['shape']} {record['dtype']}: {record['read_bandwidth_gb_s']} GB/s, bound of "
        f"batch 1: {record['bound_batch_1_tokens_per_s']} tokens/s"
    )
    names = list(record["decode"][0]["tokens_per_s"])
    print(f"  {'tokens/s':22s}" + "".join(f"{name:>20s}" for name in names))
    for row in record["decode"]:
        cells = "".join(f"{row['tokens_per_s'][name]:20.1f}" for name in names)
        print(f"  {'decode, batch ' + str(row['batch']):22s}{cells}")
    prefill = record["prefill_tokens_per_s"]
    cells = "".join(f"{prefill[name]:20.1f}" if name in prefill else " " * 20 for name in names)
    print(f"  {'prefill ' + str(PREFILL_LEN):22s}{cells}")
    for row in record["decode"]:
        print(f"  paged over contiguous step, batch {row['batch']}: {row['paged_over_contiguous']}")
    for row in record["memory"]:
        print(
            f"  peak memory, batch {row['batch']}: {row['peak_over_weights_and_pool']} x (weights "
            f"+ pool of {row['weights_and_pool_mb']} MB), above {row['imports_mb']} MB of imports"
        )
    sys.stdout.flush()


def main() -> int:
    """Measure, print tables, and optionally write JSON."""
    parser = harness.command_line("Time text generation on a CPU, compared with other engines.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)  # memory of a child process
    options = parser.parse_args()
    if options.memory:
        folder, dtype, batch = options.memory
        print(json.dumps(measure_memory(Path(folder), dtype, int(batch))))
        return 0
    header = harness.environment()
    print(header["device"], header["versions"], sep="\n")
    records = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            records.append(measure(shape, dtype, tuple(options.batches)))
            show(records[-1])
    harness.finish(options, {**header, "results": records})
    return 0


if __name__ == "__main__":
    sys.exit(main())
