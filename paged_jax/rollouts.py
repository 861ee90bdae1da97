# pyright: strict, reportUnknownMemberType=false
"""`rollout`: text generation as a pure function, for training loops and jitted programs.

The function creates a cache with enough blocks for the full length of every row. The samples of a
prompt share its blocks. Different rows of `prompt_token_ids` share no blocks, even if they are
equal. In a layer with a sliding window, a row has blocks only for the window and about 256 more
tokens, because blocks that have left the window are freed and reused while the program runs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from paged_jax.arguments import ArgumentError, check_positive, is_int, names_arguments
from paged_jax.cache import paged_cache
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.cache.sequence_blocks import (
    max_blocks_in_slot,
    num_blocks_needed,
    num_cached_tokens_at,
)
from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.step_arrays import check_token_ids
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps
from paged_jax.sampling.filters import Constraints
from paged_jax.sampling.params import NO_BIAS, NUMBERS, TokenBias
from paged_jax.sampling.sample import Draws
from paged_jax.sampling.state import SlotSampling, to_device_values

# If a layer has a sliding window, generation is divided into passes of at most this many tokens per
# row. Blocks that have left the window are freed between passes. The number is small compared to
# the windows of models, and large enough that the cost of freeing is negligible.
_MAX_TOKENS_PER_PASS = 256


@short_repr
class Rollout(NamedTuple):
    """Generated tokens of B rows. The samples of a prompt are consecutive rows.

    Attributes:
      token_ids: i32 [B, N], the generated tokens of each row, followed by zeros.
      logprobs: f32 [B, N], log-probabilities of the tokens at temperature 1, without filters.
      num_tokens: i32 [B], number of generated tokens in each row, including the stop token.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    num_tokens: jax.Array


@names_arguments
def rollout(
    model: PagedModel,
    prompt_token_ids: jax.Array,
    num_tokens: jax.Array,
    *,
    max_tokens: int,
    num_samples: int = 1,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    seed: ArrayLike = 0,
    stop_token_ids: Sequence[int] | None = None,
    token_bias: TokenBias = NO_BIAS,
    block_size: int = 16,
    cache_dtype: DTypeLike = jnp.float32,
    backend: str | None = None,
) -> Rollout:
    """Generate tokens after a batch of prompts. This can be used inside `jit` and `scan`.

    The weights are an ordinary argument, so new weights need not be loaded or copied. No gradients
    flow through the rollout: to get gradients, compute the log-probabilities again with `model`.

    The cache has blocks for T tokens of every prompt and N tokens of every sample, even if
    prompts are short or rows stop early. `LLM.rollout` generates the same tokens with an engine,
    which allocates blocks as sequences grow and stores common prefixes of prompts once.

    Args:
      model: the model, such as ``nnx.merge(graphdef, weights)`` with traced weights.
      prompt_token_ids: integer [B, T], each row padded at its end.
      num_tokens: integer [B], number of tokens in each prompt, 1 to T. Traced values outside of
        this range are clipped to it.
      max_tokens: N, maximum number of tokens to generate in a row (static). T + N must not exceed
        ``model.config.max_position_embeddings``.
      num_samples: number of samples of each prompt (static). They are consecutive rows of the
        result. Each prompt is computed and stored once.
      temperature: the logits are divided by this number, see `SamplingParams`. `temperature`,
        `top_k`, `top_p` and `min_p` are a single value or have a value for each prompt [B]. They
        may be traced.
      top_k: number of tokens to sample from, see `SamplingParams`.
      top_p: probability mass of the tokens to sample from, see `SamplingParams`.
      min_p: minimum probability relative to the most probable token, see `SamplingParams`.
      seed: an integer from 0 to 2**32 - 1 or a key of ``jax.random.key``, for all prompts, or one
        for each prompt [B]. It may be traced, for example the number of the training step. The
        random numbers of row b depend only on its seed and on b, so rows with the same prompt
        differ. Raw keys of ``jax.random.PRNGKey`` are rejected, because they have the shape of
        seeds for two or four prompts: pass ``jax.random.wrap_key_data(key)`` instead.
      stop_token_ids: tokens that end a row (static). The default None means
        ``model.config.eos_token_ids``; () means that no token ends a row.
      token_bias: biases that are added to the logits in all rows (static). `LLM.rollout` uses
        ``GenerationConfig.from_folder(folder).token_bias(...)``.
      block_size: C, number of tokens in a block of the cache.
      cache_dtype: the dtype of K and V. On CPUs, float32 is the fastest.
      backend: the backend of the kernels, see `paged_attention`.

    Returns:
      A `Rollout` with ``B * num_samples`` rows.

    Raises:
      ValueError: a shape or dtype is wrong, a size is not positive, T + N exceeds
        ``max_position_embeddings``, or a stop token is not a valid token id. Values of
        `num_tokens`, sampling parameters and prompt tokens are checked only if they are not traced.

    Memory: K and V of B * (T + num_samples * N) tokens, plus at most one block for each sample. In
    layers with a sliding window, each of the B * num_samples rows needs at most the window, 256
    tokens and two blocks. Time: a prefill of B * T tokens, and decode steps until all rows stop.

    Example:
      >>> from flax import nnx
      >>> from paged_jax.models.config import LlamaConfig
      >>> from paged_jax.models.llama import Llama
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> run = jax.jit(rollout, static_argnames=("max_tokens", "stop_token_ids"))
      >>> out = run(model, jnp.array([[3, 7, 5], [4, 0, 0]]), jnp.array([3, 1]), max_tokens=6,
      ...           temperature=0.7, seed=jnp.uint32(1))
      >>> out.token_ids.shape, out.num_tokens.tolist()
      ((2, 6), [6, 6])
    """
    check_positive("rollout", max_tokens=max_tokens, num_samples=num_samples, block_size=block_size)
    check_prompts("rollout", model.config.vocab_size, prompt_token_ids, num_tokens)
    prompts = jnp.asarray(prompt_token_ids).astype(jnp.int32)
    num_tokens = jnp.asarray(num_tokens).astype(jnp.int32)
    B, T = prompts.shape
    _check_fits(model, T, max_tokens)
    # Without stop_gradient, jax.grad of a function that calls `rollout` would fail: it cannot
    # differentiate the decode loop, because the number of iterations is not static.
    model = jax.tree.map(lax.stop_gradient, model)
    num_tokens = jnp.clip(num_tokens, 1, T)
    num_rows = B * num_samples
    tokens_per_pass = _tokens_per_pass(model.config.sliding_windows, max(T - 1, max_tokens))
    num_blocks = B * _num_blocks(T, max_tokens, num_samples, block_size)
    max_in_row = _max_blocks_in_row(model, T + max_tokens, tokens_per_pass, block_size)
    cache = model.create_cache(
        num_slots=num_rows,
        max_length=num_cached_tokens_at(T + max_tokens),
        num_blocks=min(num_blocks, num_rows * max_in_row),
        block_size=block_size,
        max_tokens=tokens_per_pass,
        dtype=cache_dtype,
    )
    cache = _prefill(model, cache, prompts, num_tokens, num_samples, tokens_per_pass, backend)

    last_tokens = prompts[jnp.arange(B, dtype=jnp.int32), num_tokens - 1]
    last_tokens, num_tokens = (jnp.repeat(x, num_samples) for x in (last_tokens, num_tokens))
    stop_ids = _stop_ids(model, stop_token_ids)
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    _check_numbers(values)
    rows = {name: _per_row(name, jnp.asarray(x), B, num_samples) for name, x in values.items()}
    rows |= {"seed": _per_row("seed", _keys(seed), B, num_samples), "held_until": num_tokens}
    state = DecodeState(
        cache=cache,
        sampling=_sampling(num_rows, model.config.vocab_size, rows, token_bias),
        token_ids=last_tokens,
        stop_ids=jnp.broadcast_to(stop_ids, (num_rows, stop_ids.shape[1])),
        max_lengths=num_tokens + max_tokens,
        constraints=Constraints.create(num_rows, vocab_size=0, max_forced=0),
    )
    slots, steps = jnp.arange(num_rows, dtype=jnp.int32), min(max_tokens, tokens_per_pass)
    draws, num_new = _decode(model, state, slots, max_tokens, steps, backend)
    return Rollout(draws.token_ids.T, draws.logprobs.T, num_new)


def _tokens_per_pass(windows: Sequence[int | None], num_tokens: int) -> int:
    """Return the maximum number of tokens per row and pass, see `_MAX_TOKENS_PER_PASS`."""
    return num_tokens if set(windows) == {None} else min(num_tokens, _MAX_TOKENS_PER_PASS)


def _decode(
    model: PagedModel,
    state: DecodeState,
    slots: jax.Array,
    max_tokens: int,
    steps: int,
    backend: str | None,
) -> tuple[Draws, jax.Array]:
    """Generate up to `max_tokens` tokens in each row, in passes of `steps` tokens.

    Blocks that have left their window are freed between two passes.

    Returns:
      The drawn tokens and their log-probabilities, as `Draws` with leading dimensions [N, B] for
      N = `max_tokens` and B rows. Also the number of generated tokens in each row, i32[B].
    """
    decode = functools.partial(decode_steps, max_steps=steps, backend=backend)
    if steps == max_tokens:
        tokens, _ = decode(model, state, slots, steps)
        return tokens.draws, tokens.num_new

    def decode_pass(
        carry: tuple[DecodeState, jax.Array, jax.Array, jax.Array],
    ) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array]:
        state, drawn, num_new, start = carry
        tokens, state = decode(model, state, slots, steps)
        drawn = lax.dynamic_update_slice_in_dim(drawn, tokens.drawn, start, axis=0)
        # If a pass ran fewer than `steps` steps, all rows have stopped, and no pass follows.
        end = jnp.where(tokens.num_steps < steps, max_tokens, start + steps)
        return state, drawn, num_new + tokens.num_new, end

    num_rows, size = slots.shape[0], steps * -(-max_tokens // steps)
    drawn, num_new = jnp.zeros((size, num_rows, 3), jnp.int32), jnp.zeros(num_rows, jnp.int32)
    carry = state, drawn, num_new, jnp.int32(0)
    _, drawn, num_new, _ = lax.while_loop(lambda carry: carry[3] < max_tokens, decode_pass, carry)
    return Draws.unpack(drawn[:max_tokens]), num_new


def _max_blocks_in_row(
    model: PagedModel, length: int, tokens_per_pass: int, block_size: int
) -> int:
    """Return the maximum number of blocks that a row of `length` tokens uses at the same time.

    This is the number in the first group of layers. That group has the largest window, so it needs
    the most blocks.
    """
    window, num_cached = model.config.layer_groups[0].sliding_window, num_cached_tokens_at(length)
    return max_blocks_in_slot(window, num_cached, tokens_per_pass, block_size)


def _num_blocks(T: int, max_tokens: int, num_samples: int, block_size: int) -> int:
    """Return the maximum number of blocks for the samples of a prompt with 1 to T tokens."""

    def blocks(length: int) -> int:
        # Full blocks of the prompt are shared by its samples. If the prompt's last block is only
        # partly filled, each sample writes into its own copy.
        shared = num_cached_tokens_at(length) // block_size
        whole = num_blocks_needed(num_cached_tokens_at(length + max_tokens), block_size)
        return shared + num_samples * (whole - shared)

    # The longest prompt does not always need the most blocks: its samples share its last block if
    # that block is full, but each sample of a shorter prompt may need a copy of a partly filled
    # block. So take the maximum over several lengths. The `block_size` largest lengths are enough:
    # a prompt with `block_size` fewer tokens fills its last block equally, but has one block less.
    return max(blocks(length) for length in range(max(1, T - block_size + 1), T + 1))


def _prefill(
    model: PagedModel,
    cache: PagedCache,
    prompt_token_ids: jax.Array,
    num_tokens: jax.Array,
    num_samples: int,
    tokens_per_pass: int,
    backend: str | None,
) -> PagedCache:
    """Compute all prompts except their last tokens, and return the filled cache.

    The slots of a prompt's samples are consecutive and share the blocks of the prompt.
    """
    T = prompt_token_ids.shape[1]
    if T == 1:
        return cache
    slots = jnp.arange(cache.num_slots, dtype=jnp.int32)
    firsts = num_samples * (slots // num_samples)
    token_ids, rows = prompt_token_ids[:, :-1], slots[::num_samples]
    if T - 1 <= tokens_per_pass:
        _, cache, _ = model.prefill(cache, token_ids, rows, num_tokens - 1, backend=backend)
    else:
        num_chunks = -(-(T - 1) // tokens_per_pass)
        token_ids = jnp.pad(token_ids, ((0, 0), (0, num_chunks * tokens_per_pass - (T - 1))))

        def append(chunk: jax.Array, cache: PagedCache) -> PagedCache:
            start = chunk * tokens_per_pass
            counts = jnp.clip(num_tokens - 1 - start, 0, tokens_per_pass)
            ids = lax.dynamic_slice_in_dim(token_ids, start, tokens_per_pass, axis=1)
            chosen = jnp.where(counts > 0, rows, -1)
            return model.prefill(cache, ids, chosen, counts, backend=backend)[1]

        ends = jnp.int32(0), jnp.int32(num_chunks)
        cache = cast(PagedCache, lax.fori_loop(*ends, append, cache))
    if num_samples > 1:
        cache, _ = paged_cache.fork(cache, jnp.where(slots == firsts, -1, firsts))
    return cache


def _check_fits(model: PagedModel, T: int, max_tokens: int) -> None:
    most = model.config.max_position_embeddings
    if T + max_tokens > most:
        raise ValueError(
            f"rollout: the number of columns of prompt_token_ids + max_tokens must be at most "
            f"max_position_embeddings = {most} of the model, got {T} + {max_tokens}. Reduce "
            "max_tokens."
        )


def as_array(function: str, name: str, values: ArrayLike) -> Any:
    """Return `values` as an array.

    Args:
      function: name of the function, for error messages.
      name: the name of the argument.
      values: an array, which is returned unchanged, or nested lists of numbers.

    Raises:
      ValueError: nested lists have different lengths.
    """
    if hasattr(values, "dtype"):
        return values
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(
            f"{function}: {name} must be an array, got rows of different lengths. Pad each row at "
            "its end."
        ) from None


def check_prompts(
    function: str, vocab_size: int, prompt_token_ids: ArrayLike, num_tokens: ArrayLike
) -> None:
    """Check shapes and dtypes of prompts and of their lengths. Check the values unless traced.

    Args:
      function: name of the function, for error messages.
      vocab_size: V, size of the vocabulary.
      prompt_token_ids: integer [B, T], see `rollout`.
      num_tokens: integer [B], see `rollout`.

    Raises:
      ValueError: see `rollout`.
    """
    given: dict[str, Any] = {"prompt_token_ids": prompt_token_ids, "num_tokens": num_tokens}
    arrays = {name: as_array(function, name, x) for name, x in given.items()}
    if arrays["num_tokens"].ndim == 2:
        raise ValueError(
            f"{function}: num_tokens must have one dimension, the number of prompts, got shape "
            f"{list(arrays['num_tokens'].shape)}. If this is a mask, pass mask.sum(axis=1), and "
            "pad each prompt at its end."
        )
    letters = {"prompt_token_ids": "BT", "num_tokens": "B"}
    sizes = bind(function, **{name: (arrays[name], each) for name, each in letters.items()})
    B, T = sizes["B"], sizes["T"]
    if not B or not T:
        raise ValueError(
            f"{function}: prompt_token_ids must have at least one row and one column, got shape "
            f"[{B}, {T}]. Pass one row for each prompt."
        )
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{function}: {name} must be an integer array, got {array.dtype}.")
    if not isinstance(num_tokens, Tracer):
        counts: list[int] = np.asarray(arrays["num_tokens"]).tolist()
        wrong = [count for count in counts if not 1 <= count <= T]
        if wrong:
            raise ValueError(
                f"{function}: num_tokens must be in 1..{T}, the number of columns of "
                f"prompt_token_ids, got {wrong[0]}."
            )
    check_token_ids(function, vocab_size, *given.values(), name="prompt_token_ids")


def _stop_ids(model: PagedModel, stop_token_ids: Sequence[int] | None) -> jax.Array:
    """Return the ids of the tokens that end a row, as an i32 array [1, number of ids]."""
    if stop_token_ids is None:
        stop_token_ids = model.config.eos_token_ids
    # Ids above the model's vocabulary are allowed, because a tokenizer may have more tokens than
    # the model.
    for token_id in stop_token_ids:
        if not is_int(token_id) or not 0 <= token_id < 2**31:
            rule = f"must hold token ids >= 0 and < 2**31, got {token_id!r}. Pass () for none."
            raise ArgumentError("rollout", rule, "stop_token_ids")
    return jnp.array([list(stop_token_ids)], jnp.int32)


def _check_numbers(values: dict[str, ArrayLike]) -> None:
    """Check that sampling parameters are in the ranges that `SamplingParams` allows.

    Traced values are not checked.
    """
    for name, value in values.items():
        if isinstance(value, Tracer):
            continue
        number = NUMBERS[name]
        for each in np.asarray(value).reshape(-1).tolist():
            if not number.allows(each):
                rule = f"must {number.rule}, got {each!r}. {number.advice}"
                raise ArgumentError("rollout", rule, name)


def _sampling(
    num_rows: int, vocab_size: int, rows: dict[str, jax.Array], token_bias: TokenBias
) -> SlotSampling:
    """Return the sampling state of all rows.

    The values in `rows` may be traced. An engine instead makes such a state from `SamplingParams`,
    which cannot be traced, with `slot_row` and `write_rows`.

    Args:
      num_rows: number of rows. Each row has its own slot.
      vocab_size: size of the vocabulary.
      rows: maps names of fields of `SlotSampling` to arrays with a value for each row. The entry
        ``"seed"`` has the random keys.
      token_bias: biases of tokens in all rows.
    """
    num_biases = len(token_bias.all_ids)
    state = SlotSampling.create(
        num_rows, vocab_size, max_logit_bias=num_biases, max_stop_ids=0, max_bad_words=0
    )
    shape = num_rows, num_biases
    bias = {
        "bias_ids": jnp.broadcast_to(jnp.array(token_bias.all_ids, jnp.int32), shape),
        "bias_values": jnp.broadcast_to(jnp.array(token_bias.values_at(0), jnp.float32), shape),
        "num_start_ids": jnp.full(num_rows, len(token_bias.start_ids), jnp.int32),
        "start_until": rows["held_until"].astype(jnp.int32) + 1,
    }
    keys = jax.random.key_data(rows["seed"])
    fields = {name: row for name, row in rows.items() if name != "seed"}
    fields = {name: row.astype(getattr(state, name).dtype) for name, row in fields.items()}
    state = dataclasses.replace(state, **fields, **bias, keys=keys)
    return jax.vmap(to_device_values)(state, jnp.arange(num_rows, dtype=jnp.uint32))


def _per_row(name: str, value: jax.Array, B: int, num_samples: int) -> jax.Array:
    """Return `value` as an array with a value for each row, [B * num_samples].

    Args:
      name: name of the argument, for the error.
      value: a single value, or a value for each prompt [B].
      B: number of prompts.
      num_samples: number of rows for each prompt.

    Raises:
      ValueError: `value` has another shape.
    """
    if value.shape not in ((), (B,)):
        raise ValueError(
            f"rollout: {name} must be one value or have shape [{B}], one value per prompt, got "
            f"shape {list(value.shape)}."
        )
    return jnp.repeat(jnp.broadcast_to(value, (B,)), num_samples)


# Size of the last dimension of raw keys: 2 for threefry2x32, 4 for rbg and unsafe_rbg.
_WORDS_OF_RAW_KEYS = (2, 4)


def _keys(seed: ArrayLike) -> jax.Array:
    """Convert seeds (integers or keys) to threefry2x32 keys, which sampling uses."""
    if not isinstance(seed, jax.Array):
        seed = _checked_seeds(seed)
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if jax.random.key_data(seed).shape[seed.ndim :] != (2,):
            raise ValueError(
                f"rollout: seed must be an integer or a threefry2x32 key, got {seed.dtype}. Pass "
                "jax.random.key(number, impl='threefry2x32')."
            )
        return seed
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise ValueError(f"rollout: seed must be an integer or a key, got {seed.dtype}.")
    if seed.dtype == np.uint32 and seed.ndim and seed.shape[-1] in _WORDS_OF_RAW_KEYS:
        raise ValueError(
            f"rollout: seed must not be a raw key of jax.random.PRNGKey, got uint32 "
            f"{list(seed.shape)}. Pass jax.random.key(number) or jax.random.wrap_key_data(seed). "
            "If the array has an integer seed for each prompt, convert it to int32."
        )
    # Cast to uint32 first: `jnp.asarray` would convert NumPy's 64-bit integers to int32.
    low = jnp.asarray(seed.astype(np.uint32))
    words = jnp.stack([jnp.zeros_like(low), low], axis=-1)
    return cast(jax.Array, jax.random.wrap_key_data(words, impl="threefry2x32"))


def _checked_seeds(seed: ArrayLike) -> np.ndarray:
    """Return Python or NumPy seeds as a NumPy array. Check that they are in [0, 2**32)."""
    seeds = np.asarray(seed)
    if seeds.dtype.kind in "iuO":  # "O": integers of more than 64 bits
        wrong = [number for number in seeds.ravel().tolist() if not 0 <= number < 2**32]
        if wrong:
            raise ValueError(
                f"rollout: seed must be in [0, 2**32), got {wrong[0]}. Pass, for example, the "
                "number of the training step."
            )
    return seeds
