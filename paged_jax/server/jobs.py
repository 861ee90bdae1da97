"""`Job`: a request's body, checked and turned into what the engine is asked to generate."""

import dataclasses
from typing import Any

from paged_jax.cache.sizes import length_with_cached_tokens
from paged_jax.sampling.params import SamplingParams
from paged_jax.server.answers import Answer
from paged_jax.server.errors import ApiError, bad_request
from paged_jax.server.limits import Limits
from paged_jax.server.service import Service


@dataclasses.dataclass(frozen=True)
class Job:
    """What the engine is asked to generate.

    Attributes:
      prompts: the token ids of each prompt.
      params: the sampling parameters of all prompts.
      cache_salt: the salt of the client's API key, joined to the client's own.
      options: further keyword arguments of `AsyncEngine.generate`.
    """

    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str
    options: dict[str, Any]

    @property
    def num_samples(self) -> int:
        """Number of samples of all prompts together."""
        return len(self.prompts) * self.params.n


def make_job(answer: Answer) -> Job:
    """Check the body of a request, and encode its prompts.

    Tokenizing a long prompt takes a while, so this runs in a thread.

    Raises:
      ApiError: the body asks for something that does not exist, or exceeds a limit.
    """
    service, body = answer.service, answer.body
    limits = service.limits
    _check_counts(answer, limits)
    try:
        params = _sampling_params(answer)
        prompts = answer.prompts()
        limits.check("max_prompts", len(prompts), param="the number of prompts")
        token_ids = [_encode(service, prompt) for prompt in prompts]
        params = _bounded(service, params, token_ids)
    except ValueError as error:
        raise bad_request(error) from None
    options: dict[str, Any] = {"explain": body.explain}
    if body.priority is not None:
        options["priority"] = _priority(service, body.priority)
    if body.timeout is not None:
        options["timeout"] = body.timeout
    return Job(token_ids, params, _cache_salt(answer), options)


def _check_counts(answer: Answer, limits: Limits) -> None:
    body = answer.body
    limits.check("max_n", body.n, param="n")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    limits.check("max_stop", len(stop), param="the number of stop strings")
    longest = max(map(len, stop), default=0)
    limits.check("max_stop_chars", longest, param="the length of a stop string")


def _sampling_params(answer: Answer) -> SamplingParams:
    service, params = answer.service, answer.params()
    for name in ("logprobs", "prompt_logprobs"):
        service.limits.check("max_logprobs", params.get(name), param=name)
    recommended = service.tokenizer.sampling_defaults if service.tokenizer else {}
    return SamplingParams(**{**(recommended or answer.unrecommended), **params})


def _bounded(service: Service, params: SamplingParams, prompts: list[list[int]]) -> SamplingParams:
    """The parameters with a bound of tokens, by default one that keeps within the limits."""
    limits = service.limits
    context = min(
        service.max_model_len, length_with_cached_tokens(service.num_blocks * service.block_size)
    )
    room = [max(1, context - len(prompt)) for prompt in prompts]
    per_token = params.n * _num_candidates(params.logprobs)
    count = params.n * _num_candidates(params.prompt_logprobs) * sum(map(len, prompts))
    if per_token:
        most = params.max_tokens
        if most is None:
            most = max(1, min(*room, (limits.max_answer_logprobs - count) // per_token))
            params = dataclasses.replace(params, max_tokens=most)
        count += per_token * sum(min(most, each) for each in room)
    product = "n times the tokens times the log-probabilities of each"
    limits.check("max_answer_logprobs", count, param=product)
    return params


def _num_candidates(asked: int | None) -> int:
    """Number of log-probabilities reported with each token, its own included."""
    return 0 if asked is None else asked + 1


def _encode(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        if service.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer. Send token ids.")
        prompt = service.tokenizer.encode(prompt)
    limits = service.limits
    limits.check("max_prompt_tokens", len(prompt), param="the number of prompt tokens")
    most = service.max_model_len - 1
    if len(prompt) > most:
        raise ApiError(
            400,
            f"The prompt must have at most {most} tokens, to leave room in the model's context "
            f"of {most + 1}, got {len(prompt)}.",
            param="prompt",
            code="context_length_exceeded",
        )
    return prompt


def _priority(service: Service, priority: int) -> int:
    if priority < 0 and service.settings.api_keys:
        raise ApiError(
            400,
            "priority must be at least 0, as a lower one would delay the requests of other "
            f"tenants, got {priority}.",
            param="priority",
        )
    return priority


def _cache_salt(answer: Answer) -> str:
    own = answer.body.cache_salt or ""
    # Different pairs of a key's salt and a client's make different texts.
    return f"{answer.salt}:{own}" if answer.salt else own
