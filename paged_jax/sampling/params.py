# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""`SamplingParams`: the sampling parameters of a request, and the checks of their values.

`numeric_params` has the bounds of the numbers. This module does not import jax.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.arguments import ArgumentError, is_int, is_real, is_sequence, names_arguments
from paged_jax.formatting import short_repr
from paged_jax.sampling.numeric_params import INTEGERS, NUMBERS
from paged_jax.sampling.structured_outputs import StructuredOutputsParams

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 16
"""Maximum number of token sequences of a request's bad words, and maximum tokens per sequence."""
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
        for name, number in (*NUMBERS.items(), *INTEGERS.items()):
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
            stop is None or _are_texts(stop),
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
            tokens is None or (is_sequence(tokens) and all(_is_token_id(t) for t in tokens)),
            "stop_token_ids",
            "be a sequence of integers >= 0 and < 2**31",
            "Use None for no stop token.",
        )
        object.__setattr__(self, "stop_token_ids", tuple(tokens or ()))

    def _check_restrictions(self) -> None:
        allowed, words = self.allowed_token_ids, self.bad_words
        self._require(
            allowed is None
            or (is_sequence(allowed) and len(allowed) > 0 and all(map(_is_token_id, allowed))),
            "allowed_token_ids",
            "be a non-empty sequence of integers >= 0 and < 2**31",
            "Use None to allow every token.",
        )
        if allowed is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
        self._require(
            words is None or _are_texts(words),
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


def _are_texts(value: object) -> bool:
    return is_sequence(value) and all(isinstance(text, str) and text for text in value)


def _is_token_id(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**31
