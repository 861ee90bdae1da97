"""Special tokens of a model, from ``tokenizer.json`` and the files next to it.

    tokenizer_config.json    names of special tokens; `added_tokens_decoder`: ids and flags
    special_tokens_map.json  names; read only if there is no `added_tokens_decoder`
    added_tokens.json        ids; read only if there is no `added_tokens_decoder`

If files contradict each other, the same file has precedence as in transformers.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from paged_jax.models.model_folder import read_json

# Standard names of special tokens, in the order in which their tokens get ids. A model may define
# other names, which are keys of its config that end in "_token".
_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
# Default special tokens of transformers' tokenizer classes, used if the files do not mention them.
_END_OF_TEXT = "<|endoftext|>"
_NAMES_OF_CLASS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG = "tokenizer_config.json"
# Matches the text before the list `added_tokens` in tokenizer.json, which precedes the vocabulary.
_ADDED_TOKENS = re.compile(r'(?<!\\)"added_tokens"\s*:\s*')


class TokenizerError(ValueError):
    """Error for a tokenizer that is missing, damaged or not supported."""


def add_special_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, object]
) -> dict[str, str]:
    """Add the special tokens of the files next to ``tokenizer.json`` to a tokenizer.

    Tokens with an id in the files are added first, in the order of the ids. Then tokens with a
    name are added, and then all other special tokens. A token that is not in the vocabulary gets
    the next free id.

    Args:
      backend: the tokenizer of ``tokenizer.json``. It is modified.
      folder: the folder of the model.
      config: content of its ``tokenizer_config.json``.

    Returns:
      The special tokens by name, such as ``{"bos_token": "<s>"}``.

    Raises:
      TokenizerError: a token is malformed, or gets an id that differs from its id in the files.
      ValueError: a file is not JSON.
    """
    tokens = _read_special_tokens(folder, _with_names_of_class(backend, config))
    registered = backend.get_added_tokens_decoder()
    # Without `added_tokens_decoder`, transformers also uses the flags of added tokens in
    # tokenizer.json.
    flagged = tokens.stated if tokens.file == _CONFIG else {**tokens.stated, **registered}
    added = [token for _, token in sorted(flagged.items(), key=lambda item: item[0])]
    names = {token.content for token in tokens.named.values()}
    for token in added:
        token.special |= token.content in names
    contents = {token.content for token in (*registered.values(), *added)}
    named = sorted(tokens.named.items(), key=lambda item: _place(item[0]))
    for token in (*(token for _, token in named), *tokens.extra):
        if token.content not in contents:
            token.special |= token.content in names
            added.append(token)
    backend.add_tokens(added)
    stated_ids = [(token_id, token.content) for token_id, token in tokens.stated.items()]
    _check_ids(backend, folder / tokens.file, stated_ids)
    return {name: token.content for name, token in tokens.named.items()}


def check_added_tokens(backend: tokenizers.Tokenizer, path: Path, text: str) -> None:
    """Check that the added tokens have the ids that ``tokenizer.json`` states.

    The library `tokenizers` ignores the ids of added tokens in the file, and numbers these tokens
    consecutively.

    Args:
      backend: tokenizer that the library has loaded from the file.
      path: path of the file.
      text: content of the file.

    Raises:
      TokenizerError: a token has another id than the file states.
    """
    if (key := _ADDED_TOKENS.search(text)) is None:
        return
    # Parse only this list, because the rest of the file is megabytes of vocabulary.
    added, _ = json.JSONDecoder().raw_decode(text, key.end())
    _check_ids(backend, path, [(token["id"], token["content"]) for token in added or ()])


def _check_ids(
    backend: tokenizers.Tokenizer, path: Path, stated: Iterable[tuple[int, str]]
) -> None:
    for token_id, content in stated:
        if content and (actual_id := backend.token_to_id(content)) != token_id:
            raise TokenizerError(
                f"{path}: the id of token {content!r} is {token_id} here, but {actual_id} in the "
                "vocabulary. Save the tokenizer again, so that its files agree."
            )


def set_post_processor(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> None:
    """Set whether a tokenizer adds BOS and EOS to texts, as ``tokenizer_config.json`` says.

    If BOS and EOS are the same token, nothing is changed, as in transformers. In this case, it is
    not clear whether the token that ``tokenizer.json`` adds is meant as BOS or as EOS.

    Args:
      backend: the tokenizer. It is modified.
      config: content of ``tokenizer_config.json``.
      special_tokens: special tokens by name.
    """
    bos, eos = (special_tokens.get(f"{key}_token", "") for key in ("bos", "eos"))
    if bos and bos == eos:
        return
    text = backend.encode("a", add_special_tokens=False).tokens
    encoded = backend.encode("a", add_special_tokens=True).tokens
    starts = (at for at in range(len(encoded)) if text and encoded[at : at + len(text)] == text)
    at = next(starts, len(encoded))
    before, after = encoded[:at], encoded[at + len(text) :]
    # Change only BOS and EOS. Keep other tokens that the tokenizer adds, such as GLM's prefix.
    if _must_add(backend, bos, before, config.get("add_bos_token")):
        before = [bos, *before]
    elif config.get("add_bos_token") is False:
        before = [token for token in before if token != bos]
    if _must_add(backend, eos, after, config.get("add_eos_token")):
        after = [*after, eos]
    elif config.get("add_eos_token") is False:
        after = [token for token in after if token != eos]
    if [*before, *text, *after] != encoded:
        surround_texts(backend, before, after)


def surround_texts(
    backend: tokenizers.Tokenizer, before: Sequence[str], after: Sequence[str]
) -> None:
    """Make a tokenizer add the given special tokens before and after each text."""
    tokens = dict.fromkeys([*before, *after])
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=None,
        special_tokens=[(token, backend.token_to_id(token)) for token in tokens],
    )


def _must_add(
    backend: tokenizers.Tokenizer, token: str, present: Sequence[str], requested: Any
) -> bool:
    return bool(requested) and token not in present and backend.token_to_id(token) is not None


def read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty dict if the file does not exist."""
    return read_json(path) if path.is_file() else {}


class _SpecialTokens(NamedTuple):
    """The special tokens that the files next to ``tokenizer.json`` define.

    Attributes:
      named: tokens by name, such as ``"bos_token"``.
      extra: other special tokens, which have no name.
      stated: tokens for which a file states an id, by this id.
      file: name of that file.
    """

    named: dict[str, tokenizers.AddedToken]
    extra: list[tokenizers.AddedToken]
    stated: dict[int, tokenizers.AddedToken]
    file: str


def _with_names_of_class(
    backend: tokenizers.Tokenizer, config: Mapping[str, object]
) -> dict[str, Any]:
    """Add the default special tokens of the tokenizer class to a config, if it lacks them."""
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    defaults = _NAMES_OF_CLASS.get(name, {})
    present = {
        key: token for key, token in defaults.items() if backend.token_to_id(token) is not None
    }
    return {**present, **config}


def _read_special_tokens(folder: Path, config: Mapping[str, object]) -> _SpecialTokens:
    named, extra = _named_and_extra(folder / _CONFIG, config)
    stated = config.get("added_tokens_decoder")
    if stated is not None:
        path = folder / _CONFIG
        if not isinstance(stated, Mapping):
            rule = f"added_tokens_decoder must be an object, got {stated!r}."
            raise TokenizerError(f"{path}: {rule}")
        tokens = {
            _token_id(path, token_id): _added_token(path, f"added_tokens_decoder.{token_id}", token)
            for token_id, token in stated.items()
        }
        return _SpecialTokens(named, extra, tokens, _CONFIG)
    path = folder / "special_tokens_map.json"
    tokens_map = read_optional(path)
    replaced, mapped_extra = _named_and_extra(path, tokens_map)
    named = {name: token for name, token in named.items() if name not in tokens_map} | replaced
    if not extra or "extra_special_tokens" in tokens_map:
        extra += mapped_extra
    special = {token.content for token in (*named.values(), *extra)}
    path = folder / "added_tokens.json"
    tokens = {
        _token_id(path, token_id): tokenizers.AddedToken(content, special=content in special)
        for content, token_id in read_optional(path).items()
    }
    return _SpecialTokens(named, extra, tokens, path.name)


def _named_and_extra(
    path: Path, config: Mapping[str, object]
) -> tuple[dict[str, tokenizers.AddedToken], list[tokenizers.AddedToken]]:
    """Read the special tokens of a file: a dict of tokens by name, and a list of other tokens."""
    tokens = {key: config[key] for key in _NAMES if config.get(key) is not None}
    for key, value in config.items():
        if key not in _NAMES and key.endswith("_token") and isinstance(value, str | Mapping):
            tokens[key] = value
    key = "extra_special_tokens"
    if not config.get(key):
        key = "additional_special_tokens"  # its name in transformers before version 5
    extra = config.get(key) or []
    if isinstance(extra, Mapping):
        tokens, extra = {**tokens, **extra}, []
    if not isinstance(extra, list):
        raise TokenizerError(f"{path}: {key} must be a list of tokens or an object, got {extra!r}.")
    named = {name: _special_token(path, name, value) for name, value in tokens.items()}
    return named, [_special_token(path, key, token) for token in extra]


def _place(name: str) -> int:
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def _special_token(path: Path, key: str, value: Any) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    return _added_token(path, key, value, is_special=path.name != _CONFIG)


def _added_token(
    path: Path, key: str, value: Any, *, is_special: bool = False
) -> tokenizers.AddedToken:
    content = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(content, str):
        rule = 'must be a token such as "<s>" or {"content": "<s>"}'
        raise TokenizerError(f"{path}: {key} {rule}, got {value!r}.")
    flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
    return tokenizers.AddedToken(content, **{"special": is_special, **flags})


def _token_id(path: Path, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TokenizerError(f"{path}: token ids must be integers, got {value!r}.") from None
