"""The OpenAPI document: routes, schemas of bodies and responses, and statuses.

FastAPI would make the document from its handlers. It is not used, because the handlers of this
server do more: they limit the size of bodies while they are read, parse large bodies in a thread,
and report errors in OpenAI's format.
"""

import re
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from paged_jax import __version__
from paged_jax.server import bodies, schemas
from paged_jax.server.anthropic_bodies import CountTokensBody, MessagesBody
from paged_jax.server.api_error import is_anthropic
from paged_jax.server.limits import Limits
from paged_jax.server.response_bodies import InputTokensBody, ResponsesBody

_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_ERRORS = {
    400: "The request has a mistake, which the message names.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    408: "The body was not complete in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests or streams; try again later.",
    500: "Generation failed.",
    503: "The server is shutting down, or its engine has stopped.",
}


class Endpoint(NamedTuple):
    """Description of an endpoint, for the OpenAPI document and the tables in docs/serving.md.

    Attributes:
      method: the HTTP method.
      path: the path, with parameters in braces.
      name: the OpenAPI operation id. It is empty for web pages, which the document does not list.
      summary: description in Markdown. It begins in lower case and has no period at its end.
      response: Pydantic model of the response; None for web pages and plain text.
      body: Pydantic model of the request body; None if there is no body.
      errors: HTTP statuses of the errors that the endpoint may return.
      can_stream: whether the response may be a stream of events.
    """

    method: str
    path: str
    name: str
    summary: str
    response: type | None = None
    body: type | None = None
    errors: tuple[int, ...] = (400, 401, 503)
    can_stream: bool = False


def _post(
    path: str, name: str, body: type, response: type, summary: str, *, can_stream: bool = False
) -> Endpoint:
    return Endpoint("POST", path, name, summary, response, body, tuple(_ERRORS), can_stream)


def _get(path: str, name: str, response: type | None, summary: str, *errors: int) -> Endpoint:
    return Endpoint("GET", path, name, summary, response, errors=errors or (400, 401, 503))


ENDPOINTS = (
    _post(
        "/v1/completions",
        "complete",
        bodies.CompletionBody,
        schemas.CompletionResponse,
        "OpenAI's completions: one or several prompts, as text or token ids",
        can_stream=True,
    ),
    _post(
        "/v1/chat/completions",
        "chat",
        bodies.ChatBody,
        schemas.ChatCompletionResponse,
        "OpenAI's chat completions, for models whose tokenizer has a chat template",
        can_stream=True,
    ),
    _post(
        "/v1/responses",
        "respond",
        ResponsesBody,
        schemas.ResponseObject,
        "OpenAI's responses, without storage, see [agents.md](agents.md)",
        can_stream=True,
    ),
    _post(
        "/v1/responses/input_tokens",
        "countInputTokens",
        InputTokensBody,
        schemas.InputTokenCount,
        "the number of tokens of a body of `/v1/responses`",
    ),
    _post(
        "/v1/messages",
        "message",
        MessagesBody,
        schemas.AnthropicMessage,
        "Anthropic's messages, see [agents.md](agents.md)",
        can_stream=True,
    ),
    _post(
        "/v1/messages/count_tokens",
        "countTokens",
        CountTokensBody,
        schemas.TokenCount,
        "the number of tokens of a body of `/v1/messages`",
    ),
    _post(
        "/generate",
        "generate",
        bodies.GenerateBody,
        schemas.GenerateResponse,
        "a prompt and the fields of `SamplingParams`; returns text and token ids",
        can_stream=True,
    ),
    _post(
        "/tokenize",
        "tokenize",
        bodies.TokenizeBody,
        schemas.TokenizeResponse,
        "the token ids of a text or chat, as in vLLM",
    ),
    _post(
        "/detokenize",
        "detokenize",
        bodies.DetokenizeBody,
        schemas.DetokenizeResponse,
        "the text of token ids, as in vLLM",
    ),
    _get(
        "/tokenizer_info",
        "tokenizerInfo",
        schemas.TokenizerInfo,
        "the special tokens and the chat template, as in vLLM",
    ),
    _get("/v1/models", "listModels", schemas.ModelList, "the served model, in a list"),
    _get(
        "/v1/models/{model}",
        "getModel",
        schemas.ModelCard,
        "the served model",
        *(400, 401, 404, 503),
    ),
    _get(
        "/get_model_info",
        "getModelInfo",
        schemas.ModelInfo,
        "the served model for SGLang's router (`pip install sglang-router`). Its policy "
        "`cache_aware` sends prompts to the server that has cached their blocks, see "
        "[replicas.md](replicas.md)",
    ),
    _get(
        "/get_server_info",
        "getServerInfo",
        schemas.ServerInfo,
        "the size of the server for SGLang's router",
    ),
    _get("/version", "version", schemas.Version, "the version of this library"),
    _get(
        "/live",
        "live",
        schemas.Probe,
        "liveness: 200, also while the server compiles or drains; 503 after the engine has failed",
        400,
    ),
    _get(
        "/ready",
        "ready",
        schemas.Probe,
        "readiness: 200 if the server accepts requests, otherwise 503 with a state: `starting`, "
        "`draining`, `full`, `stalled`, `sleeping`, `failed`",
        400,
    ),
    _get("/ping", "ping", schemas.Probe, "the same as `/ready`", 400),
    _get(
        "/health",
        "health",
        schemas.Health,
        "200 if the server is alive and makes progress, otherwise 503; with a key, also the state "
        "of the cache",
        400,
    ),
    _get(
        "/metrics",
        "metrics",
        None,
        "metrics for Prometheus, under vLLM's names if they have the same meaning",
    ),
    _get(
        "/",
        "",
        None,
        "a page for chats, which shows text as it is generated, the reasoning in a folded section, "
        "tokens per second and cached tokens",
    ),
    _get(
        "/cache",
        "",
        None,
        "a page that shows the blocks and their events live, and the throughput; a click on a "
        "sequence or block marks the blocks of the sequence",
    ),
    _get("/openapi.json", "", None, "the OpenAPI description of all endpoints"),
)
"""All endpoints except those of the operator."""
_PROBES = ("/live", "/ping", "/ready", "/health")


def document(limits: Limits, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document as JSON.

    Limits are listed only in the description. If they were part of the schemas, an exceeded limit
    would be reported as an error of the schema, without the name of the limit.

    Args:
      limits: limits on requests.
      root_path: path under which a proxy serves this server.
    """
    endpoints = [endpoint for endpoint in ENDPOINTS if endpoint.name]
    _, definitions = models_json_schema(
        [
            *((endpoint.body, "validation") for endpoint in endpoints if endpoint.body),
            *((endpoint.response, "serialization") for endpoint in endpoints if endpoint.response),
            (schemas.ErrorResponse, "serialization"),
            (schemas.AnthropicError, "serialization"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "paged_jax",
            "version": __version__,
            "description": "Text generation through a paged KV cache. Limits: "
            + ", ".join(f"{name} {value}" for name, value in vars(limits).items())
            + ".",
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": {
            endpoint.path: {endpoint.method.lower(): _operation(endpoint)} for endpoint in endpoints
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    """Return the OpenAPI operation object of an endpoint."""
    path, response = endpoint.path, _response(endpoint)
    responses: dict[str, Any] = {"200": response}
    item: dict[str, Any] = {"operationId": endpoint.name, "summary": _plain(endpoint.summary)}
    if endpoint.body is not None:
        item["requestBody"] = {"required": True, "content": _content(endpoint.body)}
    if path in _PROBES:
        item["security"] = []
        responses["503"] = {
            "description": "The server is not able to serve; `status` is the reason.",
            "content": response["content"],
        }
    if path.endswith("{model}"):
        schema = {"type": "string"}
        item["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    error = schemas.AnthropicError if is_anthropic(path) else schemas.ErrorResponse
    item["responses"] = responses | _errors(*endpoint.errors, model=error)
    return item


def _response(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.response is None:
        text = {"text/plain": {"schema": {"type": "string"}}}
        return {"description": "Metrics in Prometheus' text format.", "content": text}
    content = _content(endpoint.response)
    if not endpoint.can_stream:
        return {"description": "The response.", "content": content}
    # Streams have no schema here, because OpenAPI can describe events only since version 3.2.
    return {
        "description": "The generated text. If a stream was requested, it consists of server-sent "
        "events with JSON as data. Except for `/v1/responses` and `/v1/messages`, a stream ends "
        "with the event `data: [DONE]`.",
        "content": content | {"text/event-stream": {}},
    }


def _plain(markdown: str) -> str:
    """Replace Markdown links in a text by their link texts."""
    return _LINK.sub(r"\1", markdown)


def _errors(*statuses: int, model: type = schemas.ErrorResponse) -> dict[str, Any]:
    return {
        str(status): {"description": _ERRORS[status], "content": _content(model)}
        for status in statuses
    }


def _content(model: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
