"""What SGLang's router asks the servers behind it, under both names that each route has had."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paged_jax import __version__
from paged_jax.server import schemas
from paged_jax.server.responses import json_response
from paged_jax.server.service import Service


def routes(service: Service) -> list[Route]:
    """Routes that say what model is served, and how much at a time."""
    name = service.settings.model_name
    model = schemas.ModelInfo(
        # The name: where the folder is, is nobody's business.
        model_path=name,
        served_model_name=name,
        max_context_length=service.max_model_len,
        vocab_size=service.vocab_size,
    )
    # Without SGLang's `model_path`: the router would look for a tokenizer of that name elsewhere.
    server = schemas.ServerInfo(
        served_model_name=name,
        version=__version__,
        max_running_requests=service.max_num_seqs,
        max_total_num_tokens=service.num_blocks * service.block_size,
    )

    def route(path: str, info: schemas.ModelInfo | schemas.ServerInfo) -> Route:
        async def answer(request: Request) -> Response:
            return json_response(info)

        return Route(path, answer)

    return [
        route("/get_model_info", model),
        route("/model_info", model),
        route("/get_server_info", server),
        route("/server_info", server),
    ]
