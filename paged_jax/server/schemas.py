"""Pydantic models of responses. `openapi` publishes them.

Fields have OpenAI's names, or vLLM's names if OpenAI has no such field. OpenAI sends null for some
fields that do not apply, and leaves out others; `_OMITTED` marks the fields that are left out.

Objects that a response may contain in thousands are typed dicts, because models would take ten
times as long. Texts and events are built by `responses.to_json_dict` for the same reason.
"""

from collections.abc import Iterable
from typing import Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic rejects typing.TypedDict before Python 3.12


def _is_none(value: object) -> bool:
    return value is None


_OMITTED: Any = Field(default=None, exclude_if=_is_none)


class PromptTokensDetails(BaseModel):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Number of generated tokens that are reasoning, including its closing mark."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Numbers of tokens in the prompts and in the generated samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = _OMITTED


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion. Each list has an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class WaitEntry(TypedDict):
    """A wait of a sample: its reason, start (seconds after the request's arrival) and duration."""

    reason: str
    start: float
    seconds: float
    detail: str
    sample: int


class PreemptionEntry(TypedDict):
    """A preemption of a sample: its reason, and its time in seconds after the request's arrival."""

    seconds: float
    kind: str
    num_tokens: int
    detail: str
    sample: int


class RequestExplanation(TypedDict):
    """Why a request waited or was preempted, and how much of its prompt was cached."""

    waits: list[WaitEntry]
    preemptions: list[PreemptionEntry]
    num_cached_tokens: int
    prefix_match: str | None


class Choice(BaseModel):
    """Fields of a sample at both endpoints of OpenAI's API."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = _OMITTED
    token_ids: list[int] | None = _OMITTED


class OpenAiObject(BaseModel):
    """Fields of all responses and events of OpenAI's endpoints."""

    id: str
    created: int
    model: str
    usage: Usage | None = _OMITTED
    explanations: list[RequestExplanation | None] | None = _OMITTED


class Candidate(TypedDict):
    """A token that was generated, or was among the most probable tokens at its position."""

    logprob: float
    rank: int
    decoded_token: str


# Candidates at each prompt position by token id; None at the first position.
PromptLogprobs = list[dict[int, Candidate] | None]


class CompletionChoice(Choice):
    """A sample of a completion. In a stream, each event has only the new text and tokens."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = _OMITTED
    prompt_token_ids: list[int] | None = _OMITTED


class CompletionResponse(OpenAiObject):
    """Response of `POST /v1/completions`, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(TypedDict):
    """One of the most probable tokens at a position of a chat response."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a chat response, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat response."""

    # Entries are created lazily, during serialisation. If all existed at the same time, Python's
    # garbage collector would traverse them and block the server.
    content: Iterable[TokenLogprob]


class CalledFunction(BaseModel):
    """A called function and its JSON arguments. An event of a stream has only new arguments."""

    name: str | None = _OMITTED
    arguments: str


class ToolCall(BaseModel):
    """A function call for the client to execute."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(BaseModel):
    """New parts of a tool call: first its id and name, then its arguments."""

    index: int
    id: str | None = _OMITTED
    type: Literal["function"] | None = _OMITTED
    function: CalledFunction


class ChatMessage(BaseModel):
    """The assistant's message in a chat response. Clients read the reasoning by either name."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = _OMITTED
    reasoning_content: str | None = _OMITTED
    tool_calls: list[ToolCall] | None = _OMITTED


class ChatChoice(Choice):
    """A sample of a chat response."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletionResponse(OpenAiObject):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = _OMITTED
    prompt_token_ids: list[int] | None = _OMITTED


class ChatDelta(BaseModel):
    """New parts of a message: first its role, then its text."""

    role: Literal["assistant"] | None = _OMITTED
    content: str | None = _OMITTED
    reasoning: str | None = _OMITTED
    reasoning_content: str | None = _OMITTED
    tool_calls: list[ToolCallDelta] | None = _OMITTED


class ChatChunkChoice(Choice):
    """New parts of a sample of a chat response."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(OpenAiObject):
    """An event of the stream of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = _OMITTED


class GeneratedSample(TypedDict):
    """A sample of `POST /generate`. An event of a stream has only its new text and tokens."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Candidate]] | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int]


class GenerateResponse(BaseModel):
    """Response of `POST /generate`, and each event of its stream, which has only new parts."""

    request_id: str
    text: list[str]
    outputs: list[GeneratedSample]
    finished: bool
    usage: Usage | None = _OMITTED
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    explanation: RequestExplanation | None = None


class ResponseObject(BaseModel):
    """Response of `POST /v1/responses`. It also repeats fields of the request."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class AnthropicMessage(BaseModel):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, Any]


class AnthropicError(BaseModel):
    """Response of Anthropic's API to a request that fails."""

    type: Literal["error"]
    error: dict[str, str]
    request_id: str | None


class TokenCount(BaseModel):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class InputTokenCount(BaseModel):
    """Response of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class TokenizeResponse(BaseModel):
    """Response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Response of `POST /detokenize`. vLLM calls the text a prompt."""

    prompt: str


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerInfo(BaseModel):
    """Response of `GET /tokenizer_info`, for clients that tokenize through this server."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class ModelCard(BaseModel):
    """The served model, with the fields of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    display_name: str
    owned_by: str = "paged_jax"
    max_model_len: int


class ModelList(BaseModel):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class ModelInfo(BaseModel):
    """Response of `GET /get_model_info`, for SGLang's router."""

    model_path: str
    served_model_name: str
    is_generation: bool = True
    max_context_length: int
    vocab_size: int


class ServerInfo(BaseModel):
    """Response of `GET /get_server_info`, for SGLang's router."""

    served_model_name: str
    version: str
    max_running_requests: int
    max_total_num_tokens: int


class BlockCounts(BaseModel):
    """Numbers of blocks in the pool, and the number of tokens per block."""

    total: int
    used: int
    free: int
    block_size: int


class Version(BaseModel):
    """Response of `GET /version`."""

    version: str


class Probe(BaseModel):
    """Response of `GET /live` and `GET /ready`. `detail` describes the progress of a start."""

    status: Literal["ok", "starting", "draining", "sleeping", "full", "stalled", "failed"]
    detail: str | None = _OMITTED


class Health(BaseModel):
    """Response of `GET /health`. Clients without a required API key get only `status`."""

    status: Literal["ok", "starting", "stalled", "failed", "draining", "sleeping"]
    detail: str | None = _OMITTED
    model: str | None = _OMITTED
    version: str | None = _OMITTED
    num_running: int | None = _OMITTED
    num_waiting: int | None = _OMITTED
    blocks: BlockCounts | None = _OMITTED
    prefix_cache_hit_rate: float | None = _OMITTED
    num_preemptions: int | None = _OMITTED
    seconds_since_step: float | None = _OMITTED


class ErrorDetail(BaseModel):
    """A message, the type of error, the invalid field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Response to a request that fails."""

    error: ErrorDetail
