"""Time until the first token and peak memory of a new process.

    python -m benchmarks.quantised.starts paged_jax FILE DTYPE
    python -m benchmarks.quantised.starts llama.cpp FILE

`measure_starts` runs this twice with an empty cache folder. The second process finds the compiled
programs and kernels of the first.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import import_peer, measure_in_process, resident_bytes

PROMPT_LEN, NUM_TOKENS = 32, 16
# As for `python -m paged_jax.chat`: one sequence, and a pool for the whole context of the model.
MAX_LEN = 8192


def measure_starts(engine: str, file: Path, dtype: str = "auto") -> dict[str, dict[str, float]]:
    """Return the figures of the first and of the second start, see `start`."""
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: v for name, v in os.environ.items() if not name.startswith("JAX_")}
        environment |= {"XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu"}
        for name in ("first", "second"):
            figures[name] = measure_in_process(
                engine, "benchmarks.quantised.starts", engine, file, dtype, env=environment
            )
    return figures


def start(engine: str, file: Path, dtype: str) -> dict[str, float]:
    """Load a model in this process and generate some tokens.

    Returns:
      "imports_s", the time to import the engine; "first_token_s" and "first_token_cpu_s", the time
      and the CPU-seconds from the end of the imports to the first token; for paged_jax also
      "peak_over_weights_and_pool", the peak memory above the imports, relative to the bytes of the
      weights and the pool.
    """
    begin = time.perf_counter()
    peer = _load_class(engine)
    imported, imported_cpu = time.perf_counter(), time.process_time()
    before, _ = resident_bytes()
    if engine == "paged_jax":
        loaded = peer(file, dtype, batch=1, max_len=MAX_LEN)
    else:
        loaded = peer(file)
    loaded.start(1, PROMPT_LEN, NUM_TOKENS)
    first, first_cpu = time.perf_counter(), time.process_time()
    for _ in range(NUM_TOKENS - 2):
        loaded.step()
    figures = {
        "imports_s": round(imported - begin, 3),
        "first_token_s": round(first - imported, 3),
        "first_token_cpu_s": round(first_cpu - imported_cpu, 3),
    }
    if engine == "paged_jax":
        _, peak = resident_bytes()
        needed = loaded.weight_bytes + loaded.cache_bytes
        figures |= {
            "weights_mb": loaded.weight_bytes // 10**6,
            "pool_mb": loaded.cache_bytes // 10**6,
            "peak_mb": (peak - before) // 10**6,
            "peak_over_weights_and_pool": round((peak - before) / needed, 2),
        }
    return figures


def _load_class(engine: str) -> Any:
    """Import an engine. The compiled programs of paged_jax are kept for the next start."""
    from benchmarks.generate.peers import LlamaCppPeer, PagedJax

    if engine == "paged_jax":
        from paged_jax import LLM  # noqa: F401, part of the imports that are timed
        from paged_jax.user_cache import keep_compiled_programs

        keep_compiled_programs()
        return PagedJax
    import_peer("llama_cpp", "llama-cpp-python")
    return LlamaCppPeer


def main(arguments: list[str]) -> int:
    """Measure one start and print one JSON line."""
    engine, file, dtype = arguments
    print(json.dumps(start(engine, Path(file), dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
