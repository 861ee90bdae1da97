"""Tokenizers of GGUF files, compared with recorded tokens of llama.cpp, and with llama.cpp itself.

The vocabularies are small: the bytes or letters, and a few merges. The expected tokens were
recorded from llama-cpp-python 0.3.36. Where it is installed, they are compared again, and texts of
`PAGED_JAX_TEST_DATA` too.
"""

import hashlib
import math
import random
import warnings

import gguf
import numpy as np
import pytest

from paged_jax.models.gguf_file import GgufFile
from paged_jax.models.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from paged_jax.models.text.gguf_tokenizer import read_gguf_tokenizer
from paged_jax.models.text.special_tokens import TokenizerError
from paged_jax.models.text.tokenizer import Tokenizer
from tests.support.gguf_files import write

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# The character of each byte in the vocabulary of GPT-2 (`bytes_to_unicode` of OpenAI): printable
# bytes stand for themselves, and the n-th of the other bytes for the character 256 + n.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
              *range(ord("®"), ord("ÿ") + 1)]  # fmt: skip
_CHAR_OF = {
    byte: chr(code)
    for code, byte in [
        *zip(_PRINTABLE, _PRINTABLE, strict=True),
        *enumerate((byte for byte in range(256) if byte not in _PRINTABLE), 256),
    ]
}
TEXT = "  I'LL  pay 12345€, McDonald's\n\n\tdéjà <|im_end|> 中文字123 x--y\r\n9"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
_ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]


def byte_level(pre="smollm", **changes):
    """Return the metadata of a byte-level tokenizer whose words merge into one token each.

    The vocabulary has all pairs of letters, spaces and digits, so the tokens show where words end.
    """
    chars = [_CHAR_OF[byte] for byte in range(256)]
    letters = [_CHAR_OF[ord(char)] for char in "ILMcDonaldspyx 0123459'\n"]
    pairs = [(left, right) for left in letters for right in letters]
    merges = [*pairs, *((left + right, right) for left, right in pairs)]
    words = list(dict.fromkeys(left + right for left, right in merges))
    tokens = [*_ENDS, *chars, *words]
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    return _metadata(
        {
            "model": "gpt2",
            "pre": pre,
            "tokens": tokens,
            "token_type": types,
            "merges": [f"{left} {right}" for left, right in merges],
            "bos_token_id": 0,
            "eos_token_id": 0,
            **changes,
        }
    )


def sentencepiece(**changes):
    """Return the metadata of a SentencePiece tokenizer, whose scores decide what merges first."""
    pieces = ["▁a", "an", "▁an", "▁and", "nd", "aa", "aaa", "▁▁", "▁▁▁▁", "an▁", "▁t", "▁the", "he"]
    letters = [*"▁andthe.,é"]
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256
    types += [NORMAL] * (len(pieces) + len(letters))
    scores = [0.0] * 260 + [float(-i) for i in range(len(pieces) + len(letters))]
    return _metadata(
        {
            "model": "llama",
            "tokens": [*tokens, *pieces, *letters],
            "token_type": types,
            "scores": scores,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            **changes,
        }
    )


def gemma4(**changes):
    """Return the metadata of a tokenizer that merges characters, in the order of its merges."""
    pairs = "a n,▁ an,▁an d,▁ ▁,▁▁ ▁▁,\n \n,t h,▁ th,▁th e,n d,a a,aa a"
    merges = [tuple(pair.split(" ")) for pair in pairs.split(",")]
    entries = sentencepiece()
    num_bytes = entries["tokenizer.ggml.tokens"].index("<0xFF>") + 1
    tokens = entries["tokenizer.ggml.tokens"][:num_bytes]
    tokens += [*"▁andthe.,é\n", *(left + right for left, right in merges)]
    types = entries["tokenizer.ggml.token_type"][:num_bytes]
    return _metadata(
        {
            "model": "gemma4",
            "tokens": tokens,
            "token_type": types + [NORMAL] * (len(tokens) - num_bytes),
            "scores": [0.0] * len(tokens),
            "merges": [f"{left} {right}" for left, right in merges],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            "add_bos_token": True,
            "add_space_prefix": False,
            **changes,
        }
    )


def _metadata(entries):
    known = {f"tokenizer.ggml.{k}": v for k, v in entries.items() if v is not None and "." not in k}
    others = {key: value for key, value in entries.items() if "." in key}
    return {"general.architecture": "llama", **known, **others}


def load(tmp_path, metadata, name="m"):
    return Tokenizer.from_folder(write(tmp_path / f"{name}.gguf", metadata, {}))


def pieces(tokenizer, text, **options):
    return tokenizer.spell(tokenizer.encode(text, **options))


# Tokens of `TEXT` that are the same for all rules, after the first part and before the last.
_MIDDLE = "â Ĥ ¬ , Ġ Mc Do na ld"
_ACCENTS = "ĉ d Ã © j Ã ł Ġ <|im_end|> Ġ ä ¸ Ń æ ĸ ĩ å Ń Ĺ"
_END = "Ġx - - y č Ċ 9"


def expected(start, digits, apostrophe, lines, more_digits):
    return " ".join((start, digits, _MIDDLE, apostrophe, lines, _ACCENTS, more_digits, _END))


_I, _I_WHOLE, _I_ALONE = "Ġ ĠI ' LL Ġ Ġp ay", "Ġ ĠI 'LL Ġ Ġp ay", "Ġ Ġ I' LL Ġ Ġp ay"
_SINGLE, _THREE = "Ġ 1 2 3 4 5", "Ġ 12 3 45"
# Recorded from llama.cpp, by the name of a rule.
RECORDED = {
    "default": expected(_I, _THREE, "' s", "ĊĊ", "12 3"),
    "gpt-2": expected(_I, "Ġ1 23 45", "'s", "ĊĊ", "12 3"),
    "smollm": expected(_I, _SINGLE, "'s", "ĊĊ", "1 2 3"),
    "llama-bpe": expected(_I_WHOLE, _THREE, "'s", "ĊĊ", "12 3"),
    "dbrx": expected(_I, _THREE, "'s", "ĊĊ", "12 3"),
    "glm4": expected(_I_WHOLE, _THREE, "'s", "ĊĊ", "12 3"),
    "qwen2": expected(_I, _SINGLE, "'s", "ĊĊ", "1 2 3"),
    "qwen35": expected(_I, _SINGLE, "'s", "ĊĊ", "1 2 3"),
    "gpt-4o": expected(_I_ALONE, _THREE, "'s", "ĊĊ", "12 3"),
    "tekken": expected(_I_WHOLE, _SINGLE, "'s", "ĊĊ", "1 2 3"),
    "deepseek-v3": expected(_I, _THREE, "'s", "ĊĊ", "12 3"),
    "deepseek-coder": expected(_I, _SINGLE, "' s", "Ċ Ċ", "1 2 3"),
}
# Texts and their pieces, with and without a space before the text.
SPM_RECORDED = {
    "and the an": ("▁and ▁the ▁an", "an d ▁the ▁an"),
    " and  the": ("▁ ▁and ▁▁ t he", "▁and ▁▁ t he"),
    "aaaaa": ("▁a aa aa", "aa aaa"),
    "an and</s> and": ("▁an ▁and </s> ▁ ▁and", "an ▁and </s> ▁and"),
    "   and<tool> and é中": (
        "▁▁ ▁ ▁and <tool> ▁ ▁and ▁ é <0xE4> <0xB8> <0xAD>",
        "▁▁ ▁and <tool> ▁and ▁ é <0xE4> <0xB8> <0xAD>",
    ),
}


@pytest.mark.parametrize("pre", RECORDED)
def test_byte_level_tokens_are_those_of_llama_cpp(tmp_path, pre):
    tokenizer = load(tmp_path, byte_level(pre))
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert " ".join(tokenizer.spell(tokens)) == RECORDED[pre]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == TEXT


def test_sentencepiece_tokens_are_those_of_llama_cpp(tmp_path):
    with_space = load(tmp_path, sentencepiece())
    without = load(tmp_path, sentencepiece(add_space_prefix=False), "no-prefix")
    for text, recorded in SPM_RECORDED.items():
        for tokenizer, expected in zip((with_space, without), recorded, strict=True):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert " ".join(tokenizer.spell(tokens)) == expected
    tokens = without.encode(" and é中", add_special_tokens=False)
    assert without.decode(tokens) == " and é中"
    tokens = with_space.encode("and é中", add_special_tokens=False)
    assert with_space.decode(tokens) == "and é中"


GEMMA4_RECORDED = {
    "and the an": "an d ▁the ▁an",
    " and  the": "▁and ▁▁ th e",
    "an and</s> and": "an ▁and </s> ▁and",
    "   and<tool> and é中": "▁▁ ▁and <tool> ▁and ▁ é <0xE4> <0xB8> <0xAD>",
    "a\n\n\nthe  and\n": "a \n\n \n th e ▁ ▁and \n",
}


def test_gemma4_tokens_are_those_of_llama_cpp(tmp_path):
    tokenizer = load(tmp_path, gemma4())
    for text, recorded in GEMMA4_RECORDED.items():
        tokens = tokenizer.encode(text)
        assert " ".join(tokenizer.spell(tokens)) == f"<s> {recorded}"
        assert tokenizer.decode(tokens[1:], skip_special_tokens=False) == text


def test_names_share_rules(tmp_path):
    assert PRE_TOKENIZERS["starcoder"] is PRE_TOKENIZERS["smollm"]
    assert PRE_TOKENIZERS["llama3"] is PRE_TOKENIZERS["llama-bpe"]
    without = {k: v for k, v in byte_level().items() if not k.endswith(".pre")}
    tokenizer = load(tmp_path, without)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert " ".join(tokenizer.spell(tokens)) == RECORDED["default"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (byte_level(), ["a"]),
        (byte_level("llama-bpe"), ["<|endoftext|>", "a"]),
        (byte_level("llama-bpe", add_bos_token=False), ["a"]),
        (
            byte_level(add_bos_token=True, add_eos_token=True),
            ["<|endoftext|>", "a", "<|endoftext|>"],
        ),
        (byte_level(add_bos_token=True, bos_token_id=None), ["a"]),
        (byte_level(add_bos_token=True, bos_token_id=2**32 - 1), ["a"]),
        (sentencepiece(), ["<s>", "▁a"]),
        (sentencepiece(add_bos_token=False, add_eos_token=True), ["▁a", "</s>"]),
    ],
)
def test_files_say_which_tokens_are_added(tmp_path, metadata, expected):
    tokenizer = load(tmp_path, metadata)
    assert pieces(tokenizer, "a") == expected
    assert pieces(tokenizer, "a", add_special_tokens=False) == [
        each for each in expected if "<" not in each
    ]


def test_special_tokens_and_templates(tmp_path):
    metadata = byte_level(padding_token_id=2) | {
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_template.tool_use": "tools",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.special_tokens == {
        "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"
    }  # fmt: skip
    assert tokenizer.chat_template == TEMPLATE
    chat = tokenizer.encode_chat([{"role": "user", "content": "a<tool>"}])
    assert tokenizer.spell(chat) == ["<|endoftext|>", "a", "<tool>", "<|im_end|>"]
    # User-defined tokens are part of the text, and control tokens are not.
    assert tokenizer.decode(chat) == "a<tool>"
    assert tokenizer.sampling_defaults == {"temperature": 0.5, "top_k": 20}
    assert read_gguf_tokenizer(GgufFile.open(tmp_path / "m.gguf"))["tool_template"] == "tools"


def test_suppressed_tokens_are_never_generated(tmp_path):
    tokenizer = load(tmp_path, byte_level(suppress_tokens=[7, 3, 10**6]))
    bias = tokenizer.generation_config.token_bias(tokenizer.eos_token_ids, vocab_size=64)
    assert dict(zip(bias.ids, bias.values, strict=True)) == {7: -math.inf, 3: -math.inf}
    for wrong in ([-1], ["a"], 7):
        with pytest.raises(TokenizerError, match="suppress_tokens must be a list of token ids"):
            load(tmp_path, byte_level(suppress_tokens=wrong), "wrong")


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"tokenizer.ggml.normalizer.lowercase": False, "general.sampling.xtc_threshold": 0.1}, ""),
        ({"general.sampling.mirostat": 0, "general.sampling.mirostat_tau": 5.0}, ""),
        ({"general.sampling.penalty_last_n": 64, "general.sampling.penalty_repeat": 1.0}, ""),
        (
            {
                "tokenizer.ggml.normalizer.strip_accents": True,
                "tokenizer.ggml.unheard_of": 1,
                "general.sampling.penalty_last_n": 64,
                "general.sampling.penalty_repeat": 1.1,
                "general.sampling.sequence": "topk",
                "general.sampling.mirostat": 2,
                "general.sampling.mirostat_eta": 0.1,
            },
            "general.sampling.mirostat, general.sampling.mirostat_eta, "
            "general.sampling.penalty_last_n, general.sampling.sequence, "
            "tokenizer.ggml.normalizer.strip_accents, tokenizer.ggml.unheard_of",
        ),
    ],
)
def test_entries_without_an_effect_are_named(tmp_path, entries, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path, byte_level() | entries)
    text = f"m.gguf: the metadata must only contain known entries, got {named}. They are ignored"
    assert [text in str(each.message) for each in caught] == [True] * bool(named)


def test_all_entries_of_the_package_gguf_are_known(tmp_path):
    """A file with all entries of a converter loads, and names those that are not supported."""
    named = gguf.constants.Keys.Tokenizer.__dict__.values()
    keys = [key for key in named if isinstance(key, str) and key.startswith("tokenizer.ggml.")]
    entries = {key: 1 for key in keys if key not in byte_level() and key.endswith("_id")}
    entries |= {f"tokenizer.ggml.{key}": True for key in ("add_sep_token", "add_space_prefix")}
    entries |= {"tokenizer.ggml.remove_extra_whitespaces": True}
    entries |= {"tokenizer.ggml.precompiled_charsmap": [1, 2]}
    entries |= {"tokenizer.ggml.token_type_count": 2, "tokenizer.ggml.scores": [0.5]}
    entries |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False}
    assert {*keys} <= {*byte_level(), *entries}
    with pytest.warns(UserWarning, match=r"got tokenizer.ggml.add_sep_token\. They"):
        load(tmp_path, byte_level() | entries)


def test_answers_end_at_all_known_end_tokens(tmp_path):
    tokenizer = load(tmp_path, byte_level(eot_token_id=1))
    assert tokenizer.spell(tokenizer.eos_token_ids) == _ENDS[:3]
    metadata = byte_level()
    harmony = ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"]
    metadata["tokenizer.ggml.tokens"][:4] = harmony
    tokenizer = load(tmp_path, metadata, "harmony")
    assert tokenizer.spell(tokenizer.eos_token_ids) == ["<|return|>", "<|call|>", "<|endoftext|>"]


@pytest.mark.parametrize("merge", ["xy 7z", "7z xy", "xy xy", "xyxy"])
def test_merges_outside_the_vocabulary_are_dropped(tmp_path, merge):
    merges = byte_level()["tokenizer.ggml.merges"]
    tokenizer = load(tmp_path, byte_level(merges=[merge, *merges]))
    usual = load(tmp_path, byte_level(), "usual")
    for text in ("xy7zxy", "xyxy", "I'll xxyy 0123 Mac"):
        assert tokenizer.encode(text) == usual.encode(text)


@pytest.mark.parametrize("name", ["Phi-3 mini", "PHI3", "phi-3.5-MoE", None])
def test_phi3_drops_spaces_after_special_tokens(tmp_path, name):
    """The exceptions are those of llama.cpp: it sets the attribute RSTRIP of the other tokens."""
    metadata = sentencepiece()
    for key, value in ("tokens", "<|endoftext|>"), ("token_type", CONTROL), ("scores", -99.0):
        metadata[f"tokenizer.ggml.{key}"].append(value)
    tokenizer = load(tmp_path, metadata | ({} if name is None else {"general.name": name}))
    for token in ("</s>", "<tool>", "<unk>", "<s>", "<|endoftext|>"):
        strips = name is not None and token in ("</s>", "<tool>")
        found = pieces(tokenizer, f"an{token}  and", add_special_tokens=False)
        assert found == ["▁an", token, *(["▁and"] if strips else ["▁▁", "▁and"])]


def test_huggingface_json_comes_first(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    metadata = byte_level(pre="unknown")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    text = Backend(models.WordLevel(vocab, unk_token="a")).to_str()
    tokenizer = load(tmp_path, metadata | {"tokenizer.huggingface.json": text})
    assert pieces(tokenizer, "zz") == ["a"]
    with pytest.raises(TokenizerError, match="tokenizer.huggingface.json: "):
        load(tmp_path, metadata | {"tokenizer.huggingface.json": "{}"}, "broken")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(pre="my-bpe"), "tokenizer.ggml.pre must be one of default, .*, got 'my-bpe'"),
        (byte_level(model="bert"), "ggml.model must be 'gpt2', 'llama' or 'gemma4', got 'bert'"),
        (byte_level(model=None), "model must be 'gpt2', 'llama' or 'gemma4', got None"),
        (byte_level(tokens=None), "tokenizer.ggml.tokens must be a list of strings"),
        (byte_level(tokens=["a", "a"]), "tokens must be distinct, got 'a' more than once"),
        (byte_level(merges=None), "tokenizer.ggml.merges must be a list of strings"),
        (byte_level(token_type=[1, 1]), "token_type must be a list with a number for each"),
        (byte_level(bos_token_id="x"), "bos_token_id must be an integer, got 'x'"),
        (
            sentencepiece(tokens=[*sentencepiece()["tokenizer.ggml.tokens"][:-1], "a" * 513]),
            "tokens must have at most 512 characters each, got 513",
        ),
        (
            sentencepiece(scores=None),
            "scores must be a list with a number for each of the 283 tokens",
        ),
        (sentencepiece(scores=[float("nan")] * 283), "tokenizer.ggml.scores must be finite"),
        (sentencepiece(tokens=["<unk>", "a"]), "tokens must include a token for each byte"),
        (byte_level() | {"general.sampling.temp": -1.0}, "general.sampling.temp must be finite"),
    ],
)
def test_errors_name_the_entry(tmp_path, metadata, message):
    with pytest.raises(TokenizerError, match=message) as raised:
        load(tmp_path, metadata)
    assert "\n" not in str(raised.value)


# Recorded from llama.cpp with the vocabulary of SmolLM2: number of tokens of each text of the test
# data, and the first digits of the SHA-256 of their ids as int32.
BOOKS = {
    "pride_and_prejudice_gutenberg1342.txt": (167877, "337fccba977ee923"),
    "tinyshakespeare.txt": (341094, "48e900acd0e3537d"),
    "wizard_of_oz_gutenberg55.txt": (64154, "8bbcb80bb8ea466a"),
}
SMOLLM2_TEXT = [
    216, 339, 23, 16421, 216, 2290, 216, 33, 34, 35, 36, 37, 14195, 28, 29212, 506, 1116, 197, 84,
    2756, 90, 16739, 216, 2, 216, 28589, 29184, 36518, 33, 34, 35, 1792, 423, 105, 2738, 41,
]  # fmt: skip


@pytest.mark.slow
def test_a_real_vocabulary_gives_the_tokens_of_llama_cpp(smollm2_file, data_dir):
    tokenizer = Tokenizer.from_folder(smollm2_file)
    assert tokenizer.encode(TEXT) == SMOLLM2_TEXT
    for name, recorded in BOOKS.items():
        text = (data_dir / "text" / name).read_text(encoding="utf-8")
        tokens = tokenizer.encode(text)
        digest = hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest()
        assert (len(tokens), digest[:16]) == recorded
        assert tokenizer.decode(tokens) == text


_PARTS = [
    "a", "McDonald", "XML", "É", "ß", "Ж", "中文", "か", "각", "\U0001d4b3", "\U0001f642", "١",
    "½", "²", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\xa0", "\u3000", "'s", "'LL", "’t",
    "-", "/", "//", "...", "$", "<tool>", "<s>", "<|im_end|>", "22", "4444", "=====", "aaaaaaa",
]  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("metadata", [byte_level, sentencepiece, gemma4])
def test_random_texts_agree_with_llama_cpp(tmp_path, metadata):
    llama_cpp = pytest.importorskip("llama_cpp", reason="no llama-cpp-python")
    rng = random.Random(0)
    texts = ["".join(rng.choices(_PARTS, k=rng.randint(1, 12))) for _ in range(300)]
    names = {byte_level: RECORDED, sentencepiece: ("", "no-prefix"), gemma4: ("",)}[metadata]
    for name in names:
        entries = byte_level(name) if metadata is byte_level else metadata()
        if name == "no-prefix":
            entries |= {"tokenizer.ggml.add_space_prefix": False}
        ours = load(tmp_path, entries, name or "spm")
        peer = llama_cpp.Llama(
            str(tmp_path / f"{name or 'spm'}.gguf"), vocab_only=True, verbose=False
        )
        for text in (TEXT, *texts):
            expected = peer.tokenize(text.encode(), add_bos=True, special=True)
            assert ours.encode(text) == expected, (name, text)
