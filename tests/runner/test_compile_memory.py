"""Host memory of compilation, measured in a fresh process that has no freed memory to reuse."""

import json
import subprocess
import sys

import jax
import pytest

from paged_jax.kernels.platforms import reads_stacked_weights

_MEASURE = """
import json
from pathlib import Path
from paged_jax import LLM, SamplingParams
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

def resident(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1000

llm = LLM(random_llama(CONFIG, scan_layers=True), max_num_seqs=1, max_model_len=32)
greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
prompt = {"prompt_token_ids": [1, 2, 3]}
before = resident("VmRSS")
llm.generate([prompt], greedy)
print(json.dumps(resident("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="XLA has one emitter of fusions")
@pytest.mark.skipif(
    not reads_stacked_weights("cpu"), reason="layers are not scanned without the kernels"
)
def test_decode_with_scanned_layers_compiles_in_little_memory() -> None:
    run = [sys.executable, "-c", _MEASURE]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed) < 150  # MB: 100, or 275 with the fusion emitters
