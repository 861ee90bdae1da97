"""Beam search for HTTP requests: which requests may use it, and its run in the engine.

`LLM.beam_search` cannot be used, because it needs an engine without other requests. Here, each step
runs a request for each beam, and reads the most probable next tokens from its output. Other
requests run at the same time. All full blocks of a beam are in the prefix cache, so that a step
computes less than a block per beam. `engine.beam_search.BeamChoice` ranks the beams.
"""

import dataclasses
import itertools
from collections.abc import AsyncGenerator

from paged_jax.arguments import ArgumentError
from paged_jax.engine.beam_search import Beam, BeamChoice, BeamSearchParams, num_candidates
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.sampling.token_bias import TokenBias
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server.api_error import ApiError, bad_request
from paged_jax.server.generation_request import GenerationRequest
from paged_jax.server.job import Job, sample_job
from paged_jax.server.service import Service

# Sampling parameters that beam search supports or can ignore. All others are errors.
_BEAM_PARAMS = frozenset(
    {"n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed"}
)


def check_beam_search(service: Service, request: GenerationRequest) -> None:
    """Raise an `ApiError` if a field of the request cannot be combined with beam search."""
    default_params = SamplingParams(temperature=0)
    try:
        params = request.params()
    except ArgumentError as error:
        raise bad_request(error) from None
    for name, value in params.items():
        neutral = getattr(default_params, name)
        is_neutral = value == neutral or (neutral == () and not value)
        if name not in _BEAM_PARAMS and not is_neutral:
            name = request.constraint_field if name == "structured_outputs" else name
            raise _unsupported(name, "null" if neutral in (None, ()) else f"null or {neutral}")
    for name in ("stream", "timeout", "explain"):
        if getattr(request, name):
            raise _unsupported(name, "null")
    if request.max_tokens == 0:
        raise _unsupported("max_tokens", "at least 1")
    max_beams = max(
        width
        for width in range(MAX_LOGPROBS)
        if _num_candidates(service, width, len(service.eos_token_ids)) <= MAX_LOGPROBS or not width
    )
    if not max_beams or not service.token_bias.suppresses_only:
        problem = "use_beam_search is not implemented for the token biases of this model."
        raise ApiError(400, problem, param="use_beam_search")
    if request.num_samples > max_beams:
        name = "n" if request.num_samples == request.n else "best_of"
        raise _unsupported(name, f"at most {max_beams}")


def _unsupported(name: str, rule: str) -> ApiError:
    return ApiError(400, f"{name} must be {rule} with use_beam_search.", param=name)


def _num_candidates(service: Service, width: int, num_end_ids: int) -> int:
    """Return the number of most probable tokens that a step of beam search requests per beam.

    The number is larger if the model's biases suppress tokens: these tokens may be among the most
    probable tokens, and are dropped afterwards.
    """
    return num_candidates(width, num_end_ids) + len(service.token_bias.all_ids)


async def run_beam_search(
    service: Service, job: Job, length_penalty: float
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run beam search. Yield ``(index, output)`` for each prompt, with its beams as samples."""
    params = BeamSearchParams(
        beam_width=job.params.n,
        max_tokens=job.params.max_tokens or service.max_model_len,
        ignore_eos=job.params.ignore_eos,
        length_penalty=length_penalty,
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
    steps = job.record.part()  # the record of the request gets whole sequences only
    while running := {i: choice for i, choice in enumerate(choices) if not choice.is_done}:
        prompts = [
            [*job.prompts[i], *beam.token_ids]
            for i, choice in running.items()
            for beam in choice.beams
        ]
        step = dataclasses.replace(job, record=steps, prompts=prompts, params=next_token)
        outputs = {row: output async for row, output in sample_job(service, step)}
        ordered_outputs = (outputs[row] for row in range(len(prompts)))
        for index, choice in running.items():
            beam_outputs = list(itertools.islice(ordered_outputs, len(choice.beams)))
            first.setdefault(index, beam_outputs[0])
            suppressed_ids = _suppressed(service.token_bias, choice.num_generated)
            rows = [_most_probable(output, count, suppressed_ids) for output in beam_outputs]
            choice.advance([list(row) for row in rows], [[*row.values()] for row in rows])
    for index, choice in enumerate(choices):
        samples = [
            _beam_sample(service, choice, rank, beam) for rank, beam in enumerate(choice.best())
        ]
        output = dataclasses.replace(first[index], outputs=samples, finished=True)
        job.record.note_output(index, output)
        yield index, output


def _suppressed(bias: TokenBias, index: int) -> set[int]:
    """Return the token ids that the model's biases rule out at position `index` of the answer."""
    return {i for i, value in zip(bias.all_ids, bias.values_at(index), strict=True) if value}


def _most_probable(output: RequestOutput, count: int, suppressed_ids: set[int]) -> dict[int, float]:
    """Return the log-probabilities of the most probable next tokens, in descending order.

    Args:
      output: output of a beam's request.
      count: maximum number of tokens.
      suppressed_ids: tokens that are left out.

    Returns:
      A dict from token ids to log-probabilities.
    """
    [sample] = output.outputs
    if not sample.logprobs:
        raise ApiError(500, "The beam search was aborted.", code="generation_failed")
    row: dict[int, Logprob] = sample.logprobs[0]
    best = sorted(row.items(), key=lambda item: item[1].rank)[:count]
    return {
        token_id: logprob.logprob for token_id, logprob in best if token_id not in suppressed_ids
    }


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
