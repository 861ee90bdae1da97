"""Policy gradients with samples from the engine: a small model learns to repeat a letter.

    python examples/rl_rollout.py        # starts with random weights, half a minute on a CPU

Each step generates samples with an engine (`LLM.rollout`, with arrays as input and output),
computes their rewards, and the advantage over other samples of the same prompt (GRPO: Shao et al.,
2024, section 4.1). Then it makes a step of Adam and copies the new weights to the engine. The
engine sleeps while the trainer runs.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paged_jax import LLM, Llama, LlamaConfig, SamplingParams
from paged_jax.integrations.forwards import token_logprobs

# Token ids: 0 is padding, 1 begins a text, 2 ends it, and all others are letters. GOAL is rewarded.
VOCAB_SIZE, BOS, EOS, FIRST_LETTER, GOAL = 32, 1, 2, 3, 7


class Batch(NamedTuple):
    """Input of the loss. Each row has a prompt and its completion, without padding between them."""

    token_ids: jax.Array  # i32 [B, T + N]
    is_drawn: jax.Array  # bool [B, T + N - 1], whether the next token was generated
    logprobs: jax.Array  # f32 [B, T + N - 1], log-probability of the next token in the engine
    advantages: jax.Array  # f32 [B]


def new_model(seed: int) -> Llama:
    """Return a model with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_ids=(EOS,),
    )
    return Llama(config, rngs=nnx.Rngs(seed))


def make_batch(
    prompts: np.ndarray, num_tokens: np.ndarray, drawn: Any, rewards: np.ndarray
) -> Batch:
    """Append samples to their prompts, and compute their advantages.

    Args:
      prompts: i32 [P, T], the prompts that were passed to `LLM.rollout`.
      num_tokens: i32 [P], the number of tokens in each prompt.
      drawn: the result of `LLM.rollout`, with B rows.
      rewards: f32 [B].
    """
    num_samples = len(drawn.num_tokens) // len(prompts)
    rows = np.arange(len(drawn.num_tokens))[:, None]
    starts = np.repeat(num_tokens, num_samples)[:, None]
    places = starts + np.arange(drawn.token_ids.shape[1])[None]
    is_token = places - starts < drawn.num_tokens[:, None]
    width = prompts.shape[1] + drawn.token_ids.shape[1]
    token_ids = np.zeros((len(rows), width), np.int32)
    token_ids[:, : prompts.shape[1]] = np.repeat(prompts, num_samples, axis=0)
    token_ids[rows, places] = drawn.token_ids
    is_drawn, logprobs = np.zeros((len(rows), width - 1), bool), np.zeros((len(rows), width - 1))
    is_drawn[rows, places - 1], logprobs[rows, places - 1] = is_token, drawn.logprobs
    groups = rewards.reshape(-1, num_samples)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    arrays = token_ids, is_drawn, logprobs.astype(np.float32), advantages.astype(np.float32).ravel()
    return Batch(*map(jnp.asarray, arrays))


def loss_of(model: Llama, batch: Batch, clip: float = 0.2) -> tuple[jax.Array, jax.Array]:
    """Return the clipped loss, and the largest difference of log-probabilities to the engine."""
    logprobs = token_logprobs(model, batch.token_ids)
    gap = jnp.max(jnp.where(batch.is_drawn, jnp.abs(logprobs - batch.logprobs), 0.0))
    ratio = jnp.exp(logprobs - batch.logprobs)
    advantages = batch.advantages[:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    return -jnp.sum(jnp.where(batch.is_drawn, gain, 0.0)) / jnp.sum(batch.is_drawn), gap


def train(
    model: Llama, prompts: list[list[int]], goal: int, args: argparse.Namespace
) -> list[float]:
    """Train; return the mean reward of each step, which is the fraction of goal tokens."""
    graphdef, params = nnx.split(model)
    optimizer = optax.adam(args.learning_rate)
    state = optimizer.init(params)
    engine = LLM(model, max_num_seqs=16, num_blocks=256, block_size=8, max_chunk=32, seed=args.seed)
    sampling = SamplingParams(n=args.samples, max_tokens=args.max_tokens)
    num_tokens = np.array([len(row) for row in prompts], np.int32)
    padded = np.zeros((len(prompts), num_tokens.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def update(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            return loss_of(nnx.merge(graphdef, params), batch)

        gradients, gap = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, gap

    history = []
    for step in range(args.steps):
        drawn = engine.rollout(padded, num_tokens, sampling)
        is_token = np.arange(args.max_tokens)[None] < drawn.num_tokens[:, None]
        rewards = np.sum(is_token & (drawn.token_ids == goal), axis=1) / args.max_tokens
        engine.sleep(level=2)  # frees the memory of its pool and weights for the trainer
        batch = make_batch(padded, num_tokens, drawn, rewards.astype(np.float32))
        params, state, gap = update(params, state, batch)
        engine.update_params(params)
        engine.wake_up()
        history.append(float(rewards.mean()))
        print(f"step {step}: mean reward {history[-1]:.3f}, log-probabilities within {gap:.1e}")
    return history


def main(arguments: list[str] | None = None) -> list[float]:
    """Run the command line and return the mean rewards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=8, help="number of samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    letters = np.random.default_rng(args.seed).integers(FIRST_LETTER, VOCAB_SIZE, (4, 6))
    prompts = [[BOS, *row[: 3 + i].tolist()] for i, row in enumerate(letters)]
    return train(new_model(args.seed), prompts, GOAL, args)


if __name__ == "__main__":
    main()
