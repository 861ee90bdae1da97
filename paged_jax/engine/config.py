"""`EngineConfig`: every option of an engine, described once.

To add an option, only add a field here and the code that uses it: checks, flags, the memory planner
and the documentation read the field, see `paged_jax.options`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from jax.sharding import Mesh

from paged_jax.arguments import ArgumentError, refuse_unknown
from paged_jax.engine.pool_size import DEFAULT_RULE
from paged_jax.engine.request_factory import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from paged_jax.formatting import short_repr
from paged_jax.kernels import BACKENDS
from paged_jax.kernels.kv_dtypes import KV_DTYPES
from paged_jax.kernels.platforms import attends_to_tiles, default_block_size
from paged_jax.models.config import ModelConfig
from paged_jax.models.loading.parameters import DTYPES
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.options import (
    FRACTION,
    FUNCTION,
    GIB,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SWITCH,
    check_options,
    documented,
    one_of,
    option,
    options_of,
)
from paged_jax.runner.sizes import TILE, Sizes
from paged_jax.scheduler.scheduler import Preemption

P = ParamSpec("P")
C = TypeVar("C")


# The values of the option `kv_dtype` that quantise keys and values, for its help.
_QUANTISED = " and ".join(kv.name for kv in KV_DTYPES.values() if kv.has_scales)


@documented
@short_repr
@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of an `Engine`; their values are checked when the object is created.

    Raises:
      ValueError: an option is out of bounds. The message names the option and its bounds.
      TypeError: there is no option of this name. The message suggests a similar name.

    Example:
      >>> EngineConfig(max_num_seqs=4).max_chunk
      512
      >>> EngineConfig(swap_space=-1)
      Traceback (most recent call last):
      ...
      paged_jax.arguments.ArgumentError: Engine: swap_space must be a finite number of GiB, ...
    """

    model: str | Path | PagedModel | None = option(
        None,
        "checkpoint: a folder (Hugging Face or Orbax), a GGUF file, or a name on the Hugging Face "
        "Hub (ORG/NAME or ORG/NAME/FILE.gguf), which is looked up in the local cache of the Hub; "
        "in Python also a model",
        default_help="the small bundled model",
        metavar="MODEL",
    )
    _: dataclasses.KW_ONLY
    tokenizer: str | Path | Tokenizer | None = option(
        None,
        "folder with a tokenizer.json, or a GGUF file; in Python also a Tokenizer; without a "
        "tokenizer, prompts must be token ids and outputs have no text",
        default_help="the tokenizer of the model",
        metavar="PATH",
    )
    revision: str | None = option(
        None, "branch, tag or commit of a named model", default_help="main", metavar="NAME"
    )
    download: bool = option(
        False,
        "download a model that is given by its name, if it is not in the local cache of the Hub",
        bounds=SWITCH,
        vllm=None,
    )
    dtype: str = option(
        "auto",
        "type of the weights; int8, fp8 and int4 quantise matrices while they are loaded; with "
        "other types, matrices that are quantised in the checkpoint stay quantised",
        default_help="auto, as saved in the checkpoint",
        choices=("auto", *DTYPES),
        decides_memory=True,
    )
    dequantise: bool = option(
        False,
        "expand quantised matrices of the checkpoint to floats, instead of keeping them in their "
        "format",
        bounds=SWITCH,
        vllm=None,
        decides_memory=True,
    )
    kv_dtype: str = option(
        "auto",
        f"type of the KV cache; {_QUANTISED} quantise it",
        default_help="auto, the type of the weights; float32 on CPUs that lack the C++ kernels, or "
        "if the weights are float16",
        bounds=one_of("auto", *KV_DTYPES),
        vllm="kv_cache_dtype",
        decides_memory=True,
    )
    numerics: str = option(
        "fast",
        "fast, or exact: the log-probabilities of sampled tokens have the bits that log_probs, "
        "rollout and llm.model compute for the same tokens, whatever the batch; on CPUs",
        bounds=one_of("fast", "exact"),
        vllm=None,
    )
    int8_activations: bool = option(
        False,
        "round the inputs of int8, 5-bit and 4-bit matrices to int8 too, on CPUs with AVX512-VNNI; "
        "faster for batches and prompts, but outputs change slightly",
        bounds=SWITCH,
        vllm=None,
    )
    block_size: int | None = option(
        None,
        "tokens in a block; the prefix cache shares whole blocks",
        default_help="16; 128 on TPUs, where copies of small blocks are slow",
        bounds=POSITIVE,
        decides_memory=True,
    )
    num_blocks: int | None = option(
        None,
        "blocks in the pool",
        default_help=DEFAULT_RULE,
        bounds=POSITIVE,
        vllm="num_gpu_blocks_override",
    )
    memory_fraction: float | None = option(
        None,
        "fraction of the device's memory for weights, steps and pool together, instead of "
        "num_blocks; python -m paged_jax.plan shows what fits",
        default_help="num_blocks decides",
        bounds=FRACTION,
        vllm="gpu_memory_utilization",
    )
    max_num_seqs: int = option(
        16,
        "maximum number of samples that run at once, each in a slot",
        bounds=POSITIVE,
        decides_memory=True,
    )
    max_model_len: int | None = option(
        None,
        "maximum number of tokens in a sequence, prompt included",
        default_help="the model's context",
        bounds=POSITIVE,
        decides_memory=True,
    )
    max_chunk: int = option(
        512,
        "maximum number of prompt tokens of one sequence that a step processes",
        bounds=POSITIVE,
        vllm="long_prefill_token_threshold",
        decides_memory=True,
    )
    max_num_batched_tokens: int = option(
        2048,
        "maximum number of tokens in a step, including one for each sequence that decodes; at "
        "least max_num_seqs",
        bounds=POSITIVE,
    )
    steps_per_dispatch: int = option(
        8,
        "maximum number of decode steps that the device runs before it reports their tokens; with "
        "fewer, streams are smoother and new requests join sooner; with more, the host costs less",
        bounds=POSITIVE,
        vllm="num_scheduler_steps",
    )
    enable_prefix_caching: bool = option(
        True,
        "share the cached blocks between requests whose prompts begin with the same tokens",
        bounds=SWITCH,
        flag="--no-prefix-caching",
    )
    preemption: Preemption = option(
        "auto",
        "what happens to the blocks of a preempted sequence: recompute them, swap them to host "
        "memory, or choose the cheaper of the two (auto)",
        bounds=one_of(*get_args(Preemption)),
        vllm="preemption_mode",
    )
    swap_space: float = option(
        4.0, "host memory for swapped blocks, in GiB", bounds=GIB, metavar="GIB"
    )
    num_speculative_tokens: int = option(
        0,
        "maximum number of tokens drafted by n-gram lookup and verified in one step; outputs stay "
        "the same",
        bounds=NOT_NEGATIVE,
        vllm="speculative_config",
        decides_memory=True,
    )
    num_snapshots: int | None = option(
        None,
        "states of recurrent layers that the prefix cache keeps, in addition to the states of "
        "running samples; a cached prefix ends at one of them",
        default_help="max_num_seqs with prefix caching, else 0",
        bounds=NOT_NEGATIVE,
        vllm=None,
        decides_memory=True,
    )
    cascade_attention: bool | None = option(
        None,
        "whether a decode step reads the common prefix of all running sequences once, instead of "
        "once per sequence",
        default_help="yes on CPUs, with prefix caching, for models with full attention",
        bounds=SWITCH,
        vllm="disable_cascade_attn",
    )
    seed: int = option(0, "seed for requests without one", bounds=SEED, flag=None)
    backend: str | None = option(
        None,
        "backend of the kernels",
        default_help="the best for the device",
        choices=tuple(BACKENDS),
        vllm="attention_backend",
    )
    mesh: Mesh | None = option(
        None,
        "devices that compute the model together by tensor parallelism: all devices of the mesh, "
        "whatever its axes",
        default_help="tensor_parallel_size decides",
        flag=None,
        vllm=None,
    )
    tensor_parallel_size: int = option(
        1,
        "number of devices that compute the model together, the first that JAX finds; each holds "
        "a part of the weights and of the KV cache",
        bounds=POSITIVE,
        decides_memory=True,
    )
    show_progress: bool | None = option(
        None,
        "whether to show progress bars on stderr while weights load and programs compile",
        default_help="yes on a terminal and in a notebook",
        bounds=SWITCH,
        flag="--progress",
        vllm="use_tqdm_on_load",
    )
    check_replicas: bool = option(
        False,
        "compare the tokens and tables that several devices each compute, and raise ReplicaError "
        "if they differ; slower, for debugging",
        bounds=SWITCH,
        vllm=None,
    )
    on_compile: Callable[[str], None] | None = option(
        None,
        "function that is called with one line before a program is compiled",
        bounds=FUNCTION,
        flag=None,
        vllm=None,
    )

    def __post_init__(self) -> None:
        check_options("Engine", vars(self), type(self))
        if self.memory_fraction is not None and self.num_blocks is not None:
            raise ArgumentError(
                "Engine",
                f"must be None if num_blocks is given, got {self.memory_fraction} and "
                f"{self.num_blocks}. Give one of them.",
                "memory_fraction",
            )
        if self.numerics == "exact":
            self._check_exact()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                "Engine",
                f"must be at least max_num_seqs = {self.max_num_seqs}, so that all sequences can "
                f"decode, got {self.max_num_batched_tokens}. Use more tokens or fewer slots.",
                "max_num_batched_tokens",
            )

    def _check_exact(self) -> None:
        """Check that no other option prevents exact numerics."""
        conflicts = {
            "int8_activations": self.int8_activations,
            "cascade_attention": self.cascade_attention,
            "backend": self.backend not in (None, "cpu", "xla"),
            "tensor_parallel_size": self.tensor_parallel_size > 1,
            "mesh": self.mesh is not None,
        }
        for name, is_conflict in conflicts.items():
            if is_conflict:
                value = getattr(self, name)
                rule = f"must be 'fast' with {name}={value!r}, got 'exact'."
                raise ArgumentError("Engine", rule, "numerics")

    def program_sizes(
        self,
        function: str,
        model_config: ModelConfig,
        *,
        platform: str,
        num_eos_token_ids: int,
        num_token_biases: int = 0,
    ) -> Sizes:
        """Return the sizes that determine the array shapes in the compiled programs of an engine.

        Args:
          function: the name that error messages begin with.
          model_config: the configuration of the model.
          platform: the platform that the engine runs on, such as ``"cpu"``.
          num_eos_token_ids: number of end-of-sequence tokens of the model.
          num_token_biases: number of tokens whose logits the engine changes in every request, see
            `TokenBias`.

        Raises:
          ValueError: max_model_len exceeds the model's context.
        """
        context = model_config.max_position_embeddings
        max_model_len = context if self.max_model_len is None else self.max_model_len
        if max_model_len > context:
            raise ValueError(
                f"{function}: max_model_len must be at most the model's context of {context}, got "
                f"{max_model_len}."
            )
        num_states = 0
        has_snapshots = any(group.has_snapshots for group in model_config.cache_groups)
        if has_snapshots:  # Each slot and each snapshot needs a state.
            num_snapshots = self.max_num_seqs if self.num_snapshots is None else self.num_snapshots
            num_states = self.max_num_seqs + (num_snapshots if self.enable_prefix_caching else 0)
        has_tiles = self.backend in (None, "cpu") and attends_to_tiles(platform)
        has_tiles &= not has_snapshots
        return Sizes(
            block_size=self.block_size or default_block_size(platform),
            num_slots=self.max_num_seqs,
            max_model_len=max_model_len,
            max_chunk=min(self.max_chunk, self.max_num_batched_tokens, max_model_len),
            max_steps=self.steps_per_dispatch,
            num_drafts=self.num_speculative_tokens,
            max_logit_bias=MAX_LOGIT_BIAS + num_token_biases,
            # Round up, so that models with slightly different numbers of end-of-sequence tokens use
            # programs of the same shape.
            max_stop_ids=-(-(num_eos_token_ids + MAX_STOP_TOKEN_IDS) // 8) * 8,
            tile=TILE if has_tiles else None,
            num_states=num_states,
        )


# Maps the names of vLLM's options to the names of the corresponding options of `EngineConfig`.
VLLM_NAMES = {
    option.vllm: option.name for option in options_of(EngineConfig) if option.vllm is not None
}


def takes_options(
    config: Callable[P, C],
) -> Callable[[Callable[[Any, C], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that lets a constructor take the fields of a config as arguments.

    The decorator is for a function ``__init__(self, config)``. The decorated constructor takes the
    fields as keyword arguments, creates the config from them, and passes it to the function.
    Editors and type checkers show the fields as the arguments of the constructor.

    Args:
      config: the class of the config, such as `EngineConfig`.
    """

    def decorate(init: Callable[[Any, C], None]) -> Callable[Concatenate[Any, P], None]:
        fields = inspect.signature(config).parameters

        @functools.wraps(init)
        def init_from_options(self: Any, *args: P.args, **options: P.kwargs) -> None:
            unknown = [name for name in options if name not in fields]
            refuse_unknown("Engine", fields, unknown, VLLM_NAMES)
            init(self, config(*args, **options))

        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init_from_options.__signature__ = inspect.Signature([self_parameter, *fields.values()])  # type: ignore[attr-defined]
        return init_from_options

    return decorate
