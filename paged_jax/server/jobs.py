"""`Job`: a request's body, checked and turned into what the engine is asked to generate."""

import dataclasses
import math
from typing import Any

from paged_jax.checks import ArgumentError
from paged_jax.models.text.grammar import Grammar
from paged_jax.sampling.params import SamplingParams, StructuredOutputsParams
from paged_jax.server.answers import Answer
from paged_jax.server.errors import ApiError, bad_request
from paged_jax.server.service import Service


@dataclasses.dataclass(frozen=True)
class Job:
    """What the engine is asked to generate.

    Attributes:
      prompts: the token ids of each prompt.
      params: the sampling parameters of all prompts.
      cache_salt: the salt of the client's API key, joined to the client's own.
      options: further keyword arguments of `AsyncEngine.generate`.
      grammar: that of the form which the text must have; while it is held, the engine finds it.
    """

    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str
    options: dict[str, Any]
    grammar: Grammar | None = None


def make_job(answer: Answer) -> Job:
    """Check the body of a request, and encode its prompts.

    Tokenizing a long prompt takes a while, so this runs in a thread.

    Raises:
      ApiError: the body asks for something that does not exist, or exceeds a limit.
    """
    service, body = answer.service, answer.body
    try:
        params = _sampling_params(answer)
        token_ids = [_encode(answer, prompt) for prompt in answer.prompts()]
        params = _bounded(service, params, token_ids)
        form = params.structured_outputs
        grammar = None if form is None else _compile(answer, form)
    except ValueError as error:
        raise bad_request(error) from None
    options: dict[str, Any] = {"explain": body.explain, "client": answer.client.name}
    if body.priority is not None:
        options["priority"] = _priority(service, body.priority)
    if body.timeout is not None:
        options["timeout"] = body.timeout
    return Job(token_ids, params, _cache_salt(answer), options, grammar)


def _compile(answer: Answer, form: StructuredOutputsParams) -> Grammar:
    """Make the grammar here, where streams need not wait for it."""
    try:
        return answer.service.grammars.compile(form)
    except ArgumentError as error:
        raise ArgumentError(error.function, error.problem, answer.form_field) from None


def check_sizes(answer: Answer) -> None:
    """Refuse what is too much at a glance, before prompts are tokenized.

    Raises:
      ApiError: the body exceeds a limit, or a prompt the model's context.
    """
    body, limits = answer.body, answer.service.limits
    limits.check("max_prompts", answer.num_prompts, "prompt", what="the number of prompts")
    given = "n" if answer.num_samples == (body.n or 1) else "best_of"
    limits.check("max_n", answer.num_samples, given)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    limits.check("max_stop", len(stop), "stop", what="the number of stop strings")
    longest = max(map(len, stop), default=0)
    limits.check("max_stop_chars", longest, "stop", what="the length of a stop string")
    _check_chars(answer)


def _check_chars(answer: Answer) -> None:
    num_chars, per_token = answer.num_chars, answer.service.max_token_chars
    if num_chars > answer.longest_prompt * per_token:
        least = math.ceil(num_chars / per_token)
        raise _too_long(answer, f"{num_chars} characters, which are {least} tokens or more")


def _too_long(answer: Answer, found: str) -> ApiError:
    context, longest = answer.service.max_model_len, answer.longest_prompt
    room = ", to leave room for an answer" if longest < context else ""
    return ApiError(
        400,
        # Clients know this error by OpenAI's first sentence.
        f"This model's maximum context length is {context} tokens. The prompt must have at most "
        f"{longest}{room}, got {found}.",
        param=answer.prompt_field,
        code="context_length_exceeded",
    )


def _sampling_params(answer: Answer) -> SamplingParams:
    service, params = answer.service, answer.params()
    for name in ("logprobs", "prompt_logprobs"):
        service.limits.check("max_logprobs", params.get(name), name)
    recommended = service.generation_config
    # The bound of a chat is None if its body does not give one.
    if params.get("max_tokens", 0) is None and "max_tokens" in recommended.sampling_defaults:
        del params["max_tokens"]
    return SamplingParams(**recommended.fill_in(params, answer.unrecommended))


def _bounded(service: Service, params: SamplingParams, prompts: list[list[int]]) -> SamplingParams:
    """The parameters with a bound of tokens, by default one that keeps within the limits."""
    limits = service.limits
    room = [max(1, service.max_length - len(prompt)) for prompt in prompts]
    per_token = params.n * _num_candidates(params.logprobs)
    count = params.n * _num_candidates(params.prompt_logprobs) * sum(map(len, prompts))
    if per_token:
        most = params.max_tokens
        if most is None:
            most = max(1, min(*room, (limits.max_answer_logprobs - count) // per_token))
            params = dataclasses.replace(params, max_tokens=most)
        count += per_token * sum(min(most, each) for each in room)
    product = "n times the tokens times the log-probabilities of each"
    limits.check("max_answer_logprobs", count, None, what=product)
    return params


def _num_candidates(asked: int | None) -> int:
    """Number of log-probabilities reported with each token, its own included."""
    return 0 if asked is None else asked + 1


def _encode(answer: Answer, prompt: str | list[int]) -> list[int]:
    service = answer.service
    if isinstance(prompt, str):
        if service.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer. Send token ids.")
        adds = answer.body.add_special_tokens is not False
        prompt = service.tokenizer.encode(prompt, add_special_tokens=adds)
    limits, last = service.limits, service.vocab_size - 1
    if (most := max(prompt, default=0)) > last:
        name = answer.prompt_field
        raise ApiError(400, f"{name} must hold token ids in 0..{last}, got {most}.", param=name)
    what = "the number of prompt tokens"
    limits.check("max_prompt_tokens", len(prompt), answer.prompt_field, what=what)
    if len(prompt) > answer.longest_prompt:
        raise _too_long(answer, str(len(prompt)))
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
    salt, own = answer.client.salt, answer.body.cache_salt or ""
    # Different pairs of a key's salt and a client's make different texts.
    return f"{salt}:{own}" if salt else own
