"""How a request says that its tokens are chosen: plain Python, checked when it is made."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.argument_names import names_arguments
from paged_jax.checks import ArgumentError, is_int, is_real
from paged_jax.sampling.structured import StructuredOutputsParams
from paged_jax.short_repr import short_repr

MAX_LOGPROBS = 20
"""Most candidates that are reported with a token."""
MAX_N = 2**14
"""Most samples of a prompt, as in vLLM: all of them are on the host from the start."""


@dataclasses.dataclass(frozen=True)
class Number:
    """What is known of a numeric parameter besides its default.

    Attributes:
      type: `int` or `float`, which takes integers too.
      bounds: bounds of the value, by their names in `operator`: ge, gt, le and lt.
      rule: the bounds in words, after "must".
      advice: the sentence that follows the rule in an error.
      help: the text for the flag of ``python -m paged_jax.generate``; None for no flag.
      is_recommended: whether the authors of a model may recommend a value in its
        ``generation_config.json``.
    """

    type: type[int] | type[float]
    bounds: Mapping[str, int]
    rule: str
    advice: str
    help: str | None = None
    is_recommended: bool = False

    def allows(self, value: object) -> bool:
        """Whether the value is a finite number of the type, within the bounds."""
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
        help="divisor of the logits; 0 always takes the most probable token; default: the model's",
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
    # The upper bound is that of the int32 which holds it on the device.
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
        help="drop tokens less probable than X times the most probable one",
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
        help="divide the positive logits of tokens that came before by X, multiply the negative",
        is_recommended=True,
    ),
}
"""The numbers that shape the distribution: also what the server and the command line take."""

_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


@names_arguments
@short_repr
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, with vLLM's names and meanings.

    Attributes:
      n: samples to draw from the prompt, 16384 at most. Each has its own random stream.
      temperature: divides the logits; 0 (and anything below 1e-5) always takes the largest.
      top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
      top_k: keep the k most probable tokens; 0 or -1 keeps all.
      min_p: drop tokens less probable than this times the most probable one, in [0, 1].
      presence_penalty: subtracted from the logit of a token that was generated before.
      frequency_penalty: subtracted once for each time that a token was generated before.
      repetition_penalty: divides the positive and multiplies the negative logits of tokens that
        are in the prompt or were generated.
      seed: the seed of the random draws, 0 to 2**63 - 1; None, or -1, lets the engine pick one.
      stop: text that ends the output; one string or several, kept as a tuple.
      stop_token_ids: tokens that end the output, kept as a tuple.
      max_tokens: most tokens to generate; None is up to the longest context. With 0 the prompt is
        only computed: for its `prompt_logprobs`, or to be found in the prefix cache.
      min_tokens: tokens to generate before any stop token may appear.
      ignore_eos: continue after the model's end-of-sequence token.
      logprobs: how many of the most probable tokens to report at each position, beside the chosen
        one; None reports nothing.
      prompt_logprobs: the same for each position of the prompt but the first.
      logit_bias: added to the logits of these tokens, of which there may be 1024.
      detokenize: make text of the tokens; False saves that work where only tokens are wanted.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: keep the stop string at the end of the text.
      structured_outputs: the form that the text must have, such as a JSON schema. It ends where
        that is complete; `max_tokens` may cut it short before. `min_tokens` lets it end later where
        the form goes on, and not where it does not; with `ignore_eos` any text follows the form.

    Raises:
      ValueError: a value is out of bounds; the message names the field and the bound.

    Example:
      >>> params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop="END")
      >>> params.stop
      ('END',)
      >>> SamplingParams(top_p=0.0)
      Traceback (most recent call last):
      ...
      paged_jax.checks.ArgumentError: SamplingParams: top_p must be in (0, 1], got 0.0. ...
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
    # A dict cannot be hashed; equality still compares it.
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_tokens()
        self._check_stop()
        self._check_flags()
        self._check_form()

    def _check_numbers(self) -> None:
        for name, number in NUMBERS.items():
            value = getattr(self, name)
            _require(number.allows(value), name, number.rule, value, number.advice)

    def _check_lengths(self) -> None:
        _require(
            is_int(self.n) and 1 <= self.n <= MAX_N,
            "n",
            f"be an integer in [1, {MAX_N}]",
            self.n,
            "Send several requests for more.",
        )
        most = self.max_tokens
        _require(
            most is None or (is_int(most) and most >= 0),
            "max_tokens",
            "be an integer >= 0 or None",
            most,
            "Use None to generate up to the longest context.",
        )
        _require(
            most != 0 or self.n == 1,
            "n",
            "be 1 where max_tokens is 0, as nothing is drawn",
            self.n,
            "Use 1.",
        )
        least = self.min_tokens
        _require(
            is_int(least) and least >= 0,
            "min_tokens",
            "be an integer >= 0",
            least,
            "Use 0 to allow a stop at once.",
        )
        _require(
            most is None or least <= most,
            "min_tokens",
            f"be <= max_tokens ({most})",
            least,
            "Raise max_tokens.",
        )

    def _check_tokens(self) -> None:
        if is_int(self.seed) and self.seed == -1:  # as vLLM has it
            object.__setattr__(self, "seed", None)
        seed = self.seed
        _require(
            seed is None or (is_int(seed) and 0 <= seed < 2**63),
            "seed",
            "be an integer in [0, 2**63 - 1] or None",
            seed,
            "Use None to have one picked.",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(
                count is None or (is_int(count) and 0 <= count <= MAX_LOGPROBS),
                name,
                f"be an integer in [0, {MAX_LOGPROBS}] or None",
                count,
                "Use None to report nothing.",
            )
        if self.logit_bias is not None:
            _require(
                isinstance(self.logit_bias, Mapping)
                and all(_is_token_id(token) for token in self.logit_bias)
                and all(is_real(bias) for bias in self.logit_bias.values()),
                "logit_bias",
                "map token ids >= 0 to finite numbers",
                self.logit_bias,
                "JSON makes strings of the keys: convert them to int.",
            )
            # A copy, so that a later change of the caller's dict cannot reach a frozen object.
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(
            stop is None
            or (_is_sequence(stop) and all(isinstance(text, str) and text for text in stop)),
            "stop",
            "be a non-empty string or a sequence of them",
            self.stop,
            "Use None to stop at no text.",
        )
        object.__setattr__(self, "stop", tuple(stop or ()))
        _require(
            not stop or self.detokenize,
            "detokenize",
            "be True with stop strings",
            self.detokenize,
            "They are looked for in the text.",
        )
        tokens = self.stop_token_ids
        _require(
            tokens is None or (_is_sequence(tokens) and all(_is_token_id(t) for t in tokens)),
            "stop_token_ids",
            "be a sequence of integers >= 0 and < 2**31",
            tokens,
            "Use None to stop at no further token.",
        )
        object.__setattr__(self, "stop_token_ids", tuple(tokens or ()))

    def _check_flags(self) -> None:
        for name in _FLAGS:
            value = getattr(self, name)
            _require(isinstance(value, bool), name, "be a bool", value, "Use True or False.")

    def _check_form(self) -> None:
        form = self.structured_outputs
        _require(
            form is None or isinstance(form, StructuredOutputsParams),
            "structured_outputs",
            "be StructuredOutputsParams or None",
            form,
            "Use None for text of any form.",
        )


def _require(is_ok: bool, name: str, rule: str, value: object, advice: str) -> None:
    if not is_ok:
        raise ArgumentError("SamplingParams", f"must {rule}, got {value!r}. {advice}", name)


def _is_token_id(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**31


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
