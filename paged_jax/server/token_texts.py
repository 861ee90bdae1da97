"""Texts of single tokens, of prompts and of generated text."""

import itertools
from collections.abc import Sequence

from paged_jax.models.text.detokenizer import Detokenizer
from paged_jax.models.text.tokenizer import Tokenizer


class TokenTexts:
    """Incremental conversion of a sample's tokens to their texts.

    The texts of all tokens together are the text of the sample. If several tokens encode a single
    character, it belongs to the last of them. Skipped special tokens have the text "".

    Args:
      tokenizer: the model's tokenizer. With None, all texts are "".
      before: token ids of the prompt.
      skip_special_tokens: whether the text omits special tokens.

    Example:
      >>> TokenTexts(None, []).push(5)
      ''
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        before: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ):
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=skip_special_tokens,
                # Keep the space before the first word, unless the prompt has only special tokens.
                continues_text=not all(map(tokenizer.is_special, before)),
            )

    def push(self, token_id: int) -> str:
        """Add the next token, and return its text."""
        return "" if self._detokenizer is None else self._detokenizer.push(token_id)

    def finish(self) -> str:
        """Return the text to append to the last token: U+FFFD for an incomplete character."""
        return "" if self._detokenizer is None else self._detokenizer.finish()


def prompt_texts(
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    *,
    add_special_tokens: bool = True,
    skip_special_tokens: bool = True,
) -> list[str]:
    """Return the text of each token of a prompt. Joined, they are the text of the prompt.

    If the prompt is a text, special tokens that it contains keep their text, and special tokens
    that the tokenizer adds have the text "". If the prompt is token ids, the joined text equals the
    result of `Tokenizer.decode`.

    Args:
      tokenizer: the model's tokenizer. With None, all texts are "".
      prompt: the prompt as text or token ids.
      add_special_tokens: whether the tokenizer adds special tokens to a prompt that is a text.
      skip_special_tokens: whether the text of token ids omits special tokens.

    Example:
      >>> prompt_texts(None, [5, 6])
      ['', '']
    """
    if isinstance(prompt, str):
        assert tokenizer is not None
        return split_text(prompt, tokenizer.offsets(prompt, add_special_tokens=add_special_tokens))
    texts = TokenTexts(tokenizer, [], skip_special_tokens=skip_special_tokens)
    parts = [texts.push(token_id) for token_id in prompt]
    parts[-1] += texts.finish()
    return parts


def split_text(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Split a text into the texts of its tokens.

    If several tokens encode a single character, it belongs to the last of them. A character that no
    token encodes, such as a space that the tokenizer drops, belongs to the next token.

    Args:
      text: the text.
      offsets: start and end of each token in the text, in characters. Tokens that the tokenizer
        added have equal start and end.

    In the example, the tokenizer has added the first token and dropped a space, and the third and
    the fourth token encode the bytes of "é".

    Example:
      >>> split_text("a  é.", [(0, 0), (0, 1), (3, 4), (3, 4), (4, 5)])
      ['', 'a', '  ', 'é', '.']
    """
    parts, position = [""] * len(offsets), 0
    spans = [(index, *span) for index, span in enumerate(offsets) if span[0] < span[1]]
    for (index, _, end), (_, start, _) in itertools.pairwise(spans):
        end = max(position, min(end, start))
        parts[index], position = text[position:end], end
    parts[spans[-1][0] if spans else -1] += text[position:]
    return parts
