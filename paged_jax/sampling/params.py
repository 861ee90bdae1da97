# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""`SamplingParams`: every sampling parameter of a request, described once.

Checks, flags of command lines and fields of HTTP bodies read the fields, see `paged_jax.options`.
This module does not import jax.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from paged_jax.arguments import ArgumentError, is_int, is_real, is_sequence, names_arguments
from paged_jax.formatting import short_repr
from paged_jax.options import SWITCH, Bounds, check_options, documented, integer, number, option
from paged_jax.sampling.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
"""Maximum value of `logprobs` and `prompt_logprobs`."""
MAX_N = 2**14
"""Maximum number of samples of a request, as in vLLM. All are created when a request arrives."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 16
"""Maximum number of token sequences of a request's bad words, and maximum tokens per sequence."""


def _are_texts(value: object) -> bool:
    return is_sequence(value) and all(isinstance(text, str) and text for text in value)


def _is_stop(value: Any) -> bool:
    return value != "" if isinstance(value, str) else _are_texts(value)


def _is_token_id(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**31


def _are_token_ids(value: Any) -> bool:
    return is_sequence(value) and all(map(_is_token_id, value))


def _are_allowed(value: Any) -> bool:
    return _are_token_ids(value) and len(value) > 0


def _are_bad_words(value: Any) -> bool:
    return _are_texts(value) and len(value) <= MAX_BAD_WORDS


def _is_logit_bias(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    biases = cast(Mapping[Any, Any], value)
    return all(map(_is_token_id, biases)) and all(map(is_real, biases.values()))


def _is_constraint(value: Any) -> bool:
    return isinstance(value, StructuredOutputsParams)


_PENALTY = number("in [-2, 2]", ge=-2, le=2)
_LOGPROBS = integer(f"an integer in [0, {MAX_LOGPROBS}] or None", ge=0, le=MAX_LOGPROBS)
_BOOL, _BOOL_ADVICE = Bounds("a bool", SWITCH.contains), "Use True or False."


@documented
@names_arguments
@short_repr
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request, with the names and meanings of vLLM.

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

    n: int = option(
        1,
        f"number of samples of each prompt, at most {MAX_N}; each has its own random numbers",
        bounds=integer(f"an integer in [1, {MAX_N}]", ge=1, le=MAX_N),
        advice="Send several requests for more.",
    )
    temperature: float = option(
        1.0,
        "number by which the logits are divided; 0, or below 1e-5, always chooses the most "
        "probable token",
        bounds=number("finite and >= 0", ge=0),
        advice="Use 0 for greedy.",
        is_recommended=True,
    )
    top_p: float = option(
        1.0,
        "sample from the smallest set of most probable tokens whose probabilities add up to this",
        bounds=number("in (0, 1]", gt=0, le=1),
        advice="Use 1.0 to keep every token.",
        is_recommended=True,
    )
    # The device stores top_k as int32.
    top_k: int = option(
        0,
        "sample from this number of most probable tokens; 0 or -1 keeps all",
        bounds=integer("an integer >= -1 and < 2**31", ge=-1, lt=2**31),
        advice="Use 0 or -1 to keep every token.",
        is_recommended=True,
    )
    min_p: float = option(
        0.0,
        "drop tokens whose probability is below this fraction of the highest probability",
        bounds=number("in [0, 1]", ge=0, le=1),
        advice="Use 0.0 to keep every token.",
        is_recommended=True,
    )
    presence_penalty: float = option(
        0.0,
        "number that is subtracted from the logits of tokens that were generated before",
        bounds=_PENALTY,
        advice="Use 0.0 for none.",
    )
    frequency_penalty: float = option(
        0.0,
        "number that is subtracted from the logit of a token for each time it was generated before",
        bounds=_PENALTY,
        advice="Use 0.0 for none.",
    )
    repetition_penalty: float = option(
        1.0,
        "number by which positive logits are divided, and negative logits multiplied, for tokens "
        "in the prompt or the generated text",
        bounds=number("finite and > 0", gt=0),
        advice="Use 1.0 for none.",
        is_recommended=True,
    )
    seed: int | None = option(
        None,
        "seed of the random draws; in Python the engine picks one for None and -1",
        bounds=integer("an integer in [0, 2**63 - 1] or None", ge=0, lt=2**63),
        advice="Use None for a seed picked by the engine.",
    )
    stop: str | Sequence[str] | None = option(
        None,
        "text that ends a sample; in Python also several texts, stored as a tuple",
        default_help="none",
        bounds=Bounds("a non-empty string or a sequence of them", _is_stop),
        advice="Use None for no stop string.",
        metavar="TEXT",
    )
    stop_token_ids: Sequence[int] | None = option(
        None,
        "ids of tokens that end a sample; stored as a tuple",
        default_help="none",
        bounds=Bounds("a sequence of integers >= 0 and < 2**31", _are_token_ids),
        advice="Use None for no stop token.",
        flag=None,
    )
    max_tokens: int | None = option(
        16,
        "maximum number of tokens to generate for each sample; with 0, only the prompt is "
        "computed, for prompt_logprobs or the prefix cache; in Python None for the whole rest of "
        "the context",
        bounds=integer("an integer >= 0 or None", ge=0),
        advice="Use None to generate up to the longest context.",
    )
    min_tokens: int = option(
        0,
        "number of tokens to generate before a stop token or stop string may end the text",
        bounds=integer("an integer >= 0", ge=0),
        advice="Use 0 to allow an immediate stop.",
        flag=None,
    )
    ignore_eos: bool = option(
        False,
        "whether to continue after the model's end-of-sequence token",
        bounds=_BOOL,
        advice=_BOOL_ADVICE,
        flag=None,
    )
    logprobs: int | None = option(
        None,
        "number of most probable tokens to report at each position, in addition to the chosen "
        "token; None reports nothing",
        bounds=_LOGPROBS,
        advice="Use None to report nothing.",
        flag=None,
    )
    prompt_logprobs: int | None = option(
        None,
        "like logprobs, for each position of the prompt except the first",
        bounds=_LOGPROBS,
        advice="Use None to report nothing.",
        flag=None,
    )
    # Excluded from the hash, because dicts are not hashable. `==` still compares this field.
    logit_bias: Mapping[int, float] | None = option(
        None,
        "dict from token ids, at most 1024, to numbers that are added to their logits",
        default_help="none",
        hash=False,
        bounds=Bounds("a dict from token ids >= 0 to finite numbers", _is_logit_bias),
        advice="The keys of JSON objects are strings: convert them to int.",
        flag=None,
    )
    allowed_token_ids: Sequence[int] | None = option(
        None,
        "the only tokens that may be generated; stored as a tuple; if they include no "
        "end-of-sequence or stop token, the text ends only at max_tokens or a stop string",
        default_help="all",
        bounds=Bounds("a non-empty sequence of integers >= 0 and < 2**31", _are_allowed),
        advice="Use None to allow every token.",
        flag=None,
    )
    bad_words: Sequence[str] | None = option(
        None,
        "words that must not be generated, with or without a space before them; stored as a "
        "tuple; a token is excluded if it would complete the token sequence of a word, unless this "
        "would exclude all tokens",
        default_help="none",
        bounds=Bounds(f"a sequence of at most {MAX_BAD_WORDS} non-empty strings", _are_bad_words),
        advice="Use None for no words, and logit_bias for single tokens.",
        flag=None,
    )
    detokenize: bool = option(
        True,
        "whether to convert the tokens to text; False saves time if no text is needed",
        bounds=_BOOL,
        advice=_BOOL_ADVICE,
        flag=None,
    )
    skip_special_tokens: bool = option(
        True,
        "whether to omit special tokens from the text",
        bounds=_BOOL,
        advice=_BOOL_ADVICE,
        flag=None,
    )
    include_stop_str_in_output: bool = option(
        False,
        "whether to keep the stop string at the end of the text",
        bounds=_BOOL,
        advice=_BOOL_ADVICE,
        flag=None,
    )
    structured_outputs: StructuredOutputsParams | None = option(
        None,
        "constraint on the text, such as a JSON schema; generation ends when the text is complete "
        "under the constraint, or at max_tokens if that is earlier; it continues up to min_tokens "
        "if the constraint allows more text; with ignore_eos, any text may follow",
        default_help="none",
        bounds=Bounds("StructuredOutputsParams or None", _is_constraint),
        advice="Use None for no constraint.",
        flag=None,
    )

    def __post_init__(self) -> None:
        if is_int(self.seed) and self.seed == -1:  # as in vLLM
            object.__setattr__(self, "seed", None)
        check_options("SamplingParams", vars(self), SamplingParams)
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
        self._require(
            not self.stop or self.detokenize,
            "detokenize",
            "be True with stop strings",
            "Stop strings are searched in the text.",
        )
        # Copy the values, so that later changes by the caller do not change this frozen object.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        copies: dict[str, Any] = {"stop": tuple(stop or ())}
        for name in ("stop_token_ids", "bad_words"):
            copies[name] = tuple(getattr(self, name) or ())
        if self.allowed_token_ids is not None:
            copies["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.logit_bias is not None:
            copies["logit_bias"] = dict(self.logit_bias)
        for name, value in copies.items():
            object.__setattr__(self, name, value)

    def _require(self, is_ok: bool, name: str, rule: str, advice: str) -> None:
        if not is_ok:
            problem = f"must {rule}, got {getattr(self, name)!r}. {advice}"
            raise ArgumentError("SamplingParams", problem, name)
