# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""Sampling parameters of a request, and token biases of a model, without importing jax."""

import dataclasses
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from paged_jax.arguments import ArgumentError, is_int, is_real, names_arguments
from paged_jax.formatting import short_repr

MAX_LOGPROBS = 20
"""Maximum value of `logprobs` and `prompt_logprobs`."""
MAX_N = 2**14
"""Maximum number of samples of a request, as in vLLM. All are created when a request arrives."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 16
"""Maximum number of token sequences of a request's bad words, and maximum tokens per sequence."""


@dataclasses.dataclass(frozen=True)
class Number:
    """Type, bounds and texts of a numeric parameter.

    Attributes:
      type: `int`, or `float`, which accepts integers.
      bounds: bounds of the value. The keys are the names ge, gt, le and lt of functions in
        `operator`: ``{"ge": 0}`` means value >= 0.
      rule: the bounds in words, such as "be >= 0". An error message puts "must" before it.
      advice: the last sentence of an error message, such as "Use 0 for greedy.".
      help: the help text of the flag of ``python -m paged_jax.generate``; None for no flag.
      is_recommended: whether ``generation_config.json`` may recommend a value.
      is_optional: whether the value may be None.
    """

    type: type[int] | type[float]
    bounds: Mapping[str, int]
    rule: str
    advice: str
    help: str | None = None
    is_recommended: bool = False
    is_optional: bool = False

    def allows(self, value: object) -> bool:
        """Return whether `value` is a finite number of this type and within the bounds.

        None is allowed if `is_optional`.
        """
        if value is None:
            return self.is_optional
        return (is_int if self.type is int else is_real)(value) and all(
            getattr(operator, name)(value, bound) for name, bound in self.bounds.items()
        )


_PENALTY = Number(float, {"ge": -2, "le": 2}, "be in [-2, 2]", "Use 0.0 for none.")
NUMBERS: Mapping[str, Number] = {
    "temperature": Number(
        float,
        {"ge": 0},
        "be finite and >= 0",
        "Use 0 for greedy.",
        help="divide the logits by X; 0 always chooses the most probable token; default: the "
        "model's value",
        is_recommended=True,
    ),
    "top_p": Number(
        float,
        {"gt": 0, "le": 1},
        "be in (0, 1]",
        "Use 1.0 to keep every token.",
        help="sample from the most probable tokens whose probabilities add up to X",
        is_recommended=True,
    ),
    # The device stores top_k as int32.
    "top_k": Number(
        int,
        {"ge": -1, "lt": 2**31},
        "be an integer >= -1 and < 2**31",
        "Use 0 or -1 to keep every token.",
        help="sample from the N most probable tokens",
        is_recommended=True,
    ),
    "min_p": Number(
        float,
        {"ge": 0, "le": 1},
        "be in [0, 1]",
        "Use 0.0 to keep every token.",
        help="drop tokens whose probability is below X times the highest probability",
        is_recommended=True,
    ),
    "presence_penalty": dataclasses.replace(
        _PENALTY, help="subtract X from the logits of tokens that were generated before"
    ),
    "frequency_penalty": dataclasses.replace(
        _PENALTY, help="subtract X from the logit of a token for each time it was generated before"
    ),
    "repetition_penalty": Number(
        float,
        {"gt": 0},
        "be finite and > 0",
        "Use 1.0 for none.",
        help="divide positive logits by X, and multiply negative logits by X, for tokens in the "
        "prompt or the generated text",
        is_recommended=True,
    ),
}
"""Numeric parameters. Flags of command lines and fields of the server are made from this table."""

_STRUCTURED = "StructuredOutputsParams"


class StructuredOutputError(RuntimeError):
    """Error if the grammar of structured outputs becomes too complex during generation."""


@names_arguments
@short_repr
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on a generated text, with vLLM's field names. Exactly one field must be set.

    Attributes:
      json: a JSON schema that the text must match, as text or as a dict; stored as text.
      regex: a regular expression that the whole text must match, in the syntax of Rust's crate
        `regex`.
      choice: list of the allowed texts; stored as a tuple.
      grammar: a grammar in llguidance's variant of Lark. The text must match its rule ``start``.
      json_object: True if the text must be a JSON object, with any fields.

    Raises:
      ValueError: not exactly one field is set, or it has a wrong type. Schemas and grammars are
        compiled later, see `Engine.add_request`.

    Example:
      >>> StructuredOutputsParams(choice=["yes", "no"]).choice
      ('yes', 'no')
      >>> StructuredOutputsParams(json={"type": "integer"}).json
      '{"type": "integer"}'
      >>> StructuredOutputsParams()
      Traceback (most recent call last):
      ...
      paged_jax.arguments.ArgumentError: StructuredOutputsParams: exactly one of json, regex, ...
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in dataclasses.fields(self))
            found = " and ".join(given) or "none"
            raise ArgumentError(_STRUCTURED, f"exactly one of {names} must be given, got {found}.")
        [name] = given
        convert, rule = _FORMS[name]
        value = convert(getattr(self, name))
        if value is None:
            problem = f"must {rule}, got {getattr(self, name)!r}."
            raise ArgumentError(_STRUCTURED, problem, name)
        object.__setattr__(self, name, value)


def _schema(value: Any) -> str | None:
    try:
        # Do not sort the keys: properties are generated in the order of the schema's keys.
        text = json.dumps(dict(cast(Any, value))) if isinstance(value, Mapping) else value
        is_schema = isinstance(text, str) and isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(_STRUCTURED, f"must be JSON: {error}.", "json") from None
    return text if is_schema else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> tuple[str, ...] | None:
    is_good = _is_sequence(value) and all(isinstance(text, str) and text for text in value)
    return tuple(value) if is_good and value else None


# Maps each field to a function and a rule. The function returns the value to store, or None for an
# invalid value. An error message puts "must" before the rule.
_FORMS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "json": (_schema, "be a JSON schema, as a dict or as text"),
    "regex": (_text, "be a non-empty text"),
    "choice": (_texts, "be a list of one or more non-empty texts"),
    "grammar": (_text, "be a non-empty text"),
    "json_object": (lambda value: value is True or None, "be a bool"),
}


_LOGPROBS = Number(
    int,
    {"ge": 0, "le": MAX_LOGPROBS},
    f"be an integer in [0, {MAX_LOGPROBS}] or None",
    "Use None to report nothing.",
    is_optional=True,
)
_INTEGERS: Mapping[str, Number] = {
    "n": Number(
        int,
        {"ge": 1, "le": MAX_N},
        f"be an integer in [1, {MAX_N}]",
        "Send several requests for more.",
    ),
    "max_tokens": Number(
        int,
        {"ge": 0},
        "be an integer >= 0 or None",
        "Use None to generate up to the longest context.",
        is_optional=True,
    ),
    "min_tokens": Number(int, {"ge": 0}, "be an integer >= 0", "Use 0 to allow an immediate stop."),
    "seed": Number(
        int,
        {"ge": 0, "lt": 2**63},
        "be an integer in [0, 2**63 - 1] or None",
        "Use None for a seed picked by the engine.",
        is_optional=True,
    ),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


@names_arguments
@short_repr
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request, with the names and meanings of vLLM.

    Attributes:
      n: number of samples, at most 16384. Each sample has its own random numbers.
      temperature: the logits are divided by this number. With 0, and with values below 1e-5, the
        token with the largest logit is chosen.
      top_p: keep the smallest set of tokens whose total probability reaches this, in (0, 1].
      top_k: keep the k most probable tokens; 0 or -1 keeps all.
      min_p: drop tokens less probable than this fraction of the highest probability, in [0, 1].
      presence_penalty: number that is subtracted from the logits of tokens that were generated
        before.
      frequency_penalty: number that is subtracted from a token's logit once for each time that the
        token was generated before.
      repetition_penalty: logits of tokens in the prompt or the generated text are divided by this
        number if they are positive, and multiplied by it if they are negative.
      seed: seed of the random draws, 0 to 2**63 - 1. With None or -1 the engine picks a seed.
      stop: string, or list of strings, at which the generated text ends; stored as a tuple.
      stop_token_ids: ids of tokens at which the generated text ends; stored as a tuple.
      max_tokens: maximum number of tokens to generate; None for the whole rest of the context. With
        0, only the prompt is computed, for `prompt_logprobs` or for the prefix cache.
      min_tokens: number of tokens to generate before a stop token or stop string may end the text.
      ignore_eos: whether to continue after the model's end-of-sequence token.
      logprobs: number of most probable tokens to report at each position, in addition to the
        chosen token; None reports nothing.
      prompt_logprobs: like `logprobs`, for each position of the prompt except the first.
      logit_bias: dict from token ids, at most 1024, to numbers that are added to their logits.
      allowed_token_ids: the only tokens that may be generated; stored as a tuple. If they include
        no end-of-sequence or stop token, the text ends only at `max_tokens` or a stop string.
      bad_words: words that must not be generated, with or without a space before them; stored as a
        tuple. A token is excluded if it would complete the token sequence of a word. If this would
        exclude all tokens, the words are ignored at that position.
      detokenize: whether to convert the tokens to text. False saves time if no text is needed.
      skip_special_tokens: whether to omit special tokens from the text.
      include_stop_str_in_output: whether to keep the stop string at the end of the text.
      structured_outputs: constraint on the text, such as a JSON schema. Generation ends when the
        text is complete under the constraint, or at `max_tokens` if that is earlier. It continues
        up to `min_tokens` if the constraint allows more text. With `ignore_eos`, any text may
        follow the complete text.

    Raises:
      ValueError: a value is out of bounds. The message names the field and the bound.

    Example:
      >>> params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop="END")
      >>> params.stop
      ('END',)
      >>> SamplingParams(top_p=0.0)
      Traceback (most recent call last):
      ...
      paged_jax.arguments.ArgumentError: SamplingParams: top_p must be in (0, 1], got 0.0. ...
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Excluded from the hash, because dicts are not hashable. `==` still compares this field.
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if is_int(self.seed) and self.seed == -1:  # as in vLLM
            object.__setattr__(self, "seed", None)
        for name, number in (*NUMBERS.items(), *_INTEGERS.items()):
            self._require(number.allows(getattr(self, name)), name, number.rule, number.advice)
        self._require(
            self.max_tokens != 0 or self.n == 1,
            "n",
            "be 1 if max_tokens is 0, because nothing is generated",
            "Use 1.",
        )
        self._require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"be <= max_tokens ({self.max_tokens})",
            "Raise max_tokens.",
        )
        for name in _FLAGS:
            self._require(
                isinstance(getattr(self, name), bool), name, "be a bool", "Use True or False."
            )
        self._check_logit_bias()
        self._check_stop()
        self._check_restrictions()
        constraint = self.structured_outputs
        self._require(
            constraint is None or isinstance(constraint, StructuredOutputsParams),
            "structured_outputs",
            "be StructuredOutputsParams or None",
            "Use None for no constraint.",
        )

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        self._require(
            isinstance(self.logit_bias, Mapping)
            and all(_is_token_id(token) for token in self.logit_bias)
            and all(is_real(bias) for bias in self.logit_bias.values()),
            "logit_bias",
            "map token ids >= 0 to finite numbers",
            "The keys of JSON objects are strings: convert them to int.",
        )
        # Copy the dict, so that later changes by the caller do not change this frozen object.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._require(
            stop is None
            or (_is_sequence(stop) and all(isinstance(text, str) and text for text in stop)),
            "stop",
            "be a non-empty string or a sequence of them",
            "Use None for no stop string.",
        )
        object.__setattr__(self, "stop", tuple(stop or ()))
        self._require(
            not stop or self.detokenize,
            "detokenize",
            "be True with stop strings",
            "Stop strings are searched in the text.",
        )
        tokens = self.stop_token_ids
        self._require(
            tokens is None or (_is_sequence(tokens) and all(_is_token_id(t) for t in tokens)),
            "stop_token_ids",
            "be a sequence of integers >= 0 and < 2**31",
            "Use None for no stop token.",
        )
        object.__setattr__(self, "stop_token_ids", tuple(tokens or ()))

    def _check_restrictions(self) -> None:
        allowed, words = self.allowed_token_ids, self.bad_words
        self._require(
            allowed is None
            or (_is_sequence(allowed) and len(allowed) > 0 and all(map(_is_token_id, allowed))),
            "allowed_token_ids",
            "be a non-empty sequence of integers >= 0 and < 2**31",
            "Use None to allow every token.",
        )
        if allowed is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
        self._require(
            words is None or _texts(words) is not None or (_is_sequence(words) and not words),
            "bad_words",
            "be a sequence of non-empty strings",
            "Use None for no words.",
        )
        self._require(
            len(words or ()) <= MAX_BAD_WORDS,
            "bad_words",
            f"have at most {MAX_BAD_WORDS} words",
            "Use logit_bias for single tokens.",
        )
        object.__setattr__(self, "bad_words", tuple(words or ()))

    def _require(self, is_ok: bool, name: str, rule: str, advice: str) -> None:
        if not is_ok:
            problem = f"must {rule}, got {getattr(self, name)!r}. {advice}"
            raise ArgumentError("SamplingParams", problem, name)


def _is_token_id(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**31


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


class TokenBias(NamedTuple):
    """Biases of a model, which are added to the logits of some tokens in every request.

    Most come from the model's generation_config.json.

    Attributes:
      ids: ids of the biased tokens.
      values: the bias of each token of `ids`; -inf means that it is never generated.
      start_ids: ids of tokens that must not be the first generated token.

    In the example, token 2 must not be the first generated token (index 0). It may be generated
    later.

    Example:
      >>> bias = TokenBias(ids=(7, 4), values=(-float("inf"), 1.5), start_ids=(2,))
      >>> bias.values_at(0), bias.values_at(1)
      ((-inf, -inf, 1.5), (0.0, -inf, 1.5))
    """

    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    start_ids: tuple[int, ...] = ()

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Ids of all biased tokens: `start_ids`, followed by `ids`."""
        return self.start_ids + self.ids

    @property
    def suppresses_only(self) -> bool:
        """Whether every bias is -inf."""
        return all(value == -float("inf") for value in self.values)

    def values_at(self, index: int) -> tuple[float, ...]:
        """Return the biases of `all_ids` for the `index`-th generated token, counted from 0."""
        at_start = -float("inf") if index == 0 else 0.0
        return (at_start,) * len(self.start_ids) + self.values


NO_BIAS = TokenBias()
"""The bias of a model without recommended biases."""
