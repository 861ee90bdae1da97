"""Base classes of request bodies, and the fields of all endpoints that generate text.

Fields have the names of OpenAI's API. Fields that OpenAI does not have are named as in vLLM.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paged_jax.arguments import suggest
from paged_jax.options import Option, options_of
from paged_jax.sampling.params import SamplingParams

T = TypeVar("T")

# Type of the lists in request bodies. Validation of a list stops at its first error, because
# collecting a million errors would block the server for seconds.
Items = Annotated[list[T], Field(fail_fast=True)]


def _whole(value: Any) -> Any:
    """Convert a whole float such as 4.0 to an integer. Return other values unchanged.

    JSON has only one type of number, so clients may send integers as floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
# Pydantic's error type for unknown fields.
UNKNOWN_FIELD = "extra_forbidden"

# Prefix of older fields of vLLM for structured outputs, such as guided_json.
_OLD_FORMS = "guided_"

# Fields that are ignored, because they do not change the response: hints for caches, routers, logs
# and reasoning models. `reasoning_effort` is ignored only by endpoints without a chat template; the
# others declare it in `TemplateFields`.
IGNORED = frozenset({
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "rid",
    "safety_identifier",
    "verbosity",
})  # fmt: skip

# Fields that are ignored if they are null or have one of these values, and are errors otherwise.
# The values are the defaults of OpenAI, vLLM and SGLang, which clients often send.
NEUTRAL_VALUES: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_params": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    "vllm_xargs": ({},),
}


def is_neutral(name: str, value: Any) -> bool:
    """Return whether an unknown field with this value has no effect and can be ignored.

    Example:
      >>> is_neutral("no_stop_trim", False), is_neutral("no_stop_trim", True)
      (True, False)
      >>> is_neutral("anything", None)
      True
    """
    return value is None or name in IGNORED or value in NEUTRAL_VALUES.get(name, ())


class Body(BaseModel):
    """Base class of JSON objects in requests. Unknown fields are errors unless they are null."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    # Function that takes the name and the value of an unknown field, and returns whether to ignore
    # the field.
    ignores: ClassVar[Callable[[str, Any], bool]] = staticmethod(lambda name, value: value is None)

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if not self.ignores(name, value):
                raise PydanticCustomError(UNKNOWN_FIELD, "{rule}", self.describe_unknown(name))
        return self

    @classmethod
    def describe_unknown(cls, name: str) -> dict[str, str]:
        """Return a dict with the ``name`` and the error message (``rule``) of an unknown field."""
        name = name[:100]
        option = "structured_outputs" if name.startswith(_OLD_FORMS) else name
        suggestion = suggest(option, cls.model_fields)
        hint = "" if suggestion is None else f" Did you mean {suggestion}?"
        rule = f"{name} is not supported here"
        if (values := NEUTRAL_VALUES.get(name)) is not None:
            allowed = " or ".join(map(json.dumps, [None, *values]))
            rule = f"{name} is supported here only as {allowed}"
        return {"name": name, "rule": f"{rule}.{hint}"}


class LenientBody(Body):
    """Base class of JSON objects that accept unknown fields, such as messages."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    # Accept all unknown fields, because clients send back objects of responses and may add fields
    # to them. Unknown fields of messages and functions are passed to the chat template. Unknown
    # fields of other objects are dropped.
    ignores = staticmethod(lambda name, value: True)


def _optional(option: Option) -> Any:
    """Return the type annotation and the default of a field for an option, which may be null."""
    assert option.bounds is not None
    limits: dict[str, Any] = dict(option.bounds.limits)
    field: Any = Field(None, description=f"{option.help[0].upper()}{option.help[1:]}.")
    if option.type is int:
        integer: Any = Annotated[int, Field(**limits), WHOLE]
        return integer | None, field
    if option.type is float:
        number: Any = Annotated[float, Field(**limits)]
        return number | None, field
    assert option.type is bool, f"{option.name} needs a field of SamplingBody"
    return bool | None, field


class StreamOptions(Body):
    """Options of a stream: whether the last event or every event includes token counts."""

    include_usage: bool | None = Field(
        None, description="Whether the last event has the token counts of the request."
    )
    continuous_usage_stats: bool | None = Field(
        None,
        description="Whether each event has the token counts of its sample. Requires "
        "include_usage.",
    )
    include_obfuscation: Literal[False] | None = Field(None, description="Must be false or null.")


class TemplateFields(Body):
    """Base class of all bodies with a chat: fields for the chat template."""

    reasoning_effort: str | None = Field(
        None,
        description="Variable for the chat template, used by gpt-oss. `none` turns reasoning off.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens such as BOS. By default true for "
        "texts, and false for chats, because the chat template adds them.",
    )


# Sampling parameters whose values in JSON differ from those in Python, and those that only some
# endpoints have. Their fields are declared below and in `bodies`. All others are made from their
# declarations in `SamplingParams`.
_DECLARED_FIELDS = (
    "n", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens", "logprobs",
    "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "detokenize",
    "skip_special_tokens", "structured_outputs",
)  # fmt: skip
_FIELDS: dict[str, Any] = {
    option.name: _optional(option)
    for option in options_of(SamplingParams)
    if option.name not in _DECLARED_FIELDS
}
_SamplingFields = create_model("_SamplingFields", __base__=Body, **_FIELDS)


def _add_neutral(schema: dict[str, Any]) -> None:
    ignored_fields = {name: {"description": "Accepted and ignored."} for name in sorted(IGNORED)}
    neutral = {name: {"enum": [None, *values]} for name, values in NEUTRAL_VALUES.items()}
    # A few bodies declare a field that is in `IGNORED`: bodies of chats declare `reasoning_effort`,
    # for example. In their schemas, the declaration replaces the description "ignored".
    schema["properties"] = ignored_fields | neutral | schema["properties"]
    schema["additionalProperties"] = {"type": "null"}


class StructuredOutputs(Body):
    """A constraint on the generated text. Exactly one field must be given."""

    # The alias is needed because Pydantic's models have a method `json`.
    json_schema_: str | dict[str, Any] | None = Field(
        None, alias="json", description="A JSON schema, as an object or as a text."
    )
    regex: str | None = Field(None, description="A regular expression for the whole text.")
    choice: Items[str] | None = Field(None, description="The allowed texts.")
    grammar: str | None = Field(None, description="A grammar of llguidance, a variant of Lark.")
    json_object: bool | None = Field(None, description="Whether the text must be a JSON object.")


class SamplingBody(_SamplingFields):
    """Fields that the bodies of all endpoints for text generation have in common.

    If a field is null, the default of the model or of the endpoint is used.
    """

    model_config = ConfigDict(json_schema_extra=_add_neutral)

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = Field(
        None, description="Seed of the random draws; by default the server picks one."
    )
    n: Annotated[int, Field(ge=1), WHOLE] | None = Field(None, description="Number of samples.")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
        None,
        description="Maximum number of tokens to generate. 0 only computes the prompt, for its "
        "log-probabilities or for the prefix cache.",
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
        None, description="Number of tokens before a stop token or stop string may end the text."
    )
    stop: Text | Items[Text] | None = Field(None, description="Texts that end the output.")
    stop_token_ids: Items[TokenId] | None = Field(None, description="Tokens that end the output.")
    logit_bias: dict[str, float] | None = Field(
        None, description="Numbers that are added to the logits of tokens, by token id."
    )
    allowed_token_ids: TokenIds | None = Field(
        None, description="The only tokens that may be generated."
    )
    bad_words: Items[Text] | None = Field(
        None, description="Words that may not be generated, with or without a space before them."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Whether the text omits special tokens; by default true."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens such as BOS. By default true for "
        "texts, and false for chats, because the chat template adds them.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="The form of the text, with exactly one of `json`, `regex`, `choice`, "
        "`grammar` and `json_object`.",
    )
    stream: bool | None = Field(
        None, description="Whether to send the text as events while it is generated."
    )
    cache_salt: str | None = Field(
        None, description="Requests share cached blocks only if their salts are equal."
    )
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31), WHOLE] | None = Field(
        None, description="Requests with a lower value are served first."
    )
    timeout: Annotated[float | None, Field(gt=0)] = Field(
        None,
        description="Seconds after which the request ends with the tokens generated so far. Its "
        "`finish_reason` is then `abort`, and its `stop_reason` is `deadline`.",
    )
    explain: bool = Field(
        False,
        description="Whether the response explains why the request waited or was preempted, and "
        "where its match in the prefix cache ended.",
    )

    ignores = staticmethod(is_neutral)
