"""Beam search over HTTP, beside all other requests: each step of a beam is a request of one token.

The engine's own search needs an idle engine. Here every beam asks for the most probable tokens
after its own; the prefix cache has all full blocks of it, so a step computes less than a block.
"""

import dataclasses
import itertools
from collections.abc import AsyncGenerator

from paged_jax.engine.beams import Beam, BeamChoice, BeamSearchParams, num_candidates
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams, TokenBias
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server.answers import Answer
from paged_jax.server.errors import ApiError
from paged_jax.server.generation import generate
from paged_jax.server.jobs import Job
from paged_jax.server.service import Service

# Parameters that beam search has as well, or that change nothing where nothing is drawn.
_SHARED = frozenset(
    {"n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed"}
)


def check_beams(answer: Answer) -> None:
    """Refuse what beam search has no use for.

    Raises:
      ApiError: a field asks for something that needs tokens to be drawn, or for too many beams.
    """
    plain = SamplingParams(temperature=0)
    for name, value in answer.params().items():
        neutral = getattr(plain, name)
        if name not in _SHARED and value != neutral:
            name = answer.form_field if name == "structured_outputs" else name
            raise _refusal(name, "null" if neutral in (None, ()) else f"null or {neutral}")
    for name in ("stream", "timeout", "explain"):
        if getattr(answer.body, name):
            raise _refusal(name, "null")
    if answer.max_tokens == 0:
        raise _refusal("max_tokens", "at least 1")
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
        raise _refusal("n", f"at most {most}")


def _num_candidates(service: Service, width: int, num_end_ids: int) -> int:
    """Return the number of candidate tokens, including suppressed tokens."""
    return num_candidates(width, num_end_ids) + len(service.token_bias.all_ids)


def _refusal(name: str, rule: str) -> ApiError:
    return ApiError(400, f"{name} must be {rule} with use_beam_search.", param=name)


async def search(
    service: Service, answer: Answer, job: Job, length_penalty: float | None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """As `generate`: the best beams of each prompt in place of samples, when all are found.

    Raises:
      ApiError: the engine refuses the job, fails, or has stopped.
    """
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
    drawn = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=count)
    first: dict[int, RequestOutput] = {}
    while running := {i: choice for i, choice in enumerate(choices) if not choice.is_done}:
        prompts = [
            [*job.prompts[i], *beam.token_ids] for i, each in running.items() for beam in each.beams
        ]
        step = dataclasses.replace(job, prompts=prompts, params=drawn)
        outputs = {row: output async for row, output in generate(service, answer, step)}
        in_order = (outputs[row] for row in range(len(prompts)))
        for index, choice in running.items():
            own = list(itertools.islice(in_order, len(choice.beams)))
            first.setdefault(index, own[0])
            suppressed = _suppressed(service.token_bias, choice.num_generated)
            rows = [_most_probable(output, count, suppressed) for output in own]
            choice.advance([list(row) for row in rows], [[*row.values()] for row in rows])
    for index, choice in enumerate(choices):
        samples = [_sample(service, choice, rank, beam) for rank, beam in enumerate(choice.best())]
        output = dataclasses.replace(first[index], outputs=samples, finished=True)
        answer.record.note_output(index, output)
        yield index, output


def _suppressed(bias: TokenBias, index: int) -> set[int]:
    """Return the tokens that may not be the generated token with this index."""
    return {i for i, value in zip(bias.all_ids, bias.values_at(index), strict=True) if value}


def _most_probable(output: RequestOutput, count: int, suppressed: set[int]) -> dict[int, float]:
    """Return the most probable next tokens and their log-probabilities, the most probable first."""
    [sample] = output.outputs
    if not sample.logprobs:
        raise ApiError(500, "The search was ended.", code="generation_failed")
    row: dict[int, Logprob] = sample.logprobs[0]
    best = sorted(row.items(), key=lambda item: item[1].rank)[:count]
    return {token_id: each.logprob for token_id, each in best if token_id not in suppressed}


def _sample(service: Service, choice: BeamChoice, rank: int, beam: Beam) -> CompletionOutput:
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
