"""The OpenAPI document of the API: the schemas that bodies are checked with, and the statuses."""

from typing import Any

from pydantic.json_schema import models_json_schema

from paged_jax.server import schemas
from paged_jax.server.limits import Limits
from paged_jax.version import __version__

_BODIES = (schemas.GenerateBody, schemas.CompletionBody, schemas.ChatBody)
_ANSWERS = (
    schemas.Generated,
    schemas.Completion,
    schemas.ChatCompletion,
    schemas.ModelList,
    schemas.Model,
    schemas.Health,
    schemas.Error,
)
_ERRORS = {
    400: "The request is wrong; the message says where.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests or streams; try again later.",
    500: "Generation failed.",
    503: "The server is shutting down, or its engine has stopped.",
}


def document(limits: Limits) -> dict[str, Any]:
    """OpenAPI 3.1. The limits are told in words, as they answer with names of their own."""
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
        "paths": {
            "/generate": _post("generate", schemas.GenerateBody, schemas.Generated),
            "/v1/completions": _post("complete", schemas.CompletionBody, schemas.Completion),
            "/v1/chat/completions": _post("chat", schemas.ChatBody, schemas.ChatCompletion),
            "/v1/models": _get("listModels", schemas.ModelList, 400, 401, 503),
            "/v1/models/{model}": _get("getModel", schemas.Model, 400, 401, 404, 503)
            | {"parameters": [_path_parameter("model")]},
            "/health": _get("health", schemas.Health, 400) | {"security": []},
            "/metrics": {
                "get": {
                    "operationId": "metrics",
                    "responses": {
                        "200": {
                            "description": "Prometheus' text format.",
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


def _post(name: str, body: type, answer: type) -> dict[str, Any]:
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": _content(body)},
            "responses": {
                "200": {
                    "description": "What was generated; streamed as server-sent events if asked, "
                    "each with JSON for data, the last one with [DONE].",
                    # Without a schema: before OpenAPI 3.2 there is none for events.
                    "content": _content(answer) | {"text/event-stream": {}},
                },
                **_errors(*_ERRORS),
            },
        }
    }


def _get(name: str, answer: type, *errors: int) -> dict[str, Any]:
    responses = {"200": {"description": "The answer.", "content": _content(answer)}}
    if answer is schemas.Health:
        responses["503"] = {"description": "Not well.", "content": _content(answer)}
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
