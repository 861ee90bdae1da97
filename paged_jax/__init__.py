"""Paged attention for JAX: a block allocator inside jit, attention that reads the KV cache where
it lies, a Flax Llama that threads it, and text generation on top.

Each part is usable without the ones above it: the ops over bare pools (`paged_attention`,
`paged_prefill_attention`, `ragged_paged_attention`, `paged_rope_write`, `paged_write`,
`write_kv_pages`, `copy_blocks`), `PagedCache` and the functions of `paged_jax.cache` and
`paged_jax.blocks`, `Llama`, `rollout`, `Engine`, and `LLM`.
"""

from paged_jax.async_engine import AsyncEngine
from paged_jax.cache import blocks as blocks
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.grouped_cache import GroupedCache
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.engine.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from paged_jax.engine.engine import Engine
from paged_jax.engine.stats import EngineStats
from paged_jax.kernels import (
    cascade_attention,
    copy_blocks,
    merge_attention,
    paged_attention,
    paged_prefill_attention,
    paged_rope_write,
    paged_write,
    ragged_paged_attention,
    write_kv_pages,
)
from paged_jax.llm import LLM
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer import Heads
from paged_jax.models.llama import Llama
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.rollout import Rollout, rollout
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured import StructuredOutputError, StructuredOutputsParams
from paged_jax.scheduler.outputs import (
    CompletionOutput,
    Explanation,
    Logprob,
    PreemptionNote,
    RequestMetrics,
    RequestOutput,
    Wait,
)
from paged_jax.version import __version__ as __version__

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockPool",
    "BlockTables",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Explanation",
    "GroupedCache",
    "Heads",
    "Llama",
    "LlamaConfig",
    "Logprob",
    "PagedCache",
    "PagedModel",
    "PreemptionNote",
    "RequestMetrics",
    "RequestOutput",
    "Rollout",
    "SamplingParams",
    "StructuredOutputError",
    "StructuredOutputsParams",
    "Tokenizer",
    "Wait",
    "cascade_attention",
    "copy_blocks",
    "merge_attention",
    "paged_attention",
    "paged_prefill_attention",
    "paged_rope_write",
    "paged_write",
    "ragged_paged_attention",
    "rollout",
    "write_kv_pages",
]
