"""`RequestFactory`: checks arguments, tokenizes prompts, and creates requests."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np

from paged_jax.arguments import ArgumentError, is_int, is_real
from paged_jax.models.text.grammar import GrammarCompiler, GrammarCursor
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.outputs import RequestMetrics
from paged_jax.scheduler.request import Request, Sequence

# A text, a dict with some of `_PROMPT_KEYS`, or token ids.
Prompt = str | Mapping[str, Any] | list[int] | tuple[int, ...] | np.ndarray
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

# Maximum number of entries in a request's logit_bias. Each slot has a table of this size with 8
# bytes per entry. If any slot has a bias, a step adds the tables of all slots to the logits. For 16
# slots on 2 CPU cores, this takes 0.04 ms; with tables of 32 entries it would take 0.02 ms.
MAX_LOGIT_BIAS = 1024
# Maximum number of stop_token_ids in a request. The end-of-sequence tokens of the model do not
# count.
MAX_STOP_TOKEN_IDS = 16


@dataclasses.dataclass(frozen=True)
class RequestFactory:
    """Creates requests from prompts and sampling parameters.

    Attributes:
      tokenizer: the tokenizer; if it is None, prompts must be token ids.
      vocab_size: V, number of tokens in the vocabulary.
      max_model_len: maximum number of tokens in a sequence, prompt included.
      max_length: `max_model_len`, or fewer tokens if the pool has no room for them. Requests
        without `max_tokens` end at this length.
      seed: the engine's seed. The seeds of requests without `seed` are derived from it.
      grammars: compiler of the grammars of structured outputs.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    max_length: int
    seed: int
    grammars: GrammarCompiler

    def make_request(
        self,
        request_id: str,
        arrival: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float,
        timeout: float | None = None,
        client: str = "",
        sample_offset: int = 0,
    ) -> Request:
        """Check a prompt and its sampling parameters, and return a request.

        `arrival` is the number of requests that were added before. It determines the order in the
        queue and, if `params` have no seed, the seed of the request. See `Engine.add_request` for
        the other arguments.

        Raises:
          ArgumentError: an argument is out of bounds. The message names the field and the bound.
        """
        prompt = _as_mapping(prompt)
        text, token_ids = self._encode(prompt)
        salt = prompt.get("cache_salt", "")
        _check_options(salt, priority, arrival_time, timeout, client)
        if not is_int(sample_offset) or not 0 <= sample_offset < 2**31 - params.n:
            raise _error(
                f"must be an integer in [0, 2**31), got {sample_offset!r}.", "sample_offset"
            )
        self._check_params(params)
        constraint = params.structured_outputs
        grammar = None if constraint is None else self.grammars.compile(constraint)
        max_tokens = self._max_tokens(params, len(token_ids))
        # If the prompt contains text, not only special tokens, the generated text continues the
        # text of the prompt. The space before the first generated word is then kept.
        continues_text = self.tokenizer is not None and not all(
            self.tokenizer.is_special(token_id) for token_id in token_ids
        )
        request = Request(
            request_id=request_id,
            arrival=arrival,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._seed(arrival) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            metrics=RequestMetrics(arrival_time=arrival_time),
            priority=priority,
            deadline=None if timeout is None else arrival_time + timeout,
            cache_salt=salt,
            client=client,
            sample_offset=sample_offset,
            bad_word_ids=_encode_bad_words(self.tokenizer, tuple(params.bad_words or ())),
            # The first prompt token has no log-probability, so its entry is None.
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        request.sequences = [
            Sequence(
                request,
                index,
                list(token_ids),
                max_length=len(token_ids) + max_tokens,
                completion=Completion(params, self.tokenizer, continues_text=continues_text),
                grammar=None if grammar is None else GrammarCursor(grammar, params),
            )
            for index in range(params.n)
        ]
        return request

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Return the maximum number of tokens to generate; raise if the prompt is too long."""
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self.max_length - num_prompt_tokens)
        max_prompt_tokens = self.max_model_len - min(max_tokens, 1)
        if num_prompt_tokens > max_prompt_tokens:
            reason = "the length of the context"
            if max_tokens:
                reason = f"to leave room for a token in the context of {self.max_model_len}"
            raise _error(
                f"the prompt must have at most {max_prompt_tokens} tokens, {reason}, got "
                f"{num_prompt_tokens}."
            )
        return min(max_tokens, self.max_model_len - num_prompt_tokens)

    def _seed(self, arrival: int) -> int:
        sequence = np.random.SeedSequence([self.seed, arrival])
        return int(sequence.generate_state(1, np.uint64)[0]) >> 1

    def _encode(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        text = prompt.get("prompt")
        token_ids = prompt.get("prompt_token_ids")
        if (text is None) == (token_ids is None):
            advice = " Pass messages to LLM.chat." if "role" in prompt else ""
            raise _error(
                "a prompt must be a text or a dict with either prompt or prompt_token_ids, got the "
                f"keys {sorted(map(str, prompt))}.{advice}"
            )
        if unknown := prompt.keys() - _PROMPT_KEYS:
            # Reject unknown keys. If a misspelt cache_salt were ignored, tenants would share
            # blocks.
            raise _error(
                f"a prompt must have only the keys {', '.join(_PROMPT_KEYS)}, got "
                f"{', '.join(sorted(map(str, unknown)))}."
            )
        if token_ids is None:
            token_ids = self._encode_text(text)
        token_ids = _as_list(token_ids)
        if not token_ids:
            raise _error("must hold at least one token id, got [].", "prompt_token_ids")
        self._check_token_ids("prompt_token_ids", token_ids)
        return text, list(map(int, token_ids))

    def _encode_text(self, text: Any) -> list[int]:
        if self.tokenizer is None:
            raise _error(
                "the model must have a tokenizer for text prompts, got none. Put a tokenizer.json "
                "into its folder, or pass tokenizer= or prompt_token_ids."
            )
        if not isinstance(text, str) or not text:
            raise _error(f"must be a text of at least one character, got {text!r}.", "prompt")
        if not _is_unicode(text):
            raise _error(
                f"must be valid Unicode text, got {text[:40]!r}. Decode its bytes with the right "
                "encoding.",
                "prompt",
            )
        return self.tokenizer.encode(text)

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise _error(
                f"must be empty because the model has no tokenizer, got {params.stop}. Use "
                "stop_token_ids.",
                "stop",
            )
        bias, stop_token_ids = params.logit_bias or {}, params.stop_token_ids or ()
        if len(bias) > MAX_LOGIT_BIAS:
            raise _error(
                f"must have at most {MAX_LOGIT_BIAS} entries, got {len(bias)}.", "logit_bias"
            )
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _error(
                f"must have at most {MAX_STOP_TOKEN_IDS} entries, got {len(stop_token_ids)}.",
                "stop_token_ids",
            )
        self._check_token_ids("logit_bias", bias)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_token_ids("stop_token_ids", stop_token_ids)

    def _check_token_ids(self, name: str, token_ids: Collection[Any]) -> None:
        # Try this fast check first, because the loop below takes 0.1 s for 100,000 ids.
        is_plain = set(map(type, token_ids)) <= {int}
        if (
            is_plain
            and 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < self.vocab_size
        ):
            return
        for token_id in token_ids:
            if not is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise _error(
                    f"must hold integers in 0..{self.vocab_size - 1}, got {token_id!r}.", name
                )


# Cache the last results, because all prompts of a list have the same parameters.
@functools.lru_cache(maxsize=8)
def _encode_bad_words(
    tokenizer: Tokenizer | None, words: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of bad words, each tokenized with and without a space before it."""
    sequences = dict.fromkeys(
        _encode_bad_word(tokenizer, text)
        for word in words
        for text in (word.lstrip() or word, f" {word.lstrip() or word}")
    )
    if len(sequences) > MAX_BAD_WORDS:
        raise _error(
            f"must have at most {MAX_BAD_WORDS} token sequences, got {len(sequences)}. Most words "
            "have two token sequences, with and without a space before the word. Use fewer words.",
            "bad_words",
        )
    return tuple(sequences)


def _encode_bad_word(tokenizer: Tokenizer | None, text: str) -> tuple[int, ...]:
    if tokenizer is None:
        raise _error(
            f"must be empty because the model has no tokenizer, got {text!r}. Use logit_bias.",
            "bad_words",
        )
    token_ids: list[int] = []
    if len(text) <= MAX_BAD_WORD_TOKENS * tokenizer.max_token_chars:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
        raise _error(
            f"must be words of 1 to {MAX_BAD_WORD_TOKENS} tokens, got {text[:60]!r}.",
            "bad_words",
        )
    return tuple(token_ids)


def _check_options(salt: Any, priority: Any, arrival_time: Any, timeout: Any, client: Any) -> None:
    """Check the types of arguments of `make_request`; raise ArgumentError if one is wrong."""
    is_timeout = timeout is None or (is_real(timeout) and timeout > 0)
    for name, value, is_valid, rule in (
        ("cache_salt", salt, isinstance(salt, str), "a text"),
        ("client", client, isinstance(client, str), "a text"),
        ("priority", priority, is_int(priority), "an integer"),
        ("arrival_time", arrival_time, is_real(arrival_time), "seconds or None"),
        ("timeout", timeout, is_timeout, "seconds > 0 or None"),
    ):
        if not is_valid:
            raise _error(f"must be {rule}, got {value!r}.", name)


def _as_mapping(prompt: Any) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list | tuple) or hasattr(prompt, "__array__"):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise _error(
            "a prompt must be a text, a list of token ids, or a dict with either prompt or "
            f"prompt_token_ids, got {prompt!r}."
        )
    return prompt


def list_prompts(function: str, prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts for one prompt or several.

    Args:
      function: name of the public function, for errors.
      prompts: one prompt or several. A list of integers is a single prompt.

    Raises:
      ValueError: `prompts` is neither.

    Example:
      >>> list_prompts("LLM.generate", [5, 6]), list_prompts("LLM.generate", [[5, 6], "Hello"])
      ([[5, 6]], [[5, 6], 'Hello'])
    """
    value: Any = prompts
    if isinstance(value, str | Mapping):
        return [value]
    if not isinstance(value, Iterable):
        raise ValueError(
            f"{function}: prompts must be one prompt or a list of prompts, got {value!r}."
        )
    # Do not iterate over an array of token ids: that would create a JAX array per token.
    if hasattr(value, "__array__") and np.ndim(cast(Any, value)) == 1:
        return [cast(Any, value)]
    items: list[Any] = list(value)
    return [items] if items and all(map(is_int, items)) else items


def _error(problem: str, field: str | None = None) -> ArgumentError:
    return ArgumentError("request", problem, field)


def _as_list(token_ids: Any) -> list[Any]:
    """Convert token ids (a list, or an array of NumPy, JAX or PyTorch) to a list."""
    # Convert the whole array: iterating over it would create a JAX array per token.
    if hasattr(token_ids, "__array__"):
        array = np.asarray(token_ids)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise _error(
                f"must be a one-dimensional array of integers, got an array of shape {array.shape} "
                f"and dtype {array.dtype}.",
                "prompt_token_ids",
            )
        return array.tolist()
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise _error(f"must be a list of integers, got {token_ids!r}.", "prompt_token_ids")
    return list(token_ids)


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8.

    A Python string with lone surrogates, which stand for undecodable bytes, cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
