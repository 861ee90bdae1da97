"""Generation as one pure function: for training loops, evals, and whatever else is jitted.

The cache is made inside, with blocks for every row at its full length, and gone afterwards. So a
rollout saves no memory by its blocks: it takes as much as a contiguous cache of the same lengths.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from paged_jax import sampling
from paged_jax.cache.sizes import num_cached_tokens_at
from paged_jax.checks import check_positive
from paged_jax.dims import bind
from paged_jax.kernels.checks import as_int32
from paged_jax.models.arguments import check_token_ids
from paged_jax.models.llama import Llama
from paged_jax.runner import DecodeState, decode_steps
from paged_jax.sampling import Constraints, SlotSampling


class Rollout(NamedTuple):
    """What was generated after each of B prompts, N tokens at most. A stop token counts."""

    token_ids: jax.Array  # i32 [B, N]; 0 past num_tokens
    logprobs: jax.Array  # f32 [B, N], under the model at temperature 1, unfiltered
    num_tokens: jax.Array  # i32 [B]


def rollout(
    model: Llama,
    prompt_token_ids: jax.Array,
    num_tokens: jax.Array,
    *,
    max_tokens: int,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    seed: ArrayLike = 0,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int = 16,
    cache_dtype: DTypeLike = jnp.float32,
    backend: str | None = None,
) -> Rollout:
    """Continue a batch of prompts. One program, allocation included: jit it, scan over it.

    The weights are an argument like any other, so nothing has to be loaded or copied when they
    change. No gradient flows through a rollout: score its tokens with `model`, which does pass one.

    What it does not save: the cache holds blocks for every row at its full length, T + N tokens,
    whatever `num_tokens` and however early rows stop, and rows with the same prompt share none. An
    `Engine` takes blocks only as sequences grow, and holds what prompts have in common once.

    Args:
      model: the model, such as ``nnx.merge(graphdef, weights)`` of traced weights.
      prompt_token_ids: integer [B, T], each row padded at its end.
      num_tokens: integer [B], tokens in each prompt, 1 to T; inside `jit`, where it is not known,
        others count as the nearer of the two.
      max_tokens: N, most tokens to generate in a row (static). T + N is at most
        ``model.config.max_position_embeddings``.
      temperature, top_k, top_p, min_p: see `SamplingParams`; one for all rows or one for each;
        they may be traced.
      seed: an integer of 0 to 2**32 - 1, or ``jax.random.key`` of it, one for all rows or one for
        each; may be traced, as from the number of the training step. Row b is sample b of its seed,
        so rows with the same prompt differ, and a row's draws do not depend on the rows beside it.
      stop_token_ids: tokens that end a row; None for ``model.config.eos_token_ids``, () for none
        (static).
      block_size: C, tokens in a block of the cache, see `PagedCache`.
      cache_dtype: the dtype of K and V; on CPU, leave it at float32.
      backend: the backend of the attention, see `paged_attention`.

    Returns:
      The tokens, their log-probabilities and how many there are in each row.

    Raises:
      ValueError: shapes or types do not fit together, a size is not positive, or rows may grow
        longer than the model's positions; outside of `jit` also for a number of tokens out of
        range, or a token outside of the vocabulary.

    Cost: memory for K and V of B * (T + N) tokens; time until the last row has stopped.

    Example:
      >>> from flax import nnx
      >>> from paged_jax.models.config import LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> run = jax.jit(rollout, static_argnames=("max_tokens", "stop_token_ids"))
      >>> out = run(model, jnp.array([[3, 7, 5], [4, 0, 0]]), jnp.array([3, 1]), max_tokens=6,
      ...           temperature=0.7, seed=jnp.uint32(1))
      >>> out.token_ids.shape, out.num_tokens.tolist()
      ((2, 6), [6, 6])
    """
    check_positive("rollout", max_tokens=max_tokens, block_size=block_size)
    prompt_token_ids, num_tokens = _as_prompts(
        model.config.vocab_size, prompt_token_ids, num_tokens
    )
    B, T = prompt_token_ids.shape
    _check_fits(model, T, max_tokens)
    # A loop without a bound has no reverse derivative; this keeps jax.grad from asking for one.
    model = jax.tree.map(lax.stop_gradient, model)
    slots = jnp.arange(B, dtype=jnp.int32)
    cache = model.create_cache(
        num_slots=B,
        max_length=num_cached_tokens_at(T + max_tokens),
        block_size=block_size,
        dtype=cache_dtype,
    )
    num_tokens = jnp.clip(num_tokens, 1, T)
    if T > 1:
        _, cache, _ = model.prefill(
            cache, prompt_token_ids[:, :-1], slots, num_tokens - 1, backend=backend
        )
    if stop_token_ids is None:
        stop_token_ids = model.config.eos_token_ids
    stop_ids = jnp.array([list(stop_token_ids)], jnp.int32)
    state = DecodeState(
        cache=cache,
        sampling=_sampling(
            SlotSampling.create(B, model.config.vocab_size, max_logit_bias=0, max_stop_ids=0),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=_keys(seed),
            held_until=num_tokens,
        ),
        token_ids=prompt_token_ids[slots, num_tokens - 1],
        stop_ids=jnp.broadcast_to(stop_ids, (B, stop_ids.shape[1])),
        max_lengths=num_tokens + max_tokens,
        constraints=Constraints.create(B, vocab_size=0, max_forced=0),
    )
    tokens, _ = decode_steps(model, state, slots, max_tokens, max_steps=max_tokens, backend=backend)
    return Rollout(tokens.token_ids.T, tokens.logprobs.T, tokens.num_new)


def _check_fits(model: Llama, T: int, max_tokens: int) -> None:
    most = model.config.max_position_embeddings
    if T + max_tokens > most:
        raise ValueError(
            f"rollout: T + max_tokens must be at most max_position_embeddings = {most} "
            f"of the model, got {T} + {max_tokens}. Pass fewer max_tokens."
        )


def _as_prompts(
    vocab_size: int, prompt_token_ids: ArrayLike, num_tokens: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The prompts i32[B, T] and their lengths i32[B], unless they do not fit together."""
    prompts, lengths = jnp.asarray(prompt_token_ids), jnp.asarray(num_tokens)
    sizes = bind("rollout", prompt_token_ids=(prompts, "BT"), num_tokens=(lengths, "B"))
    B, T = sizes["B"], sizes["T"]
    if not B or not T:
        raise ValueError(
            f"rollout: prompt_token_ids must hold a token, got shape [{B}, {T}]. Pass one row for "
            "each prompt, of at least one token."
        )
    prompts, lengths = as_int32("rollout", prompt_token_ids=prompts, num_tokens=lengths)
    if not isinstance(num_tokens, Tracer):
        wrong = [count for count in np.asarray(num_tokens).tolist() if not 1 <= count <= T]
        if wrong:
            raise ValueError(
                f"rollout: num_tokens must be in 1..{T}, the width of prompt_token_ids, got "
                f"{wrong[0]}."
            )
    check_token_ids("rollout", vocab_size, prompt_token_ids, num_tokens, name="prompt_token_ids")
    return prompts, lengths


def _sampling(state: SlotSampling, **values: ArrayLike) -> SlotSampling:
    """What `sampling.write_slot` writes, for all rows at once; the values may be traced."""
    B = state.temperature.shape[0]
    rows = {name: _per_row(name, jnp.asarray(value), B) for name, value in values.items()}
    keys = jax.random.key_data(rows.pop("seed"))
    rows = {name: row.astype(getattr(state, name).dtype) for name, row in rows.items()}
    state = dataclasses.replace(state, **rows, keys=keys)
    return jax.vmap(sampling.settle)(state, jnp.arange(B, dtype=jnp.uint32))


def _per_row(name: str, value: jax.Array, num_rows: int) -> jax.Array:
    """One value for each row."""
    if value.shape not in ((), (num_rows,)):
        raise ValueError(
            f"rollout: {name} must be one value or have shape [{num_rows}], got shape "
            f"{list(value.shape)}."
        )
    return jnp.broadcast_to(value, (num_rows,))


def _keys(seed: ArrayLike) -> jax.Array:
    """The keys of seeds, or keys as they are; of the kind that `sampling` draws with."""
    if isinstance(seed, (int, np.integer)):
        if not 0 <= seed < 2**32:
            raise ValueError(
                f"rollout: seed must be in [0, 2**32), got {seed}. Pass the number of the step."
            )
        seed = np.uint32(seed)  # jnp would take it for an int32
    seed = jnp.asarray(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if jax.random.key_data(seed).shape[seed.ndim :] != (2,):
            raise ValueError(
                f"rollout: seed must be an integer or a threefry2x32 key, got {seed.dtype}. Pass "
                "jax.random.key(number, impl='threefry2x32')."
            )
        return seed
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise ValueError(f"rollout: seed must be an integer or a key, got {seed.dtype}.")
    low = seed.astype(jnp.uint32)
    return jax.random.wrap_key_data(
        jnp.stack([jnp.zeros_like(low), low], axis=-1), impl="threefry2x32"
    )
