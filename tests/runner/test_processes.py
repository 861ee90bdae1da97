"""`LeadingExecutor` and `follow`: a process that gets the messages has exactly the same state."""

import jax
import numpy as np
import pytest

from paged_jax import Engine, SamplingParams, StructuredOutputsParams
from paged_jax.engine import core, loaded_model
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.runner.processes import Message
from tests.support.structured import SIZES


class RecordedChannel:
    """A channel that stores messages as bytes, and returns them in order."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: Message) -> None:
        self.sent.append(message.encode())

    def receive(self) -> Message:
        return Message.decode(self.sent.pop(0))


@pytest.fixture
def channel(monkeypatch) -> RecordedChannel:
    channel = RecordedChannel()
    monkeypatch.setattr(core, "channel_between", lambda devices: channel)
    return channel


def make_follower(monkeypatch) -> Engine:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    follower = Engine(**SIZES)
    monkeypatch.undo()
    return follower


REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    "seeded samples": SamplingParams(n=2, seed=3, max_tokens=60, logprobs=2, ignore_eos=True),
    "biased": SamplingParams(logit_bias={5: 1.5, 7: -100.0}, stop_token_ids=[9], max_tokens=8),
    "form": SamplingParams(structured_outputs=StructuredOutputsParams(regex="(an?|the)+ in")),
    "restricted": SamplingParams(
        allowed_token_ids=range(300, 400), bad_words=["the", "in an"], max_tokens=20
    ),
    "scored": SamplingParams(prompt_logprobs=1, max_tokens=2),
}


def test_follow_gives_the_state_of_the_leader(channel, monkeypatch) -> None:
    config = GenerationConfig(
        suppress_tokens=(5,), begin_suppress_tokens=(7,), sequence_bias={9: 1.5}
    )
    monkeypatch.setattr(loaded_model, "load_generation_config", lambda model, tokenizer: config)
    leader = Engine(**SIZES)
    prompts = ["the sun", "the sun in", "an", "in", "sun", "the"]
    for text, params in zip(prompts, REQUESTS.values(), strict=True):
        leader.add_request(text, params)
    outputs = []
    while leader.has_unfinished:
        outputs += leader.step()
    leader.reset_prefix_cache()
    assert leader.stats.num_preemptions  # the pool is too small for all requests
    expected = jax.device_get(leader.core.runner.state)

    follower = make_follower(monkeypatch)
    channel.send(Message("end", {}))
    follower.follow()
    jax.tree.map(
        np.testing.assert_array_equal, expected, jax.device_get(follower.core.runner.state)
    )
