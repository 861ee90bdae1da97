"""Tokenizers of GGUF files, built for the `tokenizers` library.

A GGUF file contains the vocabulary, and either merges (byte-level BPE) or scores (SentencePiece).
It contains only the name of the rules that split texts into words, see `gguf_pre_tokenizers`. Texts
are converted to the same tokens as in llama.cpp.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from paged_jax.arguments import is_int
from paged_jax.models.gguf_file import GgufFile, Texts, warn_of_unknown
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.models.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from paged_jax.models.text.special_tokens import TokenizerError, surround_texts
from paged_jax.options import options_of
from paged_jax.sampling.params import SamplingParams

_PREFIX = "tokenizer.ggml."
# Types of tokens in `token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece vocabularies
# Maximum number of characters of a token, far above the length of any real token. A limit is needed
# because `_merges` tries every split of every token.
_MAX_PIECE_LENGTH = 512
# For each special token of Hugging Face tokenizers, the key of its id in the file.
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end an answer in common chat formats. Files often list only some of them.
_END_TOKENS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
        "<|return|>", "<|call|>", "<end_of_turn>", "<EOT>", "<｜end▁of▁sentence｜>", "<turn|>",
        "<|tool_response>",
    )
)  # fmt: skip
# In these models, spaces after special tokens are dropped, except after the tokens in
# `_PHI3_KEEPING`.
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")
# Entries that do not change tokens, or only those of tokenizers that are not supported.
_HARMLESS = frozenset(
    (
        "cls_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_pre_token_id",
        "fim_rep_token_id", "fim_sep_token_id", "fim_suf_token_id", "mask_token_id", "merges",
        "middle_token_id", "pre", "precompiled_charsmap", "prefix_token_id",
        "remove_extra_whitespaces", "scores", "suffix_token_id", "token_type_count",
        "add_bos_token", "add_eos_token", "add_space_prefix",
    )
)  # fmt: skip
# Entries that are not supported, and the values for which they have no effect.
_NEUTRAL: Mapping[str, Any] = {
    "add_sep_token": False,
    "normalizer.lowercase": False,
    "normalizer.strip_accents": False,
}
_HARMLESS_PREFIXES = ("tokenizer.chat_template", "tokenizer.huggingface.", "tokenizer.rwkv.")
_SAMPLING_PREFIX = "general.sampling."
# Entries that turn a method of sampling on, with the values that turn it off, and other entries of
# these methods.
_OFF: Mapping[str, Any] = {"xtc_probability": 0, "mirostat": 0, "penalty_repeat": 1}
_SWITCH_OF = {
    "xtc_threshold": "xtc_probability",
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "penalty_last_n": "penalty_repeat",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_gguf_tokenizer(file: GgufFile) -> dict[str, Any]:
    """Read the tokenizer of a GGUF file; return the arguments of `Tokenizer` by name.

    Raises:
      TokenizerError: the file has no tokenizer, or its tokenizer is damaged or not supported.
    """
    return _TokenizerReader(file).read()


class _TokenizerReader:
    """Reader of the tokenizer in a GGUF file.

    Args:
      file: the GGUF file.
    """

    def __init__(self, file: GgufFile):
        self._path = file.path
        self._metadata = file.metadata
        self._keys_read: set[str] = set()
        tokens = self._get("tokens")
        if not isinstance(tokens, Texts) or not len(tokens):
            raise self._error("tokens must be a list of strings that is not empty")
        # Give empty tokens the same names as llama.cpp does.
        self._tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens):
            duplicate = next(token for i, token in enumerate(self._tokens) if self._ids[token] != i)
            raise self._error(f"tokens must be distinct, got {duplicate!r} more than once")
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
        elif kind == "gemma4":
            backend, adds_bos = self._character_level(), True
        else:
            raise self._error(f"model must be 'gpt2', 'llama' or 'gemma4', got {kind!r}")
        end_ids = self._end_ids()
        self._add_special_tokens(backend, end_ids)
        special = {name: self._token(key) for name, key in _NAMED.items()}
        named = {name: token for name, token in special.items() if token is not None}
        if text is None or self._get("add_bos_token") is not None:
            self._add_ends(backend, named, adds_bos)
        templates = self._metadata.get
        generation_config = GenerationConfig(
            sampling_defaults=self._sampling_defaults(),
            suppress_tokens=self._suppressed_tokens(),
        )
        warn_of_unknown(self._path, [*self._unknown_entries(), *self._unknown_sampling()])
        return {
            "backend": backend,
            "special_tokens": named,
            "eos_token_ids": end_ids,
            "chat_template": _text(templates("tokenizer.chat_template")),
            "tool_template": _text(templates("tokenizer.chat_template.tool_use")),
            "generation_config": generation_config,
        }

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        """Return a byte-level BPE tokenizer, and whether it adds BOS by default."""
        name = self._get("pre") or "default"
        pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            names = ", ".join(PRE_TOKENIZERS)
            raise self._error(f"pre must be one of {names}, got {name!r}")
        backend = self._merging(ignore_merges=pre.ignores_merges)
        backend.pre_tokenizer = pre.build()
        backend.decoder = decoders.ByteLevel()
        return backend, pre.adds_bos

    def _merging(self, **options: Any) -> tokenizers.Tokenizer:
        """Return a tokenizer with the merges of the file. `options` are those of `models.BPE`."""
        merges = self._get("merges")
        if not isinstance(merges, Texts):
            raise self._error("merges must be a list of strings")
        # A merge is written as two tokens with a space between them. Spaces in tokens are written
        # as another character.
        parts = map(str.partition, merges, itertools.repeat(" "))
        pairs = [(left, right) for left, _, right in parts]
        try:
            return tokenizers.Tokenizer(models.BPE(self._ids, pairs, **options))
        except Exception:  # the library raises plain exceptions for tokens outside the vocabulary
            return tokenizers.Tokenizer(models.BPE(self._ids, self._known(pairs), **options))

    def _character_level(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of Gemma 4: merges of characters, over words and spaces."""
        self._check_bytes()
        backend = self._merging(
            unk_token=self._token("unknown_token_id"), fuse_unk=True, byte_fallback=True
        )
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        # No token has both a newline and another character.
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        backend.decoder = self._decoder()
        return backend

    def _known(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Drop merges of tokens outside the vocabulary, as llama.cpp does."""
        ids = self._ids
        return [(a, b) for a, b in pairs if a in ids and b in ids and a + b in ids]

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        scores = self._numbers("scores", None, self._get("scores")).astype(np.float64)
        if not np.isfinite(scores).all():
            raise self._error("scores must be finite")
        unknown = self._token("unknown_token_id", 0)
        self._check_bytes()
        backend = tokenizers.Tokenizer(
            models.BPE(
                self._ids, self._merges(scores), unk_token=unknown, fuse_unk=True,
                byte_fallback=True,
            )
        )  # fmt: skip
        has_prefix = self._get("add_space_prefix") is not False
        steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        backend.decoder = self._decoder(*[decoders.Strip(" ", 1, 0)] * has_prefix)
        return backend

    def _check_bytes(self) -> None:
        if not {f"<0x{byte:02X}>" for byte in range(256)} <= self._ids.keys():
            raise self._error("tokens must include a token for each byte, <0x00> to <0xFF>")

    def _decoder(self, *steps: Any) -> Any:
        """Return the decoder of tokens with `_SPACE` and of bytes, followed by `steps`."""
        first = decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
        return decoders.Sequence([*first, *steps])

    def _merges(self, scores: np.ndarray) -> list[tuple[str, str]]:
        """Return all pairs of tokens that form a token, by descending score of that token."""
        ids, types = self._ids, self._types
        excluded = (_UNKNOWN, _CONTROL, _BYTE)
        pairs: list[tuple[str, str]] = []
        for index in np.argsort(-scores, kind="stable").tolist():
            token = self._tokens[index]
            if len(token) < 2 or types[index] in excluded:
                continue
            if len(token) > _MAX_PIECE_LENGTH:
                raise self._error(
                    f"tokens must have at most {_MAX_PIECE_LENGTH} characters each, got "
                    f"{len(token)}"
                )
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in ids and right in ids:
                    pairs.append((left, right))
        return pairs

    def _read_json(self, text: Any) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain exceptions
            raise TokenizerError(f"{self._path}: tokenizer.huggingface.json: {error}.") from None

    def _add_special_tokens(self, backend: tokenizers.Tokenizer, end_ids: list[int]) -> None:
        name = str(self._metadata.get("general.name", "")).lower()
        is_phi3 = any(phi3_name in name for phi3_name in _PHI3_NAMES)
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
        """Make the tokenizer add BOS and EOS to texts if the file says so.

        If the file does not say whether to add BOS, `adds_bos` decides.
        """
        before, after = [], []
        if _flag(self._get("add_bos_token"), adds_bos) and "bos_token" in named:
            before = [named["bos_token"]]
        if _flag(self._get("add_eos_token"), False) and "eos_token" in named:
            after = [named["eos_token"]]
        if before or after:
            surround_texts(backend, before, after)

    def _end_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        end_ids = {self._ids[token] for token in _END_TOKENS & self._ids.keys()}
        # In the format of gpt-oss, <|end|> ends a message, but the answer may consist of several
        # messages.
        if {"<|return|>", "<|call|>"} <= self._ids.keys():
            end_ids.discard(self._ids.get("<|end|>", -1))
        end_ids |= {token_id for key in _END_KEYS if (token_id := self._id(key)) is not None}
        return sorted(end_ids)

    def _sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters that the file recommends, by name."""
        defaults = {}
        options = {option.name: option for option in options_of(SamplingParams)}
        for key, name in _SAMPLING.items():
            key = _SAMPLING_PREFIX + key
            if (value := self._metadata.get(key)) is None:
                continue
            if not options[name].allows(value):
                raise TokenizerError(f"{self._path}: {key} {options[name].problem(value)}")
            defaults[name] = value
        return defaults

    def _suppressed_tokens(self) -> tuple[int, ...]:
        """Return the ids of tokens that are never generated."""
        key = "suppress_tokens"
        if (value := self._get(key)) is None:
            return ()
        is_list = isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer)
        if not is_list or (value < 0).any():
            raise self._error(f"{key} must be a list of token ids, got {str(value)[:100]}")
        return tuple(value.tolist())

    def _unknown_entries(self) -> Iterator[str]:
        for full_key, value in self._metadata.items():
            key = full_key.removeprefix(_PREFIX)
            if not full_key.startswith("tokenizer.") or full_key.startswith(_HARMLESS_PREFIXES):
                continue
            if key in self._keys_read or key in _HARMLESS:
                continue
            if key not in _NEUTRAL or value != _NEUTRAL[key]:
                yield full_key

    def _unknown_sampling(self) -> Iterator[str]:
        entries = {
            key.removeprefix(_SAMPLING_PREFIX): value
            for key, value in self._metadata.items()
            if key.startswith(_SAMPLING_PREFIX)
        }
        for key in entries.keys() - _SAMPLING.keys():
            switch = _SWITCH_OF.get(key, key)
            is_off = switch in _OFF and entries.get(switch, _OFF[switch]) == _OFF[switch]
            if not is_off:
                yield _SAMPLING_PREFIX + key

    def _id(self, key: str, default: int | None = None) -> int | None:
        value = self._get(key)
        if value is None:
            return default
        if not is_int(value):
            raise self._error(f"{key} must be an integer, got {value!r}")
        # llama.cpp also ignores ids outside of the vocabulary. Some files use -1 for a missing
        # token.
        return value if 0 <= value < len(self._tokens) else default

    def _token(self, key: str, default: int | None = None) -> str | None:
        index = self._id(key, default)
        return None if index is None else self._tokens[index]

    def _numbers(self, key: str, default: np.ndarray | None, value: Any) -> np.ndarray:
        """Check that the array `value` has a number for each token, and return these numbers.

        If `value` is None, return `default`.
        """
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray) or len(value) < len(self._tokens):
            raise self._error(
                f"{key} must be a list with a number for each of the {len(self._tokens)} tokens"
            )
        return value[: len(self._tokens)]

    def _get(self, key: str) -> Any:
        self._keys_read.add(key)
        return self._metadata.get(_PREFIX + key)

    def _error(self, problem: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: {_PREFIX}{problem}.")


def _flag(value: Any, default: bool) -> bool:
    return value if isinstance(value, bool) else default


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
