"""Steps of a request for generated text: check, tokenize, and run in the engine.

`CompletionEndpoint` calls `check_request`, `make_job` and `run` in this order. `job` runs the
request in the engine, and `beam_search` the requests with beam search.
"""

import dataclasses
import functools
import math
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar import Grammar
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.api_error import ApiError, bad_request
from paged_jax.server.beam_search import check_beam_search, run_beam_search
from paged_jax.server.generation_request import GenerationRequest
from paged_jax.server.job import Job, sample_job
from paged_jax.server.request_log import RequestRecord
from paged_jax.server.service import Client, Service


def check_request(service: Service, request: GenerationRequest) -> None:
    """Check a request as far as possible without tokenizing its prompts.

    Raises:
      ApiError: the request names an unknown model, exceeds a limit or the model's context, or has
        options that beam search does not support.
    """
    limits = service.limits
    service.check_model(request.model)
    limits.check("max_prompts", request.num_prompts, "prompt", description="the number of prompts")
    param = "n" if request.num_samples == request.n else "best_of"
    limits.check("max_n", request.num_samples, param)
    field, stop = request.stop_field, request.stop
    limits.check("max_stop", len(stop), field, description="the number of stop strings")
    max_chars = max(map(len, stop), default=0)
    limits.check("max_stop_chars", max_chars, field, description="the length of a stop string")
    num_chars, per_token = request.num_chars, service.max_token_chars
    is_truncated = request.truncate_prompt_tokens is not None
    if num_chars > _max_prompt_tokens(service, request) * per_token and not is_truncated:
        size = (
            f"{num_chars} characters, which are {math.ceil(num_chars / per_token)} tokens or more"
        )
        raise _too_long(service, request, size)
    if request.beam_length_penalty is not None:
        check_beam_search(service, request)


def _max_prompt_tokens(service: Service, request: GenerationRequest) -> int:
    """Return the context length, minus 1 unless `max_tokens` is 0."""
    return service.max_model_len - (request.max_tokens != 0)


async def make_job(
    service: Service, request: GenerationRequest, client: Client, record: RequestRecord
) -> Job:
    """Make the sampling parameters of a request and tokenize its prompts.

    This happens in a thread if it may take long, see `Service.encode`.

    Args:
      service: the engine and its settings.
      request: the request.
      client: the sender of the request.
      record: the request's record for the log, which also stores the outputs.

    Raises:
      ApiError: the body is invalid or exceeds a limit.
    """
    num_chars = math.inf if request.is_constrained else record.size(request.num_chars)
    make = functools.partial(_make_job, service, request, client, record)
    return await service.encode(num_chars, make)


def _make_job(
    service: Service, request: GenerationRequest, client: Client, record: RequestRecord
) -> Job:
    try:
        params = _sampling_params(service, request)
        token_ids = [_tokenize(service, request, prompt) for prompt in request.prompts()]
        if request.clamps_max_tokens and params.max_tokens is not None:
            max_tokens = max(1, service.max_length - max(map(len, token_ids)))
            params = dataclasses.replace(params, max_tokens=min(params.max_tokens, max_tokens))
        params = _limit_tokens(service, params, token_ids)
        constraint = params.structured_outputs
        # Compile the grammar here, because this function runs in a separate thread. In the engine's
        # thread, the compilation would delay all streams.
        grammar = None if constraint is None else _compile(service, request, constraint)
    except ValueError as error:
        raise bad_request(error) from None
    options: dict[str, Any] = {
        "explain": request.explain,
        "client": client.name,
        "final_only": not request.stream,
    }
    if request.priority is not None:
        if request.priority < 0 and service.settings.api_keys:
            raise ApiError(
                400,
                "priority must be at least 0, because lower values would delay the requests of "
                f"other tenants, got {request.priority}.",
                param="priority",
            )
        options["priority"] = request.priority
    if request.timeout is not None:
        options["timeout"] = request.timeout
    name = f"{request.id_prefix}-{record.request_id}"
    if record.is_given:  # make the name unique: clients may use an id for several requests
        name = f"{name}-{secrets.token_hex(4)}"
    # The colon separates the two salts, so that different pairs cannot give the same text.
    salt = f"{client.salt}:{request.cache_salt}" if client.salt else request.cache_salt
    return Job(name, record, token_ids, params, salt, options, grammar)


def _compile(
    service: Service, request: GenerationRequest, constraint: StructuredOutputsParams
) -> Grammar:
    try:
        return service.grammars.compile(constraint)
    except ArgumentError as error:
        raise ArgumentError(error.function, error.problem, request.constraint_field) from None


def _too_long(service: Service, request: GenerationRequest, size: str) -> ApiError:
    context, max_tokens = service.max_model_len, _max_prompt_tokens(service, request)
    reason = ", to leave room for an answer" if max_tokens < context else ""
    return ApiError(
        400,
        # The first sentence is OpenAI's, because some clients recognise this error by it.
        f"This model's maximum context length is {context} tokens. The prompt must have at most "
        f"{max_tokens}{reason}, got {size}.",
        param=request.prompt_field,
        code="context_length_exceeded",
    )


def _sampling_params(service: Service, request: GenerationRequest) -> SamplingParams:
    params = request.params()
    for name in ("logprobs", "prompt_logprobs"):
        service.limits.check("max_logprobs", params.get(name), name)
    generation_config = service.generation_config
    # If a chat request sets no limit, the entry `max_tokens` is None. Remove the entry if the model
    # recommends a limit, so that `fill_in` adds this limit.
    if params.get("max_tokens", 0) is None and "max_tokens" in generation_config.sampling_defaults:
        del params["max_tokens"]
    return SamplingParams(**generation_config.fill_in(params, request.fallback_params))


def _limit_tokens(
    service: Service, params: SamplingParams, prompts: list[list[int]]
) -> SamplingParams:
    """Check that the number of log-probabilities in the response is within the limit.

    Return the parameters. If log-probabilities are requested and `max_tokens` is None, it is set to
    the largest value within the limit.
    """
    limits = service.limits
    token_limits = [max(1, service.max_length - len(prompt)) for prompt in prompts]
    per_token = params.n * _num_logprobs(params.logprobs)
    count = params.n * _num_logprobs(params.prompt_logprobs) * sum(map(len, prompts))
    if per_token:
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(
                1, min(*token_limits, (limits.max_answer_logprobs - count) // per_token)
            )
            params = dataclasses.replace(params, max_tokens=max_tokens)
        count += per_token * sum(min(max_tokens, token_limit) for token_limit in token_limits)
    description = "the number of log-probabilities (n * tokens * log-probabilities per token)"
    limits.check("max_answer_logprobs", count, None, description=description)
    return params


def _num_logprobs(count: int | None) -> int:
    """Return the number of log-probabilities per token for a value of `logprobs`; 0 for None.

    It is ``count + 1``: the `count` most probable tokens, and the chosen token.
    """
    return 0 if count is None else count + 1


def _tokenize(service: Service, request: GenerationRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        if service.tokenizer is None:
            raise ApiError(400, "The model has no tokenizer. Send token ids instead of text.")
        prompt = service.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
    max_tokens = request.truncate_prompt_tokens
    max_prompt_tokens = _max_prompt_tokens(service, request)
    if max_tokens is not None:
        if max_tokens == -1:
            num_free = service.max_length - (request.max_tokens or 0)
            max_tokens = max(1, min(max_prompt_tokens, num_free))
        prompt = prompt[max(0, len(prompt) - max_tokens) :]
    limits, last = service.limits, service.vocab_size - 1
    if (max_id := max(prompt, default=0)) > last:
        name = request.prompt_field
        raise ApiError(400, f"{name} must hold token ids in 0..{last}, got {max_id}.", param=name)
    description = "the number of prompt tokens"
    limits.check("max_prompt_tokens", len(prompt), request.prompt_field, description=description)
    if len(prompt) > max_prompt_tokens:
        raise _too_long(service, request, str(len(prompt)))
    return prompt


def run(
    service: Service,
    request: GenerationRequest,
    job: Job,
    on_added: Callable[[], None] = lambda: None,
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run a job. Yield ``(index, output)`` whenever the prompt with this index has new tokens.

    Args:
      service: the engine and its settings.
      request: the request.
      job: the job of the request.
      on_added: function that is called when the engine has accepted all prompts. After that, no
        error is the client's fault. Beam search does not call it.

    Raises:
      ApiError: the engine rejects the job, fails, or has stopped.
    """
    if request.beam_length_penalty is not None:
        return run_beam_search(service, job, request.beam_length_penalty)
    return sample_job(service, job, on_added)
