"""Arguments that a model passes to the ops over a paged cache."""

import re

import pytest

from paged_jax.models.llama_config import LlamaConfig
from tests.support.covering import all_pairs, once_in_core
from tests.support.decode_step import DecodeStep, PrefillStep

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
)
# Start of an attention kernel call in StableHLO, by platform. Its first result is the output of
# attention, in the dtype of the queries.
CALLS = {
    "cuda": r"@__gpu\$xla.gpu.triton\(.*paged_(?:decode|prefill)\W",
    "tpu": r"@tpu_custom_call\(.*paged_attention\W",
}


# Expected dtype of the queries, by the dtype of the pool.
QUERIES = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16", "float8_e4m3fn": "bf16"}
CASES = all_pairs(
    {"pool_dtype": [*QUERIES], "step": [DecodeStep, PrefillStep], "platform": [*CALLS]}
)


@pytest.mark.parametrize("pool_dtype, step, platform", once_in_core(row.values() for row in CASES))
def test_attention_gets_queries_in_the_dtype_of_the_pool(pool_dtype, step, platform) -> None:
    """Quantised pools get bfloat16 queries. The step is only lowered, not compiled."""
    case = step(CONFIG, 0.01, batch=3, max_blocks_per_slot=4, pool_dtype=pool_dtype)
    text = case.lower(platform).as_text()
    results = re.findall(rf"{CALLS[platform]}.*-> \(tensor<(?:\d+x)+(\w+)>", text)
    assert results == [QUERIES[pool_dtype]]
