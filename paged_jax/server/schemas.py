"""Pydantic models of answers: written here, published by `openapi`.

Fields have OpenAI's names, or vLLM's where OpenAI has none.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

# Answers. OpenAI sends null for some fields that do not apply, and leaves others out. Objects of
# which an answer may hold thousands are dicts, as models would take ten times as long; and so are
# generated texts, whole and as events: what `piece` returns.

Piece = dict[str, Any]
"""What is written as a model is, without being one."""


def _is_none(value: object) -> bool:
    return value is None


_LEFT_OUT: Any = Field(default=None, exclude_if=_is_none)


def piece(model: type[BaseModel], /, **fields: Any) -> Piece:
    """What a model with these fields is written as, for a fifth of what it costs.

    Args:
      model: the model; nothing is checked against it.
      **fields: its fields; those with a default may be missing.

    Example:
      >>> piece(ChatDelta, content="It", role=None)
      {'content': 'It'}
      >>> piece(ChatChunkChoice, index=0, delta={}, finish_reason="stop")
      {'index': 0, 'delta': {}, 'finish_reason': 'stop', 'logprobs': None}
    """
    defaults, left_out = _unstated(model)
    given = {k: value for k, value in fields.items() if value is not None or k not in left_out}
    for name, value in defaults.items():
        given.setdefault(name, value)
    return given


@functools.cache
def _unstated(model: type[BaseModel]) -> tuple[Piece, frozenset[str]]:
    """The defaults that are written, and the names of fields that are left out if None."""
    fields = model.model_fields.items()
    left_out = frozenset(name for name, field in fields if field.exclude_if is not None)
    defaults = {
        name: field.default
        for name, field in fields
        if name not in left_out and not field.is_required()
    }
    return defaults, left_out


class PromptTokensDetails(BaseModel):
    """What is known of the prompt's tokens: how many were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens in the prompts and in the generated samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion: one item of each list for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Wait(TypedDict):
    """A time in which a sample waited: from `start`, for `seconds`, and why."""

    reason: str
    start: float
    seconds: float
    detail: str
    sample: int


class Preemption(TypedDict):
    """A moment, in seconds, at which a sample lost its blocks, and why."""

    seconds: float
    kind: str
    num_tokens: int
    detail: str
    sample: int


class Explanation(TypedDict):
    """Why a request waited or was preempted, and what the prefix cache had of its prompt."""

    waits: list[Wait]
    preemptions: list[Preemption]
    num_cached_tokens: int
    prefix_match: str | None


class Choice(BaseModel):
    """Fields that each sample of an answer has, whatever the endpoint."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = _LEFT_OUT
    token_ids: list[int] | None = _LEFT_OUT


class OpenAiObject(BaseModel):
    """Fields that each answer and event of OpenAI's endpoints has."""

    id: str
    created: int
    model: str
    usage: Usage | None = _LEFT_OUT
    explanations: list[Explanation | None] | None = _LEFT_OUT


class Candidate(TypedDict):
    """A token that was generated or was among the most probable ones at its position."""

    logprob: float
    rank: int
    decoded_token: str


# Of each position, by token id; None for the first one of a prompt.
PromptLogprobs = list[dict[int, Candidate] | None]


class CompletionChoice(Choice):
    """A sample of a completion; in an event of a stream, what is new in it."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = _LEFT_OUT
    prompt_token_ids: list[int] | None = _LEFT_OUT


class Completion(OpenAiObject):
    """The answer of `POST /v1/completions`, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(TypedDict):
    """One of the most probable tokens at a position of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a chat's answer, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer."""

    # Made one by one while they are written: if all existed at once, Python's garbage collector
    # would search them, and block the server meanwhile.
    content: Iterable[TokenLogprob]


class CalledFunction(BaseModel):
    """A function and its arguments as JSON; in an event of a stream, what is new of the JSON."""

    name: str | None = _LEFT_OUT
    arguments: str


class ToolCall(BaseModel):
    """A call of a function, which the client is to make."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(BaseModel):
    """What is new in a call: its id and its name first, its arguments in pieces."""

    index: int
    id: str | None = _LEFT_OUT
    type: Literal["function"] | None = _LEFT_OUT
    function: CalledFunction


class ChatMessage(BaseModel):
    """The message that answers a chat."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = _LEFT_OUT


class ChatChoice(Choice):
    """A sample of a chat's answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(OpenAiObject):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = _LEFT_OUT
    prompt_token_ids: list[int] | None = _LEFT_OUT


class ChatDelta(BaseModel):
    """What is new in a message: its role first, its text in pieces."""

    role: Literal["assistant"] | None = _LEFT_OUT
    content: str | None = _LEFT_OUT
    tool_calls: list[ToolCallDelta] | None = _LEFT_OUT


class ChatChunkChoice(Choice):
    """What is new in a sample of a chat's answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(OpenAiObject):
    """An event in the stream of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = _LEFT_OUT


class GeneratedSample(TypedDict):
    """A sample of the answer of `POST /generate`; in a stream, what is new in it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Candidate]] | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int]


class Generated(BaseModel):
    """The answer of `POST /generate`; in a stream, `text` and `token_ids` are what is new."""

    request_id: str
    text: list[str]
    outputs: list[GeneratedSample]
    finished: bool
    usage: Usage | None = _LEFT_OUT
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    explanation: Explanation | None = None


class Tokens(BaseModel):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The answer of `POST /detokenize`, which vLLM calls a prompt."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The answer of `GET /tokenizer_info`: what clients need who tokenize through this server."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paged_jax"
    max_model_len: int


class ModelInfo(BaseModel):
    """The answer of `GET /get_model_info`, by which SGLang's router knows what is served."""

    model_path: str
    served_model_name: str
    is_generation: bool = True
    max_context_length: int
    vocab_size: int


class ServerInfo(BaseModel):
    """The answer of `GET /get_server_info`, by which SGLang's router knows the model's name."""

    served_model_name: str
    version: str
    max_running_requests: int
    max_total_num_tokens: int


class ModelList(BaseModel):
    """The answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class Blocks(BaseModel):
    """Numbers of blocks in the pool, and the number of tokens in each."""

    total: int
    used: int
    free: int
    block_size: int


class Probe(BaseModel):
    """The answer of `GET /live` and `GET /ready`: a word, and what a start is doing."""

    status: Literal["ok", "starting", "draining", "sleeping", "full", "stalled", "failed"]
    detail: str | None = _LEFT_OUT


class Health(BaseModel):
    """The answer of `GET /health`; only `status` if the client needs an API key and has none."""

    status: Literal["ok", "starting", "stalled", "failed", "draining", "sleeping"]
    detail: str | None = _LEFT_OUT
    model: str | None = _LEFT_OUT
    version: str | None = _LEFT_OUT
    num_running: int | None = _LEFT_OUT
    num_waiting: int | None = _LEFT_OUT
    blocks: Blocks | None = _LEFT_OUT
    prefix_cache_hit_rate: float | None = _LEFT_OUT
    num_preemptions: int | None = _LEFT_OUT
    seconds_since_step: float | None = _LEFT_OUT


class ErrorDetail(BaseModel):
    """What is wrong: a sentence, the kind of error, the field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The answer to a request that fails."""

    error: ErrorDetail
