"""Steps of a request for generated text: check, tokenize, and run in the engine.

`CompletionEndpoint` calls `check_request`, `make_job` and `run` in this order. The functions at the
end of this file implement beam search.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from paged_jax.arguments import ArgumentError
from paged_jax.async_engine import EngineClosedError
from paged_jax.engine.beam_search import Beam, BeamChoice, BeamSearchParams, num_candidates
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.models.text.grammar import Grammar
from paged_jax.sampling.numeric_params import MAX_LOGPROBS
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.sampling.token_bias import TokenBias
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import bodies
from paged_jax.server.answers import Answer
from paged_jax.server.api_error import ApiError, bad_request, engine_stopped, sleeping
from paged_jax.server.service import Service

T = TypeVar("T")

# Sampling parameters that beam search supports or can ignore. All others are errors.
_BEAM_PARAMS = frozenset(
    {"n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed"}
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A request in the form that the engine needs: validated and tokenized.

    Attributes:
      prompts: token ids of each prompt.
      params: sampling parameters of all prompts.
      cache_salt: salt of the client's API key, followed by the ``cache_salt`` of the request.
      options: other keyword arguments for `AsyncEngine.generate`.
      grammar: the compiled grammar of ``params.structured_outputs``, or None. The engine looks it
        up in the cache of grammars, which has only weak references to evicted grammars. So this
        reference keeps it alive.
    """

    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str
    options: dict[str, Any]
    grammar: Grammar | None = None


def check_request(answer: Answer) -> None:
    """Check a request as far as possible without tokenizing its prompts.

    Raises:
      ApiError: the request names an unknown model, exceeds a limit or the model's context, or has
        options that beam search does not support.
    """
    body, limits = answer.body, answer.service.limits
    answer.service.check_model(getattr(body, "model", None))
    limits.check("max_prompts", answer.num_prompts, "prompt", what="the number of prompts")
    given = "n" if answer.num_samples == (body.n or 1) else "best_of"
    limits.check("max_n", answer.num_samples, given)
    field, stop = answer.stop
    limits.check("max_stop", len(stop), field, what="the number of stop strings")
    longest = max(map(len, stop), default=0)
    limits.check("max_stop_chars", longest, field, what="the length of a stop string")
    num_chars, per_token = answer.num_chars, answer.service.max_token_chars
    is_truncated = getattr(body, "truncate_prompt_tokens", None) is not None
    if num_chars > answer.max_prompt_tokens * per_token and not is_truncated:
        least = math.ceil(num_chars / per_token)
        raise _too_long(answer, f"{num_chars} characters, which are {least} tokens or more")
    if answer.uses_beam_search:
        _check_beam_search(answer)


async def make_job(answer: Answer) -> Job:
    """Make the sampling parameters of a request and tokenize its prompts.

    This happens in a thread if it may take long, see `Service.encode`.

    Raises:
      ApiError: the body is invalid or exceeds a limit.
    """
    num_chars = math.inf if answer.is_constrained else answer.record.size(answer.num_chars)
    return await answer.service.encode(num_chars, functools.partial(_make_job, answer))


def _make_job(answer: Answer) -> Job:
    service, body = answer.service, answer.body
    try:
        params = _sampling_params(answer)
        token_ids = [_tokenize(answer, prompt) for prompt in answer.prompts()]
        if answer.clamps_max_tokens and params.max_tokens is not None:
            room = max(1, service.max_length - max(map(len, token_ids)))
            params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        params = _limit_tokens(service, params, token_ids)
        constraint = params.structured_outputs
        # Compile the grammar here, because this function runs in a separate thread. In the engine's
        # thread, the compilation would delay all streams.
        grammar = None if constraint is None else _compile(answer, constraint)
    except ValueError as error:
        raise bad_request(error) from None
    options: dict[str, Any] = {"explain": body.explain, "client": answer.client.name}
    if body.priority is not None:
        if body.priority < 0 and service.settings.api_keys:
            raise ApiError(
                400,
                "priority must be at least 0, because lower values would delay the requests of "
                f"other tenants, got {body.priority}.",
                param="priority",
            )
        options["priority"] = body.priority
    if body.timeout is not None:
        options["timeout"] = body.timeout
    salt, own = answer.client.salt, body.cache_salt or ""
    # The colon separates the two salts, so that different pairs cannot give the same text.
    return Job(token_ids, params, f"{salt}:{own}" if salt else own, options, grammar)


def _compile(answer: Answer, constraint: StructuredOutputsParams) -> Grammar:
    try:
        return answer.service.grammars.compile(constraint)
    except ArgumentError as error:
        raise ArgumentError(error.function, error.problem, answer.constraint_field) from None


def _too_long(answer: Answer, found: str) -> ApiError:
    context, most = answer.service.max_model_len, answer.max_prompt_tokens
    room = ", to leave room for an answer" if most < context else ""
    return ApiError(
        400,
        # The first sentence is OpenAI's, because some clients recognise this error by it.
        f"This model's maximum context length is {context} tokens. The prompt must have at most "
        f"{most}{room}, got {found}.",
        param=answer.prompt_field,
        code="context_length_exceeded",
    )


def _sampling_params(answer: Answer) -> SamplingParams:
    service, params = answer.service, answer.params()
    for name in ("logprobs", "prompt_logprobs"):
        service.limits.check("max_logprobs", params.get(name), name)
    recommended = service.generation_config
    # If a chat request sets no limit, the entry `max_tokens` is None. Remove the entry if the model
    # recommends a limit, so that `fill_in` adds this limit.
    if params.get("max_tokens", 0) is None and "max_tokens" in recommended.sampling_defaults:
        del params["max_tokens"]
    return SamplingParams(**recommended.fill_in(params, answer.fallback_params))


def _limit_tokens(
    service: Service, params: SamplingParams, prompts: list[list[int]]
) -> SamplingParams:
    """Check that the number of log-probabilities in the response is within the limit.

    Return the parameters. If log-probabilities are requested and `max_tokens` is None, it is set to
    the largest value within the limit.
    """
    limits = service.limits
    room = [max(1, service.max_length - len(prompt)) for prompt in prompts]
    per_token = params.n * _num_logprobs(params.logprobs)
    count = params.n * _num_logprobs(params.prompt_logprobs) * sum(map(len, prompts))
    if per_token:
        most = params.max_tokens
        if most is None:
            most = max(1, min(*room, (limits.max_answer_logprobs - count) // per_token))
            params = dataclasses.replace(params, max_tokens=most)
        count += per_token * sum(min(most, each) for each in room)
    product = "the number of log-probabilities (n * tokens * log-probabilities per token)"
    limits.check("max_answer_logprobs", count, None, what=product)
    return params


def _num_logprobs(asked: int | None) -> int:
    """Return the number of log-probabilities per token for a value of `logprobs`; 0 for None.

    It is ``asked + 1``: the `asked` most probable tokens, and the chosen token.
    """
    return 0 if asked is None else asked + 1


def _tokenize(answer: Answer, prompt: str | list[int]) -> list[int]:
    service = answer.service
    if isinstance(prompt, str):
        if service.tokenizer is None:
            raise ApiError(400, "The model has no tokenizer. Send token ids instead of text.")
        adds = answer.body.add_special_tokens is not False
        prompt = service.tokenizer.encode(prompt, add_special_tokens=adds)
    most = getattr(answer.body, "truncate_prompt_tokens", None)
    if most is not None:
        if most == -1:
            room = service.max_length - (answer.max_tokens or 0)
            most = max(1, min(answer.max_prompt_tokens, room))
        prompt = prompt[max(0, len(prompt) - most) :]
    limits, last = service.limits, service.vocab_size - 1
    if (most := max(prompt, default=0)) > last:
        name = answer.prompt_field
        raise ApiError(400, f"{name} must hold token ids in 0..{last}, got {most}.", param=name)
    what = "the number of prompt tokens"
    limits.check("max_prompt_tokens", len(prompt), answer.prompt_field, what=what)
    if len(prompt) > answer.max_prompt_tokens:
        raise _too_long(answer, str(len(prompt)))
    return prompt


def run(
    answer: Answer, job: Job, on_added: Callable[[], None] = lambda: None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run a job. Yield ``(index, output)`` whenever the prompt with this index has new tokens.

    Args:
      answer: the request.
      job: the job of the request.
      on_added: function that is called when the engine has accepted all prompts. After that, no
        error is the client's fault. Beam search does not call it.

    Raises:
      ApiError: the engine rejects the job, fails, or has stopped.
    """
    if answer.uses_beam_search:
        return _beam_search(answer, job)
    return _sample(answer, job, on_added)


def _sample(
    answer: Answer, job: Job, on_added: Callable[[], None] = lambda: None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    num_missing = len(job.prompts)

    def note_added() -> None:
        nonlocal num_missing
        num_missing -= 1
        if not num_missing:
            on_added()

    streams = [_outputs(answer, job, index, note_added) for index in range(len(job.prompts))]
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _outputs(
    answer: Answer, job: Job, index: int, on_added: Callable[[], None]
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run ``job.prompts[index]``. Yield ``(index, output)`` whenever it has new tokens."""
    service = answer.service
    stream = service.engine.generate(
        {"prompt_token_ids": job.prompts[index], "cache_salt": job.cache_salt},
        job.params,
        request_id=f"{answer.name}-{index}",
        final_only=not answer.body.stream,
        on_added=on_added,
        **job.options,
    )
    try:
        async with contextlib.aclosing(stream):
            with service.stalls.arrival():
                first = await anext(stream, None)
            if first is not None:
                yield index, _record(answer, index, first)
            async for output in stream:
                yield index, _record(answer, index, output)
    except ValueError as error:
        raise bad_request(error) from None
    except EngineAsleepError:
        raise sleeping() from None
    except EngineClosedError:
        raise engine_stopped() from None


def _record(answer: Answer, index: int, output: RequestOutput) -> RequestOutput:
    """Store an output in the record of the request log, and return the output.

    Raises:
      ApiError: a sample of the output has failed.
    """
    answer.record.note_output(index, output)
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise ApiError(500, str(sample.stop_reason), code="generation_failed")
    return output


async def _merge(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several streams as they arrive. The first error ends all streams."""
    # The queue has room for a single item. If the client reads slowly, each of the merged streams
    # waits in `put`. The engine then keeps only the newest output of the stream's prompt, which
    # includes all earlier tokens.
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(1)

    async def forward(stream: AsyncGenerator[T]) -> None:
        end = None
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        num_left = len(tasks)
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Beam search. `LLM.beam_search` cannot be used, because it needs an engine without other requests.
# Here, each step runs a request for each beam, and reads the most probable next tokens from its
# output. Other requests run at the same time. All full blocks of a beam are in the prefix cache, so
# that a step computes less than a block per beam.


def _check_beam_search(answer: Answer) -> None:
    plain = SamplingParams(temperature=0)
    for name, value in answer.params().items():
        neutral = getattr(plain, name)
        is_neutral = value == neutral or (neutral == () and not value)
        if name not in _BEAM_PARAMS and not is_neutral:
            name = answer.constraint_field if name == "structured_outputs" else name
            raise _unsupported(name, "null" if neutral in (None, ()) else f"null or {neutral}")
    for name in ("stream", "timeout", "explain"):
        if getattr(answer.body, name):
            raise _unsupported(name, "null")
    if answer.max_tokens == 0:
        raise _unsupported("max_tokens", "at least 1")
    service = answer.service
    most = max(
        width
        for width in range(MAX_LOGPROBS)
        if _num_candidates(service, width, len(service.eos_token_ids)) <= MAX_LOGPROBS or not width
    )
    if not most or not service.token_bias.suppresses_only:
        problem = "use_beam_search is not implemented for the token biases of this model."
        raise ApiError(400, problem, param="use_beam_search")
    if (answer.body.n or 1) > most:
        raise _unsupported("n", f"at most {most}")


def _unsupported(name: str, rule: str) -> ApiError:
    return ApiError(400, f"{name} must be {rule} with use_beam_search.", param=name)


def _num_candidates(service: Service, width: int, num_end_ids: int) -> int:
    """Return the number of most probable tokens that a step of beam search requests per beam.

    The number is larger if the model's biases suppress tokens: these tokens may be among the most
    probable tokens, and are dropped afterwards.
    """
    return num_candidates(width, num_end_ids) + len(service.token_bias.all_ids)


async def _beam_search(answer: Answer, job: Job) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run beam search. Yield ``(index, output)`` for each prompt, with its beams as samples."""
    service, body = answer.service, answer.body
    length_penalty = body.length_penalty if isinstance(body, bodies.OpenAiBody) else None
    params = BeamSearchParams(
        beam_width=job.params.n,
        max_tokens=job.params.max_tokens or service.max_model_len,
        ignore_eos=job.params.ignore_eos,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        include_stop_str_in_output=job.params.include_stop_str_in_output,
    )
    end_ids = frozenset() if params.ignore_eos else service.eos_token_ids
    choices = [
        BeamChoice(
            prompt,
            max(1, min(params.max_tokens, service.max_length - len(prompt))),
            params,
            end_ids,
        )
        for prompt in job.prompts
    ]
    count = min(_num_candidates(service, params.beam_width, len(end_ids)), service.vocab_size)
    next_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=count)
    first: dict[int, RequestOutput] = {}
    while running := {i: choice for i, choice in enumerate(choices) if not choice.is_done}:
        prompts = [
            [*job.prompts[i], *beam.token_ids] for i, each in running.items() for beam in each.beams
        ]
        step = dataclasses.replace(job, prompts=prompts, params=next_token)
        outputs = {row: output async for row, output in _sample(answer, step)}
        in_order = (outputs[row] for row in range(len(prompts)))
        for index, choice in running.items():
            own = list(itertools.islice(in_order, len(choice.beams)))
            first.setdefault(index, own[0])
            suppressed = _suppressed(service.token_bias, choice.num_generated)
            rows = [_most_probable(output, count, suppressed) for output in own]
            choice.advance([list(row) for row in rows], [[*row.values()] for row in rows])
    for index, choice in enumerate(choices):
        samples = [
            _beam_sample(service, choice, rank, beam) for rank, beam in enumerate(choice.best())
        ]
        output = dataclasses.replace(first[index], outputs=samples, finished=True)
        answer.record.note_output(index, output)
        yield index, output


def _suppressed(bias: TokenBias, index: int) -> set[int]:
    """Return the token ids that the model's biases rule out at position `index` of the answer."""
    return {i for i, value in zip(bias.all_ids, bias.values_at(index), strict=True) if value}


def _most_probable(output: RequestOutput, count: int, suppressed: set[int]) -> dict[int, float]:
    """Return the log-probabilities of the most probable next tokens, in descending order.

    Args:
      output: output of a beam's request.
      count: maximum number of tokens.
      suppressed: tokens that are left out.

    Returns:
      A dict from token ids to log-probabilities.
    """
    [sample] = output.outputs
    if not sample.logprobs:
        raise ApiError(500, "The beam search was aborted.", code="generation_failed")
    row: dict[int, Logprob] = sample.logprobs[0]
    best = sorted(row.items(), key=lambda item: item[1].rank)[:count]
    return {token_id: each.logprob for token_id, each in best if token_id not in suppressed}


def _beam_sample(service: Service, choice: BeamChoice, rank: int, beam: Beam) -> CompletionOutput:
    token_ids, tokenizer = list(beam.token_ids), service.tokenizer
    keeps_end = not beam.is_complete or choice.params.include_stop_str_in_output
    text = ""
    if tokenizer is not None:
        text = tokenizer.decode(
            token_ids if keeps_end else token_ids[:-1],
            skip_special_tokens=not choice.params.include_stop_str_in_output,
            continues_text=not all(map(tokenizer.is_special, choice.prompt_token_ids)),
        )
    return CompletionOutput(
        index=rank,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=beam.cum_logprob,
        finish_reason="stop" if beam.is_complete else "length",
    )
