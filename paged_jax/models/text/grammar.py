"""Grammars that restrict the tokens of structured outputs.

A constraint (`StructuredOutputsParams`) describes the texts that a request allows. The library
llguidance (extra ``structured``) compiles a constraint to a grammar, and computes which tokens may
come next. A matcher of llguidance is a position in a grammar. This module advances matchers over
the tokens of sequences.
"""

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import tokenizers

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar_source import (
    MANY_LABELS,
    constraint_source,
    constraint_text,
    label_fuel,
    split_labels,
    unforced_source,
    without_descriptions,
)
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# Maximum number of grammars that the cache keeps. At most _NUM_LONG of them may have a source of
# more than _LONG characters, because such a grammar can take a hundred megabytes.
_NUM_KEPT, _NUM_LONG, _LONG = 64, 8, 4096
# Maximum number of characters of a constraint. llguidance is recursive for nested rules and
# references. It needs up to 500 bytes of stack per character, and aborts the process if the stack
# overflows.
_MAX_CHARS = 2**17
_STACK_PER_CHAR, _LEAST_STACK = 2048, 2**24
# Limit on llguidance's work to build a lexer, in its unit "fuel". With llguidance's default, which
# is 20 times larger, a constraint of 10,000 optional letters in a row takes 200 MB.
_LEXER_FUEL = 50_000
_PLAIN = SamplingParams()
_STACK_LOCK = threading.Lock()


class GrammarCompiler:
    """Thread-safe compiler of `StructuredOutputsParams` to grammars, with a cache.

    Args:
      backend: the model's tokenizer, see `Tokenizer.backend`. If it is None, every constraint is
        rejected.
      vocab_size: vocabulary size of the model (V).
      eos_token_ids: tokens that end a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ):
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        # All grammars in use: the grammars in `_kept`, and grammars that the cache has evicted, but
        # that requests still use.
        self._alive = weakref.WeakValueDictionary[StructuredOutputsParams, Grammar]()

    def compile(self, constraint: StructuredOutputsParams) -> "Grammar":
        """Return the grammar of a constraint from the cache, or compile it.

        Compiling takes milliseconds, or seconds for a large schema. The first call also reads the
        vocabulary.

        Raises:
          ArgumentError: llguidance rejects the constraint, or the constraint is too large; or the
            model has no tokenizer or no end token, or llguidance is not installed.
        """
        grammar = self._alive.get(constraint)
        if grammar is None:
            # Compile without holding the lock, because compiling can take seconds.
            grammar = self._compile(constraint)
        with self._lock:
            self._keep(constraint, grammar)
        return grammar

    def check(self, constraint: StructuredOutputsParams) -> None:
        """Check that a constraint can be compiled, without keeping the grammar.

        Raises:
          ArgumentError: see `compile`.
        """
        self._compile(constraint)

    def check_available(self) -> None:
        """Check that grammars can be used with this model.

        Raises:
          ArgumentError: the model has no tokenizer or no end token, or llguidance is not
            installed.
        """
        _ = self._ll_tokenizer

    def _keep(self, constraint: StructuredOutputsParams, grammar: "Grammar") -> None:
        self._alive[constraint] = self._kept[constraint] = grammar
        self._kept.move_to_end(constraint)
        long_keys = [key for key, cached in self._kept.items() if cached.num_chars > _LONG]
        if len(long_keys) > _NUM_LONG:
            del self._kept[long_keys[0]]
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)

    def _compile(self, constraint: StructuredOutputsParams) -> "Grammar":
        tokenizer = self._ll_tokenizer
        if len(constraint.json or "") > _MAX_CHARS:
            constraint = without_descriptions(constraint)
        num_chars = len(constraint.json or constraint.regex or constraint.grammar or "")
        num_chars += sum(map(len, constraint.choice or ()))
        if num_chars > _MAX_CHARS:
            raise _error(f"must have at most {_MAX_CHARS} characters, got {num_chars}.")
        stack = _STACK_PER_CHAR * num_chars + _LEAST_STACK

        def unforced() -> "LLMatcher":
            return _with_stack(stack, lambda: _unforced_matcher(tokenizer, constraint))

        try:
            matcher = _with_stack(stack, lambda: _matcher(tokenizer, constraint))
        except RecursionError:
            raise _error("cannot be compiled, because it is nested too deeply") from None
        except ValueError as error:
            raise _error(f"cannot be compiled: {_reason(error)}") from None
        return Grammar(tokenizer, matcher, self._eos_token_ids, num_chars, unforced)

    @functools.cached_property
    def _ll_tokenizer(self) -> "LLTokenizer":
        if self._backend is None:
            raise _error("must be None because the model has no tokenizer, got a schema.")
        if not self._eos_token_ids:
            raise _error(
                "must be None because the model has no end-of-sequence token, got a schema."
            )
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise _error(
                f"must be None because llguidance is not installed ({error}), got a schema. Run: "
                'pip install "paged-jax[structured]".'
            ) from error
        num_tokens = self._backend.get_vocab_size(with_added_tokens=True)
        try:
            return LLTokenizer(
                self._backend.to_str(),
                n_vocab=max(self._vocab_size, num_tokens),
                eos_token=self._eos_token_ids[0],
            )
        except ValueError as error:
            raise _error(
                "must be None because llguidance cannot read the model's tokenizer: "
                f"{_reason(error)}"
            ) from None


class Grammar:
    """A compiled grammar, which several sequences may share.

    Args:
      tokenizer: llguidance's representation of the tokenizer.
      matcher: llguidance's matcher before the first token.
      eos_token_ids: tokens that end a text.
      num_chars: number of characters of the constraint.
      unforced: function that returns a matcher of the same grammar that does not force tokens, see
        `GrammarCursor`.
    """

    def __init__(
        self,
        tokenizer: "LLTokenizer",
        matcher: "LLMatcher",
        eos_token_ids: list[int],
        num_chars: int,
        unforced: Callable[[], "LLMatcher"],
    ):
        self.tokenizer = tokenizer
        self._matcher = matcher
        self._make_unforced = unforced
        self.eos_token_ids = eos_token_ids
        self.num_chars = num_chars

    def start(self) -> "LLMatcher":
        """Return a new matcher that is positioned before the first token."""
        return self._matcher.deep_copy()

    def start_unforced(self) -> "LLMatcher":
        """Return a new matcher that does not force tokens.

        It allows every sequence of tokens that spells a text of the grammar, see `GrammarCursor`.

        Raises:
          ValueError: llguidance cannot compile the grammar without forcing tokens.
        """
        return self._unforced.deep_copy()

    @functools.cached_property
    def _unforced(self) -> "LLMatcher":
        return self._make_unforced()


class GrammarCursor:
    """Position of a sequence of tokens in a grammar. Not thread-safe.

    If the grammar allows only one text to come next, this text is forced: its tokens are chosen by
    llguidance instead of the model. This choice depends only on the preceding tokens. A tokenizer
    that changes texts, for example by removing spaces, may not be able to represent the forced
    text. In this case, the model chooses all following tokens.

    Args:
      grammar: the grammar.
      params: parameters of the request. Only `min_tokens`, `stop_token_ids` and `ignore_eos` are
        used.

    Attributes:
      forced: tokens that are forced to come next. The last is an end token if the text must end
        there.
      is_over: whether an end token has been generated. Tokens after it are not restricted.
      failure: error message if llguidance failed, for example because the grammar became too
        complex; None otherwise. After a failure, an end token is forced.
    """

    def __init__(self, grammar: Grammar, params: SamplingParams = _PLAIN):
        self._grammar = grammar
        self._params = params
        self.reset()

    def reset(self) -> None:
        """Reset the position to the beginning, before the first token."""
        self.forced: list[int] = []
        self.failure: str | None = None
        self.is_over = False
        self._num_followed: int | None = None  # None before the first call of `follow`
        self._consumed: list[int] = []  # tokens consumed by the matcher
        self._is_forced = True
        self._matcher = self._grammar.start()

    def follow(self, token_ids: Sequence[int], start: int) -> None:
        """Advance over the tokens that were generated since the last call, and update `forced`.

        Args:
          token_ids: all tokens of the sequence, including the prompt.
          start: index of the first generated token in `token_ids`.
        """
        if self._num_followed is None:
            self._find_forced()
            self._num_followed = 0
        for token_id in token_ids[start + self._num_followed :]:
            if not self.is_over:
                self._take(token_id)
            self._num_followed += 1

    def _take(self, token_id: int) -> None:
        self.is_over = token_id in self._grammar.eos_token_ids
        if self.forced:
            expected = self.forced.pop(0)
            assert token_id == expected, "the token must be the forced token"
        elif not self.is_over:  # `_find_forced` has advanced the matcher over forced tokens
            self._matcher.consume_token(token_id)
            self._consumed.append(token_id)
            self._find_forced()

    @property
    def ends(self) -> bool:
        """Whether the last forced token is an end token."""
        return bool(self.forced) and self.forced[-1] in self._grammar.eos_token_ids

    def _find_forced(self) -> None:
        """Find the tokens that are forced next, and advance the matcher over them."""
        self.forced = []
        if self._is_forced:
            forced = _forced_tokens(self._grammar.tokenizer, self._matcher)
            if forced is None:
                self._stop_forcing()
            elif forced:
                self._matcher.consume_tokens(forced)
                self._consumed += forced
                self.forced = forced
        if self._matcher.is_error():
            self._fail()
        if self._matcher.is_stopped():
            self.forced.append(self._grammar.eos_token_ids[0])

    def _stop_forcing(self) -> None:
        """Replace the matcher by a matcher at the same position that does not force tokens."""
        self._is_forced = False
        try:
            self._matcher = self._grammar.start_unforced()
        except ValueError as error:
            self._fail(error)
            return
        if self._consumed:
            self._matcher.consume_tokens(self._consumed)

    def _fail(self, error: object = None) -> None:
        reason = _reason(error or self._matcher.get_error())
        self.failure = f"the grammar could not be followed: {reason}"

    def write_mask(self, words: np.ndarray) -> None:
        """Write the mask of the tokens that may come after the forced tokens.

        Args:
          words: array to write the mask to, i32[ceil(V / 32)]. Bit ``t % 32`` of word ``t // 32``
            is set if token t is allowed.
        """
        if self.ends:  # with ignore_eos, tokens after the end are not restricted
            words[:] = -1
            return
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        words[:] = mask[: words.size]
        if self._matcher.is_error():
            self._fail()
            words[:] = 0
        first, *other_ids = self._grammar.eos_token_ids
        if self.failure is not None or _has(words, first):
            words |= _bits((first, *other_ids), words.size)
        self._hold_ends_back(words)

    def _hold_ends_back(self, words: np.ndarray) -> None:
        """Before `min_tokens` tokens, forbid end tokens if other tokens are allowed."""
        params = self._params
        index = (self._num_followed or 0) + len(self.forced)
        if index >= params.min_tokens or self.failure is not None:
            return
        end_ids = list(params.stop_token_ids or ())
        if not params.ignore_eos:
            end_ids += self._grammar.eos_token_ids
        allowed = words & ~_bits(end_ids, words.size)
        if allowed.any():
            words[:] = allowed


def _matcher(tokenizer: "LLTokenizer", constraint: StructuredOutputsParams) -> "LLMatcher":
    """Return a matcher of a constraint that is positioned before the first token.

    A constraint with many labels (see `grammar_source`) gets more fuel than `_LEXER_FUEL`. This is
    safe, because the cost only grows linearly with the labels. Without its labels, the constraint
    must not need more than `_LEXER_FUEL`.

    Raises:
      ValueError: llguidance rejects the constraint, or the constraint is too large.
    """
    text = constraint_text(constraint)
    labels, shorter = split_labels(constraint, text)
    if shorter != text and len(labels) > MANY_LABELS:
        _compiled(tokenizer, constraint_source(constraint, shorter), _LEXER_FUEL)
    return _compiled(
        tokenizer, constraint_source(constraint, text), _LEXER_FUEL + label_fuel(labels)
    )


def _unforced_matcher(tokenizer: "LLTokenizer", constraint: StructuredOutputsParams) -> "LLMatcher":
    """Return a matcher that does not force tokens. The caller must check `is_error`."""
    text = constraint_text(constraint)
    labels, _ = split_labels(constraint, text)
    source = unforced_source(constraint_source(constraint, text))
    return _new_matcher(tokenizer, source, _LEXER_FUEL + label_fuel(labels))


def _compiled(tokenizer: "LLTokenizer", source: str, fuel: int) -> "LLMatcher":
    """Return a matcher of llguidance's grammar `source`, after checking it for errors.

    The check includes computing the first mask, because some errors appear only then.

    Raises:
      ValueError: llguidance rejects the source, or cannot compute the first mask.
    """
    matcher = _new_matcher(tokenizer, source, fuel)
    first = matcher
    if not matcher.is_error():  # some errors appear only then
        first = matcher.deep_copy()
        forced = _forced_tokens(tokenizer, first)
        if forced is None:
            first = _new_matcher(tokenizer, unforced_source(source), fuel)
        elif forced:
            first.consume_tokens(forced)
    if not (first.is_error() or first.is_stopped()):
        first.compute_bitmask()
    if first.is_error():
        raise ValueError(first.get_error())
    return matcher


def _new_matcher(tokenizer: "LLTokenizer", source: str, fuel: int) -> "LLMatcher":
    """Return a new matcher for the grammar `source`. Callers must check `is_error`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=fuel)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def _forced_tokens(tokenizer: "LLTokenizer", matcher: "LLMatcher") -> list[int] | None:
    """Return the tokens of the text that is forced next.

    The result is None if the tokenizer cannot represent this text.
    """
    text = matcher.compute_ff_bytes()
    # Check all of the text, not only the forced tokens: masks also depend on the text after them.
    if text and tokenizer.decode_bytes(tokenizer.tokenize_bytes(text)) != text:
        return None
    forced = matcher.compute_ff_tokens()
    if matcher.is_error() or matcher.validate_tokens(forced) == len(forced):
        return forced
    return None


def _with_stack(size: int, function: Callable[[], T]) -> T:
    """Call a function in a thread with a stack of `size` bytes, and return its result.

    A large stack only reserves address space. Memory is allocated for the used part only.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run, name="paged_jax grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _bits(token_ids: Iterable[int], size: int) -> np.ndarray:
    """Return a mask, i32[size], with only the bits of the given tokens set."""
    words = np.zeros(size, np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def _has(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def _reason(error: object) -> str:
    """Return llguidance's error message as one line, without the parser state in it."""
    return " ".join(str(error).partition("\n<state>")[0].split())


def _error(problem: str) -> ArgumentError:
    return ArgumentError("request", problem, "structured_outputs")
