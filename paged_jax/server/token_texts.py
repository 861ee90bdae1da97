"""The text of each token: `TokenTexts` of an answer's, `prompt_texts` of a prompt's.

All of them together are the text of the answer, with the prompt before it if that is echoed.
"""

import itertools
from collections.abc import Sequence

from paged_jax.models.text.tokenizer import Detokenizer, Tokenizer


class TokenTexts:
    """Divides the text of an answer among its tokens.

    A character of several tokens belongs to the last of them, and a special token that the text
    leaves out has no text, wherever it stands.

    Args:
      tokenizer: the model's; None gives no token a text.
      before: the tokens of the prompt, after which the text begins.
      skip_special_tokens: whether the text leaves special tokens out.

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
                # A first word keeps the space before it, unless only a start token precedes it.
                continues_text=not all(map(tokenizer.is_special, before)),
            )

    def push(self, token_id: int) -> str:
        """The text of the next token."""
        return "" if self._detokenizer is None else self._detokenizer.push(token_id)

    def finish(self) -> str:
        """What is left after the last token: replacement characters for bytes that are no text."""
        return "" if self._detokenizer is None else self._detokenizer.finish()


def prompt_texts(
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    *,
    add_special_tokens: bool = True,
    skip_special_tokens: bool = True,
) -> list[str]:
    """Divide the text of a prompt among its tokens.

    A text that was given is divided as it stands: special tokens in it have what was written, those
    that the tokenizer adds have no text. The text of token ids is what `Tokenizer.decode` makes.

    Args:
      tokenizer: the model's; None gives no token a text.
      prompt: the prompt, as text or as token ids.
      add_special_tokens: whether special tokens were added to a text.
      skip_special_tokens: whether the text of token ids leaves special tokens out.

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
    """Cut a text where its tokens end.

    A character of several tokens belongs to the last of them, and one of none, as a space that the
    tokenizer drops, to the next.

    Example:
      >>> split_text("a  é.", [(0, 0), (0, 1), (3, 4), (3, 4), (4, 5)])
      ['', 'a', '  ', 'é', '.']
    """
    parts, done = [""] * len(offsets), 0
    places = [(index, *each) for index, each in enumerate(offsets) if each[0] < each[1]]
    for (index, _, end), (_, start, _) in itertools.pairwise(places):
        end = max(done, min(end, start))
        parts[index], done = text[done:end], end
    parts[places[-1][0] if places else -1] += text[done:]
    return parts
