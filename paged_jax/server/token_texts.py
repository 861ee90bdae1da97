"""`TokenTexts`: the text of each token, so that all of them together are the text of an answer."""

from collections.abc import Sequence

from paged_jax.models.text.tokenizer import Detokenizer, Tokenizer


class TokenTexts:
    """Divides the text of an answer among its tokens.

    A character of several tokens belongs to the last of them, and a special token that the text
    leaves out has no text, wherever it stands.

    Args:
      tokenizer: the model's; None gives no token a text.
      before: the tokens of the prompt, if the text begins after it.
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
