# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""Table of the numeric sampling parameters: types, bounds, and texts of flags and errors."""

import dataclasses
import operator
from collections.abc import Mapping

from paged_jax.arguments import is_int, is_real

MAX_LOGPROBS = 20
"""Maximum value of `logprobs` and `prompt_logprobs`."""
MAX_N = 2**14
"""Maximum number of samples of a request, as in vLLM. All are created when a request arrives."""


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


_LOGPROBS = Number(
    int,
    {"ge": 0, "le": MAX_LOGPROBS},
    f"be an integer in [0, {MAX_LOGPROBS}] or None",
    "Use None to report nothing.",
    is_optional=True,
)
INTEGERS: Mapping[str, Number] = {
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
