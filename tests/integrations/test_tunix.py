"""Tests of the GRPO learner of Tunix with `PagedRollout`. Skipped without the extra tunix."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.support.processes import run_on_devices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix", reason="the extra tunix is not installed")
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    from paged_jax.integrations.tunix import MAPPING, PagedRollout

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "num_layers": 1, "vocab_size": 16, "embed_dim": 32, "hidden_dim": 32, "num_heads": 4,
    "head_dim": 8, "num_kv_heads": 2, "norm_eps": 1e-5,
}  # fmt: skip
NUM_TOKENS = 8
CONFIG = base_rollout.RolloutConfig(
    max_tokens_to_generate=NUM_TOKENS,
    max_prompt_length=12,
    temperature=1.0,
    top_p=1.0,
    kv_cache_size=24,
    return_logprobs=True,
)
ENGINE = {"max_num_seqs": 16, "num_blocks": 96, "block_size": 4, "max_chunk": 16}
# Prompts have a common prefix of two blocks, including the first token.
PROMPTS = ["aabbccdd", "aabbccde"]
GOAL = "e"


@pytest.fixture(autouse=True)
def broadcasting() -> Iterator[None]:
    """Allow implicit broadcasting, which Tunix needs and these tests forbid otherwise."""
    with jax.numpy_rank_promotion("allow"):
        yield


class Letters:
    """Tokenizer with a token for each letter from a to m."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(ord("a") + i - 3) for i in ids if i >= 3)

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


def new_actor(kind: Any = llama3.Llama3, seed: int = 0, **changes: Any) -> Any:
    """Return a model of Tunix; its next token depends on all previous tokens."""
    config = {llama3.Llama3: llama3, qwen2.Qwen2: qwen2, qwen3.Qwen3: qwen3}[kind].ModelConfig
    model = kind(config(**SIZES, **{"rope_theta": 1_000_000, **changes}), rngs=nnx.Rngs(seed))
    leaves, treedef = jax.tree.flatten(nnx.state(model))
    generator = np.random.default_rng(seed)
    moved = [x + 0.1 * generator.standard_normal(x.shape, np.float32) for x in leaves]
    nnx.update(model, jax.tree.unflatten(treedef, moved))
    return model


def mesh() -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto)


def trainers_logprobs(
    model: Any, out: base_rollout.RolloutOutput, temperature: float = 1.0
) -> Iterator[np.ndarray]:
    """Check the samples of an engine with the forward pass of the trainer, row by row."""
    full = np.zeros((len(out.tokens), NUM_TOKENS), np.int32)
    for row, tokens in zip(full, out.tokens, strict=True):
        row[: len(tokens)] = tokens
    logps = common.compute_per_token_logps(
        *nnx.split(model),
        prompt_tokens=jnp.asarray(out.left_padded_prompt_tokens),
        completion_tokens=jnp.asarray(full),
        pad_id=0,
        eos_id=2,
        temperature=temperature,
    )
    for row, tokens in zip(np.asarray(logps), out.tokens, strict=True):
        yield row[: len(tokens)]


def largest_gap(model: Any, out: base_rollout.RolloutOutput, temperature: float = 1.0) -> float:
    pairs = zip(trainers_logprobs(model, out, temperature), out.logprobs, strict=True)
    return max(float(np.abs(theirs - ours).max()) for theirs, ours in pairs)


_TWO_DEVICES = """
import warnings
import jax
import numpy as np
from flax import nnx

warnings.simplefilter("ignore")
from tests.integrations.test_tunix import *

mesh = jax.make_mesh((1, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rollout = PagedRollout(new_actor(), Letters(), mesh, CONFIG, **ENGINE)
assert rollout.comparison.largest <= 1e-5
assert len(rollout.llm.cache.k.sharding.device_set) == 2
other = new_actor(seed=1)
rollout.update_params(nnx.state(other, nnx.Param), (nnx.Param,))
assert largest_gap(other, rollout.generate(PROMPTS, CONFIG)) <= 1e-5
print("done")
"""


def test_engine_uses_the_devices_of_the_mesh() -> None:
    assert run_on_devices(_TWO_DEVICES, num_devices=2) == "done\n"


def new_cluster(actor: Any, steps: int) -> Any:
    roles = rl_cluster.Role
    return rl_cluster.RLCluster(
        actor=actor,
        reference=new_actor(),
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh()),
            rollout_engine=functools.partial(PagedRollout, **ENGINE),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(2e-2),
                eval_every_n_steps=1000,
                max_steps=steps,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
            rollout_config=CONFIG,
        ),
    )


@contextlib.contextmanager
def compilations(step: Callable[[], int]) -> Iterator[list[tuple[int, str]]]:
    """Return a list of compiled programs with the number of the step."""
    compiled: list[tuple[int, str]] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append((step(), details["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    with contextlib.suppress(AssertionError):  # a learner removes all listeners when it ends
        jax.monitoring.unregister_event_duration_listener(listen)


def test_grpo_raises_the_reward() -> None:
    """Log-probabilities of engine and trainer agree to 1e-5, before and after training."""
    steps, rewards = 16, []
    cluster = new_cluster(new_actor(), steps)
    engine, actor = cluster.rollout.llm, cluster.actor_trainer.model
    assert largest_gap(actor, cluster.rollout.generate(PROMPTS, CONFIG)) <= 1e-5

    def reward(prompts: list[str], completions: list[str], **options: Any) -> list[float]:
        scores = [text.count(GOAL) / NUM_TOKENS for text in completions]
        rewards.append(float(np.mean(scores)))
        return scores

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=8, num_iterations=1, beta=0.0, epsilon=0.2
        ),
    )
    hits = engine.stats.num_cached_tokens
    with compilations(lambda: len(rewards)) as compiled:
        learner.train([{"prompts": np.array(PROMPTS)}] * steps)
    assert np.mean(rewards[:2]) < 0.2 and np.mean(rewards[-2:]) > 0.8
    assert compiled and not [name for step, name in compiled if step > 1]
    # In every step, the second prompt found two blocks of the first. In the first step, before the
    # weights changed, the first prompt found its own blocks. After changes nothing was found.
    assert engine.stats.num_cached_tokens - hits == (steps + 1) * 8
    assert largest_gap(actor, cluster.rollout.generate(PROMPTS, CONFIG)) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (llama3.Llama3, {"weight_tying": True}),
        (qwen2.Qwen2, {"rope_theta": 10_000}),
        (qwen3.Qwen3, {"use_tied_embedding": True}),
    ],
)
def test_engine_computes_the_same_as_models_of_tunix(kind, changes) -> None:
    rollout = PagedRollout(new_actor(kind, **changes), Letters(), mesh(), CONFIG, **ENGINE)
    assert rollout.comparison.is_close and rollout.comparison.largest <= 1e-5


@pytest.mark.parametrize("kind", [llama3.Llama3, qwen3.Qwen3])
def test_engine_adapts_to_a_trainer_that_ignores_its_config(kind) -> None:
    actor = new_actor(kind, rope_theta=10_000)  # as they do in Tunix 0.1.7
    with pytest.warns(UserWarning, match=r"uses rope_theta = 1e\+06, but the config has 1000"):
        rollout = PagedRollout(actor, Letters(), mesh(), CONFIG, **ENGINE)
    assert rollout.llm.config.ropes[0].theta == 1_000_000
    assert largest_gap(actor, rollout.generate(PROMPTS, CONFIG)) <= 1e-5


def test_paged_rollout_rejects_other_forward_passes() -> None:
    swapped = dict(MAPPING)
    k, v = (f"layers.*.attn.{name}_proj.w" for name in "kv")
    swapped[k], swapped[v] = swapped[v], swapped[k]
    with pytest.raises(
        ValueError, match=r"got a difference of .* nats\. They differ from the firs"
    ):
        PagedRollout(new_actor(), Letters(), mesh(), CONFIG, mapping=swapped, **ENGINE)
    with pytest.raises(ValueError, match="must be a dense Llama 3, Qwen 2 or Qwen 3 model of"):
        PagedRollout(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), Letters(), mesh(), CONFIG)


def test_generate_returns_the_format_of_tunix() -> None:
    actor = new_actor()
    rollout = PagedRollout(actor, Letters(), mesh(), CONFIG, **ENGINE)
    assert rollout.model() is None and (rollout.pad_id(), rollout.eos_id()) == (0, 2)
    config = dataclasses.replace(CONFIG, temperature=0.7)
    # Three samples of a prompt, and a sample of a prompt that is longer than the usual width.
    prompts = ["ab"] * 3 + ["abcdefghijklm"]
    out = rollout.generate(prompts, config)
    assert out.left_padded_prompt_tokens.shape == (4, 16)
    assert out.left_padded_prompt_tokens[0].tolist() == [0] * 13 + [1, 3, 4]
    assert len(set(out.text[:3])) > 1, "each sample has draws of its own"
    assert out.text == [Letters().decode(tokens.tolist()) for tokens in out.tokens]
    for tokens in out.tokens:  # rows end with the end token or with a padding token
        assert not {0, 2} & set(tokens[:-1].tolist())
    for theirs, ours in zip(trainers_logprobs(actor, out, 0.7), out.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    rollout.update_params(nnx.state(new_actor(seed=1), nnx.Param), (nnx.Param,))
    other = rollout.generate(prompts, config)
    assert largest_gap(new_actor(seed=1), other, 0.7) <= 1e-5 < largest_gap(actor, other, 0.7)
    with pytest.raises(NotImplementedError, match="Train without LoRA"):
        rollout.update_params(nnx.state(actor), (nnx.LoRAParam,))
