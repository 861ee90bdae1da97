"""Short calls of `LLM` for tests, and prompts for the tiny model."""

from collections.abc import Iterable
from typing import Any

from paged_jax import LLM, SamplingParams
from paged_jax.scheduler.outputs import CompletionOutput, RequestOutput

PROMPTS = ["the cat sat on a mat", "in the house, he said", "ab", "one day", "who is it?"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)


def generate(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    """Return the outputs of `LLM.generate` without a progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)


def complete_prompt(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    """Return the completion of a prompt, greedy by default."""
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params}
    [output] = generate(llm, prompt, SamplingParams(**params))
    return output.outputs[0]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[list[int]]]:
    """Return the tokens of each sample of each output."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]
