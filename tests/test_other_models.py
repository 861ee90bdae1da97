"""Tests of other models in the engine: a small model of these tests, and Qwen3 of Tunix."""

import dataclasses
import importlib.util
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, Heads, LlamaConfig, PagedModel, SamplingParams, rollout
from tests.support import ROOT
from tests.support.tiny_model import SIZES

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=48,
)


@dataclasses.dataclass
class Unhashable:
    """Mutable config without a hash, as in modules of other libraries."""

    slope: float


class Block(nnx.Module):
    """Layer with LayerNorm, an MLP and no rotary embedding."""

    def __init__(self, *, rngs: nnx.Rngs):
        E, D = CONFIG.hidden_size, CONFIG.head_dim
        self.norm = nnx.LayerNorm(E, rngs=rngs)
        self.qkv = nnx.LinearGeneral(E, (4 + 2 + 2, D), rngs=rngs)
        self.out = nnx.Linear(4 * D, E, rngs=rngs)
        self.up = nnx.Linear(E, CONFIG.intermediate_size, rngs=rngs)
        self.down = nnx.Linear(CONFIG.intermediate_size, E, rngs=rngs)

    def __call__(self, index: Any, x: jax.Array, attend: Any, carry: Any) -> tuple[jax.Array, Any]:
        q, k, v = jnp.split(self.qkv(self.norm(x)), (4, 6), axis=-2)
        out, carry = attend(index, Heads(q, k, v), carry)
        x = x + self.out(out.astype(x.dtype).reshape(*x.shape[:-1], -1))
        return x + self.down(jax.nn.gelu(self.up(x))), carry


class Other(PagedModel):
    """Model with learned positions and layers in a scan."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.config, self.options = CONFIG, Unhashable(slope=2.0)
        self.embed = nnx.Embed(CONFIG.vocab_size, CONFIG.hidden_size, rngs=rngs)
        self.places = nnx.Embed(CONFIG.max_position_embeddings, CONFIG.hidden_size, rngs=rngs)
        self.head = nnx.Linear(CONFIG.hidden_size, CONFIG.vocab_size, rngs=rngs)

        @nnx.split_rngs(splits=CONFIG.num_hidden_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.blocks = stack(rngs)

    def hidden_states(self, token_ids, positions, attend, carry, backend=None):
        x = self.embed(token_ids) + self.options.slope * self.places(positions)
        graphdef, stacked = nnx.split(self.blocks)

        def body(state, layer):
            weights, index = layer
            return nnx.merge(graphdef, weights)(index, state[0], attend, state[1]), None

        indices = jnp.arange(CONFIG.num_hidden_layers, dtype=jnp.int32)
        (x, carry), _ = jax.lax.scan(body, (x, carry), (stacked, indices))
        return x, carry

    def logits(self, x, backend=None):
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> Other:
    return Other(rngs=nnx.Rngs(3))


def greedy(model: Other, prompt: list[int], num_tokens: int) -> list[int]:
    """Generate tokens greedily, with whole sequences and without a cache."""

    def attend(index, heads, carry):
        q, k, v = (x[None] for x in heads[:3])
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)[0], carry

    length = len(prompt) + num_tokens
    steps = jnp.arange(length, dtype=jnp.int32)

    @nnx.jit
    def score(model, tokens):
        return model.logits(model.hidden_states(tokens, steps, attend, ())[0])

    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), length):
        tokens[end] = np.argmax(score(model, tokens)[end - 1])
    return tokens[len(prompt) :].tolist()


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6, 7]]


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=6),
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
def test_engine_runs_another_model(model) -> None:
    """Prompts run in chunks and share a prefix; then the weights are replaced."""
    llm = LLM(model, **(SIZES | {"max_chunk": 8}))
    assert generate(llm) == [greedy(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in generate(llm)}) == len(PROMPTS)
    assert llm.stats.num_cached_tokens > 0
    other = Other(rngs=nnx.Rngs(4))
    llm.update_params(other)
    assert generate(llm) == [greedy(other, prompt, 6) for prompt in PROMPTS]
    with pytest.raises(
        ValueError, match="load_params: the engine's model must be a Decoder, got Other"
    ):
        llm.load_params(ROOT)


def test_rollout_runs_another_model(model) -> None:
    """The model is an argument of jit, so its tree structure must have a hash."""
    tokens, lengths = np.zeros((2, 9), np.int32), np.array([9, 4], np.int32)
    for row, prompt in enumerate(PROMPTS[:2]):
        tokens[row, : len(prompt)] = prompt
    run = jax.jit(lambda tokens: rollout(model, tokens, lengths, max_tokens=6, temperature=0.0))
    rows = np.asarray(run(tokens).token_ids)
    assert rows[:, :6].tolist() == [greedy(model, prompt, 6) for prompt in PROMPTS[:2]]


def test_engine_rejects_unsupported_modules(model) -> None:
    with pytest.raises(ValueError, match="a folder or a PagedModel, got a module of Linear"):
        LLM(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # type: ignore[arg-type]
    mesh = jax.make_mesh((1,), ("tp",))
    with pytest.raises(ValueError, match="must be a Decoder to be divided over devices, got Other"):
        LLM(model, mesh=mesh)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("tunix", reason="the extra tunix is not installed")
    spec = importlib.util.spec_from_file_location("x", ROOT / "examples" / "other_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_engine_runs_qwen3_of_tunix(example, capsys) -> None:
    with jax.numpy_rank_promotion("allow"):  # Tunix needs implicit broadcasting
        example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.endswith("forward pass: True") for line in lines)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wrapper_does_not_change_the_model_of_tunix(example) -> None:
    model = example.tiny_qwen3()
    paged = example.PagedQwen3(model)
    assert type(model.layers[0].attn) is example.qwen3.Attention
    assert type(paged.model.layers[0].attn) is example.PagedAttention
    ours, theirs = (jax.tree.leaves(nnx.state(x)) for x in (paged.model, model))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
