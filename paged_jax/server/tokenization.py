"""Routes that use the tokenizer: tokenize, detokenize, count tokens, tokenizer info."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.server import bodies, schemas
from paged_jax.server.anthropic_bodies import CountTokensBody, chat_of_messages
from paged_jax.server.api_error import ApiError, bad_request
from paged_jax.server.chats import (
    Chat,
    num_chars,
    template_messages,
    template_tools,
    template_variables,
)
from paged_jax.server.json_encoding import json_response
from paged_jax.server.receiving import receive_body
from paged_jax.server.request_log import RECORD
from paged_jax.server.response_bodies import InputTokensBody, chat_body
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Service

T = TypeVar("T")

# Fields that only a chat has.
_CHAT_FIELDS = ("tools", "continue_final_message", "reasoning_effort", "chat_template_kwargs")


async def tokenize(service: Service, request: Request) -> Response:
    """Handle `POST /tokenize`: return the token ids of a text or a chat.

    The text may be longer than the context.

    Raises:
      ApiError: the body is invalid, or the model has no tokenizer.
    """
    tokenizer = _tokenizer(service)
    body = await receive_body(service, request, bodies.TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Exactly one of prompt and messages must be given.")
    for name in _CHAT_FIELDS if body.messages is None else ():
        if getattr(body, name):
            raise ApiError(400, f"{name} must be null if prompt is given.", param=name)
    tools = template_tools(body.tools or (), tokenizer) or None

    def encode() -> list[int]:
        if body.prompt is not None:
            add_special_tokens = body.add_special_tokens is not False
            return tokenizer.encode(body.prompt, add_special_tokens=add_special_tokens)
        chat = tokenizer.render_chat(
            template_messages(body.messages or []),
            template_variables(body),
            tools=tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )
        return tokenizer.encode(chat, add_special_tokens=bool(body.add_special_tokens))

    size = len(body.prompt) if body.prompt is not None else num_chars(body.messages or [])
    token_ids = await _encode(service, request, size, encode)
    return json_response(
        schemas.TokenizeResponse(
            count=len(token_ids),
            max_model_len=service.max_model_len,
            tokens=token_ids,
            token_strs=tokenizer.spell(token_ids) if body.return_token_strs else None,
        )
    )


async def count_message_tokens(service: Service, request: Request) -> Response:
    """Handle `POST /v1/messages/count_tokens`: return the number of prompt tokens.

    The prompt includes tools and the text of the chat template.

    Raises:
      ApiError: the body is invalid, or the model has no tokenizer.
    """
    body = await receive_body(service, request, CountTokensBody)
    service.check_model(body.model)
    count = await _count(service, request, lambda: chat_of_messages(body, service.tokenizer))
    return json_response(schemas.TokenCount(input_tokens=count))


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Handle `POST /v1/responses/input_tokens`: return the number of prompt tokens.

    The prompt includes tools and the text of the chat template.

    Raises:
      ApiError: the body is invalid, or the model has no tokenizer.
    """
    body = await receive_body(service, request, InputTokensBody)
    service.check_model(body.model)
    count = await _count(service, request, lambda: chat_body(body, service.tokenizer))
    return json_response(schemas.InputTokenCount(input_tokens=count))


async def _count(
    service: Service, request: Request, make_chat: Callable[[], bodies.ChatBody]
) -> int:
    def count() -> int:
        try:
            return len(Chat(service, make_chat()).token_ids())
        except ValueError as error:
            raise bad_request(error) from None

    record = request.scope[RECORD]
    async with service.while_connected(request.receive):
        return await service.encode(record.size(record.num_bytes), count)


async def detokenize(service: Service, request: Request) -> Response:
    """Handle `POST /detokenize`: return the text of token ids, including special tokens.

    Raises:
      ApiError: the body is invalid, or the model has no tokenizer.
    """
    tokenizer = _tokenizer(service)
    body = await receive_body(service, request, bodies.DetokenizeBody)
    service.check_model(body.model)
    max_id = tokenizer.vocab_size - 1
    if (last := max(body.tokens, default=0)) > max_id:
        raise ApiError(
            400, f"tokens must hold integers in 0..{max_id}, got {last}.", param="tokens"
        )
    text = await _encode(
        service,
        request,
        len(body.tokens),
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=False),
    )
    return json_response(schemas.DetokenizeResponse(prompt=text))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Handle `GET /tokenizer_info`: return the special tokens and the chat template.

    Raises:
      ApiError: the model has no tokenizer.
    """
    tokenizer = _tokenizer(service)
    special_tokens = {name: tokenizer.special_tokens.get(name) for name in schemas.SPECIAL_TOKENS}
    return json_response(
        schemas.TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            **special_tokens,
            chat_template=tokenizer.chat_template,
            model_max_length=service.max_model_len,
        )
    )


def _tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        raise ApiError(400, "The model has no tokenizer.")
    return service.tokenizer


async def _encode(service: Service, request: Request, size: int, function: Callable[[], T]) -> T:
    """Call a function with `Service.encode`, and count it as one sample in progress.

    Args:
      service: the service.
      request: the request.
      size: number of characters or tokens to process.
      function: the function.

    Raises:
      ApiError: `function` raised a ValueError, or see `Service.admit`.
    """
    size = request.scope[RECORD].size(size)
    with service.admit(1, request.scope[CLIENT], is_stream=False):
        try:
            async with service.while_connected(request.receive):
                return await service.encode(size, function)
        except ValueError as error:
            raise bad_request(error) from None
