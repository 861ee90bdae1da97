# pyright: strict
"""Conversion of tokens that arrive one at a time to text, see `Detokenizer`."""

from collections.abc import Sequence
from typing import Protocol

# Stands for bytes that are not valid UTF-8.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Maximum number of bytes at the end of a text that may be an incomplete UTF-8 character.
_MAX_OPEN_BYTES = 3
# Maximum number of tokens to hold back until their text is final. Real texts need fewer.
_MAX_PENDING = 16


class _TokenDecoder(Protocol):
    """The methods of a `Tokenizer` that a detokenizer calls."""

    def is_special(self, token_id: int) -> bool: ...

    def is_known(self, token_id: int) -> bool: ...

    def decode_at_once(
        self, token_ids: Sequence[int], skip_special_tokens: bool, continues_text: bool
    ) -> str: ...


class Detokenizer:
    """Incremental converter of generated tokens to text.

    Text is returned as soon as later tokens cannot change it. The concatenation of all returned
    texts equals the result of `Tokenizer.decode`. The cost of a token does not depend on the number
    of tokens before it. `tokenizers.DecodeStream` has the same purpose, but it fails after invalid
    UTF-8 bytes.

    Args:
      tokenizer: the tokenizer.
      skip_special_tokens: whether to omit special tokens.
      continues_text: whether the tokens follow a prompt, see `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: _TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._continues_text = continues_text
        self._pending: list[int] = []

    def snapshot(self) -> tuple[bool, list[int]]:
        """Return a copy of the state, for `restore`."""
        return self._continues_text, self._pending.copy()

    def restore(self, snapshot: tuple[bool, list[int]]) -> None:
        """Restore the state that `snapshot` has returned."""
        self._continues_text, pending = snapshot
        self._pending = pending.copy()

    def push(self, token_id: int) -> str:
        """Append a token, and return the text that has become final, which may be empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        if not self._tokenizer.is_known(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._pending, self._continues_text)
        if text.endswith(REPLACEMENT):
            return self._settle(text)
        if text:
            return self._hand_out(text, len(self._pending))
        # The token has no text, or it is a leading space, which is dropped. Later spaces are kept.
        self._continues_text |= bool(self._decode(self._pending, True))
        self._pending.clear()
        return ""

    def peek(self, token_ids: Sequence[int]) -> str | None:
        """Return the text that `push` would return for these tokens, without appending them.

        This takes one library call, which costs less than one call per token. The result is None
        if `push` must be used instead: at the start of a text, and if a character is incomplete.
        """
        if not self._continues_text:
            return None
        # `decode_at_once` omits special and unknown tokens, like `push`.
        text = self._decode([*self._pending, *token_ids], True)
        return None if REPLACEMENT in text else text

    def accept(self) -> None:
        """Append the tokens of the last call of `peek`, which must not have returned None."""
        self._pending.clear()

    def finish(self) -> str:
        """Return the rest of the text, with a replacement character for each invalid byte."""
        text = self._decode(self._pending, self._continues_text)
        return self._hand_out(text, len(self._pending))

    def _settle(self, text: str) -> str:
        """Return the beginning of the pending `text` that later tokens cannot change."""
        count = len(self._pending)
        splits = [self._split(at) for at in range(1, count)]
        for head, tail in splits:
            # Valid text follows the invalid bytes, so no later token can complete their character.
            if tail and not tail.endswith(REPLACEMENT):
                return self._hand_out(head + tail, count)
        if count <= _MAX_OPEN_BYTES:
            return ""
        # If decoding the two parts of a split separately also gives `text`, the split is not inside
        # a character. The text before such a split is final.
        cuts = (at for at, parts in enumerate(splits, 1) if "".join(parts) == text)
        at = next(cuts, count - _MAX_OPEN_BYTES if count >= _MAX_PENDING else 0)
        return self._hand_out(splits[at - 1][0], at) if at else ""

    def _split(self, at: int) -> tuple[str, str]:
        """Decode the pending tokens in two parts: the first `at` tokens, and the later tokens."""
        head = self._decode(self._pending[:at], self._continues_text)
        return head, self._decode(self._pending[at:], self._continues_text or bool(head))

    def _decode(self, token_ids: list[int], continues_text: bool) -> str:
        return self._tokenizer.decode_at_once(token_ids, self._skip_special_tokens, continues_text)

    def _hand_out(self, text: str, num_tokens: int) -> str:
        del self._pending[:num_tokens]
        self._continues_text |= bool(text)
        return text
