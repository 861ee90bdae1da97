"""Checks the arguments of an engine, and makes of them the sizes of its programs.

`Engine` and the planner, `paged_jax.engine.memory_plan`, take the same arguments and refuse the
same mistakes in the same words.
"""

from typing import Any

from paged_jax.checks import ArgumentError, check_positive, is_int, is_real
from paged_jax.engine.footprint import KV_DTYPES
from paged_jax.engine.inputs import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from paged_jax.models.config import LlamaConfig
from paged_jax.runner.sizes import MAX_NUM_BATCHED_TOKENS, Sizes
from paged_jax.scheduler.preemption import Preemption
from paged_jax.scheduler.scheduler import check_step_limits


def check_arguments(
    function: str,
    *,
    kv_dtype: str = "auto",
    num_blocks: int | None = None,
    memory_fraction: float | None = None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int | None = None,
    num_speculative_tokens: int = 0,
    preemption: str = "auto",
    **sizes: Any,
) -> None:
    """Refuse what can be refused before a model is loaded.

    Args:
      function: the name that messages begin with.
      kv_dtype, num_blocks, memory_fraction, max_num_seqs, max_num_batched_tokens, max_model_len,
        num_speculative_tokens, preemption: see `Engine`.
      **sizes: other arguments that must be positive integers.

    Raises:
      ValueError: an argument is out of bounds; the message names it and the bound.
    """
    sizes |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    optional = {"num_blocks": num_blocks, "max_model_len": max_model_len}
    sizes |= {name: value for name, value in optional.items() if value is not None}
    check_positive(function, **sizes)
    if not is_int(num_speculative_tokens) or num_speculative_tokens < 0:
        rule = f"must be an integer, at least 0, got {num_speculative_tokens!r}."
        raise ArgumentError(function, rule, "num_speculative_tokens")
    _check_memory_fraction(function, memory_fraction, num_blocks)
    check_step_limits(
        function, max_num_batched_tokens, max_num_seqs, preemption, slots_name="max_num_seqs"
    )
    if kv_dtype not in (choices := ("auto", *KV_DTYPES)):
        raise ValueError(
            f"{function}: kv_dtype must be one of {', '.join(choices)}, got {kv_dtype!r}."
        )


def check_switches(function: str, **switches: Any) -> None:
    """Check that arguments are True or False; None stands for a default.

    Raises:
      ArgumentError: naming the first that is not. Any text is true to Python, "no" as well.
    """
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise ArgumentError(function, f"must be True or False, got {value!r}.", name)


def check_function(function: str, **arguments: Any) -> None:
    """Check that arguments can be called; None stands for nothing to call.

    Raises:
      ArgumentError: naming the first that cannot.
    """
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise ArgumentError(function, f"must be a function or None, got {value!r}.", name)


def check_engine_numbers(function: str, *, seed: int, swap_space: float) -> None:
    """Check the arguments that an engine has and a memory plan has not.

    Raises:
      ArgumentError: the seed is no integer in 0 to 2**63 - 1, or swap_space no size.
    """
    if not is_int(seed) or not 0 <= seed < 2**63:
        raise ArgumentError(function, f"must be an integer in 0..2**63 - 1, got {seed!r}.", "seed")
    if not is_real(swap_space) or swap_space < 0:
        rule = f"must be a finite number of GiB, at least 0, got {swap_space!r}."
        raise ArgumentError(function, rule, "swap_space")


def _check_memory_fraction(
    function: str, memory_fraction: float | None, num_blocks: int | None
) -> None:
    if memory_fraction is None:
        return
    if not is_real(memory_fraction) or not 0 < memory_fraction <= 1:
        raise ValueError(
            f"{function}: memory_fraction must be above 0 and at most 1, got {memory_fraction!r}."
        )
    if num_blocks is not None:
        raise ValueError(
            f"{function}: memory_fraction must be None where num_blocks is given, got "
            f"{memory_fraction} and {num_blocks}. Give one of them."
        )


def program_sizes(
    function: str,
    config: LlamaConfig,
    *,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int | None,
    max_chunk: int,
    num_speculative_tokens: int,
    num_eos_token_ids: int,
    num_token_biases: int = 0,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    steps_per_dispatch: int = 1,
) -> Sizes:
    """What shapes the programs of an engine.

    Args:
      function: the name that messages begin with.
      config: the configuration of the model.
      num_eos_token_ids: tokens that end sequences of the model.
      num_token_biases: number of biases that apply to every request, see `TokenBias`.
      block_size, max_num_seqs, max_model_len, max_chunk, num_speculative_tokens,
        max_num_batched_tokens, steps_per_dispatch: see `Engine`; checked before.

    Raises:
      ValueError: max_model_len is longer than the model's context.
    """
    context = config.max_position_embeddings
    if max_model_len is None:
        max_model_len = context
    if max_model_len > context:
        raise ValueError(
            f"{function}: max_model_len must be at most the model's context of {context}, got "
            f"{max_model_len}."
        )
    return Sizes(
        block_size=block_size,
        num_slots=max_num_seqs,
        max_model_len=max_model_len,
        max_chunk=min(max_chunk, max_num_batched_tokens, max_model_len),
        max_steps=steps_per_dispatch,
        num_drafts=num_speculative_tokens,
        max_logit_bias=MAX_LOGIT_BIAS + num_token_biases,
        # Rounded up, so that models and tokenizers of few end tokens or more share programs.
        max_stop_ids=-(-(num_eos_token_ids + MAX_STOP_TOKEN_IDS) // 8) * 8,
    )


def choose_cascade(
    wanted: bool | None, config: LlamaConfig, platform: str, *, enable_prefix_caching: bool
) -> bool:
    """Whether decoding reads blocks that all running sequences share once for all of them.

    Args:
      wanted: the `cascade_attention` of `Engine`.
      config: the configuration of the model.
      platform: the platform that the engine runs on.
      enable_prefix_caching: whether requests come to share blocks.

    Raises:
      ValueError: it is wanted, and all layers of the model have a sliding window.
    """
    has_window = None not in config.windows
    if wanted and has_window:
        raise ValueError(
            "Engine: cascade_attention must be False where all layers have a sliding window."
        )
    if wanted is None:
        return platform == "cpu" and enable_prefix_caching and not has_window
    return wanted


def preemption_over_processes(function: str, preemption: Preemption) -> Preemption:
    """What ``"auto"`` is for an engine over several processes: each has but a part of a block.

    Raises:
      ValueError: blocks are to be swapped.
    """
    if preemption == "swap":
        raise ArgumentError(
            function,
            "must be 'recompute' or 'auto' over several processes, got 'swap'.",
            "preemption",
        )
    return "recompute"
