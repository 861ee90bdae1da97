"""Models that several devices share, and what they must compute."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from paged_jax import Engine, SamplingParams
from paged_jax.models.causal_attention import CausalAttention
from paged_jax.models.decoder import Decoder
from paged_jax.models.layer_attention import Heads, Recurrence
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.tensor_parallel import TensorParallel
from paged_jax.runner.programs import list_calls

# Two KV heads, which 4 and 8 devices must share, and a vocabulary that neither number divides.
CONFIG = LlamaConfig(
    vocab_size=46,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    qkv_bias=True,
    o_bias=True,
)
SIZES = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 4, "max_chunk": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PAIR = SamplingParams(temperature=1, seed=3, n=2, max_tokens=14, ignore_eos=True)
# The first two prompts have the same beginning.
PROMPTS = [[0, *range(5, 22)], [0, *range(5, 15), 7, 8]]


def make_model(*, scan_layers: bool = False, seed: int = 1, **changes: Any) -> Decoder:
    """Create a model with next tokens that depend on all previous tokens."""
    config = dataclasses.replace(CONFIG, **changes)
    model = Decoder(config, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    leaves, treedef = jax.tree.flatten(nnx.state(model))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [0.3 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    leaves = [x + y for x, y in zip(leaves, noise, strict=True)]
    nnx.update(model, jax.tree.unflatten(treedef, leaves))
    return model


def logits(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Return the logits f32[T, V] of a sequence i32[T], computed without a cache."""
    attend = CausalAttention(model.config)

    def attend_to_sequence(index, inputs, carry):
        if isinstance(inputs, Recurrence):
            row = inputs._replace(inputs=tuple(x[None] for x in inputs.inputs))
        else:
            heads = (x[None] for x in inputs.split())
            row = Heads(*heads, inputs.scale, inputs.soft_cap, inputs.sinks, inputs.value_dim)
        return attend(index, row, ())[0][0], carry

    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    return model.logits(model.hidden_states(tokens, positions, attend_to_sequence, ())[0])


_FORWARD = jax.jit(Decoder.__call__)


def greedy_tokens(
    model: Decoder, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[np.ndarray]]:
    """Return the most probable tokens after a prompt, and the log-probabilities f32[V] of each.

    They come from the whole forward pass on one device, without a cache.
    """
    token_ids = np.zeros(-(-(len(prompt) + num_tokens) // 64) * 64, np.int32)
    token_ids[: len(prompt)] = prompt
    rows = []
    for end in range(len(prompt), len(prompt) + num_tokens):
        row = np.asarray(_FORWARD(model, token_ids[None]), np.float64)[0, end - 1]
        rows.append(row - np.log(np.sum(np.exp(row - row.max()))) - row.max())
        token_ids[end] = np.argmax(row)
    return token_ids[len(prompt) : len(prompt) + num_tokens].tolist(), rows


def divided_logits(model: Decoder, num_devices: int, tokens: jax.Array) -> tuple[jax.Array, int]:
    """Return the logits of a model that is divided over devices, and the number of all-reduces.

    Check too that changing the layout of each parameter and back does not change its values.
    """
    mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
    parallel = TensorParallel.create("test", mesh, model.config)
    state = nnx.state(model)
    arrays, treedef = jax.tree.flatten(state)
    names = list(named_arrays(state))
    laid_out = [parallel.to_program_layout(name, x) for name, x in zip(names, arrays, strict=True)]
    for name, x, y in zip(names, arrays, laid_out, strict=True):
        same = parallel.to_model_layout(name, y)
        np.testing.assert_array_equal(np.asarray(same), np.asarray(x), name, strict=True)
    specs = [parallel.program_spec(name, x.shape) for name, x in zip(names, arrays, strict=True)]
    graphdef = nnx.graphdef(model.make_shard(parallel))

    def run(arrays: list[jax.Array]) -> jax.Array:
        return logits(nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays)), tokens)

    program = jax.jit(
        jax.shard_map(
            run, mesh=parallel.mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
        )
    )
    lowered = program.lower(laid_out)
    num_sums = lowered.as_text().count('"stablehlo.all_reduce"')
    return lowered.compile()(laid_out), num_sums


def generate(engine: Engine) -> list[list[list[int]]]:
    """Return the tokens of each sample of greedy requests and of pairs with shared blocks."""
    ids = [
        engine.add_request({"prompt_token_ids": prompt}, params)
        for prompt in PROMPTS
        for params in (GREEDY, PAIR)
    ]
    outputs = run(engine)
    return [[sample.token_ids for sample in outputs[id].outputs] for id in ids]


def run(engine: Engine) -> dict[str, Any]:
    """Run an engine until it is idle, and return the outputs of all requests."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def compile_call(engine: Engine, name: str) -> jax.stages.Compiled:
    """Compile one of the engine's programs."""
    runner = engine.core.runner
    calls = list_calls(runner.executor.programs, runner.executor.sizes, runner.state.cache)
    [call] = [call for call in calls if call.name == name]
    arguments = runner.executor.weights.arrays, runner.state, *call.args
    return call.program.lower(*arguments, **call.static).compile()


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the number of each kind of collective in a program, without zeros."""
    names = re.findall(
        r" = \S.*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
        r"(?:-start)?\(",
        compiled.as_text(),
    )
    return {name: names.count(name) for name in sorted(set(names))}
