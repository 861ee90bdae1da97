"""Special tokens from the files next to tokenizer.json, compared with transformers."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from paged_jax.models.text.tokenizer import Tokenizer, TokenizerError

# The vocabulary of `_backend` ends with "<|in|>" (256), which is not special, and "<|old|>" (257),
# which is special.
_TEXT = "<|in|>a <|old|> b<|im_start|>c <|im_end|> [PAD]<x>"


def _backend():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "<|in|>"])}
    backend = Backend(models.BPE(vocab, []))
    backend.add_special_tokens(["<|old|>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _write(folder, backend=None, **files):
    (backend or _backend()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _stated(content, **flags):
    return {"content": content, "special": True, "normalized": False, **flags}


_FILES = {
    "ids and flags": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "259": _stated("<|im_end|>", lstrip=True),
                "258": _stated("<|im_start|>", rstrip=True),
                "256": _stated("<|in|>", special=False),
            },
            "eos_token": "<|im_end|>",
        }
    },
    "special in vocabulary": {
        "tokenizer_config": {"eos_token": "<|in|>", "pad_token": "[PAD]"},
    },
    "named before extra": {
        "tokenizer_config": {
            "additional_special_tokens": ["<x>", "<|im_start|>"],
            "pad_token": "[PAD]",
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "rstrip": True},
        },
    },
    "names of the model": {
        "tokenizer_config": {
            "extra_special_tokens": {"start_token": "<|im_start|>", "x_token": "<x>"},
            "end_token": "<|im_end|>",
            "add_bos_token": False,
            "eos_token": "<|old|>",
        },
    },
    "added_tokens.json": {
        "added_tokens": {"<|im_end|>": 259, "<|im_start|>": 258, "<|in|>": 256},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
    },
    "special_tokens_map.json": {
        "special_tokens_map": {
            "eos_token": {"content": "<|im_end|>", "lstrip": True, "normalized": False},
            "pad_token": "[PAD]",
            "additional_special_tokens": ["<x>"],
        },
        "tokenizer_config": {"eos_token": "<|old|>", "cls_token": "<|in|>"},
    },
    "added_tokens_decoder replaces the older files": {
        "special_tokens_map": {"eos_token": "<|old|>", "bos_token": "<x>"},
        "added_tokens": {"<x>": 258},
        "tokenizer_config": {
            "added_tokens_decoder": {"258": _stated("[PAD]", special=False, normalized=True)},
            "eos_token": "[PAD]",
        },
    },
}


@pytest.mark.peers
@pytest.mark.parametrize("name", _FILES)
def test_from_folder_adds_the_same_special_tokens_as_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    folder = _write(tmp_path, **_FILES[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    assert ours.encode(_TEXT) == theirs.encode(_TEXT)
    assert ours.decode(ours.encode(_TEXT)) == theirs.decode(
        theirs.encode(_TEXT), skip_special_tokens=True
    )
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)


def test_from_folder_adds_special_tokens_with_stated_ids(tmp_path):
    folder = _write(
        tmp_path,
        tokenizer_config={
            "added_tokens_decoder": {
                "258": _stated("<|im_start|>"),
                "259": _stated("<think>", special=False),
                "260": _stated("<|im_end|>"),
            },
            "eos_token": "<|im_end|>",
            "pad_token": "[PAD]",
            "extra_special_tokens": ["<x>"],
        },
    )
    tokenizer = Tokenizer.from_folder(folder)
    added = ["<|im_start|>", "<think>", "<|im_end|>", "[PAD]", "<x>"]
    assert tokenizer.encode("".join(added)) == [258, 259, 260, 261, 262]
    assert tokenizer.decode([258, 259, 260, 261, 262]) == "<think>"
    assert tokenizer.eos_token_ids == (260,)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"added_tokens_decoder": {"300": _stated("<x>")}}},
            r"tokenizer_config.json: the id of token '<x>' is 300 here, but 258 in the .*\. Save",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"258": _stated("<|in|>")}}},
            "the id of token '<|in|>' is 258 here, but 256 in",
        ),
        (
            {"added_tokens": {"<x>": 259}},
            r"added_tokens.json: the id of token '<x>' is 259 here, but 258 in",
        ),
        ({"added_tokens": {"<x>": 257}}, "the id of token '<x>' is 257 here, but None in"),
        ({"added_tokens": {"<x>": "a"}}, "added_tokens.json: token ids must be integers, got 'a'"),
        (
            {"tokenizer_config": {"added_tokens_decoder": ["<x>"]}},
            "added_tokens_decoder must be an object, got",
        ),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token must be a token such as .*, got 5"),
        (
            {"special_tokens_map": {"eos_token": {"id": 5}}},
            "special_tokens_map.json: eos_token must be a token such as .*, got {'id': 5}",
        ),
        (
            {"tokenizer_config": {"extra_special_tokens": "<x>"}},
            "extra_special_tokens must be a list of tokens or an object, got '<x>'",
        ),
    ],
)
def test_from_folder_rejects_special_tokens_that_do_not_fit(tmp_path, files, message):
    folder = _write(tmp_path, **files)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder)


_TEMPLATES = {
    "none": None,
    "start": ["<|old|>", "$A"],
    "end": ["$A", "<|old|>"],
    "both": ["<|old|>", "$A", "<|old|>"],
}


@pytest.mark.parametrize("adds_bos", [None, False, True])
@pytest.mark.parametrize("adds_eos", [None, False, True])
@pytest.mark.parametrize("template", _TEMPLATES)
def test_encode_leaves_a_token_that_is_bos_and_eos_to_tokenizer_json(
    tmp_path, adds_bos, adds_eos, template
):
    backend, single = _backend(), _TEMPLATES[template]
    if single is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=[("<|old|>", 257)]
        )
    config = {"bos_token": "<|old|>", "eos_token": "<|old|>"}
    adds = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    config |= {key: value for key, value in adds.items() if value is not None}
    folder = _write(tmp_path, backend, tokenizer_config=config)
    # transformers.PreTrainedTokenizerFast encodes all of them like the tokenizers library.
    assert Tokenizer.from_folder(folder).encode("ab") == backend.encode("ab").ids


@pytest.mark.peers
@pytest.mark.parametrize("template", _TEMPLATES)
def test_transformers_leaves_a_token_that_is_bos_and_eos_to_tokenizer_json(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    backend, single = _backend(), _TEMPLATES[template]
    if single is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=[("<|old|>", 257)]
        )
    config = {"bos_token": "<|old|>", "eos_token": "<|old|>", "add_bos_token": False}
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(
        _write(tmp_path, backend, tokenizer_config=config)
    )
    assert theirs.encode("ab") == backend.encode("ab").ids


@pytest.mark.parametrize("indent", [None, 2])
def test_from_folder_rejects_a_tokenizer_json_with_wrong_ids(tmp_path, indent):
    content = json.loads(_backend().to_str())
    [token] = content["added_tokens"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).encode("<|old|>") == [257]
    token["id"] = 300
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")
    rule = r"tokenizer.json: the id of token '<\|old\|>' is 300 here, but 257 in"
    with pytest.raises(TokenizerError, match=rule):
        Tokenizer.from_folder(tmp_path)


_CLASSES = {
    "GPT2Tokenizer": ["<|endoftext|>"],
    "Qwen2TokenizerFast": ["<|endoftext|>"],
    "LlamaTokenizer": ["<unk>", "<s>", "</s>"],
    "GemmaTokenizerFast": ["<unk>", "<pad>", "<bos>", "<eos>", "<mask>"],
}


@pytest.mark.peers
@pytest.mark.parametrize("name", _CLASSES)
@pytest.mark.parametrize("stated", [{}, {"eos_token": "a"}, {"unk_token": None}])
def test_from_folder_uses_default_names_of_the_tokenizer_class(tmp_path, name, stated):
    transformers = pytest.importorskip("transformers")
    tokens = _CLASSES[name]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate([*tokens, "▁", "a", "b"])}, [])
    )
    _write(tmp_path, backend, tokenizer_config={"tokenizer_class": name, **stated})
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    special = [token for token, token_id in theirs.get_added_vocab().items()]
    assert [token for token in special if not ours.is_special(theirs.get_vocab()[token])] == []


@pytest.mark.peers
@pytest.mark.parametrize("splits", [False, True, None])
def test_encode_splits_special_tokens_if_configured(tmp_path, splits):
    transformers = pytest.importorskip("transformers")
    config = {"eos_token": "<|old|>"} | ({} if splits is None else {"split_special_tokens": splits})
    folder = _write(tmp_path, tokenizer_config=config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert Tokenizer.from_folder(folder).encode(_TEXT) == theirs.encode(_TEXT)
    assert (257 in theirs.encode(_TEXT)) == (not splits)


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({"add_eos_token": True}, ["<|a|>", "<|b|>"], ["<|end|>"]),
        ({"add_bos_token": True}, ["<|old|>", "<|a|>", "<|b|>"], []),
        ({"add_bos_token": False, "add_eos_token": None}, ["<|a|>", "<|b|>"], []),
    ],
)
def test_encode_keeps_other_tokens_of_the_post_processor(tmp_path, config, before, after):
    """In GLM each text starts with two tokens that are not BOS."""
    backend = _backend()
    backend.add_special_tokens(["<|a|>", "<|b|>", "<|end|>"])
    tokens = [(token, backend.token_to_id(token)) for token in ("<|a|>", "<|b|>")]
    backend.post_processor = processors.TemplateProcessing(
        single=["<|a|>", "<|b|>", "$A"], pair=None, special_tokens=tokens
    )
    names = {"bos_token": "<|old|>", "eos_token": "<|end|>"}
    tokenizer = Tokenizer.from_folder(
        _write(tmp_path, backend, tokenizer_config={**names, **config})
    )
    body = tokenizer.encode("ab", add_special_tokens=False)
    before, after = (list(map(backend.token_to_id, each)) for each in (before, after))
    assert tokenizer.encode("ab") == [*before, *body, *after]
