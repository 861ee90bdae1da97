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
from paged_jax.cache.sequence_blocks import num_blocks_needed, num_cached_tokens_at
from paged_jax.data_axes import map_rows
from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.step_arrays import check_token_ids
from paged_jax.options import options_of
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps
from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.sample import Draws
from paged_jax.sampling.state import SlotSampling, to_device_values
from paged_jax.sampling.token_bias import NO_BIAS, TokenBias

# Token ids of rows: an integer array, padded at the end of each row, or a list for each row.
Prompts = ArrayLike | Sequence[Sequence[int]]

# If a layer has a sliding window, generation is divided into passes of at most this many tokens per
# row. Blocks that have left the window are freed between passes. The number is small compared to
# the windows of models, and large enough that the cost of freeing is negligible.
_MAX_TOKENS_PER_PASS = 256


@short_repr
class JoinedSequences(NamedTuple):
    """Prompts with their generated tokens, without padding between them.

    Attributes:
      token_ids: i32 [B, T + N], each row padded at its end by zeros.
      mask: bool [B, T + N], whether each token was generated.
      num_tokens: i32 [B], number of tokens in each row.
    """

    token_ids: jax.Array
    mask: jax.Array
    num_tokens: jax.Array


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """Generated tokens of B rows. The samples of a prompt are consecutive rows.

    Attributes:
      token_ids: i32 [B, N], the generated tokens of each row, followed by zeros.
      logprobs: f32 [B, N], log-probabilities of the tokens at temperature 1, without filters.
      num_drawn: i32 [B], number of generated tokens in each row, including the stop token.
      numerics: the numerics with which the tokens were drawn, see `PagedModel.with_numerics`.
      cache_dtype: name of the dtype of the cache with which the tokens were drawn.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    num_drawn: jax.Array
    numerics: str = dataclasses.field(default="fast", metadata={"static": True})
    cache_dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    @property
    def mask(self) -> jax.Array:
        """Whether each element of `token_ids` is a generated token, bool [B, N]."""
        steps = np.arange(self.token_ids.shape[1], dtype=np.int32)[None]
        return cast(jax.Array, steps < self.num_drawn[:, None])

    def sequences(
        self, prompt_token_ids: Prompts, num_tokens: ArrayLike | None = None
    ) -> JoinedSequences:
        """Put the generated tokens after the prompts from which they were drawn.

        Args:
          prompt_token_ids: the prompts as they were given to `rollout`.
          num_tokens: the number of tokens in each prompt, as it was given to `rollout`.

        Raises:
          ValueError: the number of rows is not a multiple of the number of prompts.

        Example:
          >>> drawn = Rollout(jnp.array([[7, 8], [9, 0]]), jnp.zeros((2, 2)), jnp.array([2, 1]))
          >>> joined = drawn.sequences([[3], [4, 5]])
          >>> joined.token_ids.tolist(), joined.num_tokens.tolist()
          ([[3, 7, 8, 0], [4, 5, 9, 0]], [3, 3])
          >>> joined.mask.astype(int).tolist()
          [[0, 1, 1, 0], [0, 0, 1, 0]]
        """
        rows, counts = read_rows(
            "Rollout.sequences", "prompt_token_ids", prompt_token_ids, "num_tokens", num_tokens
        )
        bind("Rollout.sequences", prompt_token_ids=(rows, "BT"), num_tokens=(counts, "B"))
        num_rows = self.token_ids.shape[0]
        rows, counts = repeat_prompts("Rollout.sequences", rows, counts, num_rows)
        token_ids = join_sequences(rows, counts, jnp.asarray(self.token_ids))
        lengths = counts + jnp.asarray(self.num_drawn)
        positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        is_token = positions < lengths[:, None]
        mask = is_token & (positions >= counts[:, None])
        return JoinedSequences(jnp.where(is_token, token_ids, 0), mask, lengths)


@names_arguments
def rollout(
    model: PagedModel,
    prompt_token_ids: Prompts,
    num_tokens: ArrayLike | None = None,
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
    cache_dtype: DTypeLike | None = None,
    numerics: str | None = None,
    backend: str | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Rollout:
    """Generate tokens after a batch of prompts. This can be used inside `jit` and `scan`.

    The weights are an ordinary argument, so new weights need not be loaded or copied. No gradients
    flow through the rollout: to get gradients, use `log_probs`.

    The cache has blocks for T tokens of every prompt and N tokens of every sample, even if
    prompts are short or rows stop early. `LLM.rollout` generates the same tokens with an engine,
    which allocates blocks as sequences grow and stores common prefixes of prompts once.

    With `axis_name`, each device of a mesh generates the samples of its share of the prompts, and
    all of them draw the tokens that a single device would draw.

    Args:
      model: the model, such as ``nnx.merge(graphdef, weights)`` with traced weights.
      prompt_token_ids: integer [B, T], each row padded at its end; or a list of token ids for each
        prompt.
      num_tokens: integer [B], number of tokens in each prompt, 1 to T. Traced values outside of
        this range are clipped to it. None if the prompts are lists of their own lengths.
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
        differ. Rows are counted over all devices, see `axis_name`. Raw keys of
        ``jax.random.PRNGKey`` are rejected, because they have the shape of seeds for two or four
        prompts: pass ``jax.random.wrap_key_data(key)`` instead.
      stop_token_ids: tokens that end a row (static). The default None means
        ``model.config.eos_token_ids``; () means that no token ends a row.
      token_bias: biases that are added to the logits in all rows (static). `LLM.rollout` uses
        ``GenerationConfig.from_folder(folder).token_bias(...)``.
      block_size: C, number of tokens in a block of the cache.
      cache_dtype: the dtype of K and V; None for ``model.cache_dtype``, or the dtype that an
        engine with the same model uses by default, see `PagedModel.kv_dtype`. On CPUs, float32 is
        the fastest.
      numerics: ``"fast"`` or ``"exact"``, see `PagedModel.with_numerics`; None for the model's.
      backend: the backend of the kernels, see `paged_attention`.
      axis_name: the mesh axis or axes over which prompts are divided (static). In `jax.shard_map`
        with ``check_vma=False``, it must name the axes that divide the caller's prompts, or be ()
        if every device has the same prompts. Otherwise `rollout` divides the prompts, B must be a
        multiple of the number of devices along the axes, and each device gathers all weights. The
        default None means the axes that divide the rows of `prompt_token_ids` if they are explicit
        axes. With automatic axes, it means that every device computes all rows.

    Returns:
      A `Rollout` with ``B * num_samples`` rows.

    Raises:
      ValueError: a shape or dtype is wrong, a size is not positive, T + N exceeds
        ``max_position_embeddings``, a stop token is not a valid token id, or `axis_name` is missing
        or does not fit the mesh. Values of `num_tokens`, sampling parameters and prompt tokens are
        checked only if they are not traced.

    Memory: K and V of B * (T + num_samples * N) tokens, plus at most one block for each sample. In
    layers with a sliding window, each of the B * num_samples rows needs at most the window, 256
    tokens and two blocks. Time: a prefill of B * T tokens, and decode steps until all rows stop.

    Example:
      >>> from flax import nnx
      >>> from paged_jax import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> run = jax.jit(rollout, static_argnames=("max_tokens", "stop_token_ids"))
      >>> out = run(model, jnp.array([[3, 7, 5], [4, 0, 0]]), jnp.array([3, 1]), max_tokens=6,
      ...           temperature=0.7, seed=jnp.uint32(1))
      >>> out.token_ids.shape, out.num_drawn.tolist()
      ((2, 6), [6, 6])
    """
    check_positive("rollout", max_tokens=max_tokens, num_samples=num_samples, block_size=block_size)
    vocab_size = model.config.vocab_size
    prompt_rows, counts = read_prompts("rollout", vocab_size, prompt_token_ids, num_tokens)
    B, T = prompt_rows.shape
    _check_fits(model, T, max_tokens)
    # Without stop_gradient, jax.grad of a function that calls `rollout` would fail: it cannot
    # differentiate the decode loop, because the number of iterations is not static.
    model = jax.tree.map(lax.stop_gradient, model.with_numerics(numerics, cache_dtype, backend))
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    _check_numbers(values)
    arrays = {name: jnp.asarray(value) for name, value in values.items()} | {"seed": _keys(seed)}
    prompts = _Prompts(
        token_ids=jnp.asarray(prompt_rows).astype(jnp.int32),
        num_tokens=jnp.clip(jnp.asarray(counts).astype(jnp.int32), 1, T),
        sampling={name: _per_prompt(name, array, B) for name, array in arrays.items()},
    )
    # Exact numerics need a single program, because XLA fuses operations of a program.
    generate = functools.partial(
        _generate if model.numerics == "fast" else _generate_in_jit,
        max_tokens=max_tokens,
        num_samples=num_samples,
        stop_ids=tuple(_stop_ids(model, stop_token_ids)),
        token_bias=token_bias,
        block_size=block_size,
        backend=backend,
    )
    return map_rows("rollout", generate, model, prompts, axis_name)


class _Prompts(NamedTuple):
    """B prompts of up to T tokens.

    Attributes:
      token_ids: i32 [B, T], each row padded at its end.
      num_tokens: i32 [B], number of tokens in each prompt.
      sampling: maps names of fields of `SlotSampling` to arrays [B]. The entry ``"seed"`` has the
        random keys.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    sampling: dict[str, jax.Array]


def _generate(
    model: PagedModel,
    prompts: _Prompts,
    first_prompt: jax.Array,
    *,
    max_tokens: int,
    num_samples: int,
    stop_ids: Sequence[int],
    token_bias: TokenBias,
    block_size: int,
    backend: str | None,
) -> Rollout:
    """Generate the samples of some prompts on one device.

    Args:
      model: the model.
      prompts: this device's prompts.
      first_prompt: i32[], index of the first of these prompts among those of all devices.
      max_tokens: see `rollout`, as `num_samples`, `token_bias`, `block_size` and `backend`.
      num_samples: number of samples of each prompt.
      stop_ids: the tokens that end a row.
      token_bias: biases in all rows.
      block_size: number of tokens in a block.
      backend: the backend of the kernels.
    """
    B, T = prompts.token_ids.shape
    num_rows = B * num_samples
    frees_blocks = any(group.retention.frees for group in model.config.cache_groups)
    num_tokens = max(T - 1, max_tokens)
    tokens_per_pass = min(num_tokens, _MAX_TOKENS_PER_PASS) if frees_blocks else num_tokens
    num_blocks = B * _num_blocks(T, max_tokens, num_samples, block_size)
    max_in_row = _max_blocks_in_row(model, T + max_tokens, tokens_per_pass, block_size)
    cache = model.create_cache(
        num_slots=num_rows,
        max_length=num_cached_tokens_at(T + max_tokens),
        num_blocks=min(num_blocks, num_rows * max_in_row),
        block_size=block_size,
        max_tokens=tokens_per_pass,
        dtype=model.kv_dtype,
    )
    cache = _prefill(model, cache, prompts, num_samples, tokens_per_pass, backend)

    last_tokens = prompts.token_ids[jnp.arange(B, dtype=jnp.int32), prompts.num_tokens - 1]
    last_tokens = jnp.repeat(last_tokens, num_samples)
    values = {**prompts.sampling, "held_until": prompts.num_tokens}
    rows = {name: jnp.repeat(value, num_samples) for name, value in values.items()}
    slots = jnp.arange(num_rows, dtype=jnp.int32)
    row_ids = first_prompt * num_samples + slots
    stop_row = jnp.array([list(stop_ids)], jnp.int32)
    state = DecodeState(
        cache=cache,
        sampling=_sampling(row_ids, model.config.vocab_size, rows, token_bias),
        token_ids=last_tokens,
        stop_ids=jnp.broadcast_to(stop_row, (num_rows, len(stop_ids))),
        max_lengths=rows["held_until"] + max_tokens,
        constraints=Constraints.create(num_rows, vocab_size=0, max_forced=0),
    )
    steps = min(max_tokens, tokens_per_pass)
    draws, num_new = _decode(model, state, slots, max_tokens, steps, backend)
    kind = {"numerics": model.numerics, "cache_dtype": model.kv_dtype.name}
    return Rollout(draws.token_ids.T, draws.logprobs.T, num_new, **kind)


_generate_in_jit = jax.jit(
    _generate,
    static_argnames=(
        "max_tokens", "num_samples", "stop_ids", "token_bias", "block_size", "backend",
    ),
)  # fmt: skip


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
        state, packed_draws, num_new, start = carry
        tokens, state = decode(model, state, slots, steps)
        packed_draws = lax.dynamic_update_slice_in_dim(
            packed_draws, tokens.packed_draws, start, axis=0
        )
        # If a pass ran fewer than `steps` steps, all rows have stopped, and no pass follows.
        end = jnp.where(tokens.num_steps < steps, max_tokens, start + steps)
        return state, packed_draws, num_new + tokens.num_new, end

    num_rows, size = slots.shape[0], steps * -(-max_tokens // steps)
    packed_draws = jnp.zeros((size, num_rows, 3), jnp.int32)
    num_new = jnp.zeros(num_rows, jnp.int32)
    carry = state, packed_draws, num_new, jnp.int32(0)
    _, packed_draws, num_new, _ = lax.while_loop(
        lambda carry: carry[3] < max_tokens, decode_pass, carry
    )
    return Draws.unpack(packed_draws[:max_tokens]), num_new


def _max_blocks_in_row(
    model: PagedModel, length: int, tokens_per_pass: int, block_size: int
) -> int:
    """Return the maximum number of blocks that a row of `length` tokens uses at the same time.

    This is the number in the first group of layers. That group has the largest window, so it needs
    the most blocks.
    """
    rule, num_cached = model.config.layer_groups[0].retention, num_cached_tokens_at(length)
    return rule.max_in_slot(num_cached, tokens_per_pass, block_size)


def _num_blocks(T: int, max_tokens: int, num_samples: int, block_size: int) -> int:
    """Return the maximum number of blocks for the samples of a prompt with 1 to T tokens."""

    def blocks(length: int) -> int:
        # Full blocks of the prompt are shared by its samples. If the prompt's last block is only
        # partly filled, each sample writes into its own copy.
        shared = num_cached_tokens_at(length) // block_size
        num_blocks = num_blocks_needed(num_cached_tokens_at(length + max_tokens), block_size)
        return shared + num_samples * (num_blocks - shared)

    # The longest prompt does not always need the most blocks: its samples share its last block if
    # that block is full, but each sample of a shorter prompt may need a copy of a partly filled
    # block. So take the maximum over several lengths. The `block_size` largest lengths are enough:
    # a prompt with `block_size` fewer tokens fills its last block equally, but has one block less.
    return max(blocks(length) for length in range(max(1, T - block_size + 1), T + 1))


def _prefill(
    model: PagedModel,
    cache: PagedCache,
    prompts: _Prompts,
    num_samples: int,
    tokens_per_pass: int,
    backend: str | None,
) -> PagedCache:
    """Compute all prompts except their last tokens, and return the filled cache.

    The slots of a prompt's samples are consecutive and share the blocks of the prompt.
    """
    num_tokens, T = prompts.num_tokens, prompts.token_ids.shape[1]
    if T == 1:
        return cache
    slots = jnp.arange(cache.num_slots, dtype=jnp.int32)
    first_slots = num_samples * (slots // num_samples)
    token_ids, rows = prompts.token_ids[:, :-1], slots[::num_samples]
    if T - 1 <= tokens_per_pass:
        _, cache, _ = model.prefill(cache, token_ids, rows, num_tokens - 1, backend=backend)
    else:
        num_chunks = -(-(T - 1) // tokens_per_pass)
        token_ids = jnp.pad(token_ids, ((0, 0), (0, num_chunks * tokens_per_pass - (T - 1))))

        def append(chunk: jax.Array, cache: PagedCache) -> PagedCache:
            start = chunk * tokens_per_pass
            counts = jnp.clip(num_tokens - 1 - start, 0, tokens_per_pass)
            ids = lax.dynamic_slice_in_dim(token_ids, start, tokens_per_pass, axis=1)
            row_slots = jnp.where(counts > 0, rows, -1)
            return model.prefill(cache, ids, row_slots, counts, backend=backend)[1]

        ends = jnp.int32(0), jnp.int32(num_chunks)
        cache = cast(PagedCache, lax.fori_loop(*ends, append, cache))
    if num_samples > 1:
        cache, _ = paged_cache.fork(cache, jnp.where(slots == first_slots, -1, first_slots))
    return cache


def _check_fits(model: PagedModel, T: int, max_tokens: int) -> None:
    max_positions = model.config.max_position_embeddings
    if T + max_tokens > max_positions:
        raise ValueError(
            f"rollout: the number of columns of prompt_token_ids + max_tokens must be at most "
            f"max_position_embeddings = {max_positions} of the model, got {T} + {max_tokens}. "
            "Reduce max_tokens."
        )


def read_rows(
    function: str, name: str, rows: Prompts, name_of_counts: str, counts: ArrayLike | None
) -> tuple[Any, Any]:
    """Return rows of token ids as an array [B, T], and the number of tokens in each row [B].

    Arrays are returned unchanged.

    Args:
      function: name of the function, for error messages.
      name: the name of the argument `rows`.
      rows: an array, or a list of token ids for each row, which is padded with zeros.
      name_of_counts: the name of the argument `counts`.
      counts: the number of tokens in each row; None for the lengths of the lists.

    Raises:
      ValueError: `rows` is an array and `counts` is None, or lists with `counts` have different
        lengths.
    """
    if counts is not None:
        try:
            return _as_array(rows), _as_array(counts)
        except ValueError:
            raise ValueError(
                f"{function}: {name} must be an array, got rows of different lengths. Pad each "
                f"row at its end, or leave out {name_of_counts}."
            ) from None
    if hasattr(rows, "dtype"):
        raise ValueError(
            f"{function}: {name_of_counts} must be given if {name} is an array, got None. Pass the "
            "number of tokens in each row."
        )
    arrays = [np.asarray(row) for row in cast(Sequence[Any], rows)]
    if invalid := [array for array in arrays if array.ndim != 1]:
        raise ValueError(
            f"{function}: {name} must be a list of token ids for each row, got an element with "
            f"{invalid[0].ndim} dimensions. Pass [row] for a single row."
        )
    lengths = np.array([array.size for array in arrays], np.int32)
    dtypes = [array.dtype for array in arrays if array.size]
    padded = np.zeros(
        (len(arrays), lengths.max(initial=0)), np.result_type(*dtypes) if dtypes else np.int32
    )
    for row, array in zip(padded, arrays, strict=True):
        row[: array.size] = array
    return padded, lengths


def _as_array(values: Any) -> Any:
    return values if hasattr(values, "dtype") else np.asarray(values)


def read_prompts(
    function: str,
    vocab_size: int,
    prompt_token_ids: Prompts,
    num_tokens: ArrayLike | None,
) -> tuple[Any, Any]:
    """Return prompts and their lengths as arrays [B, T] and [B], and check them.

    The arguments and errors are those of `read_rows` and `check_prompts`.
    """
    rows, counts = read_rows(
        function, "prompt_token_ids", prompt_token_ids, "num_tokens", num_tokens
    )
    check_prompts(function, vocab_size, rows, counts)
    return rows, counts


def repeat_prompts(
    function: str, prompts: ArrayLike, num_tokens: ArrayLike, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return i32 prompts [num_rows, T] and their lengths, each repeated for all of its samples.

    Raises:
      ValueError: `num_rows` is not a multiple of the number of prompts.
    """
    arrays = (jnp.asarray(x).astype(jnp.int32) for x in (prompts, num_tokens))
    rows, counts = arrays
    num_samples, remainder = divmod(num_rows, rows.shape[0])
    if remainder or not num_samples:
        raise ValueError(
            f"{function}: token_ids must have the same number of rows for each of the "
            f"{rows.shape[0]} prompts, got {num_rows} rows. Pass the prompts from which the rows "
            "were drawn."
        )
    return jnp.repeat(rows, num_samples, axis=0), jnp.repeat(counts, num_samples)


def join_sequences(prompts: jax.Array, num_tokens: jax.Array, sampled_ids: jax.Array) -> jax.Array:
    """Put generated tokens [B, N] after prompts [B, T], i32 [B, T + N], padded by zeros."""
    (_, T), N = prompts.shape, sampled_ids.shape[1]
    steps = jnp.arange(T + N, dtype=jnp.int32)[None] - num_tokens[:, None]
    index = jnp.clip(steps, 0, N - 1)
    after = jnp.take_along_axis(sampled_ids.astype(jnp.int32), index, axis=1)
    before = jnp.pad(prompts.astype(jnp.int32), ((0, 0), (0, N)))
    return jnp.where(steps < 0, before, jnp.where(steps < N, after, 0))


def check_prompts(function: str, vocab_size: int, prompt_token_ids: Any, num_tokens: Any) -> None:
    """Check shapes and dtypes of prompts and of their lengths. Check the values unless traced.

    Args:
      function: name of the function, for error messages.
      vocab_size: V, size of the vocabulary.
      prompt_token_ids: integer [B, T], see `rollout`.
      num_tokens: integer [B], see `rollout`.

    Raises:
      ValueError: see `rollout`.
    """
    arrays = {"prompt_token_ids": prompt_token_ids, "num_tokens": num_tokens}
    if arrays["num_tokens"].ndim == 2:
        raise ValueError(
            f"{function}: num_tokens must have one dimension, the number of prompts, got shape "
            f"{list(arrays['num_tokens'].shape)}. If this is a mask, pass mask.sum(axis=1), and "
            "pad each prompt at its end."
        )
    letters = {"prompt_token_ids": "BT", "num_tokens": "B"}
    sizes = bind(function, **{name: (arrays[name], dims) for name, dims in letters.items()})
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
        counts: list[int] = np.asarray(num_tokens).tolist()
        invalid = [count for count in counts if not 1 <= count <= T]
        if invalid:
            raise ValueError(
                f"{function}: num_tokens must be in 1..{T}, the number of columns of "
                f"prompt_token_ids, got {invalid[0]}."
            )
    check_token_ids(function, vocab_size, *arrays.values(), name="prompt_token_ids")


def _stop_ids(model: PagedModel, stop_token_ids: Sequence[int] | None) -> Sequence[int]:
    """Check the ids of the tokens that end a row; the default are the model's end tokens."""
    if stop_token_ids is None:
        stop_token_ids = model.config.eos_token_ids
    # Ids above the model's vocabulary are allowed, because a tokenizer may have more tokens than
    # the model.
    for token_id in stop_token_ids:
        if not is_int(token_id) or not 0 <= token_id < 2**31:
            rule = f"must hold token ids >= 0 and < 2**31, got {token_id!r}. Pass () for none."
            raise ArgumentError("rollout", rule, "stop_token_ids")
    return stop_token_ids


def _check_numbers(values: dict[str, ArrayLike]) -> None:
    """Check that sampling parameters are in the ranges that `SamplingParams` allows.

    Traced values are not checked.
    """
    options = {option.name: option for option in options_of(SamplingParams)}
    for name, value in values.items():
        if not isinstance(value, Tracer):
            for element in np.asarray(value).reshape(-1).tolist():
                options[name].check("rollout", element)


def _sampling(
    row_ids: jax.Array, vocab_size: int, rows: dict[str, jax.Array], token_bias: TokenBias
) -> SlotSampling:
    """Return the sampling state of all rows.

    The values in `rows` may be traced. An engine instead makes such a state from `SamplingParams`,
    which cannot be traced, with `slot_row` and `write_rows`.

    Args:
      row_ids: i32 [R], index of each row among the rows of all devices. Random numbers depend on
        it. Each row has its own slot.
      vocab_size: size of the vocabulary.
      rows: maps names of fields of `SlotSampling` to arrays with a value for each row. The entry
        ``"seed"`` has the random keys.
      token_bias: biases of tokens in all rows.
    """
    num_rows, num_biases = row_ids.shape[0], len(token_bias.all_ids)
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
    return jax.vmap(to_device_values)(state, row_ids.astype(jnp.uint32))


def _per_prompt(name: str, value: jax.Array, B: int) -> jax.Array:
    """Return `value` as an array with a value for each prompt, [B].

    Args:
      name: name of the argument, for the error.
      value: a single value, or a value for each prompt [B].
      B: number of prompts.

    Raises:
      ValueError: `value` has another shape.
    """
    if value.shape not in ((), (B,)):
        raise ValueError(
            f"rollout: {name} must be one value or have shape [{B}], one value per prompt, got "
            f"shape {list(value.shape)}."
        )
    return jnp.broadcast_to(value, (B,))


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
        invalid = [number for number in seeds.ravel().tolist() if not 0 <= number < 2**32]
        if invalid:
            raise ValueError(
                f"rollout: seed must be in [0, 2**32), got {invalid[0]}. Pass, for example, the "
                "number of the training step."
            )
    return seeds
