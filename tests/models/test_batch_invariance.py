"""Batch invariance of decode on CPUs: a sequence's logits do not depend on the batch.

This holds for batch sizes that the CPU kernels support. The tests run optimised code, because XLA
compiles norms, rotations and the softmax separately for each batch size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import paged_cache
from paged_jax.kernels import Pools
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.sampling.sample import log_sum_exp
from tests.support.compiler import needs_compiler
from tests.support.random_model import random_llama

pytestmark = [pytest.mark.optimised, needs_compiler]

S, MAX_LENGTH = 32, 300
CONFIG = LlamaConfig(
    vocab_size=203,
    hidden_size=72,
    intermediate_size=88,
    num_hidden_layers=1,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    qk_norm=True,
)


@jax.jit
def log_probabilities(model, cache, token_ids, slots):
    """Return the log-probabilities of the next tokens, float32 ``[B, V]``."""
    logits, _, ok = model.decode(cache, token_ids, slots)
    return logits - log_sum_exp(logits), ok


def filled_cache(model) -> paged_cache.PagedCache:
    """Return a cache with sequences of all lengths, in one or two segments of the kernel."""
    rng = np.random.default_rng(0)
    cache = model.create_cache(num_slots=S, max_length=MAX_LENGTH)
    lengths = jnp.asarray(rng.integers(0, MAX_LENGTH, S), jnp.int32)
    cache, ok = jax.jit(paged_cache.reserve, static_argnames="max_tokens")(
        cache, lengths, max_tokens=MAX_LENGTH
    )
    assert ok
    pools = (jnp.asarray(rng.normal(size=cache.k.shape), jnp.float32) for _ in range(2))
    return cache.replace_pools(Pools(*pools))


@pytest.mark.parametrize(
    ("dtype", "scan_layers"),
    [
        ("float32", True),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
        pytest.param("int8", True, marks=pytest.mark.slow),
    ],
)
def test_decode_gives_equal_bits_in_any_batch(dtype, scan_layers) -> None:
    model = random_llama(CONFIG, dtype=dtype, scan_layers=scan_layers)
    cache = filled_cache(model)
    token_ids = np.arange(5, 5 + S, dtype=np.int32)
    slots = np.random.default_rng(1).permutation(S).astype(np.int32)
    together, _ = log_probabilities(model, cache, token_ids, slots)
    together = np.asarray(together)
    assert np.isfinite(together).all()
    for rows, left_out in (([7], []), ([3, 4, 5, 6, 7], [0, 3])):
        some = slots[rows]
        some[left_out] = -1
        others, ok = log_probabilities(model, cache, token_ids[rows], some)
        assert ok
        kept = np.delete(np.arange(len(rows)), left_out)
        np.testing.assert_array_equal(others[kept], together[rows][kept])
        # Rows left out stay zero up to the logits, so all tokens are equally likely.
        np.testing.assert_allclose(
            others[jnp.array(left_out, int)], -np.log(CONFIG.vocab_size), 1e-6
        )
