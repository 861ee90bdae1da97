"""The bodies of requests and answers, as pydantic models: what is checked is what is published.

Names are OpenAI's, and vLLM's where OpenAI has none.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from paged_jax.server.limits import MAX_PROMPTS

T = TypeVar("T")

# One mistake in a list is enough: to tell all of a million takes seconds, for everybody.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Nothing = Annotated[list[Any] | None, Field(max_length=0)]


class Body(BaseModel):
    """A request's body. A field that does not exist is a mistake, not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """What all endpoints take; `None` is the model's or the endpoint's default."""

    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop: Text | Items[Text] | None = None
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    cache_salt: str | None = Field(
        None, description="Requests share cached blocks only where their salts are the same."
    )
    priority: Annotated[int | None, Field(gt=-(2**31), lt=2**31)] = Field(
        None, description="Lower is served first."
    )
    timeout: Annotated[float | None, Field(gt=0)] = Field(
        None, description="Seconds after which the request ends where it stands."
    )
    explain: bool = Field(
        False,
        description="Answer with why it waited or was preempted, and where the match in the "
        "prefix cache ended.",
    )


class GenerateBody(SamplingBody):
    """Of `POST /generate`: either `prompt` or `prompt_token_ids`, and `SamplingParams`."""

    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    logprobs: Annotated[int | None, Field(ge=0)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0)] = None


class OpenAiBody(SamplingBody):
    """What both of OpenAI's endpoints take."""

    model: str | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # What clients send by habit, in the one form that changes nothing.
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionBody(OpenAiBody):
    """Of `POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[Items[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[Items[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int | None, Field(ge=0)] = None
    echo: bool | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Text
    content: str | Items[TextPart] | None
    name: str | None = None
    # What an answer has that a client sends back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing = None
    tool_calls: Nothing = None


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(OpenAiBody):
    """Of `POST /v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0)] = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the model's chat template, such as enable_thinking."
    )
    tools: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


# Answers. OpenAI sends null for some fields that do not apply, and leaves others out. What comes by
# the thousand in an answer are dicts: models would take ten times as long.


def _is_none(value: object) -> bool:
    return value is None


_LEFT_OUT: Any = Field(default=None, exclude_if=_is_none)


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = _LEFT_OUT


class OpenAiAnswer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage | None = _LEFT_OUT
    explanations: list[Any] | None = _LEFT_OUT


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class Completion(OpenAiAnswer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    # Made one by one while they are written: all at once, Python's search for garbage among them
    # would hold up everybody.
    content: Iterable[TokenLogprob]


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(OpenAiAnswer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = _LEFT_OUT
    content: str | None = _LEFT_OUT


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(OpenAiAnswer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Candidate(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


class GeneratedSample(BaseModel):
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Candidate]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = _LEFT_OUT


class Generated(BaseModel):
    """The answer of `POST /generate`; streamed, `text` and `token_ids` are what is new."""

    request_id: str
    text: list[str]
    outputs: list[GeneratedSample]
    finished: bool
    usage: Usage | None = _LEFT_OUT
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Candidate] | None] | None = None
    explanation: Any = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paged_jax"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Blocks(BaseModel):
    total: int
    used: int
    free: int
    block_size: int


class Health(BaseModel):
    """To who has no key, where one is needed, only the status is told."""

    status: Literal["ok", "stalled", "failed", "draining"]
    model: str | None = _LEFT_OUT
    version: str | None = _LEFT_OUT
    num_running: int | None = _LEFT_OUT
    num_waiting: int | None = _LEFT_OUT
    blocks: Blocks | None = _LEFT_OUT
    prefix_cache_hit_rate: float | None = _LEFT_OUT
    num_preemptions: int | None = _LEFT_OUT
    seconds_since_step: float | None = _LEFT_OUT


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail
