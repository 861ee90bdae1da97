"""Tests that the server agrees with its OpenAPI document, on requests drawn from the schema."""

import collections
import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from starlette.routing import Route

from paged_jax import Engine
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Settings, admin, create_app
from paged_jax.server.openapi import ENDPOINTS
from tests.support.live_server import LiveServer
from tests.support.tiny_model import SIZES, save_tiny_model

OPERATIONS = [
    ("POST", "/generate"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{model}"), ("GET", "/health"), ("GET", "/metrics"),
    ("GET", "/live"), ("GET", "/ready"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/ping"), ("GET", "/version"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/tokenizer_info"), ("GET", "/get_model_info"), ("GET", "/get_server_info"),
]  # fmt: skip
# Number of valid and of invalid requests per operation.
NUM_EXAMPLES = 50
# Maximum seconds per request, including compiling.
TIME_LIMIT = 60
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("fuzz"), chat_template=TEMPLATE)
    with LiveServer(Engine(folder, **SIZES), Settings(model_name="tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def schema(server) -> Any:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    return schema


def test_document_lists_the_tested_operations(server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    found = [
        (method, path) for path in paths for method in ("get", "post") if method in paths[path]
    ]
    assert {(method.upper(), path) for method, path in found} == set(OPERATIONS)


def test_endpoints_are_the_routes_of_the_application(server) -> None:
    """The table has all routes, except those of the operator and second names for routers."""
    routes = create_app(server.service).routes
    paths = {route.path.replace(":path", "") for route in routes if isinstance(route, Route)}
    admin_paths = {route.path for route in admin.routes(server.service)}
    others = admin_paths | {"/model_info", "/server_info"}
    others |= {path for path in paths if path.startswith(("/cache/", "/chat/"))}
    assert {each.path for each in ENDPOINTS} == paths - others


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*each, "positive") for each in OPERATIONS]
    # GET requests cannot be invalid.
    + [(*each, "negative") for each in OPERATIONS if each[0] == "POST"],
)
def test_responses_conform_to_the_document(server, schema, method, path, mode) -> None:
    import schemathesis

    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
        schemathesis.checks.CHECKS.get_one("content_type_conformance"),
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
    ]

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def check(case) -> None:
        if path == "/generate" and mode == "positive":
            # The schema does not express that exactly one prompt is needed, nor its token ids.
            case.body.pop("prompt_token_ids", None)
            case.body["prompt"] = case.body.get("prompt") or "ab"
        if method == "POST" and mode == "positive":
            if path == "/tokenize" and statuses.total() % 2:
                case.body.pop("messages", None)
                case.body["prompt"] = case.body.get("prompt") or "ab"
            if path == "/detokenize" and statuses.total() % 2:
                case.body["tokens"] = [5]
            if path == "/v1/responses" and statuses.total() % 2:
                case.body["input"] = "ab"
            if path.startswith("/v1/messages") and statuses.total() % 2:
                case.body["messages"] = [{"role": "user", "content": "ab"}]
            # Nor does it express the model's name, its tools and its supported forms.
            for name in (
                "model",
                "tools",
                "tool_choice",
                "structured_outputs",
                "response_format",
                "text",
                "output_config",
                "chat_template_kwargs",
            ):
                if statuses.total() % 2:
                    case.body.pop(name, None)
            for message in case.body.get("messages") or []:
                message.pop("tool_calls", None)
        response = case.call(timeout=TIME_LIMIT)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    statuses: collections.Counter[int] = collections.Counter()
    check()
    if method == "POST":
        # Enough requests must have been accepted or rejected.
        assert statuses[200 if mode == "positive" else 400] >= 10
    server.wait_until_idle()
    check_invariants(server.engine.cache.tables)
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(server) -> None:
    bodies = [
        {"prompt": "the cat", "max_tokens": 4, "stream": True, "logprobs": 3},
        {"prompt": "ab", "n": 3, "temperature": 1.0, "max_tokens": 3, "explain": True},
        {"prompt": "ab", "n": 0},
        {"prompt": "ab", "stop_token_ids": [99]},
        {"nothing": 1},
    ]

    def play_round() -> int:
        with server.client() as client:
            for number in range(200):
                body = {**bodies[number % len(bodies)], "cache_salt": str(number)}
                assert client.post("/generate", content=json.dumps(body), headers=JSON).status_code
                assert client.get(f"/v1/models/{number}").status_code == 404
        server.wait_until_idle()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        sizes = [play_round() for _ in range(4)]
    finally:
        tracemalloc.stop()
    # The first round fills caches. A round has 400 requests of at most 200 bytes.
    assert sizes[-1] - sizes[1] < 2 * 400 * 200


JSON = {"content-type": "application/json"}
