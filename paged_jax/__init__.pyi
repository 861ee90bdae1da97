# pyright: strict, reportUnknownMemberType=false
# The public names: read by type checkers, and by `__init__.py` when a name is first used.

from . import cache as cache
from . import cache_map as cache_map
from . import distributed as distributed
from . import kernels as kernels
from .async_engine import AsyncEngine as AsyncEngine
from .cache import blocks as blocks
from .cache.block_pool import BlockPool as BlockPool
from .cache.blocks import BlockTables as BlockTables
from .cache.groups import CacheGroup as CacheGroup
from .cache.paged_cache import PagedCache as PagedCache
from .engine.beam_search import BeamSearchOutput as BeamSearchOutput
from .engine.beam_search import BeamSearchParams as BeamSearchParams
from .engine.beam_search import BeamSearchSequence as BeamSearchSequence
from .engine.engine import Engine as Engine
from .kernels.attention import paged_attention as paged_attention
from .kernels.attention import paged_prefill_attention as paged_prefill_attention
from .kernels.cascade import cascade_attention as cascade_attention
from .kernels.cascade import merge_attention as merge_attention
from .kernels.ragged import ragged_paged_attention as ragged_paged_attention
from .kernels.writing import copy_blocks as copy_blocks
from .kernels.writing import paged_rope_write as paged_rope_write
from .kernels.writing import paged_write as paged_write
from .kernels.writing import write_kv_pages as write_kv_pages
from .llm import LLM as LLM
from .models.decoder import Decoder as Decoder
from .models.decoder import Llama as Llama
from .models.layer_attention import Heads as Heads
from .models.llama_config import LlamaConfig as LlamaConfig
from .models.paged_model import PagedModel as PagedModel
from .models.text.tokenizer import Tokenizer as Tokenizer
from .rollouts import JoinedSequences as JoinedSequences
from .rollouts import Rollout as Rollout
from .rollouts import rollout as rollout
from .sampling.params import SamplingParams as SamplingParams
from .sampling.structured_outputs import StructuredOutputError as StructuredOutputError
from .sampling.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from .scheduler.engine_stats import EngineStats as EngineStats
from .scheduler.outputs import CompletionOutput as CompletionOutput
from .scheduler.outputs import Explanation as Explanation
from .scheduler.outputs import Logprob as Logprob
from .scheduler.outputs import PreemptionNote as PreemptionNote
from .scheduler.outputs import RequestMetrics as RequestMetrics
from .scheduler.outputs import RequestOutput as RequestOutput
from .scheduler.outputs import Wait as Wait
from .token_scores import TokenScores as TokenScores
from .training import log_probs as log_probs
from .training import score_tokens as score_tokens

__version__: str
