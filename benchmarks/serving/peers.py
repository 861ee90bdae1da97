"""Continuous batching of transformers, vLLM and paged_jax on the CPU, in separate processes.

    python -m benchmarks.serving.peers JOB.json

serves the requests of a job file with one engine and prints one JSON line. A separate process is
necessary to measure the peak memory of an engine. `measure` writes such files and starts the
processes.

transformers is used as in its own `generate_batch`: one manager with a separate thread, and
requests in the same order. The difference is that each request has its own number of new tokens,
which `generate_batch` does not support. "as it comes" leaves all sizes to transformers, which then
uses a share of the machine's memory. "sized" sets the number of blocks and the batch for this
workload. vLLM has its own Python, see `benchmarks.serving.vllm_peer`.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.bandwidth import num_cores
from benchmarks.harness import PeerUnavailable, import_peer, measure_in_process, resident_bytes
from benchmarks.serving.workloads import Request

OURS = "paged_jax"
PEERS = ("transformers, as it comes", "transformers, sized")
VLLM = "vLLM"
# Number of tokens in a block of transformers.
_PAGE_SIZE = 32
_ENVIRONMENT = {
    # Use the CPU even if there are other devices: all engines run there, and peaks are comparable.
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # Spinning threads would block the threads that they wait for.
    "OMP_WAIT_POLICY": "passive",
}
# Fraction of the machine's memory that must be available for the peer that uses 60% of it.
_SHARE_OF_MEMORY = 0.7


def measure(
    engine: str,
    folder: Path,
    dtype: str,
    requests: list[Request],
    warmup: list[Request],
    sizes: dict[str, Any],
    timeout: float,
    python: str | Path = sys.executable,
) -> dict[str, Any]:
    """Serve requests with one engine in a new process; all arrive at the start.

    Args:
      engine: OURS, VLLM or one of the PEERS.
      folder: a Hugging Face model folder.
      dtype: "float32" or "bfloat16".
      requests: requests to time.
      warmup: requests that are served before the measurement, with other prompts.
      sizes: the fields of `benchmarks.serving.engines.EngineSizes`.
      timeout: seconds after which the process is ended.
      python: the interpreter of the process.

    Returns:
      Seconds, CPU seconds of all threads, number of generated tokens, the tokens of each request,
      and memory in bytes.

    Raises:
      PeerUnavailable: packages of the peer are missing, it would not leave enough memory to others,
        or the process failed or took too long.
    """
    if engine == PEERS[0] and _available_memory() < _SHARE_OF_MEMORY:
        raise PeerUnavailable(
            f"{engine}: needs 60% of the machine's memory, of which {_available_memory():.0%} is "
            "available"
        )
    job = {
        "engine": engine,
        "folder": str(folder),
        "dtype": dtype,
        "requests": _to_json(requests),
        "warmup": _to_json(warmup),
        "sizes": sizes,
    }
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "job.json"
        path.write_text(json.dumps(job))
        return measure_in_process(
            engine,
            "benchmarks.serving." + ("vllm_peer" if engine == VLLM else "peers"),
            path,
            timeout=timeout,
            python=python,
            env={**os.environ, **_ENVIRONMENT},
        )


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Serve a job in this process, which should have done nothing else; see `measure`."""
    requests, warmup = (
        [Request(prompt, num_new) for prompt, num_new in job[key]] for key in ("requests", "warmup")
    )
    run = _run_ours if job["engine"] == OURS else _run_transformers
    return run(job, requests, warmup)


def _run_ours(
    job: dict[str, Any], requests: list[Request], warmup: list[Request]
) -> dict[str, Any]:
    from benchmarks.serving.engines import EngineSizes, make_engine, serve, warm_up
    from paged_jax import Llama

    before, _ = resident_bytes()
    model = Llama.from_pretrained(job["folder"], dtype=job["dtype"])
    engine = make_engine(model, EngineSizes(**job["sizes"]), "paged, prefix cache")
    warm_up(engine, warmup)
    engine.reset_prefix_cache()
    # `warm_up` runs only small batches. Also compile the programs for a batch of all requests.
    serve(engine, warmup)
    engine.reset_prefix_cache()
    cpu_start = time.process_time()
    outcome = serve(engine, requests)
    cpu_seconds = time.process_time() - cpu_start
    return make_record(outcome.seconds, cpu_seconds, outcome.token_ids, before)


def _run_transformers(
    job: dict[str, Any], requests: list[Request], warmup: list[Request]
) -> dict[str, Any]:
    torch, transformers = (import_peer(name, name) for name in ("torch", "transformers"))
    before, _ = resident_bytes()
    torch.set_num_threads(num_cores())
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=getattr(torch, job["dtype"]), local_files_only=True
    ).eval()
    options: dict[str, Any] = {}
    if job["engine"] == "transformers, sized":
        options = {
            "page_size": _PAGE_SIZE,
            "num_blocks": -(-job["sizes"]["pool_tokens"] // _PAGE_SIZE),
            "max_batch_tokens": max(len(request.prompt_token_ids) for request in requests),
        }
    # Without an end token every request generates all of its tokens.
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
    ) as manager:
        _serve_transformers(manager, warmup)
        start, cpu_start = time.perf_counter(), time.process_time()
        token_ids = _serve_transformers(manager, requests)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        record = make_record(seconds, cpu_seconds, token_ids, before)
    return record


def _serve_transformers(manager: Any, requests: list[Request]) -> list[list[int]]:
    # `generate_batch` uses the same order: prompts with a common beginning are neighbours.
    order = sorted(range(len(requests)), key=lambda i: requests[i].prompt_token_ids, reverse=True)
    indices = {
        manager.add_request(requests[i].prompt_token_ids, max_new_tokens=requests[i].num_new): i
        for i in order
    }
    token_ids: list[list[int]] = [[] for _ in requests]
    num_left = len(requests)
    while num_left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers: the generation thread must run, got none")
            continue
        if result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers: {result.error}")
            token_ids[indices[result.request_id]] = result.generated_tokens
            num_left -= 1
    return token_ids


def make_record(
    seconds: float, cpu_seconds: float, token_ids: list[list[int]], before: int
) -> dict[str, Any]:
    """Return the record of a job, with the peak of this process; `before` are bytes of imports."""
    _, peak = resident_bytes()
    num_tokens = sum(map(len, token_ids))
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "num_tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds, 1),
        "imports_bytes": before,
        "peak_bytes": peak,
        "token_ids": token_ids,
    }


def _available_memory() -> float:
    """Return the available fraction of the machine's memory; 1 if the system does not report it."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 1.0
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    available, total = (int(fields[key].split()[0]) for key in ("MemAvailable", "MemTotal"))
    return available / total


def _to_json(requests: list[Request]) -> list[tuple[list[int], int]]:
    return [(request.prompt_token_ids, request.num_new) for request in requests]


def main(arguments: list[str]) -> int:
    """Serve the requests of a job file, and print one JSON line."""
    try:
        record = run_job(json.loads(Path(arguments[0]).read_text()))
    except PeerUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
