"""Tokenizers, chat templates and detokenisation of streams."""

import codecs
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paged_jax.arguments import ArgumentError
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.chat_template import ChatTemplateError
from paged_jax.models.text.detokenizer import Detokenizer
from paged_jax.models.text.tokenizer import Tokenizer, TokenizerError
from tests.support.bundled_reference import read_json

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_fallback():
    """Return a tokenizer like Llama 2: pieces with a mark for the space, and bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "▁▁", "ab", "é"]
    backend = Backend(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _metaspace():
    backend = _byte_fallback()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return backend


def _byte_level():
    """Return a tokenizer like GPT-2, Llama 3 and Qwen: every token is a string of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "Ġa", "ðŁ", "Ļ\u0124", "æĹ"])}
    backend = Backend(models.BPE(vocab, [("Ġ", "a"), ("ð", "Ł"), ("æ", "Ĺ")]))
    backend.add_special_tokens(["<|end|>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


_BACKENDS = {
    "byte_fallback": _byte_fallback(),
    "metaspace": _metaspace(),
    "byte_level": _byte_level(),
}
_TOKENIZERS = {name: Tokenizer(backend) for name, backend in _BACKENDS.items()}


def _write(folder, backend=None, **files):
    (backend or _byte_fallback()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _stream(tokenizer, token_ids, **options):
    stream = Detokenizer(tokenizer, **options)
    return [*map(stream.push, token_ids), stream.finish()]


def test_bundled_tokenizer_matches_transformers():
    tokenizer = Tokenizer.from_folder(bundled_folder())
    stored = read_json()
    assert len(stored["texts"]) > 15
    for item in stored["texts"]:
        assert tokenizer.encode(item["text"]) == item["ids"]
        assert tokenizer.encode(item["text"], add_special_tokens=False) == item["plain_ids"]
        assert tokenizer.decode(item["ids"]) == item["decoded"]
        assert "".join(_stream(tokenizer, item["ids"])) == item["decoded"]
    for item in stored["continuations"]:
        prompt_ids, generated_ids = item["prompt_ids"], item["generated_ids"]
        assert tokenizer.encode(item["prompt"]) == prompt_ids
        assert tokenizer.decode(prompt_ids + generated_ids) == item["text"]
        generated = _stream(tokenizer, generated_ids, continues_text=bool(item["prompt"]))
        assert item["prompt"] + "".join(generated) == item["text"]
    for item in stored["chats"]:
        options = {"add_generation_prompt": False}
        assert tokenizer.apply_chat_template(item["messages"], **options) == item["text"]
        assert tokenizer.encode_chat(item["messages"], **options) == item["ids"]


@pytest.mark.slow
def test_tokenizer_matches_references_of_stories260k(data_dir):
    folder = data_dir / "models" / "stories260K"
    tokenizer = Tokenizer.from_folder(folder)
    items = json.loads((folder / "reference.json").read_text(encoding="utf-8"))["items"]
    assert len(items) == 4
    for item in items:
        token_ids = item["prompt_ids"] + item["generated_ids"]
        assert tokenizer.encode(item["prompt"]) == item["prompt_ids"]
        assert tokenizer.decode(token_ids) == item["text"]
        assert "".join(_stream(tokenizer, token_ids)) == item["text"]
        # After the prompt, the first generated token keeps its leading space.
        prompt = tokenizer.decode(item["prompt_ids"])
        generated = _stream(tokenizer, item["generated_ids"], continues_text=bool(prompt))
        assert prompt + "".join(generated) == item["text"]
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 512
    assert tokenizer.sampling_defaults == {"temperature": 0.0}
    assert tokenizer.chat_template is None


@pytest.mark.slow
def test_tokenizer_matches_references_of_tinyllama(data_dir):
    folder = data_dir / "configs" / "TinyLlama-1.1B-Chat-v1.0"
    tokenizer = Tokenizer.from_folder(folder)
    items = json.loads((folder / "reference_tokenization.json").read_text(encoding="utf-8"))
    assert len(items) > 50
    for item in items:
        assert tokenizer.encode(item["text"], add_special_tokens=False) == item["ids"]
        assert tokenizer.encode(item["text"]) == [1, *item["ids"]]
        assert tokenizer.decode(item["ids"]) == item["text"]
        assert "".join(_stream(tokenizer, item["ids"])) == item["text"]


@pytest.mark.parametrize("bos_in_post_processor", [False, True])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"add_bos_token": True}, [1]),
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 2]),
        ({"add_eos_token": False}, None),
    ],
)
def test_encode_adds_bos_if_the_files_say_so(tmp_path, bos_in_post_processor, config, expected):
    backend = _byte_fallback()
    if bos_in_post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], pair=None, special_tokens=[("<s>", 1)]
        )
    if expected is None:
        expected = [1] if bos_in_post_processor else []
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    folder = _write(tmp_path, backend, tokenizer_config={**names, **config})
    tokenizer = Tokenizer.from_folder(folder)
    body = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == expected[:1] + body + expected[1:]


def test_from_folder_collects_stop_tokens_and_sampling_defaults(tmp_path):
    folder = _write(
        tmp_path,
        special_tokens_map={"eos_token": "</s>", "bos_token": "<s>"},
        tokenizer_config={"bos_token": None},
        generation_config={"eos_token_id": [7, 5], "do_sample": True, "top_p": 0.9, "top_k": 64},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (2, 5, 7)
    assert tokenizer.sampling_defaults == {"top_p": 0.9, "top_k": 64}
    greedy = {"eos_token_id": 9, "do_sample": False, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(greedy), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (2, 9)
    assert tokenizer.sampling_defaults == {"temperature": 0.0}


def test_from_folder_ignores_truncation_and_padding(tmp_path):
    backend = _byte_fallback()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(_write(tmp_path, backend))
    assert len(tokenizer.encode("bbbbb")) == 5


def test_from_folder_rejects_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match="the folder must contain a tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match="Convert tokenizer.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    message = "tokenizer.json: must be a valid file of the tokenizers library"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)
    _write(tmp_path, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match="eos_token_id must be token ids"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", _TOKENIZERS)
@given(data=st.data(), skip_special_tokens=st.booleans())
@settings(max_examples=200, derandomize=True)
def test_detokenizer_matches_decode(name, data, skip_special_tokens):
    tokenizer = _TOKENIZERS[name]
    ids = st.integers(0, tokenizer.vocab_size - 1)
    text = st.text(st.sampled_from("ab é日本🙂\n"), max_size=6).map(tokenizer.encode)
    token_ids = sum(data.draw(st.lists(text | st.lists(ids, max_size=3), max_size=5)), [])
    streamed = "".join(_stream(tokenizer, token_ids, skip_special_tokens=skip_special_tokens))
    whole = _BACKENDS[name].decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens) == streamed
    # The library also replaces characters before invalid bytes.
    if name == "byte_level" or "\ufffd" not in whole:
        assert streamed == whole


@pytest.mark.parametrize("name", _TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, derandomize=True)
def test_detokenizer_continues_a_text(name, data):
    tokenizer = _TOKENIZERS[name]
    head, tail = data.draw(st.lists(st.text("ab é日🙂\n"), min_size=2, max_size=2))
    token_ids = tokenizer.encode(head) + tokenizer.encode(tail)
    whole, first = tokenizer.decode(token_ids), tokenizer.decode(tokenizer.encode(head))
    if first:
        rest = _stream(tokenizer, tokenizer.encode(tail), continues_text=True)
        assert first + "".join(rest) == whole


@pytest.mark.parametrize("name", _TOKENIZERS)
@given(data=st.data(), skip_special_tokens=st.booleans(), continues_text=st.booleans())
@settings(max_examples=200, derandomize=True)
def test_peek_matches_push(name, data, skip_special_tokens, continues_text):
    tokenizer = _TOKENIZERS[name]
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=3)
    text = st.text(st.sampled_from("ab é日🙂\n"), max_size=6).map(tokenizer.encode)
    options = {"skip_special_tokens": skip_special_tokens, "continues_text": continues_text}
    one_by_one, together = Detokenizer(tokenizer, **options), Detokenizer(tokenizer, **options)
    for token_ids in data.draw(st.lists(text | ids, max_size=6)):
        pushed = "".join(map(one_by_one.push, token_ids))
        peeked = together.peek(token_ids)
        assert peeked in (None, pushed)
        if peeked is None:
            assert "".join(map(together.push, token_ids)) == pushed
        else:
            together.accept()
        assert together._pending == one_by_one._pending
    assert together.finish() == one_by_one.finish()


def test_peek_returns_plain_text():
    stream = Detokenizer(_TOKENIZERS["byte_fallback"], continues_text=True)
    assert stream.peek([262, 263]) == " a b"
    assert stream.peek([3 + 0xF0]) is None


def test_detokenizer_keeps_a_character_after_a_dropped_space():
    tokenizer = _TOKENIZERS["byte_fallback"]
    token_ids = [3 + byte for byte in b" \xf0\x9f\x99\x82"]
    assert tokenizer.decode(token_ids) == "🙂"
    assert "".join(_stream(tokenizer, token_ids)) == "🙂"


@pytest.mark.parametrize("name", _TOKENIZERS)
@given(text=st.text(st.sampled_from("ab é日🙂\n\ufffd") | st.characters(codec="utf-8"), max_size=6))
@settings(max_examples=200, derandomize=True)
def test_token_bytes_concatenate_to_the_text(name, text):
    tokenizer = _TOKENIZERS[name]
    token_ids = tokenizer.encode(text)
    # In tokenizers with pieces, the mark of the space also represents a space.
    expected = text if name == "byte_level" else text.replace("▁", " ")
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == expected.encode()


@pytest.mark.parametrize("name", _TOKENIZERS)
def test_token_bytes_of_each_byte(name):
    tokenizer = _TOKENIZERS[name]
    for byte in range(256):
        token_id = tokenizer.backend.token_to_id(_byte_token(byte, name == "byte_level"))
        assert tokenizer.token_bytes(token_id) == bytes([byte])
    special = "<|end|>" if name == "byte_level" else "</s>"
    assert tokenizer.token_bytes(tokenizer.encode(special)[0]) == special.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_token_bytes_of_a_replacement_character_in_the_vocabulary():
    backend = Backend(models.WordLevel({"a": 0, "\ufffd": 1}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    assert Tokenizer(backend).token_bytes(1) == "\ufffd".encode()


def _with_each_byte_replaced(error):
    """Handle errors of `bytes.decode`, which would replace several bytes by one character."""
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("each_byte", _with_each_byte_replaced)
_HALVES = [
    b"\xf0\x9f\x99\x82",
    b"\xf0\x9f\x99",
    b"\xe6\x97\xa5",
    b"\xe6\x97",
    b"\xc3",
    b"\xff",
    b"a",
]


@pytest.mark.parametrize("name", _TOKENIZERS)
@given(parts=st.lists(st.sampled_from(_HALVES) | st.binary(max_size=6), max_size=12))
@settings(max_examples=200, derandomize=True)
def test_detokenizer_replaces_only_invalid_bytes(name, parts):
    data = b"".join(parts)
    tokenizer, is_level = _TOKENIZERS[name], name == "byte_level"
    token_ids = [tokenizer.backend.token_to_id(_byte_token(byte, is_level)) for byte in data]
    stream, pieces = Detokenizer(tokenizer, continues_text=True), []
    for token_id in token_ids:
        pieces.append(stream.push(token_id))
        assert len(stream._pending) <= 3
    text = "".join([*pieces, stream.finish()])
    # With a token per byte each byte becomes a replacement character; otherwise as in Python.
    assert text == data.decode(errors="replace" if is_level else "each_byte")
    assert tokenizer.decode(token_ids, continues_text=True) == text


def _byte_token(byte, is_level):
    if not is_level:
        return f"<0x{byte:02X}>"
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return chr(byte) if byte in visible else chr(256 + others.index(byte))


@pytest.mark.parametrize("name", _TOKENIZERS)
@pytest.mark.parametrize("kind", ["bytes", "unknown"])
def test_detokenizer_does_not_hold_back_tokens_without_text(name, kind):
    tokenizer = _TOKENIZERS[name]
    byte = tokenizer.backend.token_to_id(_byte_token(0xFF, name == "byte_level"))
    stream = Detokenizer(tokenizer)
    token_ids = [byte if kind == "bytes" else 10**6] * 100
    texts = [stream.push(token_id) for token_id in token_ids]
    assert len(stream._pending) <= 3
    assert all(texts[3:]) if kind == "bytes" else not any(texts)


def test_detokenizer_waits_for_tokens_that_split_characters():
    """No prefix of such a text is final."""
    tail, middle, head = "\u0139\u00a5", "\u0139\u00a5\u00e6", "\u00e6"
    backend = Backend(models.BPE({"a": 0, head: 1, middle: 2, tail: 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    for count in (1, 5, 12):
        assert "".join(_stream(tokenizer, [1] + [2] * count + [3])) == "日" * (count + 1)
    texts = _stream(tokenizer, [1] + [2] * 1000)
    assert max(map(len, texts)) < 50


def test_detokenizer_returns_text_as_soon_as_it_is_final():
    tokenizer = _TOKENIZERS["byte_fallback"]
    assert _stream(tokenizer, tokenizer.encode("a\nb")) == ["a", "\n", "b", ""]
    smile = [3 + byte for byte in "🙂".encode()]
    assert _stream(tokenizer, [260, *smile, 260]) == ["a", "", "", "", "🙂", "a", ""]
    assert _stream(tokenizer, smile[:2]) == ["", "", "\ufffd\ufffd"]
    assert _stream(tokenizer, [262, 1, 263]) == ["a", "", " b", ""]
    # Models have more ids than their tokenizer. Such an id does not start the text.
    assert _stream(tokenizer, [10**6, 262, 10**6, 263]) == ["", "a", "", " b", ""]
    # A complete character is final for any next token.
    assert _stream(tokenizer, [*smile, 3 + 0xFF, 260]) == ["", "", "", "🙂", "", "\ufffda", ""]
    assert tokenizer.decode([*smile, 3 + 0xFF, 260]) == "🙂\ufffda"
    assert tokenizer.decode([262], continues_text=True) == " a"
    assert tokenizer.decode([262]) == "a"


def test_apply_chat_template_writes_the_chat(tmp_path):
    config = {"chat_template": "{{ bos_token }}" + _CHATML, "bos_token": "<s>"}
    tokenizer = Tokenizer.from_folder(_write(tmp_path, tokenizer_config=config))
    messages = [{"role": "user", "content": " Hi <b> "}]
    chat = "<s><|im_start|>user\nHi <b><|im_end|>\n"
    assert tokenizer.chat_template is not None
    assert tokenizer.apply_chat_template(messages) == chat + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == chat


def test_apply_chat_template_finds_the_template_in_all_places(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = _write(tmp_path, tokenizer_config={"chat_template": named})
    messages = [{"role": "user", "content": ""}]
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "D"
    (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "J"


@pytest.mark.peers
@pytest.mark.parametrize(
    "template",
    [
        _CHATML,
        "{%- if tools %}tools{%- endif %}\n  {%- if documents is none %}\n none\n{% endif %}",
        "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}\n!",
        "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }} {{ strftime_now('%d %b %Y') }} {{ enable_thinking }}",
    ],
)
def test_apply_chat_template_matches_transformers(template):
    transformers = pytest.importorskip("transformers")
    messages = [
        {"role": "system", "content": "Be <brief> & 'kind' é."},
        {"role": "user", "content": "Hi\n"},
    ]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_fallback())
    for prompt in (False, True):
        options = {"add_generation_prompt": prompt, "enable_thinking": False}
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )
        tokenizer = Tokenizer(_byte_fallback(), chat_template=template)
        assert tokenizer.apply_chat_template(messages, **options) == expected


def test_bundled_model_continues_a_chat() -> None:
    tokenizer = Tokenizer.from_folder(bundled_folder())
    parts = [{"type": "text", "text": "Who are you?"}]
    messages = [{"role": "system", "content": "A ball.\n"}, {"role": "user", "content": parts}]
    text = "A ball.\n\nWho are you?\n\n"
    # The chat begins like every training text.
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [], "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", [], "roles must alternate"),
        ("{{ raise_exception('two\nlines') }}", [], "two lines"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "a"}], "rejects"),
        ("{{ messages[0].x.y }}", [{"role": "user", "content": "a"}], "rejects"),
        ("{{ ''.__class__.__mro__ }}", [], "unsafe"),
        ("{{ messages.append(1) }}", [], "unsafe|not safely callable"),
        (_CHATML, [{"content": "a"}], '"role": "user".*, got {.content'),
        (_CHATML, "a", "each message must be a dict such as .*, got 'a'"),
        (_CHATML, [{"role": "user", "content": 5}], "content must be a text or a list .* got 5"),
        (
            _CHATML,
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "got 'image_url'. Images",
        ),
        (_CHATML, [{"role": "user", "content": [{"type": "text"}]}], "got one without a text"),
        (_CHATML, [{"role": "user", "content": ["Hi"]}], "each part of content must be .* 'Hi'"),
    ],
)
def test_apply_chat_template_rejects_in_one_line(template, messages, message):
    tokenizer = Tokenizer(_byte_fallback(), chat_template=template)
    with pytest.raises(ChatTemplateError, match=message) as raised:
        tokenizer.apply_chat_template(messages)
    assert "\n" not in str(raised.value)


def test_apply_chat_template_joins_the_parts_of_a_message():
    tokenizer = Tokenizer(_byte_fallback(), chat_template=_CHATML)
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    for content, text in ((parts, "Hi there"), (tuple(parts), "Hi there"), ([], ""), (None, "")):
        messages = [{"role": "user", "content": content}]
        expected = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        assert tokenizer.apply_chat_template(messages) == expected
        assert messages == [{"role": "user", "content": content}]


def test_encode_chat_passes_variables_except_reserved_names():
    template = (
        "{{ messages[0].content }}{% if enable_thinking %} a{% endif %}{% if n %}b{% endif %}"
    )
    tokenizer = Tokenizer(_byte_fallback(), chat_template=template)
    messages = [{"role": "user", "content": "ab"}]
    text = tokenizer.apply_chat_template(messages, enable_thinking=True, n=0)
    asked = tokenizer.encode_chat(messages, {"enable_thinking": True, "n": 0})
    assert asked == tokenizer.encode(text) == tokenizer.encode("ab a")
    assert tokenizer.encode_chat(messages) == tokenizer.encode("ab")
    for name in ("messages", "add_generation_prompt", "tokenize", "self", "bos_token", 5):
        with pytest.raises(ChatTemplateError, match=f"own variables, got {name!r}"):
            tokenizer.encode_chat(messages, {name: True})
    with pytest.raises(ChatTemplateError, match="must be a dict, got 5"):
        tokenizer.encode_chat(messages, 5)


def test_tokenizer_rejects_templates_that_are_not_jinja():
    with pytest.raises(ChatTemplateError, match="must be valid Jinja"):
        Tokenizer(_byte_fallback(), chat_template="{% if %}")


def test_is_special_matches_the_tokens_that_decode_omits():
    backend = _byte_fallback()
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = Tokenizer(backend)
    think = backend.token_to_id("<think>")
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think, 2]) == "<think>"
    assert tokenizer.decode([think, 2], skip_special_tokens=False) == "<think></s>"


@pytest.mark.parametrize("text", ["a\udc9fb", "\ud83d"])
def test_lone_surrogates_are_errors_that_name_the_text(text):
    tokenizer = Tokenizer(_byte_fallback(), chat_template="{{ messages[0].content }}")
    for encode in (
        tokenizer.encode,
        tokenizer.offsets,
        lambda text: tokenizer.encode_chat([{"role": "user", "content": text}]),
    ):
        with pytest.raises(ArgumentError, match=r"encode: text must be valid Unicode text, got '"):
            encode(text)
