"""The OpenAPI document: every route, the schemas that bodies are checked against, the statuses."""

from typing import Any

from pydantic.json_schema import models_json_schema

from paged_jax import __version__
from paged_jax.server import bodies, schemas
from paged_jax.server.limits import Limits

_BODIES = (
    bodies.GenerateBody,
    bodies.CompletionBody,
    bodies.ChatBody,
    bodies.TokenizeBody,
    bodies.DetokenizeBody,
)
_ANSWERS = (
    schemas.Generated,
    schemas.Completion,
    schemas.ChatCompletion,
    schemas.Tokens,
    schemas.Text,
    schemas.TokenizerInfo,
    schemas.ModelList,
    schemas.Model,
    schemas.ModelInfo,
    schemas.ServerInfo,
    schemas.Probe,
    schemas.Health,
    schemas.Error,
)
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


def document(limits: Limits, root_path: str = "") -> dict[str, Any]:
    """The document, in OpenAPI 3.1.

    Limits are listed in its description rather than in the schemas, as the error of an exceeded
    limit names the limit.

    Args:
      limits: bounds of requests.
      root_path: the path under which a proxy serves this server.
    """
    _, definitions = models_json_schema(
        [
            *((model, "validation") for model in _BODIES),
            *((model, "serialization") for model in _ANSWERS),
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
            "/generate": _text("generate", bodies.GenerateBody, schemas.Generated),
            "/v1/completions": _text("complete", bodies.CompletionBody, schemas.Completion),
            "/v1/chat/completions": _text("chat", bodies.ChatBody, schemas.ChatCompletion),
            "/tokenize": _post("tokenize", bodies.TokenizeBody, _answer(schemas.Tokens)),
            "/detokenize": _post("detokenize", bodies.DetokenizeBody, _answer(schemas.Text)),
            "/tokenizer_info": _get("tokenizerInfo", schemas.TokenizerInfo, 400, 401, 503),
            "/v1/models": _get("listModels", schemas.ModelList, 400, 401, 503),
            "/v1/models/{model}": _get("getModel", schemas.Model, 400, 401, 404, 503)
            | {"parameters": [_path_parameter("model")]},
            "/get_model_info": _get("getModelInfo", schemas.ModelInfo, 400, 401, 503),
            "/get_server_info": _get("getServerInfo", schemas.ServerInfo, 400, 401, 503),
            "/live": _get("live", schemas.Probe, 400) | {"security": []},
            "/ready": _get("ready", schemas.Probe, 400) | {"security": []},
            "/health": _get("health", schemas.Health, 400) | {"security": []},
            "/metrics": {
                "get": {
                    "operationId": "metrics",
                    "responses": {
                        "200": {
                            "description": "Metrics in Prometheus' text format.",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        },
                        **_errors(400, 401, 503),
                    },
                }
            },
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _text(name: str, body: type, answer: type) -> dict[str, Any]:
    generated = {
        "description": "The generated text, if asked for as a stream of server-sent events whose "
        "data is JSON; the data of the last event is [DONE].",
        # Without a schema: OpenAPI has none for events before version 3.2.
        "content": _content(answer) | {"text/event-stream": {}},
    }
    return _post(name, body, generated)


def _post(name: str, body: type, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": _content(body)},
            "responses": {"200": answer, **_errors(*_ERRORS)},
        }
    }


def _answer(answer: type) -> dict[str, Any]:
    return {"description": "The answer.", "content": _content(answer)}


def _get(name: str, answer: type, *errors: int) -> dict[str, Any]:
    responses = {"200": _answer(answer)}
    if answer in (schemas.Health, schemas.Probe):
        responses["503"] = {
            "description": "The server cannot do that now; `status` says why.",
            "content": _content(answer),
        }
    return {"get": {"operationId": name, "responses": {**responses, **_errors(*errors)}}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {"description": _ERRORS[status], "content": _content(schemas.Error)}
        for status in statuses
    }


def _content(model: type) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"application/json": {"schema": reference}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
