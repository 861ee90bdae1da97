"""Checks of argument values, and hints for unknown argument names, without importing jax.

Users often pass argument names of vLLM, transformers, OpenAI or llama.cpp. The error for an unknown
argument suggests the name that this library uses instead.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


class ArgumentError(ValueError):
    """Error for an argument with an invalid value.

    The message is ``FUNCTION: FIELD must RULE, got VALUE.``, followed by advice. The HTTP server
    reports `field` and `message` to its clients, without the name of the Python function.

    Args:
      function: name of the function or class that was called.
      problem: ``"must RULE, got VALUE."``. The message puts the name of `field` before it. If
        `field` is None, `problem` is a whole sentence.
      field: name of the argument; None if several arguments are involved.

    Example:
      >>> error = ArgumentError("request", "must be an integer, got 'x'.", "priority")
      >>> str(error)
      "request: priority must be an integer, got 'x'."
      >>> error.field, error.message
      ('priority', "priority must be an integer, got 'x'.")
    """

    def __init__(self, function: str, problem: str, field: str | None = None):
        super().__init__(function, problem, field)
        self.function = function
        self.problem = problem
        self.field = field

    @property
    def message(self) -> str:
        """The error message without the name of the function."""
        return self.problem if self.field is None else f"{self.field} {self.problem}"

    def __str__(self) -> str:
        return f"{self.function}: {self.message}"


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, but not a bool."""
    # Compare the exact type first. `isinstance` with the abstract class is ten times slower, and
    # each request has dozens of numbers to check.
    if type(value) is int:
        return True
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number in the range of a float, but not a bool."""
    if type(value) is float:  # see `is_int`
        return math.isfinite(value)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # the value is an integer or a fraction that is too large for a float
        return False


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence, but no text and no bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_positive(function: str, **sizes: object) -> None:
    """Check that sizes are positive integers.

    Args:
      function: name of the function or class, for the error message.
      **sizes: the arguments to check, by their names.

    Raises:
      ArgumentError: a size is not a positive integer.

    Example:
      >>> check_positive("Engine", block_size=0)
      Traceback (most recent call last):
      paged_jax.arguments.ArgumentError: Engine: block_size must be a positive integer, got 0. ...
    """
    for name, size in sizes.items():
        if not is_int(size) or size < 1:
            # Tracers of `jax.jit` have the attribute `aval`, their abstract value.
            advice = "Name it in static_argnames" if hasattr(size, "aval") else "Pass at least 1"
            rule = f"must be a positive integer, got {size!r}. {advice}."
            raise ArgumentError(function, rule, name)


# The first word of each line is the name of an argument in this library. The other words are its
# names in other libraries. `_SAMPLING` lists fields of `SamplingParams`, `_OTHERS` other arguments.
_SAMPLING = """
max_tokens max_new_tokens max_length max_completion_tokens max_output_tokens max_gen_toks
max_tokens max_gen_len
max_tokens n_predict num_predict n_tokens num_tokens_to_generate max_tokens_to_sample
max_tokens max_decode_steps
min_tokens min_new_tokens min_length
temperature temp do_sample
top_p p nucleus top_prob
top_k k topk
n num_samples num_return_sequences best_of num_outputs num_completions num_generations
beam_width num_beams beam_size n_beams width
stop stop_strings stop_sequences stop_words until
stop_token_ids eos_token_id eos_token_ids stop_ids stop_tokens stop_token_id
seed random_seed rng_seed rng key prng_key generator manual_seed
logprobs top_logprobs num_logprobs return_logprobs output_scores
prompt_logprobs return_prompt_logprobs
repetition_penalty repeat_penalty repetition_penalties
logit_bias suppress_tokens sequence_bias
logit_bias logits_bias
bad_words bad_words_ids banned_strings banned_words
allowed_token_ids allowed_tokens
structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding
structured_outputs response_format json_schema structured_output grammar schema
skip_special_tokens skip_special
min_p
presence_penalty
frequency_penalty
"""
_OTHERS = """
num_samples n num_return_sequences best_of num_generations num_outputs
blocks slot_mapping slots block_ids
json json_schema schema
regex pattern
choice choices options enum
grammar ebnf lark gbnf cfg
json_object json_mode
sampling_params params sampling_parameters generation_config generation_params
sampling_params sampling_config
params sampling_params beam_search_params generation_config
prompts prompt inputs input text texts prompt_token_ids input_ids requests
prompt prompts inputs input text prompt_token_ids input_ids
prompt_token_ids input_ids prompts token_ids inputs tokens prompt
num_tokens lengths prompt_lens prompt_lengths attention_mask seq_lens
messages conversation conversations chat prompt prompts
chat_template_kwargs template_kwargs chat_template_args enable_thinking
use_tqdm progress show_progress progress_bar verbose tqdm
show_progress verbose
request_id id uid
model model_name model_path model_id pretrained_model_name_or_path checkpoint path m
folder pretrained_model_name_or_path model_path path model_name model_id model checkpoint
tokenizer tokenizer_name tokenizer_path tokenizer_id
dtype torch_dtype weight_dtype param_dtype quantization load_in_8bit precision
kv_dtype cache_dtype kv_cache_type
cache_dtype kv_dtype kv_cache_dtype
dtype cache_dtype kv_dtype kv_cache_dtype
max_model_len max_seq_len max_sequence_length max_seq_length context_length n_ctx
max_model_len max_context_len
max_model_len ctx_size context_len max_length max_total_tokens max_position_embeddings
max_num_seqs max_batch_size max_num_sequences batch_size max_concurrency max_slots
max_num_seqs max_running_requests
num_slots batch_size max_num_seqs max_batch_size num_sequences
block_size page_size tokens_per_block
num_blocks num_pages total_num_pages num_gpu_blocks num_kv_blocks
memory_fraction mem_fraction_static gpu_memory_fraction memory_utilization
max_chunk chunk_size chunked_prefill_size max_prefill_tokens prefill_chunk_size
enable_prefix_caching prefix_caching enable_prefix_cache enable_caching
enable_prefix_caching disable_radix_cache
steps_per_dispatch multi_step decode_steps num_decode_steps
num_speculative_tokens speculative_tokens num_draft_tokens draft_len prompt_lookup_num_tokens
swap_space swap_space_gb cpu_swap_space
tensor_parallel_size tp tp_size tensor_parallel num_devices tensor_parallelism num_gpus
backend attention_backend attn_implementation implementation impl attn_backend
on_compile compile_callback
timeout timeout_s deadline request_timeout
host hostname address
port listen_port
api_key api_keys api_token
served_model_name model_name
sliding_window window window_size local_window_size attention_window window_left
scale sm_scale softmax_scale scaling attn_scale query_scale
sm_scale scale softmax_scale scaling attn_scale
soft_cap softcap logit_cap logits_soft_cap attn_logits_soft_cap attn_logit_softcapping
soft_cap logit_soft_cap
context_lens kv_lens lengths seq_lens seqlens context_lengths kv_lengths cache_seqlens
context_lens lens
context_lens sequence_lengths seq_lengths
kv_lens context_lens lengths seq_lens context_lengths kv_lengths
query_lens q_lens q_lengths query_lengths seqlens_q
cu_q_lens cu_seqlens cu_seqlens_q query_start_loc cu_query_lens
num_seqs num_sequences distribution batch_size
block_tables block_table page_table page_tables page_indices kv_indices block_indices
page_indices block_tables block_table page_table page_tables kv_indices block_indices
k_pool k_pages k_cache key_cache key_pool k_cache_pool
v_pool v_pages v_cache value_cache value_pool v_cache_pool
kv_pages kv_cache pages kv_pool
q query queries
k key keys
v value values
sinks sink s_aux attention_sinks attention_sink
return_lse return_softmax_lse save_residuals need_lse
k_scale k_scales key_scale
v_scale v_scales value_scale
mask_value mask_val
layer layer_idx layer_id layer_index
num_layers num_hidden_layers n_layers n_layer
num_hidden_layers num_layers n_layers n_layer
num_attention_heads num_heads n_heads n_head num_q_heads num_query_heads
num_kv_heads num_key_value_heads n_kv_heads kv_heads
num_key_value_heads num_kv_heads n_kv_heads kv_heads
hidden_size d_model embed_dim dim n_embd
intermediate_size d_ff ffn_dim mlp_dim n_inner
head_dim head_size d_head
rms_norm_eps norm_eps eps layer_norm_eps
max_blocks_per_slot max_pages_per_seq max_blocks_per_seq pages_per_seq
"""


# Argument names of other libraries that have no counterpart in this library, with advice for users.
_ADVICE = {
    "enforce_eager compilation_config max_seq_len_to_capture cuda_graph_sizes": (
        "Leave it out: the engine always runs compiled programs."
    ),
    "trust_remote_code": "Leave it out: code of a checkpoint never runs.",
    "enable_lora lora_modules lora_path adapter lora_request max_lora_rank": (
        "Merge the adapter into the weights first; adapters are not supported."
    ),
    "device device_map n_gpu_layers num_gpu_layers main_gpu gpu_layers ngl cuda_device": (
        "The engine runs on JAX's default device. Set the environment variable JAX_PLATFORMS to "
        "cpu, cuda or tpu to use another."
    ),
    "pipeline_parallel_size data_parallel_size": (
        "Use tensor_parallel_size to divide a model, or several engines (see docs/replicas.md)."
    ),
    "distributed_executor_backend": "See docs/several-devices.md.",
    "enable_chunked_prefill": "Leave it out: prompts are always read in chunks of max_chunk.",
    "disable_log_stats disable_log_requests": (
        "The engine writes no log. For the log of the server, use --log-level."
    ),
    "download_dir cache_dir": "Set the environment variable HF_HOME.",
    "load_format hf_overrides": "Leave it out: the files and their config.json determine it.",
    "tokenizer_mode skip_tokenizer_init": "Leave it out: a prompt of token ids needs no tokenizer.",
    "cpu_offload_gb": (
        "Weights cannot be offloaded to the CPU. The dtypes int8 and int4 make them smaller."
    ),
    "limit_mm_per_prompt images image multi_modal_data mm_processor_kwargs": (
        "Images and audio are not supported."
    ),
    "task runner convert embed encode classify score reward": (
        "Only text generation is supported."
    ),
    "logits_processors logits_processor": (
        "Use logit_bias, allowed_token_ids or structured_outputs of SamplingParams."
    ),
    "use_beam_search num_beams early_stopping length_penalty beam_width": (
        "Use LLM.beam_search with BeamSearchParams."
    ),
    "pad_token_id padding_side": "Leave it out: batches need no padding.",
    "no_repeat_ngram_size": "Use repetition_penalty or frequency_penalty.",
    "get_tokenizer": "Use its attribute tokenizer.",
    "get_metrics": "Use its attribute stats.",
    "start_profile stop_profile": "Use jax.profiler.trace, see docs/engine.md.",
    "llm_engine": "An LLM is itself an engine, with the methods add_request, step and abort.",
    "mask attention_mask attn_mask is_causal causal": (
        "Attention is always causal. The lengths and sliding_window determine which tokens a query "
        "attends to."
    ),
}
_ADVICE_BY_NAME = {name: text for names, text in _ADVICE.items() for name in names.split()}


def advise(name: str) -> str | None:
    """Return advice on an argument name of another library that has no counterpart here.

    Returns None if there is no advice on `name`.

    Example:
      >>> advise("trust_remote_code")
      'Leave it out: code of a checkpoint never runs.'
    """
    return _ADVICE_BY_NAME.get(name)


def _read(table: str) -> list[list[str]]:
    """Split a table into lines, and each line into names. Empty lines are skipped."""
    return [line.split() for line in table.split("\n") if line]


_LINES = _read(_SAMPLING + _OTHERS)
# Maps each name of a sampling parameter, here or in another library, to the `SamplingParams` field.
_SAMPLING_NAMES = {name: line[0] for line in _read(_SAMPLING) for name in line}


def suggest(
    name: str, valid_names: Collection[str], synonyms: Mapping[str, str] | None = None
) -> str | None:
    """Return the name in `valid_names` that the user probably meant by `name`.

    The first choice is the name that means the same here as `name` does in another library. The
    second choice is a name with a similar spelling. Returns None if there is neither.

    Args:
      name: the unknown name that the user wrote.
      valid_names: the valid names.
      synonyms: maps names of another library to names of this library. It is searched before the
        tables of this module.

    Example:
      >>> suggest("max_new_tokens", ["max_tokens", "min_tokens"])
      'max_tokens'
      >>> suggest("temprature", ["temperature"])
      'temperature'
    """
    if synonyms is not None and synonyms.get(name) in valid_names:
        return synonyms[name]
    for first, *aliases in _LINES:
        if name in aliases and first in valid_names:
            return first
    close = get_close_matches(name, valid_names, n=1)
    return close[0] if close else None


def refuse_unknown(
    function: str,
    valid_names: Collection[str],
    unknown: Iterable[str],
    synonyms: Mapping[str, str] | None = None,
) -> None:
    """Raise TypeError for the first unknown argument, with the name that was probably meant.

    Does nothing if `unknown` is empty.

    Args:
      function: name of the function, for the error message.
      valid_names: names of the arguments that the function has.
      unknown: names of the unknown arguments that the user passed.
      synonyms: see `suggest`.

    Raises:
      TypeError: `unknown` is not empty.

    Example:
      >>> refuse_unknown("Engine", ["memory_fraction"], ["mem_fraction_static"])
      Traceback (most recent call last):
      TypeError: Engine: mem_fraction_static is not an argument. Did you mean memory_fraction?
    """
    for name in unknown:
        raise TypeError(
            f"{function}: {name} is not an argument.{_hint(name, valid_names, synonyms)}"
        )


def _hint(
    name: str, valid_names: Collection[str], synonyms: Mapping[str, str] | None = None
) -> str:
    if (text := advise(name)) is not None and not any(
        name in aliases and first in valid_names for first, *aliases in _LINES
    ):
        return f" {text}"
    candidates = [
        candidate for candidate in ("sampling_params", "params") if candidate in valid_names
    ]
    suggestion = suggest(name, valid_names, synonyms)
    if candidates and name in _SAMPLING_NAMES and suggestion not in candidates:
        return f" Did you mean {candidates[0]}=SamplingParams({_SAMPLING_NAMES[name]}=...)?"
    return "" if suggestion is None else f" Did you mean {suggestion}?"


def names_arguments(function: T, forwards_to: Callable[..., Any] | None = None) -> T:
    """Make a function or class raise a TypeError with a hint for unknown keyword arguments.

    This is a decorator.

    Args:
      function: the function or class.
      forwards_to: the function that gets the ``**options`` of `function`. Its arguments are
        accepted too. None if `function` has no ``**options``.

    Example:
      >>> @names_arguments
      ... def attend(q, *, sliding_window=None): ...
      >>> attend(0, window=4)
      Traceback (most recent call last):
      TypeError: attend: window is not an argument. Did you mean sliding_window?
    """
    if isinstance(function, type):
        wrapped: Any = function
        wrapped.__init__ = _checked(wrapped.__init__, wrapped.__name__)
        return wrapped
    return _checked(function, function.__qualname__, forwards_to)


def _checked(function: Any, name: str, forwards_to: Any = None) -> Any:
    parameters = list(inspect.signature(function).parameters.values())
    has_options = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    assert has_options == (forwards_to is not None), f"{name} must say who gets its **options"
    if forwards_to is not None:
        parameters += inspect.signature(forwards_to).parameters.values()
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    valid_names = {parameter.name for parameter in parameters if parameter.kind in keyword_kinds}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= valid_names:
            refuse_unknown(
                name, valid_names - {"self", "cls"}, [k for k in kwargs if k not in valid_names]
            )
        return function(*args, **kwargs)

    return checked
