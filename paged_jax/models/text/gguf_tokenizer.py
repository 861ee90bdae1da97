"""Tokenizers of GGUF files, built for the `tokenizers` library.

The files have the vocabulary, and merges or scores. The regular expressions that split texts into
words are not in the file, only a name (`pre_tokenizers`). The tokens are the same as llama.cpp's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from paged_jax.arguments import is_int
from paged_jax.models.gguf_file import GgufFile, Texts
from paged_jax.models.text.pre_tokenizers import PRE_TOKENIZERS
from paged_jax.models.text.special_tokens import TokenizerError
from paged_jax.sampling.params import NUMBERS

_PREFIX = "tokenizer.ggml."
# Types of tokens in `token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece vocabularies
# Far above any real vocabulary. `_merges` tries every split of every token.
_MAX_PIECE_LENGTH = 512
# Special tokens by name, and the key of their ids.
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end an answer in the chat formats of common models. Many files name only some.
_END_TOKENS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
        "<|return|>", "<|call|>", "<end_of_turn>", "<EOT>", "<｜end▁of▁sentence｜>",
    )
)  # fmt: skip
# Phi-3 drops spaces after all special tokens except these.
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_gguf_tokenizer(file: GgufFile) -> dict[str, Any]:
    """Return the arguments of `Tokenizer` for a GGUF file.

    Raises:
      TokenizerError: the file has no tokenizer, or an unsupported tokenizer. The message names it.
    """
    return _TokenizerReader(file).read()


class _TokenizerReader:
    """Reader of the tokenizer of a file.

    Args:
      file: the GGUF file.
    """

    def __init__(self, file: GgufFile):
        self._path = file.path
        self._metadata = file.metadata
        tokens = self._get("tokens")
        if not isinstance(tokens, Texts) or not len(tokens):
            raise self._error("tokens must be a list of texts")
        # llama.cpp gives empty tokens the same name.
        self._tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens):
            twice = next(each for i, each in enumerate(self._tokens) if self._ids[each] != i)
            raise self._error(f"tokens must differ, got {twice!r} twice")
        types = self._get("token_type")
        self._types = self._numbers("token_type", np.full(len(tokens), _NORMAL), types)

    def read(self) -> dict[str, Any]:
        kind = self._get("model")
        if (text := self._metadata.get("tokenizer.huggingface.json")) is not None:
            backend, adds_bos = self._read_json(text), False
        elif kind == "gpt2":
            backend, adds_bos = self._byte_level()
        elif kind == "llama":
            backend, adds_bos = self._sentencepiece(), True
        else:
            raise self._error(f"model {kind!r} is not supported, only 'gpt2' and 'llama'")
        end_ids = self._end_ids()
        self._add_special_tokens(backend, end_ids)
        special = {name: self._token(key) for name, key in _NAMED.items()}
        named = {name: token for name, token in special.items() if token is not None}
        if text is None or self._get("add_bos_token") is not None:
            self._add_ends(backend, named, adds_bos)
        templates = self._metadata.get
        return {
            "backend": backend,
            "special_tokens": named,
            "eos_token_ids": end_ids,
            "chat_template": _text(templates("tokenizer.chat_template")),
            "tool_template": _text(templates("tokenizer.chat_template.tool_use")),
            "sampling_defaults": self._sampling_defaults(),
        }

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        """Return a byte-level BPE tokenizer, and whether it adds BOS by default."""
        name = self._get("pre") or "default"
        pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            known = ", ".join(PRE_TOKENIZERS)
            raise self._error(f"pre {name!r} is not supported, only {known}")
        merges = self._get("merges")
        if not isinstance(merges, Texts):
            raise self._error("merges must be a list of texts")
        backend = tokenizers.Tokenizer(
            models.BPE(self._ids, self._pairs(merges), ignore_merges=pre.ignores_merges)
        )
        backend.pre_tokenizer = pre.build()
        backend.decoder = decoders.ByteLevel()
        return backend, pre.adds_bos

    def _pairs(self, merges: Texts) -> list[tuple[str, str]]:
        """Return the merges whose tokens are in the vocabulary; llama.cpp ignores the others."""
        ids = self._ids
        # A space separates two tokens, and tokens have other characters for spaces.
        pairs = [merge.partition(" ") for merge in merges]
        return [(a, b) for a, _, b in pairs if a in ids and b in ids and a + b in ids]

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        scores = self._numbers("scores", None, self._get("scores")).astype(np.float64)
        if not np.isfinite(scores).all():
            raise self._error("scores must be finite")
        unknown = self._token("unknown_token_id", 0)
        if not {f"<0x{byte:02X}>" for byte in range(256)} <= self._ids.keys():
            raise self._error("tokens must have a token for each byte")
        backend = tokenizers.Tokenizer(
            models.BPE(
                self._ids, self._merges(scores), unk_token=unknown, fuse_unk=True,
                byte_fallback=True,
            )
        )  # fmt: skip
        has_prefix = self._get("add_space_prefix") is not False
        steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        steps = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
        )
        return backend

    def _merges(self, scores: np.ndarray) -> list[tuple[str, str]]:
        """Return all pairs of tokens that form a token, in the order of its score."""
        ids, types = self._ids, self._types
        excluded = (_UNKNOWN, _CONTROL, _BYTE)
        pairs: list[tuple[str, str]] = []
        for index in np.argsort(-scores, kind="stable").tolist():
            token = self._tokens[index]
            if len(token) < 2 or types[index] in excluded:
                continue
            if len(token) > _MAX_PIECE_LENGTH:
                raise self._error(
                    f"tokens must have at most {_MAX_PIECE_LENGTH} characters, got {len(token)}"
                )
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in ids and right in ids:
                    pairs.append((left, right))
        return pairs

    def _read_json(self, text: Any) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no more specific error
            raise TokenizerError(f"{self._path}: tokenizer.huggingface.json: {error}.") from None

    def _add_special_tokens(self, backend: tokenizers.Tokenizer, end_ids: list[int]) -> None:
        name = str(self._metadata.get("general.name", "")).lower()
        is_phi3 = any(each in name for each in _PHI3_NAMES)
        is_special = np.isin(self._types, (_UNKNOWN, _CONTROL))
        is_special[end_ids] = True
        indices = np.flatnonzero(is_special | (self._types == _USER_DEFINED))
        backend.add_tokens(
            [
                tokenizers.AddedToken(
                    content := self._tokens[index],
                    special=bool(is_special[index]),
                    normalized=False,
                    rstrip=is_phi3 and content not in _PHI3_KEEPING,
                )
                for index in indices.tolist()
            ]
        )

    def _add_ends(
        self, backend: tokenizers.Tokenizer, named: Mapping[str, str], adds_bos: bool
    ) -> None:
        """Make the tokenizer add BOS and EOS to texts, if the file says so."""
        before, after = [], []
        if _flag(self._get("add_bos_token"), adds_bos) and "bos_token" in named:
            before = [named["bos_token"]]
        if _flag(self._get("add_eos_token"), False) and "eos_token" in named:
            after = [named["eos_token"]]
        if before or after:
            backend.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                pair=None,
                special_tokens=[(token, self._ids[token]) for token in {*before, *after}],
            )

    def _end_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        found = {self._ids[token] for token in _END_TOKENS & self._ids.keys()}
        # In the format of gpt-oss, <|end|> ends a message, and the answer may go on.
        if {"<|return|>", "<|call|>"} <= self._ids.keys():
            found.discard(self._ids.get("<|end|>", -1))
        found |= {each for key in _END_KEYS if (each := self._id(key)) is not None}
        return sorted(found)

    def _sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters that the file recommends."""
        defaults = {}
        for key, name in _SAMPLING.items():
            key = f"general.sampling.{key}"
            if (value := self._metadata.get(key)) is None:
                continue
            if not (number := NUMBERS[name]).allows(value):
                raise TokenizerError(f"{self._path}: {key} must {number.rule}, got {value!r}.")
            defaults[name] = value
        return defaults

    def _id(self, key: str, default: int | None = None) -> int | None:
        value = self._get(key)
        if value is None:
            return default
        if not is_int(value):
            raise self._error(f"{key} must be an integer, got {value!r}")
        # llama.cpp also ignores ids outside of the vocabulary. Some files have -1 for no token.
        return value if 0 <= value < len(self._tokens) else default

    def _token(self, key: str, default: int | None = None) -> str | None:
        index = self._id(key, default)
        return None if index is None else self._tokens[index]

    def _numbers(self, key: str, default: np.ndarray | None, value: Any) -> np.ndarray:
        """Return an array with a number for each token."""
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray) or len(value) < len(self._tokens):
            raise self._error(f"{key} must be a list of {len(self._tokens)} numbers")
        return value[: len(self._tokens)]

    def _get(self, key: str) -> Any:
        return self._metadata.get(_PREFIX + key)

    def _error(self, problem: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: {_PREFIX}{problem}.")


def _flag(value: Any, default: bool) -> bool:
    return value if isinstance(value, bool) else default


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
