"""Text to token ids and back, whole or token by token as they are generated."""

import functools
import itertools
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paged_jax.arguments import names_arguments
from paged_jax.models.text.chat_roles import ChatRoles
from paged_jax.models.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    as_data,
    check_variables,
    read_templates,
)
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.models.text.special_tokens import (
    TokenizerError,
    add_special_tokens,
    check_added_tokens,
    read_optional,
    set_post_processor,
)
from paged_jax.models.text.tools import ToolFormat, ToolSupport, find_support

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes of a character that may wait for its last one.
_MAX_OPEN_BYTES = 3
# Tokens that wait for their text to be final. One may have several bytes, and begin and end within
# characters: so many of that kind in a row are no text that a model writes.
_MAX_PENDING = 16
# Names of tokens that are one byte, in tokenizers with byte fallback.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _bytes_by_char() -> dict[str, int]:
    """Return the byte of each character in the names of byte-level tokens.

    Bytes that are printable in Latin-1 stand for themselves. The others follow from 256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _bytes_by_char()


class Tokenizer:
    """A Hugging Face tokenizer, with the special tokens and chat template of its model.

    Args:
      backend: a tokenizer of the `tokenizers` library; its post-processor adds the special tokens.
      special_tokens: special tokens by name, ``{"bos_token": "<s>"}``, for the chat template.
      eos_token_ids: the tokens that end a text.
      chat_template: Jinja source, None where the model has none.
      tool_template: the one for chats with tools, where the model has another for them.
      sampling_defaults: what the model's authors recommend, by the names of `SamplingParams`.
      generation_config: what they say in a file, instead of `sampling_defaults`.

    Example:
      >>> from tokenizers import Tokenizer as Backend, models
      >>> tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
      >>> tokenizer.encode("b")
      [1]
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        generation_config: GenerationConfig | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.generation_config = generation_config or GenerationConfig(
            sampling_defaults=dict(sampling_defaults or {})
        )
        self._backend = backend
        self.chat_template = chat_template
        self._chat_template = (
            None if chat_template is None else ChatTemplate(chat_template, tool_template)
        )
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._anchor_id, self._anchor_length = self._find_anchor()

    @classmethod
    @names_arguments
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and the files beside it.

        ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json`` define
        special tokens. The first also says whether a text starts with one. The chat template is
        in ``chat_template.jinja`` or in ``tokenizer_config.json``. ``generation_config.json`` has
        more stop tokens and sampling defaults.

        Raises:
          TokenizerError: there is no ``tokenizer.json``, it is damaged, or a special token does
            not fit its vocabulary.
          ValueError: a file beside it is not JSON, or `GenerationConfig` cannot be read.
          ChatTemplateError: the chat template is not valid Jinja.
        """
        folder = Path(folder)
        backend = _read_backend(folder)
        config = read_optional(folder / "tokenizer_config.json")
        special_tokens = add_special_tokens(backend, folder, config)
        set_post_processor(backend, config, special_tokens)
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        chat_template, tool_template = read_templates(folder, config)
        generation = GenerationConfig.from_folder(folder)
        own_eos = backend.token_to_id(special_tokens.get("eos_token", ""))
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=(*generation.eos_token_ids, *(() if own_eos is None else (own_eos,))),
            chat_template=chat_template,
            tool_template=tool_template,
            generation_config=generation,
        )

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Values that the model's authors recommend, by the names of `SamplingParams`."""
        return self.generation_config.sampling_defaults

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Most characters of a text that one token can stand for."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        # Unicode's normal form C joins at most three characters.
        return longest * (1 if self._backend.normalizer is None else 3)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` and `encode_chat` can work."""
        return self._chat_template is not None

    @functools.cached_property
    def _chat_roles(self) -> ChatRoles:
        return ChatRoles(self.apply_chat_template)

    @functools.cached_property
    def tool_support(self) -> ToolSupport:
        """Support for tools in the chat template."""
        if self._chat_template is None:
            return ToolSupport()
        return find_support(self.apply_chat_template)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model calls functions; None if its chat template has no format known here."""
        return self.tool_support.format

    def to_json(self) -> str:
        """The contents of a ``tokenizer.json``, for other libraries."""
        return self._backend.to_str()

    @names_arguments
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids.

        Args:
          text: the text; special tokens in it become themselves.
          add_special_tokens: add special tokens, such as the one that starts every text. Not for a
            chat, whose template has written them already.
        """
        # As a batch, for which other threads need not wait: that of a server's streams, say.
        [encoded] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Where the characters of each token begin and end in a text; nowhere for what is added."""
        [encoded] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoded.offsets

    @names_arguments
    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> str:
        """Turn token ids into text.

        As the `tokenizers` library does, except next to bytes that are not UTF-8, in tokenizers
        that have a token for each byte (byte fallback). There the library gives up every character
        that is spelled in bytes; here only those bytes become replacement characters, because what
        stands before them has been streamed already.

        Args:
          token_ids: ids; those outside the vocabulary are left out.
          skip_special_tokens: leave special tokens out.
          continues_text: the tokens follow others: keep the space before the first, which
            some tokenizers drop at the start of a text.
        """
        text = self._decode(token_ids, skip_special_tokens, continues_text)
        if _REPLACEMENT not in text:
            return text
        stream = Detokenizer(
            self, skip_special_tokens=skip_special_tokens, continues_text=continues_text
        )
        return "".join([*map(stream.push, token_ids), stream.finish()])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write a chat as text, to be encoded without adding special tokens.

        Args:
          messages: see `ChatTemplate.render`.
          add_generation_prompt: end with what opens an answer.
          **variables: further variables of the template, such as ``enable_thinking``.

        Raises:
          ChatTemplateError: the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise ChatTemplateError(
                "apply_chat_template",
                "the model has no chat template. Use plain prompts, or a chat model.",
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    @names_arguments
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Turn a chat into the token ids that ask for its next message.

        Args:
          messages: see `apply_chat_template`; for the role "developer" see `ChatRoles.checked`.
          chat_template_kwargs: variables for the template, such as ``enable_thinking``.
          tools: functions that may be called, as OpenAI describes them; see `tool_format`.
          add_generation_prompt: see `apply_chat_template`.
          add_special_tokens: see `encode`; a template most often writes them itself.

        Raises:
          ChatTemplateError: as for `apply_chat_template`, or the variables are none that a caller
            may set, or the template does not show the tools or one of the messages to the model.
        """
        if tools and self._chat_template is not None and not self.tool_support.shows_tools:
            rule = "must be empty as the model's chat template has no tools, got some."
            raise ChatTemplateError("encode_chat", rule, "tools")
        text = self.apply_chat_template(
            self._chat_roles.checked(as_data(messages)),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **check_variables(chat_template_kwargs),
        )
        return self.encode(text, add_special_tokens=add_special_tokens)

    def spell(self, token_ids: Iterable[int]) -> list[str]:
        """The tokens as the vocabulary has them, empty for those outside of it."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, also if they are parts of a character.

        The bytes of all tokens of a text together are the text in UTF-8.
        """
        text = self.decode([token_id], skip_special_tokens=False, continues_text=True)
        if _REPLACEMENT in text:
            # The text does not say which bytes they are, but the token's name does.
            [name] = self.spell([token_id])
            if "ByteLevel" in self._decoder_types and _BYTE_OF.keys() >= set(name):
                return bytes(_BYTE_OF[char] for char in name)
            if "ByteFallback" in self._decoder_types and (byte := _BYTE_TOKEN.fullmatch(name)):
                return bytes([int(byte[1], 16)])
        return text.encode()

    @functools.cached_property
    def _decoder_types(self) -> frozenset[str]:
        decoder = self._backend.decoder
        settings = {} if decoder is None else json.loads(decoder.__getstate__())
        parts = settings.get("decoders", [settings])
        return frozenset(part.get("type") for part in parts)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out."""
        return token_id in self._special_ids

    def _is_known(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def _decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool, continues_text: bool
    ) -> str:
        if not continues_text:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Behind another token these are not the first, so that nothing is dropped from them.
        text = self._backend.decode(
            [self._anchor_id, *token_ids], skip_special_tokens=skip_special_tokens
        )
        return text[self._anchor_length :]

    def _find_anchor(self) -> tuple[int, int]:
        """A token that stands for the text so far, and the length of its text."""
        letters = map(self._backend.token_to_id, string.ascii_letters)
        # Bytes would join those that follow, and a space might be dropped.
        for token_id in itertools.chain(letters, range(self.vocab_size)):
            if token_id is not None and (text := self._backend.decode([token_id])).isalnum():
                return token_id, len(text)
        raise TokenizerError("Tokenizer: the vocabulary must have a word, got none.")


class Detokenizer:
    """Turns generated tokens into text as they come.

    Text is handed out once later tokens cannot change it; all of it together is what
    `Tokenizer.decode` makes of all the tokens. (`tokenizers.DecodeStream` fails for good once a
    character is followed by bytes that are none, and never gives out the last of them.) A token
    costs the same however many came before it, and whatever they are.

    Args:
      tokenizer: the tokenizer of the tokens.
      skip_special_tokens: leave special tokens out.
      continues_text: the tokens follow a prompt, see `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._continues_text = continues_text
        self._pending: list[int] = []

    def snapshot(self) -> tuple[bool, list[int]]:
        """All of its state, for `restore`."""
        return self._continues_text, self._pending.copy()

    def restore(self, snapshot: tuple[bool, list[int]]) -> None:
        """Undo what has changed since a snapshot."""
        self._continues_text, pending = snapshot
        self._pending = pending.copy()

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is final with it, often none."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        if not self._tokenizer._is_known(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._pending, self._continues_text)
        if text.endswith(_REPLACEMENT):
            return self._settle(text)
        if text:
            return self._hand_out(text, len(self._pending))
        # Nothing by itself, or a space that is dropped because it comes first: it is not any more.
        self._continues_text |= bool(self._decode(self._pending, True))
        self._pending.clear()
        return ""

    def peek(self, token_ids: Sequence[int]) -> str | None:
        """The text that `push` would return for these tokens together. Changes nothing.

        In one call of the library, which costs less than one for each token; so None where it
        takes one for each, at the start of a text and next to half characters.
        """
        if not self._continues_text:
            return None
        # The library leaves out the tokens that `push` leaves out.
        text = self._decode([*self._pending, *token_ids], True)
        return None if _REPLACEMENT in text else text

    def accept(self) -> None:
        """Count as pushed the tokens of a `peek` that was not None."""
        self._pending.clear()

    def finish(self) -> str:
        """Return what is left, with a replacement character for each byte that is no text."""
        text = self._decode(self._pending, self._continues_text)
        return self._hand_out(text, len(self._pending))

    def _settle(self, text: str) -> str:
        """Hand out what is final of a text that ends within a character, or with bytes that are
        none."""
        count = len(self._pending)
        splits = [self._split(at) for at in range(1, count)]
        for head, tail in splits:
            if tail and not tail.endswith(_REPLACEMENT):  # behind bytes that are none: they stay so
                return self._hand_out(head + tail, count)
        if count <= _MAX_OPEN_BYTES:
            return ""
        # Where the text falls into two, the front is final. Elsewhere a character would be cut.
        places = (at for at, parts in enumerate(splits, 1) if "".join(parts) == text)
        at = next(places, count - _MAX_OPEN_BYTES if count >= _MAX_PENDING else 0)
        return self._hand_out(splits[at - 1][0], at) if at else ""

    def _split(self, at: int) -> tuple[str, str]:
        """The texts of the tokens that wait, in two parts."""
        head = self._decode(self._pending[:at], self._continues_text)
        return head, self._decode(self._pending[at:], self._continues_text or bool(head))

    def _decode(self, token_ids: list[int], continues_text: bool) -> str:
        return self._tokenizer._decode(token_ids, self._skip_special_tokens, continues_text)

    def _hand_out(self, text: str, num_tokens: int) -> str:
        del self._pending[:num_tokens]
        self._continues_text |= bool(text)
        return text


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = " Convert tokenizer.model." if (folder / "tokenizer.model").is_file() else ""
        raise TokenizerError(f"{folder}: no tokenizer.json there.{hint}")
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path}: not a tokenizer: {error}.") from None
    check_added_tokens(backend, path, text)
    return backend
