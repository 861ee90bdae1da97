"""Grammars over tokens: which tokens may follow in a text that must have a form.

The work is llguidance's, of the extra ``structured``. Here its matchers follow sequences of tokens.
"""

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar_source import (
    MANY_LABELS,
    form_source,
    form_text,
    label_fuel,
    split_labels,
    unforced_source,
    without_descriptions,
)
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.sampling.params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# Grammars that are kept for the requests that come next, and how many of them may have a source
# of more characters than most: they can take a hundred megabytes each.
_NUM_KEPT, _NUM_LONG, _LONG = 64, 8, 4096
# Characters of a form. llguidance calls itself for each rule or reference within another, with up
# to 500 bytes of stack for each character, and ends the process where the stack ends.
_MAX_CHARS = 2**17
_STACK_PER_CHAR, _LEAST_STACK = 2048, 2**24
# Of llguidance's default a twentieth: 10,000 optional letters in a row take 200 MB.
_LEXER_FUEL = 50_000
_PLAIN = SamplingParams()
_STACK_LOCK = threading.Lock()


class Grammars:
    """Compiles the forms that requests ask for. Several threads may use it.

    Args:
      tokenizer: the tokenizer; None for a model without one, for which every form is refused.
      vocab_size: V, tokens that the model knows.
      eos_token_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        # And those that a request has, so that the engine finds what was compiled before it came.
        self._alive = weakref.WeakValueDictionary[StructuredOutputsParams, Grammar]()

    def compile(self, form: StructuredOutputsParams) -> "Grammar":
        """Make a grammar of the form that a request asks for, or find it.

        Raises:
          ArgumentError: there is no such grammar, with llguidance's reason, or it is too large; or
            the model has no tokenizer or no end token, or llguidance is not installed.

        Cost: milliseconds, seconds for a large schema; the first call reads the vocabulary, too.
        """
        grammar = self._alive.get(form)
        if grammar is None:
            # Without the lock: what takes seconds for one must not hold up who finds theirs.
            grammar = self._compile(form)
        with self._lock:
            self._keep(form, grammar)
        return grammar

    def check(self, form: StructuredOutputsParams) -> None:
        """Compile a form to check that it can be expressed. The grammar is not kept.

        Raises:
          ArgumentError: see `compile`.
        """
        self._compile(form)

    def check_available(self) -> None:
        """Check that texts of this model can be bound to any form.

        Raises:
          ArgumentError: the model has no tokenizer or no end token, or llguidance is not
            installed.
        """
        _ = self._ll_tokenizer

    def _keep(self, form: StructuredOutputsParams, grammar: "Grammar") -> None:
        self._alive[form] = self._kept[form] = grammar
        self._kept.move_to_end(form)
        long = [each for each, kept in self._kept.items() if kept.num_chars > _LONG]
        if len(long) > _NUM_LONG:
            del self._kept[long[0]]
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)

    def _compile(self, form: StructuredOutputsParams) -> "Grammar":
        tokenizer = self._ll_tokenizer
        if len(form.json or "") > _MAX_CHARS:
            form = without_descriptions(form)
        num_chars = len(form.json or form.regex or form.grammar or "")
        num_chars += sum(map(len, form.choice or ()))
        if num_chars > _MAX_CHARS:
            raise _refusal(f"must have at most {_MAX_CHARS} characters, got {num_chars}.")
        stack = _STACK_PER_CHAR * num_chars + _LEAST_STACK

        def unforced() -> "LLMatcher":
            return _with_stack(stack, lambda: _unforced_matcher(tokenizer, form))

        try:
            matcher = _with_stack(stack, lambda: _matcher(tokenizer, form))
        except RecursionError:
            raise _refusal("cannot be had: it is nested too deeply") from None
        except ValueError as error:
            raise _refusal(f"cannot be had: {_reason(error)}") from None
        return Grammar(tokenizer, matcher, self._eos_token_ids, num_chars, unforced)

    @functools.cached_property
    def _ll_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            raise _refusal("must be None as the model has no tokenizer, got a form.")
        if not self._eos_token_ids:
            raise _refusal("must be None as the model has no end-of-sequence token, got a form.")
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise _refusal(
                "must be None as llguidance is not installed, got a form. Run: pip install "
                '"paged-jax[structured]".'
            ) from None
        try:
            return LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._eos_token_ids[0],
            )
        except ValueError as error:
            raise _refusal(
                f"must be None as llguidance cannot read the model's tokenizer: {_reason(error)}"
            ) from None


class Grammar:
    """A compiled grammar, from which each sequence that follows it starts anew.

    Args:
      tokenizer: the tokenizer of llguidance.
      matcher: the matcher of llguidance before the first token.
      eos_token_ids: tokens that end a text.
      num_chars: characters of its source.
      unforced: function that makes a matcher that forces no tokens.
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
        """Return a matcher before the first token."""
        return self._matcher.deep_copy()

    def start_unforced(self) -> "LLMatcher":
        """Return a matcher before the first token that allows every spelling of the text.

        Raises:
          ValueError: llguidance cannot compile it.
        """
        return self._unforced.deep_copy()

    @functools.cached_property
    def _unforced(self) -> "LLMatcher":
        return self._make_unforced()


class GrammarCursor:
    """Where a sequence of tokens is in a grammar. It belongs to one thread.

    Where the text that comes next is known, so are its tokens: those of llguidance's choice, which
    depends on the tokens before them and on nothing else. A tokenizer that changes texts, such as
    one that removes spaces, may have tokens for it that spell another text. From then on the tokens
    of known texts are drawn like others.

    Args:
      grammar: the grammar.
      params: when the text may end: `min_tokens`, `stop_token_ids` and `ignore_eos`.

    Attributes:
      forced: tokens that come next, an end token included where nothing else can follow.
      is_over: whether an end token has come, after which the text may have any form.
      failure: why nothing more can be said of the grammar, as it is too complex; None if all is
        well. An end token is forced then.
    """

    def __init__(self, grammar: Grammar, params: SamplingParams = _PLAIN):
        self._grammar = grammar
        self._params = params
        self.reset()

    def reset(self) -> None:
        """Begin anew, before the first token."""
        self.forced: list[int] = []
        self.failure: str | None = None
        self.is_over = False
        self._num_followed: int | None = None  # None until the first look
        self._consumed: list[int] = []  # by the matcher
        self._is_forced = True
        self._matcher = self._grammar.start()

    def follow(self, token_ids: Sequence[int], start: int) -> None:
        """Take the tokens that were generated since the last call.

        Args:
          token_ids: all tokens of the sequence.
          start: index of the first one that was generated.
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
            assert token_id == self.forced.pop(0), "what comes must be what is forced"
        elif not self.is_over:  # the one behind them is always drawn
            self._matcher.consume_token(token_id)
            self._consumed.append(token_id)
            self._find_forced()

    @property
    def ends(self) -> bool:
        """Whether the last of the forced tokens ends the text."""
        return bool(self.forced) and self.forced[-1] in self._grammar.eos_token_ids

    def _find_forced(self) -> None:
        """Look what must come next. The matcher is behind that afterwards."""
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
        """Continue with a matcher that lets the model choose the tokens of known texts."""
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
        """Write which tokens may follow the forced ones.

        Args:
          words: i32[V / 32], rounded up: the lowest bit of the first number is that of token 0.
        """
        if self.ends:  # where the text goes on nevertheless, it is free
            words[:] = -1
            return
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        words[:] = mask[: words.size]
        if self._matcher.is_error():
            self._fail()
            words[:] = 0
        first, *others = self._grammar.eos_token_ids
        if self.failure is not None or _has(words, first):
            words |= _bits((first, *others), words.size)
        self._hold_ends_back(words)

    def _hold_ends_back(self, words: np.ndarray) -> None:
        """Leave out what ends the text too early, unless nothing else can follow."""
        params = self._params
        index = (self._num_followed or 0) + len(self.forced)
        if index >= params.min_tokens or self.failure is not None:
            return
        held = list(params.stop_token_ids or ())
        if not params.ignore_eos:
            held += self._grammar.eos_token_ids
        rest = words & ~_bits(held, words.size)
        if rest.any():
            words[:] = rest


def _matcher(tokenizer: "LLTokenizer", form: StructuredOutputsParams) -> "LLMatcher":
    """Return a matcher of the form, positioned before the first token.

    Labels get fuel beyond the limit, as their cost is linear. The rest of the form must be within
    the limit without them.

    Raises:
      ValueError: llguidance rejects the form, or the form is too large.
    """
    text = form_text(form)
    labels, shorter = split_labels(form, text)
    if shorter != text and len(labels) > MANY_LABELS:
        _compiled(tokenizer, form_source(form, shorter), _LEXER_FUEL)
    return _compiled(tokenizer, form_source(form, text), _LEXER_FUEL + label_fuel(labels))


def _unforced_matcher(tokenizer: "LLTokenizer", form: StructuredOutputsParams) -> "LLMatcher":
    """Return a matcher of the form that forces no tokens; it may have an error."""
    text = form_text(form)
    labels, _ = split_labels(form, text)
    source = unforced_source(form_source(form, text))
    return _new_matcher(tokenizer, source, _LEXER_FUEL + label_fuel(labels))


def _compiled(tokenizer: "LLTokenizer", source: str, fuel: int) -> "LLMatcher":
    """Return a matcher of llguidance's source; raise ValueError if it cannot compute a mask."""
    matcher = _new_matcher(tokenizer, source, fuel)
    first = matcher
    if not matcher.is_error():  # some are found to be too large only here
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
    """Return a matcher before the first token; it may have an error."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=fuel)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def _forced_tokens(tokenizer: "LLTokenizer", matcher: "LLMatcher") -> list[int] | None:
    """Return the tokens of the text that must come next; None if they do not spell that text."""
    text = matcher.compute_ff_bytes()
    # Check all of the text, because masks also depend on the tokens after the forced tokens.
    if text and tokenizer.decode_bytes(tokenizer.tokenize_bytes(text)) != text:
        return None
    forced = matcher.compute_ff_tokens()
    if matcher.is_error() or matcher.validate_tokens(forced) == len(forced):
        return forced
    return None


def _with_stack(size: int, function: Callable[[], T]) -> T:
    """Return ``function()``, called in a thread with so many bytes of stack.

    They are addresses: memory is taken where they are used.
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
    """A mask of some tokens, i32[size]."""
    words = np.zeros(size, np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def _has(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def _reason(error: object) -> str:
    """A sentence of llguidance's, without its state and in one line."""
    return " ".join(str(error).partition("\n<state>")[0].split())


def _refusal(problem: str) -> ArgumentError:
    return ArgumentError("request", problem, "structured_outputs")
