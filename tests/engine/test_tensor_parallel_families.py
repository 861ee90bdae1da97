"""Model families on two devices, compared with transformers on small random weights.

Engines run families whose caches differ in kind: recurrent states, latents, windows, and heads of
other sizes. For families that differ from these in their layers alone, the logits are compared,
because an engine costs ten times as much to compile.

The families have all kinds of layers and groups, except soft caps and a window in all layers. With
such a window, sequences stop taking blocks, and none would be preempted. All families run in a
single process, because a process takes seconds to start.
"""

import json

import numpy as np
import pytest

from tests.support import families
from tests.support.processes import run_on_devices

# Importing torch and transformers takes seconds.
pytestmark = pytest.mark.slow

NUM_DRAFTS, MAX_TOKENS, NUM_SCORED = 3, 64, 70
# Kind of preemption and maximum number of drafts of each engine. The families have:
ENGINES = {
    "qwen3_next": ("swap", NUM_DRAFTS),  # gated delta nets, gates of attention, shared experts
    "kimi_linear": ("recompute", NUM_DRAFTS),  # Kimi Delta Attention, latents, groups of experts
    "falcon_h1": ("recompute", NUM_DRAFTS),  # Mamba-2 beside attention
    "lfm2_moe": ("swap", 0),  # short convolutions
    "gemma3n": ("recompute", 0),  # windows, shared keys and values, streams, sparse gates
    "gemma4 with experts": ("swap", NUM_DRAFTS),  # other heads in some layers, keys as values
}
LOGITS = [
    "nemotron_h",  # layers with only an MLP, or only Mamba-2
    "llama4",  # attention to chunks, experts with weighted inputs
    "gpt_oss",  # sinks, experts with biases
    "deepseek_v3",  # latent queries, rotated latents, dense layers
    "granitemoehybrid",  # Mamba-2 with a group of heads on both devices
    "olmo_hybrid",  # norms over all heads, norms after attention
    "cohere2",  # attention and MLP in parallel, with one sum over devices
]
_PROGRAM = """
import json
import sys

import numpy as np
from paged_jax import Engine, Llama, SamplingParams
from paged_jax.engine.drafts import Drafter
from paged_jax.engine.memory_plan import collectives, make_plan
from paged_jax.runner import runner
from paged_jax.runner.programs import list_calls
from tests.support.tensor_parallel import divided_logits
from tests.support.workload import Job, check_empty, full_batch, play


def planned_sums(config):
    plan = make_plan(config, 1 << 30, "cpu", tensor_parallel_size=2)
    return collectives(plan, 1).num_all_reduces


engines, folder = sys.argv[1:]
for name, expected in np.load(folder + "/logits.npz").items():
    model = Llama.from_pretrained(folder + "/" + name, scan_layers=False)
    logits, num_sums = divided_logits(model, 2, np.load(folder + "/tokens.npy"))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4, err_msg=name)
    assert num_sums == planned_sums(model.config), name

runner.row_bucket = full_batch
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
problems = []
for name, (folder, preemption, num_drafts, jobs) in json.loads(engines).items():

    def draft(_, sequence):
        tokens, count = jobs[sequence.request.request_id][1], sequence.num_generated
        drafted = tokens[count : count + count % num_drafts]
        return [*drafted, ((drafted or [count])[-1] + 1) % 90]  # the last one is wrong

    if num_drafts:
        Drafter._draft = draft
    model = Llama.from_pretrained(folder, scan_layers=False)
    engine = Engine(
        model, block_size=8, num_blocks=24, max_num_seqs=3, max_model_len=160, max_chunk=16,
        max_num_batched_tokens=32, preemption=preemption, num_speculative_tokens=num_drafts,
        backend="xla", tensor_parallel_size=2,
    )
    arrivals = zip((0, 5, 6), jobs.items(), strict=True)
    outputs = play(
        engine,
        [Job(key, {"prompt_token_ids": job[0]}, params, at=at) for at, (key, job) in arrivals],
    )
    check_empty(engine)
    stats = engine.stats
    facts = {
        key: list(outputs[key].outputs[0].token_ids) == tokens for key, (_, tokens) in jobs.items()
    }
    facts["cached"] = stats.num_cached_tokens > 0
    facts["preempted"] = stats.num_preemptions > 0
    facts["swapped"] = (stats.num_swap_preemptions > 0) == (preemption == "swap")
    facts["drafts"] = (stats.num_accepted_tokens > 0) == (num_drafts > 0)

    # The plan counts the sums over devices.
    executor = engine.core.runner.executor
    calls = list_calls(executor.programs, executor.sizes, engine.cache)
    call = [call for call in calls if call.name == "decode of 3 samples"][0]
    lowered = call.program.lower(executor.weights.arrays, executor.state, *call.args, **call.static)
    num_sums = lowered.as_text().count('"stablehlo.all_reduce"')
    facts["sums"] = num_sums == planned_sums(model.config)
    # Each device has a share of the states of recurrent layers.
    states = engine.cache.states
    facts["states"] = all(
        2 * pool.addressable_shards[0].data.shape[2] == pool.shape[2]
        for pool in (() if states is None else states.pools[0])
    )
    problems += [(name, key) for key, is_right in facts.items() if not is_right]
assert not problems, problems
"""


def test_families_on_two_devices_match_transformers(tmp_path) -> None:
    """Prompts share a beginning, which later prompts find in the prefix cache; blocks run out."""
    tokens = np.random.default_rng(0).integers(2, families.VOCAB_SIZE, 110).tolist()
    ends = {"first": 80, "second": 90, "third": 100}
    prompts = {key: tokens[:70] + tokens[end : end + 9] for key, end in ends.items()}
    cases = {}
    for name, options in ENGINES.items():
        theirs = families.reference(families.CASES[name])
        theirs.save_pretrained(tmp_path / name)
        jobs = {
            key: (prompt, families.greedy_tokens(theirs, prompt, MAX_TOKENS))
            for key, prompt in prompts.items()
        }
        cases[name] = str(tmp_path / name), *options, jobs
    expected, sequence = {}, np.asarray(tokens[:NUM_SCORED], np.int32)
    for name in LOGITS:
        theirs = families.reference(families.CASES[name])
        theirs.save_pretrained(tmp_path / name)
        expected[name] = families.logits(theirs, sequence[None])[0]
        assert np.std(expected[name]) > 0.2  # otherwise any model would match
    np.save(tmp_path / "tokens.npy", sequence)
    np.savez(tmp_path / "logits.npz", **expected)
    run_on_devices(_PROGRAM, json.dumps(cases), tmp_path, num_devices=2)
