"""Tests of keys that send requests with equal prompt prefixes to the same server."""

import json

import pytest

from paged_jax.server.affinity import prompt_key, prompt_text

STORY = "Once upon a time there was a castle on a hill. "
SYSTEM = {"role": "system", "content": STORY * 6}


def key(**body) -> str | None:
    return prompt_key(json.dumps(body).encode())


def test_prompt_key_is_equal_for_equal_first_blocks() -> None:
    assert key(prompt=STORY * 6 + "A", max_tokens=3) == key(prompt=STORY * 6 + "B", stream=True)
    assert key(prompt=STORY * 6) != key(prompt="T" + STORY * 6)


def test_prompt_key_ignores_a_partial_last_block() -> None:
    blocks = "a" * 64 + "b" * 64
    assert key(prompt=blocks) == key(prompt=blocks + "c" * 63) != key(prompt=blocks + "c" * 64)


def test_prompt_key_of_a_short_prompt_covers_all_of_it() -> None:
    assert key(prompt="It is") == key(prompt="It is") != key(prompt="It was")


def test_prompt_key_of_a_conversation_stays_equal() -> None:
    first = [SYSTEM, {"role": "user", "content": "Who?"}]
    later = [*first, {"role": "assistant", "content": "A king."}, {"role": "user", "content": "?"}]
    # The same message with its fields in another order.
    other = [dict(reversed(SYSTEM.items())), *later[1:]]
    assert key(messages=first) == key(messages=later) == key(messages=other)
    assert key(messages=first) != key(messages=first, tools=[{"type": "function"}])


def test_prompt_key_accepts_token_ids() -> None:
    ids = list(range(200))
    assert key(prompt=ids) == key(prompt=[ids, [1]]) == key(prompt_token_ids=[*ids, 7])
    assert key(prompt=ids) != key(prompt=ids[1:])
    assert key(prompt=[STORY, "other"]) == key(prompt=STORY)


def test_prompt_key_depends_on_prompt_cache_key() -> None:
    keys = {key(prompt=STORY * 6, prompt_cache_key=name) for name in (None, "a", "b")}
    assert len(keys) == 3 and key(prompt=STORY * 6) in keys


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b'"text"', b"{}", b'{"prompt": null}', b'{"prompt": []}',
     b'{"prompt": {"a": 1}}', b'{"prompt": 5}', b'{"messages": []}', b'{"prompt": [[]]}', b"\xff"],
)  # fmt: skip
def test_prompt_key_is_none_without_a_prompt(body) -> None:
    assert (prompt_text(body), prompt_key(body)) == ("", None)


def test_prompt_key_accepts_malformed_bodies() -> None:
    nested = b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    for body in (nested, b'{"prompt": "\\ud800"}', b'{"messages": "\\ud800"}', b'{"prompt": [{}]}'):
        assert prompt_key(body) is None or len(prompt_key(body) or "") == 64
