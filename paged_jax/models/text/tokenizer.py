# pyright: strict, reportUnknownMemberType=false
"""Conversion between texts and token ids.

Tokens that arrive one at a time are converted by `detokenizer`.
"""

import functools
import itertools
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paged_jax.arguments import ArgumentError, names_arguments
from paged_jax.models.gguf_file import GgufFile, is_gguf
from paged_jax.models.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    as_data,
    check_variables,
    read_templates,
)
from paged_jax.models.text.detokenizer import REPLACEMENT, Detokenizer
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.models.text.gguf_tokenizer import read_gguf_tokenizer
from paged_jax.models.text.special_tokens import (
    TokenizerError,
    add_special_tokens,
    check_added_tokens,
    read_optional,
    set_post_processor,
)
from paged_jax.models.text.tool_formats import ToolFormat, ToolSupport, find_support

# Names of the tokens for single bytes in tokenizers with byte fallback.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _bytes_by_char() -> dict[str, int]:
    """Return the byte for each character in the names of byte-level tokens.

    A byte that is a printable Latin-1 character is written as this character. Other bytes are
    written as the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(unprintable)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _bytes_by_char()


class Tokenizer:
    """A Hugging Face tokenizer, with the special tokens and chat template of its model.

    Args:
      backend: tokenizer of the `tokenizers` library. Its post-processor adds special tokens.
      special_tokens: special tokens by name, such as ``{"bos_token": "<s>"}``, for the chat
        template.
      eos_token_ids: tokens that end a text.
      chat_template: Jinja source of the chat template; None if the model has none.
      tool_template: Jinja source of the template for chats with tools; None if it is the same.
      sampling_defaults: recommended sampling parameters, by their names in `SamplingParams`.
      generation_config: content of ``generation_config.json``, to pass instead of
        `sampling_defaults`.

    Attributes:
      backend: the tokenizer of the `tokenizers` library.
      special_tokens: special tokens by name.
      eos_token_ids: the tokens that end a text, sorted.
      chat_template: Jinja source of the chat template; None if the model has none.
      generation_config: generation defaults of the model.

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
        sampling_defaults: Mapping[str, object] | None = None,
        generation_config: GenerationConfig | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.generation_config = generation_config or GenerationConfig(
            sampling_defaults=dict(sampling_defaults or {})
        )
        self.backend = backend
        self.chat_template = chat_template
        self._chat_template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, tool_template, self.special_tokens)
        )
        added = backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._anchor_id, self._anchor_length = self._find_anchor()

    def __repr__(self) -> str:
        template = "no chat template" if self.chat_template is None else "a chat template"
        return f"Tokenizer({self.backend.get_vocab_size()} tokens, {template})"

    @classmethod
    @names_arguments
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load a tokenizer from ``tokenizer.json`` and the files next to it.

        ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json`` define
        special tokens. The first file also states which special tokens are added. The chat template
        is in ``chat_template.jinja`` or in ``tokenizer_config.json``. ``generation_config.json``
        contains end tokens and sampling defaults.

        Args:
          folder: folder of the model, or a GGUF file, which contains all of this information.

        Raises:
          TokenizerError: ``tokenizer.json`` is missing or damaged, or a special token contradicts
            its vocabulary.
          ValueError: another file is not JSON, or ``generation_config.json`` is invalid.
          ChatTemplateError: the chat template is not valid Jinja.
        """
        folder = Path(folder)
        if is_gguf(folder):
            return cls(**read_gguf_tokenizer(GgufFile.open(folder)))
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
    def sampling_defaults(self) -> Mapping[str, object]:
        """Recommended sampling parameters, by their names in `SamplingParams`."""
        return self.generation_config.sampling_defaults

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, including special tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Upper bound on the number of characters of text that a single token stands for."""
        max_length = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        # Unicode normalisation (form C) combines at most three characters into one.
        return max_length * (1 if self.backend.normalizer is None else 3)

    @functools.cached_property
    def tool_support(self) -> ToolSupport:
        """Description of how the chat template supports tools."""
        if self._chat_template is None:
            return ToolSupport()
        return find_support(self._chat_template.render).with_special_tokens(
            {self.spell([token_id])[0]: token_id for token_id in self._special_ids}
        )

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format in which the model writes tool calls; None if the format is not known."""
        return self.tool_support.format

    @names_arguments
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Convert text to token ids.

        Args:
          text: the text. Names of special tokens in it become these tokens.
          add_special_tokens: whether to add special tokens. Use False for chats, because the chat
            template writes them.

        Raises:
          ArgumentError: the text has lone surrogates, which UTF-8 cannot represent.
        """
        return self._encode(text, add_special_tokens).ids

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Return the character positions of the start and end of each token in a text.

        Args:
          text: see `encode`.
          add_special_tokens: see `encode`. For added tokens, start and end are equal.
        """
        return self._encode(text, add_special_tokens).offsets

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            # `encode_batch` releases the GIL, so other threads can run (for example in a server).
            [encoded] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:  # the library names neither the argument nor the reason
            raise ArgumentError(
                "encode",
                f"must be valid Unicode text, got {text!r:.100}. Decode its bytes with the right "
                "encoding.",
                "text",
            ) from None
        return encoded

    @names_arguments
    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> str:
        """Convert token ids to text.

        The result is that of the `tokenizers` library, except near invalid UTF-8 bytes in
        tokenizers with byte fallback. There, the library also replaces valid characters that
        consist of byte tokens. This method does not, because they may have been streamed already.

        Args:
          token_ids: the tokens. Ids outside of the vocabulary are ignored.
          skip_special_tokens: whether to omit special tokens.
          continues_text: whether the tokens follow other text. If True, keep a leading space, which
            some tokenizers drop at the start of a text.
        """
        text = self.decode_at_once(token_ids, skip_special_tokens, continues_text)
        if REPLACEMENT not in text:
            return text
        stream = Detokenizer(
            self, skip_special_tokens=skip_special_tokens, continues_text=continues_text
        )
        return "".join([*map(stream.push, token_ids), stream.finish()])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Convert a chat to text, which must be encoded without adding special tokens.

        Args:
          messages: see `ChatTemplate.render`.
          add_generation_prompt: whether to end the text with the beginning of an assistant message.
          **variables: other variables of the template, such as ``enable_thinking``.

        Raises:
          ChatTemplateError: the model has no chat template, or the template rejects the messages.
        """
        return self._require_template().render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    @names_arguments
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        chat_template_kwargs: Mapping[str, object] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Convert a chat to token ids, to generate its next message.

        Args:
          messages: see `apply_chat_template`. OpenAI's role "developer" becomes "system" if the
            template does not know it.
          chat_template_kwargs: variables of the template, such as ``enable_thinking``.
          tools: functions that may be called, in OpenAI's format.
          add_generation_prompt: see `apply_chat_template`.
          add_special_tokens: see `encode`. Usually the chat template writes special tokens.

        Raises:
          ChatTemplateError: see `apply_chat_template`; also if a variable is reserved, or the
            template would omit the tools or a message.
        """
        text = self.render_chat(
            messages,
            chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        return self.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        chat_template_kwargs: Mapping[str, object] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Convert a chat to text. For the arguments and errors, see `encode_chat`."""
        template = self._require_template()
        if tools and not self.tool_support.shows_tools:
            rule = "must be empty as the model's chat template has no tools, got some."
            raise ChatTemplateError("encode_chat", rule, "tools")
        return template.render(
            template.with_known_roles(as_data(messages)),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **check_variables(chat_template_kwargs),
        )

    def _require_template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise ChatTemplateError(
                "apply_chat_template",
                "the model has no chat template. Use plain prompts, or a chat model.",
            )
        return self._chat_template

    def spell(self, token_ids: Iterable[int]) -> list[str]:
        """Return the names of tokens in the vocabulary; an empty string for unknown ids."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text. They may be a part of a character.

        The concatenated bytes of a text's tokens are the text in UTF-8.
        """
        text = self.decode([token_id], skip_special_tokens=False, continues_text=True)
        if REPLACEMENT in text:
            # Decoded text does not show the bytes of incomplete characters, but token names do.
            [name] = self.spell([token_id])
            if "ByteLevel" in self._decoder_types and _BYTE_OF.keys() >= set(name):
                return bytes(_BYTE_OF[char] for char in name)
            if "ByteFallback" in self._decoder_types and (byte := _BYTE_TOKEN.fullmatch(name)):
                return bytes([int(byte[1], 16)])
        return text.encode()

    @functools.cached_property
    def _decoder_types(self) -> frozenset[str]:
        decoder = self.backend.decoder
        settings: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder else {}
        parts: list[dict[str, Any]] = settings.get("decoders", [settings])
        return frozenset(str(part.get("type")) for part in parts)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a special token, which `decode` omits."""
        return token_id in self._special_ids

    def is_special_text(self, text: str) -> bool:
        """Return whether a text is the name of a special token."""
        token_id = self.backend.token_to_id(text)
        return token_id is not None and self.is_special(token_id)

    def is_known(self, token_id: int) -> bool:
        """Return whether the vocabulary has a token with this id."""
        return self.backend.id_to_token(token_id) is not None

    def decode_at_once(
        self, token_ids: Sequence[int], skip_special_tokens: bool, continues_text: bool
    ) -> str:
        """Decode like `decode`, but like the `tokenizers` library near invalid UTF-8 bytes."""
        if not continues_text:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Put an anchor token in front, so that a leading space of the other tokens is not dropped.
        text = self.backend.decode(
            [self._anchor_id, *token_ids], skip_special_tokens=skip_special_tokens
        )
        return text[self._anchor_length :]

    def _find_anchor(self) -> tuple[int, int]:
        """Find the token that `decode_at_once` puts first; return its id and text length."""
        letters = map(self.backend.token_to_id, string.ascii_letters)
        # It must be a word, because the decoder joins adjacent byte tokens and may drop spaces.
        for token_id in itertools.chain(letters, range(self.vocab_size)):
            if token_id is not None and (text := self.backend.decode([token_id])).isalnum():
                return token_id, len(text)
        raise TokenizerError("Tokenizer: no token of the vocabulary consists of letters or digits.")


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        has_model = (folder / "tokenizer.model").is_file()
        hint = " Convert tokenizer.model with transformers." if has_model else ""
        raise TokenizerError(f"{folder}: the folder must contain a tokenizer.json.{hint}")
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no more specific error
        raise TokenizerError(
            f"{path}: must be a valid file of the tokenizers library: {error}."
        ) from None
    check_added_tokens(backend, path, text)
    return backend
