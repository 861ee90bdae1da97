"""Generation defaults of a model, from the file ``generation_config.json``.

This module reads all options that influence which tokens transformers generates. If such an option
is not implemented here, an error names it. Options about the cache, the output and assisted
generation are ignored.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Never

from paged_jax.arguments import is_int, is_real
from paged_jax.formatting import short_repr
from paged_jax.models.config_json import as_integer
from paged_jax.models.model_folder import read_json
from paged_jax.options import Option, integer, options_of
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.token_bias import TokenBias

FILE_NAME = "generation_config.json"
DRAWING_OPTIONS = frozenset({"temperature", "top_p", "top_k", "min_p"})
"""Options that control random sampling."""

_MAX_TOKENS = Option(
    "max_new_tokens",
    int,
    None,
    "maximum number of tokens to generate",
    bounds=integer("an integer >= 1", ge=1, lt=2**31),
    advice="Remove it for no limit.",
)
_MIN_TOKENS = Option(
    "min_new_tokens",
    int,
    None,
    "minimum number of tokens to generate",
    bounds=integer("an integer >= 0", ge=0, lt=2**31),
    advice="Use 0 for none.",
)
# Options that are not implemented, each with the values for which it has no effect.
_UNSUPPORTED: Mapping[str, Collection[Any]] = {
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "token_healing": (False,),
    "watermarking_config": (),
}
_UNSUPPORTED_IF_DRAWN: Mapping[str, Collection[Any]] = {
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "top_h": (),
    "typical_p": (1,),
}


@short_repr
@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Generation defaults of a model, as recommended by its authors.

    Attributes:
      path: the file that was read; None if the folder has no such file.
      eos_token_ids: tokens that end a text.
      sampling_defaults: recommended sampling parameters, by their names in `SamplingParams`. If
        the file sets neither `do_sample` nor any of the `DRAWING_OPTIONS`, they contain none of
        the `DRAWING_OPTIONS`.
      suppress_tokens: tokens that are never generated.
      begin_suppress_tokens: tokens that must not be the first generated token.
      bad_words_ids: tokens that are never generated, unless they are end tokens.
      sequence_bias: biases that are added to the logits, by token id.
    """

    path: Path | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[int, ...] = ()
    sequence_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "GenerationConfig":
        """Read ``generation_config.json`` in a model's folder; defaults if there is none.

        Raises:
          ValueError: the file is not JSON, an option is invalid, or an option that changes the
            generated tokens is not implemented. The message names the file and the option.
        """
        path = Path(folder) / FILE_NAME
        return cls() if not path.is_file() else _Reader(path).read()

    def fill_in(self, options: Mapping[str, Any], otherwise: Mapping[str, Any]) -> dict[str, Any]:
        """Add the recommended values to the fields of `SamplingParams` that the caller has set.

        Args:
          options: fields that the caller has set. They override the recommended values.
          otherwise: default values. They are used only if the file recommends none of the
            `DRAWING_OPTIONS`.
        """
        fields = {**self.sampling_defaults, **options}
        if not DRAWING_OPTIONS & self.sampling_defaults.keys():
            fields = {**otherwise, **fields}
        max_tokens = fields.get("max_tokens", SamplingParams.max_tokens)
        if "min_tokens" in fields and "min_tokens" not in options and is_int(max_tokens):
            fields["min_tokens"] = min(fields["min_tokens"], max_tokens)
        return fields

    def token_bias(self, eos_token_ids: Collection[int], vocab_size: int) -> TokenBias:
        """Return the bias of each token, from the suppressed tokens and `sequence_bias`.

        Args:
          eos_token_ids: tokens that end a text.
          vocab_size: vocabulary size (V). Biases of tokens outside of the vocabulary are dropped.
        """

        def known(token_ids: Collection[int]) -> list[int]:
            return [token_id for token_id in dict.fromkeys(token_ids) if token_id < vocab_size]

        bad_words = set(self.bad_words_ids) - set(eos_token_ids)
        suppressed = known([*self.suppress_tokens, *sorted(bad_words)])
        values = {token_id: self.sequence_bias[token_id] for token_id in known(self.sequence_bias)}
        values |= dict.fromkeys(suppressed, -math.inf)
        start_ids = known(sorted(set(self.begin_suppress_tokens) - set(suppressed)))
        return TokenBias(tuple(values), tuple(values.values()), tuple(start_ids))


class _Reader:
    """Reader of ``generation_config.json``, whose error messages begin with the path."""

    def __init__(self, path: Path):
        self._path = path
        self._options = {
            name: value for name, value in read_json(path).items() if value is not None
        }

    def read(self) -> GenerationConfig:
        eos = self._options.get("eos_token_id", [])
        defaults = self._sampling_defaults()
        self._reject_unsupported(is_drawn=defaults.get("temperature", 1.0) > 0)
        return GenerationConfig(
            path=self._path,
            eos_token_ids=self._token_ids("eos_token_id", eos if isinstance(eos, list) else [eos]),
            sampling_defaults=defaults,
            suppress_tokens=self._ids_of("suppress_tokens"),
            begin_suppress_tokens=self._ids_of("begin_suppress_tokens"),
            bad_words_ids=self._bad_words(),
            sequence_bias=self._sequence_bias(),
        )

    def _sampling_defaults(self) -> dict[str, Any]:
        do_sample = self._options.get("do_sample")
        if not isinstance(do_sample, bool | None):
            self._fail("do_sample", f"must be true or false, got {do_sample!r}.")
        recommended = [option for option in options_of(SamplingParams) if option.is_recommended]
        options = {option.name: self._number(option) for option in recommended}
        options["max_tokens"] = self._number(_MAX_TOKENS)
        options["min_tokens"] = self._number(_MIN_TOKENS)
        options["stop"] = self._stop_strings()
        defaults = {name: value for name, value in options.items() if value is not None}
        if defaults.get("min_tokens", 0) > defaults.get("max_tokens", math.inf):
            min_tokens, max_tokens = defaults["min_tokens"], defaults["max_tokens"]
            self._fail(
                "min_new_tokens",
                f"must be at most max_new_tokens ({max_tokens}), got {min_tokens}.",
            )
        if do_sample is False:
            defaults = {k: v for k, v in defaults.items() if k not in DRAWING_OPTIONS}
            return {"temperature": 0.0, **defaults}
        if do_sample and not DRAWING_OPTIONS & defaults.keys():
            return {"temperature": 1.0, **defaults}
        return defaults

    def _stop_strings(self) -> tuple[str, ...] | None:
        stop = self._options.get("stop_strings")
        if stop is None:
            return None
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            self._fail("stop_strings", f"must be a text or a list of texts, got {stop!r}.")
        return tuple(texts)

    def _reject_unsupported(self, *, is_drawn: bool) -> None:
        rejected = {**_UNSUPPORTED, **(_UNSUPPORTED_IF_DRAWN if is_drawn else {})}
        for name, neutral in rejected.items():
            value = self._options.get(name)
            if value is not None and value not in neutral:
                self._fail(name, f"is not implemented, got {value!r}. Remove it from the file.")

    def _ids_of(self, name: str) -> tuple[int, ...]:
        return self._token_ids(name, self._options.get(name, []))

    def _bad_words(self) -> tuple[int, ...]:
        name = "bad_words_ids"
        words = self._options.get(name, [])
        if not isinstance(words, list) or not all(
            isinstance(word, list) and word for word in words
        ):
            self._fail(name, f"must be a list of lists of token ids, got {words!r}.")
        return tuple(self._one_token(name, word) for word in words)

    def _sequence_bias(self) -> dict[int, float]:
        name = "sequence_bias"
        pairs = self._options.get(name, [])
        is_list = isinstance(pairs, list) and all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and pair[0]
            for pair in pairs
        )
        if not is_list:
            self._fail(name, f"must be a list like [[[5], -2.0]], got {pairs!r}.")
        for _, value in pairs:
            if not (is_real(value) or value == -math.inf):
                self._fail(name, f"must have numbers as biases, got {value!r}.")
        return {self._one_token(name, word): float(value) for word, value in pairs}

    def _one_token(self, name: str, word: list[Any]) -> int:
        token_id, *extra_ids = self._token_ids(name, word)
        if extra_ids:
            self._fail(
                name,
                f"is not implemented for sequences of several tokens, got {word!r}. Remove them "
                "from the file.",
            )
        return token_id

    def _token_ids(self, name: str, value: Any) -> tuple[int, ...]:
        ids = [as_integer(token_id) for token_id in value] if isinstance(value, list) else [value]
        # Some files have -1 for "no end token".
        min_id = -1 if name == "eos_token_id" else 0
        if not isinstance(value, list) or not all(
            is_int(token_id) and token_id >= min_id for token_id in ids
        ):
            self._fail(name, f"must be token ids, got {value!r}.")
        return tuple(ids)

    def _number(self, option: Option) -> Any:
        value = self._options.get(option.name)
        value = as_integer(value) if option.type is int else value
        if value is not None and not option.allows(value):
            self._fail(option.name, option.problem(value))
        return value

    def _fail(self, name: str, problem: str) -> Never:
        raise ValueError(f"{self._path}: {name} {problem}")
