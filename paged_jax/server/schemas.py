"""Pydantic models of responses. Their schemas are part of /openapi.json.

Fields have the names of OpenAI's API. Fields that OpenAI does not have are named as in vLLM. As in
OpenAI's API, some fields without a value are null, and others are left out: those with `_OMITTED`.

If a response may have thousands of objects of a type, the type is a typed dict, because Pydantic
models would take ten times as long. For the same reason, responses and events with generated text
are built with `json_encoding.to_json_dict` instead of the models.
"""

from collections.abc import Iterable
from typing import Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # before Python 3.12, pydantic rejects typing.TypedDict


def _is_none(value: object) -> bool:
    return value is None


_OMITTED: Any = Field(default=None, exclude_if=_is_none)


class PromptTokensDetails(BaseModel):
    """Number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Number of generated tokens of the reasoning, including its end tag."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts of a request: prompt tokens, and generated tokens of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = _OMITTED


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion. Each list has an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class WaitEntry(TypedDict):
    """A period of waiting of a sample.

    `start` is in seconds after the request's arrival, and `seconds` is the duration.
    """

    reason: str
    start: float
    seconds: float
    detail: str
    sample: int


class PreemptionEntry(TypedDict):
    """A preemption of a sample. `seconds` is its time after the request's arrival."""

    seconds: float
    kind: str
    num_tokens: int
    detail: str
    sample: int


class RequestExplanation(TypedDict):
    """Explanation of a request: its waits and preemptions, and its match in the prefix cache."""

    waits: list[WaitEntry]
    preemptions: list[PreemptionEntry]
    num_cached_tokens: int
    prefix_match: str | None


class Choice(BaseModel):
    """Fields of a sample in responses of `/v1/completions` and `/v1/chat/completions`."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = _OMITTED
    token_ids: list[int] | None = _OMITTED


class OpenAiObject(BaseModel):
    """Fields of responses and events of `/v1/completions` and `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    usage: Usage | None = _OMITTED
    explanations: list[RequestExplanation | None] | None = _OMITTED


class Candidate(TypedDict):
    """Log-probability of a token: the chosen token, or one of the most probable tokens."""

    logprob: float
    rank: int
    decoded_token: str


# For each position of a prompt, a dict from token ids to log-probabilities. The first position has
# None.
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
    """A token and its log-probability, in OpenAI's format for chats."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token with its log-probability, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the content's tokens in a chat response."""

    # An iterator that creates each entry when it is serialised. If all entries existed at the same
    # time, Python's garbage collector would traverse them and block the server.
    content: Iterable[TokenLogprob]


class CalledFunction(BaseModel):
    """A called function and its JSON arguments. In a stream, `arguments` has only new text."""

    name: str | None = _OMITTED
    arguments: str


class ToolCall(BaseModel):
    """A function call that the client should execute."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(BaseModel):
    """New part of a tool call in a stream: first its id and name, then parts of its arguments."""

    index: int
    id: str | None = _OMITTED
    type: Literal["function"] | None = _OMITTED
    function: CalledFunction


class ChatMessage(BaseModel):
    """The assistant's message in a chat response.

    The reasoning is in two fields with the same value, because clients read one or the other.
    """

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
    """New part of a message in a stream: first its role, then its text and tool calls."""

    role: Literal["assistant"] | None = _OMITTED
    content: str | None = _OMITTED
    reasoning: str | None = _OMITTED
    reasoning_content: str | None = _OMITTED
    tool_calls: list[ToolCallDelta] | None = _OMITTED


class ChatChunkChoice(Choice):
    """A sample in an event of a streamed chat response, with the new part of its message."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(OpenAiObject):
    """An event of the stream of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = _OMITTED


class GeneratedSample(TypedDict):
    """A sample of `POST /generate`. In a stream, each event has only the new text and tokens."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Candidate]] | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int]


class GenerateResponse(BaseModel):
    """Response of `POST /generate`, and each event of its stream.

    In a stream, each event has only the new text and tokens.
    """

    request_id: str
    text: list[str]
    outputs: list[GeneratedSample]
    finished: bool
    usage: Usage | None = _OMITTED
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    explanation: RequestExplanation | None = None


class ResponseObject(BaseModel):
    """Response of `POST /v1/responses`. It also contains fields of the request."""

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
    """Error response of Anthropic's API."""

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
    """Response of `POST /detokenize`. The text is in `prompt`, as in vLLM."""

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
    """Description of the served model, with the fields of OpenAI's and Anthropic's APIs."""

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
    """Numbers of blocks in the pool, and number of tokens per block (`block_size`)."""

    total: int
    used: int
    free: int
    block_size: int


class Version(BaseModel):
    """Response of `GET /version`."""

    version: str


class Probe(BaseModel):
    """Response of `GET /live` and `GET /ready`. `detail` is the progress of the startup."""

    status: Literal["ok", "starting", "draining", "sleeping", "full", "stalled", "failed"]
    detail: str | None = _OMITTED


class Health(BaseModel):
    """Response of `GET /health`. Without a required API key, it has only `status`."""

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
    """Message, type, invalid field (`param`) and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Error response of OpenAI's API and of this server's own endpoints."""

    error: ErrorDetail
