"""Other CPU engines behind a small protocol, for comparison with paged_jax.

Every peer reads the same Hugging Face folder, gets the same prompts and decodes greedily, one step
per call. A caller can therefore interleave paged_jax and the peers in one run. The speed of hosts
changes over time, so only ratios within a short period are meaningful.

    python -m benchmarks.generate.peers --peer transformers-dynamic --dtype float32 --batch 1

measures one peer in a separate process, which is necessary to measure its peak memory, and prints
one JSON line.

A peer uses all cores through its own thread pool, and its threads may spin for a moment after a
step. Interleave runs of several steps and drop the first step of each run, as `timed_steps` does.
Otherwise a peer suffers from the spinning threads of another peer, and from its weights in the
cache. If other jobs share the cores, set OMP_WAIT_POLICY=passive before the start. Otherwise a
spinning thread can block the thread that it waits for, and torch and llama.cpp can become ten times
slower.
"""

import argparse
import importlib
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.bandwidth import num_cores
from benchmarks.common.process import PeerUnavailable, import_peer, resident_bytes, run_module
from benchmarks.common.shapes import DTYPES, SHAPES
from benchmarks.generate.llama_cpp_peer import LlamaCppPeer
from benchmarks.generate.peer import Peer, timed_steps
from benchmarks.generate.transformers_peer import TransformersPeer

PREFILL_LEN = 512
"""Number of prompt tokens in the prefill measurement of the command line."""


PEERS: dict[str, Callable[[str | Path, str], Peer]] = {
    "transformers-dynamic": lambda folder, dtype: TransformersPeer(folder, dtype, "dynamic"),
    "transformers-static": lambda folder, dtype: TransformersPeer(folder, dtype, "static"),
    "transformers-compiled": lambda folder, dtype: TransformersPeer(folder, dtype, "static", True),
    "llama.cpp": lambda folder, dtype: LlamaCppPeer(folder, dtype),
    "llama.cpp-unified": lambda folder, dtype: LlamaCppPeer(folder, dtype, unified=True),
}
"""Every peer by name, created from a model folder and a key of `shapes.DTYPES`."""

_PACKAGES = {
    "transformers": {"torch": "torch", "transformers.models.llama": "transformers"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}


def measure(
    name: str, folder: str | Path, dtype: str, batch: int, prompt_len: int, new_tokens: int
) -> dict[str, Any]:
    """Measure one peer in this process, for JSON. The process should have done nothing else.

    Each decode step is timed, starting with `prompt_len` cached tokens. Prefill is timed five times
    with a prompt of 512 tokens, after a warm-up. "best" is the shortest time: the speed of the
    engine without other load.

    Raises:
        PeerUnavailable: if packages of the peer are missing.
    """
    packages = next(names for prefix, names in _PACKAGES.items() if name.startswith(prefix))
    for module, package in packages.items():
        import_peer(module, package)
    after_import, _ = resident_bytes()
    peer = PEERS[name](folder, dtype)
    peer.start(batch, prompt_len, new_tokens + 2)
    steps = timed_steps(peer, new_tokens, warmup=2)
    _, decode_peak = resident_bytes()
    prefills = [peer.prefill(PREFILL_LEN) for _ in range(6)][1:]
    _, peak = resident_bytes()
    peer.close()
    return {
        "peer": peer.name,
        "dtype": dtype,
        "batch": batch,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "decode_tok_s_median": round(batch / statistics.median(steps), 1),
        "decode_tok_s_best": round(batch / min(steps), 1),
        "prefill_tok_s_median": round(PREFILL_LEN / statistics.median(prefills), 1),
        "prefill_tok_s_best": round(PREFILL_LEN / min(prefills), 1),
        "rss_after_import_mb": after_import // 10**6,
        "peak_rss_decode_mb": decode_peak // 10**6,
        "peak_rss_mb": peak // 10**6,
        "cores": num_cores(),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages.values()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure one peer and print one JSON line."""
    parser = argparse.ArgumentParser(description="Measure one peer on the CPU.")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="model folder, instead of --shape")
    options = parser.parse_args(arguments)
    if options.folder is not None and not (options.folder / "config.json").is_file():
        parser.error(f"--folder must contain a config.json, got {options.folder}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder
        if folder is None:
            folder = Path(temporary) / options.shape
            # In a separate process: otherwise the peak memory would include all tensors of the
            # conversion.
            run_module(
                "benchmarks.common.shapes", options.shape, folder, "--dtype", options.dtype,
                check=True,
            )  # fmt: skip
        try:
            record = measure(
                options.peer,
                folder,
                options.dtype,
                options.batch,
                options.prompt_len,
                options.new_tokens,
            )
        except PeerUnavailable as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps({"model": str(options.folder or options.shape)} | record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
