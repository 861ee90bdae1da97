"""Policy gradients with samples from the engine: a small model learns to repeat a letter.

    python examples/rl_rollout.py        # starts with random weights, half a minute on a CPU

Each step generates samples with an engine (`LLM.rollout`), computes their rewards, and the
advantage over other samples of the same prompt (GRPO: Shao et al., 2024, section 4.1). Then it
makes some epochs of Adam with the clipped loss, and copies the new weights to the engine. The
engine sleeps while the trainer runs.

With exact numerics, `log_probs` computes the bits of the engine, so the ratio of probabilities is
exactly 1 in the first epoch. No forward pass computes log-probabilities before the update: those of
the engine are used.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paged_jax import LLM, Llama, LlamaConfig, Rollout, SamplingParams, log_probs

# Token ids: 0 is padding, 1 begins a text, 2 ends it, and all others are letters. GOAL is rewarded.
VOCAB_SIZE, BOS, EOS, FIRST_LETTER, GOAL = 32, 1, 2, 3, 7


class Batch(NamedTuple):
    """Input of the loss: P prompts and B samples."""

    prompts: np.ndarray  # i32 [P, T]
    num_tokens: np.ndarray  # i32 [P], number of tokens in each prompt
    drawn: Rollout  # of B rows
    advantages: np.ndarray  # f32 [B]


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


def advantages_of(rewards: np.ndarray, num_samples: int) -> np.ndarray:
    """Return the advantage of each sample over the other samples of its prompt, f32 [B]."""
    groups = rewards.reshape(-1, num_samples)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    return advantages.astype(np.float32).ravel()


def loss_of(model: Llama, batch: Batch, clip: float = 0.2) -> tuple[jax.Array, jax.Array]:
    """Return the clipped loss, and the ratio of each generated token, 1 in the padding."""
    prompts, num_tokens, drawn, advantages = batch
    logprobs = log_probs(model, prompts, num_tokens, drawn.token_ids, num_drawn=drawn.num_drawn)
    ratio = jnp.exp(logprobs - drawn.logprobs)
    gain = ratio * advantages[:, None]
    gain = jnp.minimum(gain, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages[:, None])
    return -jnp.sum(jnp.where(drawn.mask, gain, 0.0)) / jnp.sum(drawn.mask), ratio


def train(
    model: Llama, prompts: list[list[int]], goal: int, args: argparse.Namespace
) -> list[float]:
    """Train; return the mean reward of each step, which is the fraction of goal tokens."""
    optimizer = optax.adam(args.learning_rate)
    engine = LLM(
        model,
        max_num_seqs=16,
        num_blocks=256,
        block_size=8,
        max_chunk=32,
        numerics="exact",
        seed=args.seed,
    )
    # The model of the engine also computes exact log-probabilities in the loss.
    graphdef, params = nnx.graphdef(engine.model), nnx.state(model)
    state = optimizer.init(params)
    sampling = SamplingParams(n=args.samples, max_tokens=args.max_tokens)
    num_tokens = np.array([len(row) for row in prompts], np.int32)
    padded = np.zeros((len(prompts), num_tokens.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def update(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            return loss_of(nnx.merge(graphdef, params), batch)

        gradients, ratio = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, ratio

    history = []
    for step in range(args.steps):
        drawn = engine.rollout(padded, num_tokens, sampling)
        rewards = np.sum(drawn.mask & (drawn.token_ids == goal), axis=1) / args.max_tokens
        engine.sleep(level=2)  # frees the memory of its pool and weights for the trainer
        batch = Batch(padded, num_tokens, drawn, advantages_of(rewards, args.samples))
        ranges = []
        for _ in range(args.epochs):
            params, state, ratio = update(params, state, batch)
            ranges.append((float(ratio.min()), float(ratio.max())))
        # Another ratio would mean that the engine has other weights than the trainer.
        assert ranges[0] == (1.0, 1.0), ranges[0]
        engine.update_params(params)
        engine.wake_up()
        history.append(float(rewards.mean()))
        ratios = ", ".join(f"{low:.4f} to {high:.4f}" for low, high in ranges)
        print(f"step {step}: mean reward {history[-1]:.3f}, ratios of each epoch {ratios}")
    return history


def main(arguments: list[str] | None = None) -> list[float]:
    """Run the command line and return the mean rewards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=2, help="number of updates per step")
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
