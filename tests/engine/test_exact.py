"""Exact numerics: sampler, scorer and trainer give the same bits, whatever the batch.

The log-probabilities of an engine are compared with `log_probs` of the same tokens, which computes
whole sequences without a cache. Engines preempt sequences, hit the prefix cache, run prompts in
chunks, and verify drafts. The core has each kind of layer in both dtypes. The full tier has all
pairs of kinds of layers, dtypes, backends, batches of 2 to 64 sequences, other options of an
engine, and shapes of `log_probs`.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine, RequestOutput, SamplingParams, log_probs, rollout
from paged_jax.engine.drafts import Drafter
from paged_jax.models.decoder import Decoder
from paged_jax.models.parts.convolution import ShortConvolution
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.kimi_delta import KimiDelta
from paged_jax.models.parts.latent import LatentSizes
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.runner import runner
from tests.support.compiler import needs_compiler
from tests.support.covering import all_pairs
from tests.support.random_model import random_llama
from tests.support.tensor_parallel import CONFIG
from tests.support.workload import Job, check_empty, full_batch, play

pytestmark = needs_compiler

RECURRENT = {"layer_types": ("linear_attention", "full_attention")}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DELTA = GatedDeltaNet(conv_width=4, num_key_heads=4, num_value_heads=8, key_dim=6, value_dim=10)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"qk_norm": True, "residual_multiplier": 0.7, "norm_placement": "sandwich"},
    "window": {
        "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6,
        "attention_sinks": True, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
    },
    "latent": {
        "num_key_value_heads": 8, "qkv_bias": False, "o_bias": False,
        "latent": LatentSizes(12, 16, 6, 4, 5),
    },
    "recurrent": {**RECURRENT, "mixer": DELTA, "attention_gate": True},
    "experts": {**EXPERTS, "shared_expert_intermediate_size": 20, "norm_topk_prob": True},
}  # fmt: skip
# Models with two kinds of layers, so that fewer programs have all pairs of kinds and options.
MIXED_KINDS: dict[str, dict[str, Any]] = {
    "window and mamba": {
        **KINDS["dense"], **KINDS["window"], "layer_types": ("sliding_attention", "hybrid"),
        "mixer": Mamba2(num_heads=8, num_groups=2, head_dim=6, state_dim=10, conv_width=4),
    },
    "latent and kimi delta": {
        **KINDS["latent"], **RECURRENT, "mixer": KimiDelta(conv_width=4, num_heads=4, head_dim=6),
    },
    "recurrent and experts": KINDS["recurrent"] | KINDS["experts"],
}  # fmt: skip
# These layers have little code that the others do not run, so they run only with both backends.
MORE_KINDS: dict[str, dict[str, Any]] = {
    "convolution and chunks": {
        "layer_types": ("linear_attention", "chunked_attention"), "attention_chunk_size": 16,
        "mixer": ShortConvolution(conv_width=3, num_channels=24),
    },
}  # fmt: skip
# Options of the engines of the core. Together they have both kinds of preemption, drafts, and
# several sizes of chunks, blocks and dispatches.
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {"preemption": "swap", "num_speculative_tokens": 3},
    "window": {"preemption": "recompute", "block_size": 4, "num_blocks": 26},
    "latent": {"preemption": "swap", "max_chunk": 8, "steps_per_dispatch": 1},
    "recurrent": {"preemption": "recompute", "num_speculative_tokens": 3},
    "experts": {"preemption": "recompute", "steps_per_dispatch": 3},
}
LENGTH, MAX_TOKENS, NUM_DRAFTS = 96, 20, 3
# Lengths of the prompts. The second and the third begin with the tokens of the first.
LENGTHS = {"first": 61, "same beginning": 70, "same again": 75, "short": 2}
# Engines with more slots also run short requests, so that all slots decode in one batch.
FEW_SLOTS = 5


def make_model(kind: str, dtype: str, weights: str | None = None) -> Decoder:
    changes = {**KINDS, **MORE_KINDS, **MIXED_KINDS}[kind]
    config = dataclasses.replace(CONFIG, max_position_embeddings=LENGTH, dtype=dtype, **changes)
    return random_llama(config, scale=0.35, dtype=weights or dtype)


def make_engine(model: Decoder, kv_dtype: str, **options: Any) -> Engine:
    sizes = {"block_size": 8, "num_blocks": 14, "max_num_seqs": 3, "max_chunk": 16}
    sizes |= {"max_model_len": LENGTH, "kv_dtype": kv_dtype} | options
    return Engine(
        model,
        numerics="exact",
        # So many that the short requests of a large batch decode at the same time.
        max_num_batched_tokens=max(32, 4 * sizes["max_num_seqs"]),
        **sizes,
    )


def draft_from(answers: dict[str, list[int]]):
    """Return a drafter that drafts some tokens of the answers, and then a wrong token."""

    def draft(_: Drafter, sequence) -> list[int]:
        tokens, count = answers.get(sequence.request.request_id, []), sequence.num_generated
        drafted = tokens[count : count + count % NUM_DRAFTS]
        return [*drafted, (tokens[count] + 1) % CONFIG.vocab_size] if drafted else []

    return draft


def fill_batch(max_num_seqs: int, tokens: list[int]) -> list[Job]:
    """Return short requests that arrive first and take the slots of a large batch, except one."""
    return [
        Job(
            f"short {index}",
            {"prompt_token_ids": tokens[index % 7 :][: 1 + index % 5]},
            SamplingParams(seed=index, max_tokens=7, ignore_eos=True, logprobs=0),
        )
        for index in range(max_num_seqs - 1 if max_num_seqs > FEW_SLOTS else 0)
    ]


def run(engine: Engine, *, scores: bool, num_samples: int = 2) -> list[RequestOutput]:
    """Run requests with a common beginning, several samples, and several temperatures."""
    tokens = np.random.default_rng(3).integers(2, CONFIG.vocab_size, LENGTH).tolist()
    jobs = fill_batch(engine.max_num_seqs, tokens)
    for index, (name, length) in enumerate(LENGTHS.items()):
        params = SamplingParams(
            temperature=1.0 if index % 2 else 0.6,
            seed=index,
            n=num_samples if name == "short" else 1,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            prompt_logprobs=0 if scores and name == "first" else None,
            logprobs=0,
        )
        jobs.append(
            Job(name, {"prompt_token_ids": tokens[:length]}, params, at=(0, 6, 7, 8)[index])
        )
    batches = []
    outputs = play(engine, jobs, on_step=lambda _: batches.append(num_decoding(engine)))
    assert max(batches) >= engine.max_num_seqs - 1 or engine.max_num_seqs <= FEW_SLOTS
    check_empty(engine)
    return [outputs[job.name] for job in jobs]


def num_decoding(engine: Engine) -> int:
    """Return the number of sequences in the next decode batch."""
    return sum(not sequence.num_prefill for sequence in engine.core.scheduler.running)


SCORE = jax.jit(log_probs)


def score(
    model: Decoder, prompts: list[list[int]], drawn: list[list[int]], shape: tuple[int, int]
) -> np.ndarray:
    """Return `log_probs` of the drawn tokens, in micro-batches of a shape: rows and tokens."""
    num_rows, length = shape
    found = []
    for first in range(0, len(prompts), num_rows):
        part = slice(first, first + num_rows)
        # Rows without generated tokens fill the last micro-batch.
        fill = first + num_rows - len(prompts)
        rows = [*prompts[part], *[[1]] * fill], [*drawn[part], *[[]] * fill]
        padded = np.zeros((2, num_rows, length), np.int32)
        for array, lists in zip(padded, rows, strict=True):
            for row, numbers in zip(array, lists, strict=True):
                row[: len(numbers)] = numbers
        counts = [np.array([len(numbers) for numbers in lists]) for lists in rows]
        scores = SCORE(model, padded[0], counts[0], padded[1], num_drawn=counts[1])
        found += [*np.asarray(scores)]
    return np.stack(found)[: len(prompts)]


def check_bits(
    model: Decoder, outputs: list[RequestOutput], shape: tuple[int, int] = (6, LENGTH)
) -> None:
    """Check that `log_probs` has the bits of all log-probabilities of the engine."""
    prompts, drawn, reported = [], [], []
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        for sample in output.outputs:
            prompts.append(prompt)
            drawn.append(list(sample.token_ids))
            rows = zip(sample.logprobs, sample.token_ids, strict=True)
            reported.append([row[token].logprob for row, token in rows])
        if output.prompt_logprobs is not None:
            prompts.append(prompt[:1])
            drawn.append(prompt[1:])
            rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            reported.append([row[token].logprob for row, token in rows])
    found = score(model, prompts, drawn, shape)
    for row, wanted in zip(found, reported, strict=True):
        np.testing.assert_array_equal(row[: len(wanted)], np.float32(wanted))
        assert not row[len(wanted) :].any()
    assert np.std(np.concatenate(reported)) > 0.2


def run_twice(
    engine: Engine,
    monkeypatch,
    *,
    scores: bool,
    num_samples: int = 2,
    shape: tuple[int, int] = (6, LENGTH),
) -> None:
    """Check the bits of two runs. The second finds prompts in the prefix cache, and drafts."""
    answers: dict[str, list[int]] = {}
    monkeypatch.setattr(Drafter, "_draft", draft_from(answers))
    first = run(engine, scores=scores, num_samples=num_samples)
    check_bits(engine.model, first, shape)
    answers |= {x.request_id: list(x.outputs[0].token_ids) for x in first if len(x.outputs) == 1}
    second = run(engine, scores=scores, num_samples=num_samples)
    for output, same in zip(first, second, strict=True):
        pairs = zip(output.outputs, same.outputs, strict=True)
        assert all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_has_the_bits_of_log_probs(kind, dtype, monkeypatch) -> None:
    # One row is padded to three, which saves a program a case.
    monkeypatch.setattr(runner, "row_bucket", full_batch)
    options = dict(OPTIONS[kind])
    if dtype == "float32":  # the program that verifies drafts is tested in bfloat16
        options.pop("num_speculative_tokens", None)
    engine = make_engine(make_model(kind, dtype), dtype, **options)
    run_twice(engine, monkeypatch, scores=dtype == "bfloat16")
    stats = engine.stats
    assert stats.num_preemptions > 0
    # Whether a snapshot of a recurrent layer survives depends on the steps of other requests.
    assert stats.num_cached_tokens > 0 or kind == "recurrent"
    assert (stats.num_swap_preemptions > 0) == (options["preemption"] == "swap")
    assert (stats.num_accepted_tokens > 0) == ("num_speculative_tokens" in options)
    assert engine.model.numerics == "exact" and engine.model.cache_dtype == dtype


# This order of the factors, and of some of their values, gives the fewest rows.
FACTORS = {
    "max_num_seqs": (2, 5, 17, 64),
    "dtypes": (
        ("bfloat16", None, "bfloat16"), ("float32", "int8", "int8"), ("float32", None, "float32"),
    ),
    "block_size": (8, 4, 16),
    # What is compared with `log_probs`, beside the engine's generated tokens.
    "compared": ("rollout", "prompt_logprobs"),
    # Backends that the engine replaces by their exact variants.
    "backend": ("cpu", "xla"),
    "kind": ("recurrent and experts", "window and mamba", "latent and kimi delta"),
    "max_chunk": (16, 64, 8),
    "preemption": ("swap", "recompute"),
    "num_speculative_tokens": (0, NUM_DRAFTS),
    "steps_per_dispatch": (1, 8),
    "num_samples": (1, 3),
    # Number of rows of a micro-batch of `log_probs`, and their length with padding.
    "shape": ((2, LENGTH + 9), (6, LENGTH)),
    "enable_prefix_caching": (False, True),
}  # fmt: skip
PAIRS = all_pairs(FACTORS)
PAIRS += [
    row | {"kind": kind, "backend": backend}
    for (kind, backend), row in zip(
        itertools.product(MORE_KINDS, FACTORS["backend"]), PAIRS[1:], strict=False
    )
]


# Two rows with programs as users compile them, also for a single row. The others pad rows, because
# `tanh` of XLA has other bits in vectors if a program is compiled without optimisations. For the
# XLA backend, `tests/models/test_xla_exact.py` has such programs.
ROWS = [pytest.param(row, False, id=str(row["kind"])) for row in PAIRS]
ROWS += [
    pytest.param(
        # Drafts would need one more program for each number of rows.
        row | {"max_num_seqs": size, "num_speculative_tokens": 0},
        True,
        id=f"{row['kind']}-{size}",
        marks=pytest.mark.optimised,
    )
    for row, size in ((PAIRS[0], 1), (PAIRS[-2], 5))
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "has_any_rows"), ROWS)
def test_pairs_of_options_have_the_bits_of_log_probs(row, has_any_rows, monkeypatch) -> None:
    """Also checks `rollout`, whose rows have other lengths."""
    if not has_any_rows:
        monkeypatch.setattr(runner, "row_bucket", full_batch)
    options = dict(row)
    kind, (dtype, weights, kv_dtype) = options.pop("kind"), options.pop("dtypes")
    compared, shape = options.pop("compared"), options.pop("shape")
    num_samples = options.pop("num_samples")
    model = make_model(kind, dtype, weights)
    num_blocks = 2 * LENGTH // row["block_size"] + 2 * row["max_num_seqs"]
    engine = make_engine(model, kv_dtype, num_blocks=num_blocks, **options)
    scores = compared == "prompt_logprobs"
    run_twice(engine, monkeypatch, scores=scores, num_samples=num_samples, shape=shape)
    if compared == "rollout":
        check_rollout(engine.model, row["block_size"], shape)


def check_rollout(model: Decoder, block_size: int, shape: tuple[int, int]) -> None:
    """Check that `log_probs` has the bits of `rollout`."""
    prompts = np.random.default_rng(1).integers(2, CONFIG.vocab_size, (3, 40))
    lengths = np.array([40, 3, 17])
    drawn = jax.jit(
        lambda model: rollout(
            model, prompts, lengths, max_tokens=12, stop_token_ids=(), block_size=block_size
        )
    )(model)
    rows = [x[:n].tolist() for x, n in zip(prompts, lengths, strict=True)]
    found = score(model, rows, np.asarray(drawn.token_ids).tolist(), shape)
    np.testing.assert_array_equal(found[:, :12], np.asarray(drawn.logprobs))


def test_forward_pass_and_micro_batches_have_the_bits_of_log_probs() -> None:
    """`model(token_ids)`, a trainer's micro-batches, and a value inside of `jax.value_and_grad`."""
    model = make_model("dense", "bfloat16").with_numerics("exact", "bfloat16")
    rng = np.random.default_rng(5)
    prompts, drawn = rng.integers(2, 46, (6, 30)), rng.integers(2, 46, (6, 12))
    lengths, counts = np.array([30, 1, 7, 16, 29, 2]), np.array([12, 3, 12, 1, 12, 12])
    wanted = np.asarray(SCORE(model, prompts, lengths, drawn, num_drawn=counts))
    eager = log_probs(model, prompts, lengths, drawn, num_drawn=counts)
    np.testing.assert_array_equal(eager, wanted)

    def loss(model, rows):
        values = log_probs(model, *rows[:3], num_drawn=rows[3])
        return values.mean(), values

    @jax.jit
    def train(model, rows):
        def add(total, rows):
            (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(model, rows)
            return jax.tree.map(jnp.add, total, gradient), values

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, model), rows)[1]

    for size in (1, 3):
        rows = [x.reshape(-1, size, *x.shape[1:]) for x in (prompts, lengths, drawn, counts)]
        found = train(model, tuple(map(jnp.asarray, rows)))
        np.testing.assert_array_equal(np.asarray(found).reshape(6, -1), wanted)

    logits = np.asarray(jax.jit(lambda model: model(prompts.astype(np.int32)))(model), np.float64)
    scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    tokens = SCORE(model, prompts[:, :1], np.ones(6, int), prompts[:, 1:])
    expected = np.take_along_axis(scores[:, :-1], prompts[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(tokens, expected, rtol=0, atol=2e-6)


def test_exact_numerics_are_refused_by_name() -> None:
    model = make_model("dense", "float32")
    for options, message in (
        ({"backend": "triton"}, "numerics must be 'fast' with backend='triton', got 'exact'"),
        ({"cascade_attention": True}, "with cascade_attention=True"),
        ({"int8_activations": True}, "with int8_activations=True"),
        ({"tensor_parallel_size": 2}, "with tensor_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(model, "float32", **options)
    with pytest.raises(ValueError, match="numerics must be one of fast, exact, got 'precise'"):
        Engine(model, numerics="precise")
    with pytest.raises(ValueError, match="numerics must be 'fast' or 'exact', got 'precise'"):
        model.with_numerics("precise")
