"""`of_validation`: the error to answer when a request's body does not match its schema."""

import itertools

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paged_jax.server.bodies import UNKNOWN_FIELD
from paged_jax.server.errors import ApiError

# A body with more mistakes is refused without looking at each.
_MAX_MISTAKES = 100
# Fields of OpenAI's API that this server accepts only with the values that change nothing.
_NO_AUDIO = "as this server does not support audio"
_UNSUPPORTED = {
    "function_call": "be null, as calls are tool_calls here",
    "audio": f"be null, {_NO_AUDIO}",
    "content": 'be a text or a list of {"type": "text"} parts, as this server does not support '
    "images or audio",
    "modalities": f'be null or ["text"], {_NO_AUDIO}',
    "include_obfuscation": "be null or false, as this server does not pad its events",
    "suffix": "be null or empty, as this server does not support text after the completion",
    "service_tier": 'be null, "auto" or "default", as this server has one tier',
}
# Fields that may have several forms.
_FORMS = {
    "prompt": "be a text, a list of texts, token ids, or a list of token ids of each prompt, "
    "none of them empty",
    "stop": "be a text or a list of texts, none of them empty",
    "tool_choice": 'be "none", "auto", "required" or {"type": "function", "function": '
    '{"name": NAME}}',
}


def of_validation(error: ValidationError) -> ApiError:
    """The answer to a body with mistakes: it names the first of them."""
    if error.error_count() > _MAX_MISTAKES:
        return ApiError(
            400, f"The body has {error.error_count()} mistakes.", code="too_many_mistakes"
        )
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    if first["type"] == UNKNOWN_FIELD:
        return _unknown_field(first)
    # A field that may have several forms has a mistake in each of them.
    same = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    places = zip(*(filter(_is_place, each["loc"]) for each in same), strict=False)
    place = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, places)]
    param = ".".join(map(str, place)) or None
    messages = list(dict.fromkeys(each["msg"] for each in same))
    if len(messages) > 1 and place and place[0] in _FORMS:
        message, param = f"{place[0]} must {_FORMS[place[0]]}.", str(place[0])
    else:
        message = ", or ".join(messages)
        message = _unsupported(place) or (f"{param}: {message}." if param else f"{message}.")
    return ApiError(400, message, param=param, code=first["type"])


def _unknown_field(error: ErrorDetails) -> ApiError:
    """The answer to a field that does not exist, or not with such a value."""
    facts = error.get("ctx", {})
    place = ".".join(map(str, filter(_is_place, (*error["loc"], facts["name"]))))
    return ApiError(400, facts["rule"], param=place, code=UNKNOWN_FIELD)


def _unsupported(place: list[int | str]) -> str | None:
    """The sentence for a field that has one of its own."""
    for index, part in enumerate(place):
        if part in _UNSUPPORTED:
            return f"{'.'.join(map(str, place[: index + 1]))} must {_UNSUPPORTED[part]}."
    return None


def _is_place(part: int | str) -> bool:
    """False for the names that pydantic gives to the forms of a field, as in "prompt.list[int]"."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
