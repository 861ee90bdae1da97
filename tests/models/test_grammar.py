"""Grammars over the tokens of the bundled model: allowed tokens, forced tokens and ends."""

import json
import re
import sys
import time
import weakref
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, normalizers

from paged_jax import SamplingParams, StructuredOutputsParams, Tokenizer
from paged_jax.arguments import ArgumentError
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.grammar import GrammarCompiler, GrammarCursor
from paged_jax.models.text.grammar_source import split_labels
from tests.support.structured import PERSON
from tests.support.tiny_model import EOS

V = 1536


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_folder())


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.backend, V, [EOS])


@pytest.fixture(scope="module")
def start(grammars):
    """Return a function that makes a cursor before the first token of a constraint."""

    def make(params: SamplingParams = SamplingParams(), **constraint) -> GrammarCursor:  # noqa: B008
        return GrammarCursor(grammars.compile(StructuredOutputsParams(**constraint)), params)

    return make


def allowed(cursor: GrammarCursor) -> list[int]:
    words = np.zeros(V // 32, np.int32)
    cursor.write_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def walk(cursor: GrammarCursor, rng: np.random.Generator) -> list[int]:
    """Return random allowed tokens up to the end token, which is omitted."""
    token_ids: list[int] = []
    while True:
        cursor.follow(token_ids, 0)
        token_id = cursor.forced[0] if cursor.forced else int(rng.choice(allowed(cursor)))
        if token_id == EOS:
            return token_ids
        token_ids.append(token_id)


def is_person(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "is_old"] and len(value["name"]) <= 4


@pytest.mark.parametrize(
    ("constraint", "is_allowed"),
    [
        ({"regex": "(red|green) [0-9]{2,4}!?"}, re.compile("(red|green) [0-9]{2,4}!?").fullmatch),
        ({"choice": [f"{index}" for index in range(3000)]}, lambda text: int(text) < 3000),
        ({"choice": ["yes", 'per"haps\n', "caf\u00e9"]}, ["yes", 'per"haps\n', "caf\u00e9"].count),
        ({"grammar": 'start: "a" b\nb: /[xyz]/ | "(" b ")"'}, re.compile(r"a\(*[xyz]\)*").match),
        ({"json": PERSON}, is_person),
        ({"json": json.dumps(PERSON)}, is_person),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_random_tokens_follow_the_constraint(start, tokenizer, constraint, is_allowed) -> None:
    rng = np.random.default_rng(0)
    texts = [tokenizer.decode(walk(start(**constraint), rng)) for _ in range(12)]
    assert all(map(is_allowed, texts)), texts
    assert len(set(texts)) > 2


@pytest.mark.parametrize(
    "labels",
    [
        [f"label {index}" for index in range(5000)],
        [str(index) for index in range(9000)],
        [f'"{index}"\n' for index in range(5000)],
        [*range(4000), *map(str, range(4000)), None, {"a": [1]}],
    ],
    ids=["words", "digits", "escapes", "kinds"],
)
def test_enum_with_thousands_of_labels_is_followed(start, tokenizer, labels) -> None:
    rng = np.random.default_rng(0)
    schema = {"type": "object", "properties": {"it": {"enum": labels}}, "required": ["it"]}
    lark = f"start: call\ncall: %json {json.dumps({**schema, 'additionalProperties': False})}"
    for constraint in ({"json": schema}, {"grammar": lark}):
        text = tokenizer.decode(walk(start(**constraint), rng))
        assert json.loads(text)["it"] in labels, text


@pytest.mark.parametrize("name", ["anyOf", "oneOf"])
def test_union_of_thousands_of_constants_is_followed(start, tokenizer, name) -> None:
    """A union of constants, some with a title, like an enum."""
    labels = [{"const": str(index), "title": "a"} for index in range(1000)]
    schema = {name: [*labels, *({"const": f"n{index}"} for index in range(4000))]}
    value = json.loads(tokenizer.decode(walk(start(json=schema), np.random.default_rng(0))))
    assert 0 <= int(value.removeprefix("n")) < (4000 if value.startswith("n") else 1000)


def test_split_labels_reads_nested_unions_a_few_times() -> None:
    """Reading the inner unions of all 400 levels took seconds."""
    inner = f'{{"type": [{",".join("1" * 40_000)}]}}'
    text = '{"anyOf": [' * 400 + inner + "]}" * 400
    start = time.process_time()
    assert split_labels(StructuredOutputsParams(json={}), text) == ([], text)
    assert time.process_time() - start < 0.5


def test_choice_of_thousands_of_texts_is_followed(start, tokenizer) -> None:
    choice = [str(index) for index in range(9000)]
    text = tokenizer.decode(walk(start(choice=choice), np.random.default_rng(0)))
    assert text in choice


@pytest.mark.parametrize("place", ["$defs", "default", "properties"])
def test_label_fuel_does_not_help_other_parts_of_a_schema(grammars, place) -> None:
    """A pattern that needs 200 MB is rejected, even next to a large enum."""
    enum = {"enum": [*range(9000)]}
    beside = {"properties": {"label": enum}} if place == "properties" else {place: {"all": enum}}
    schema = {"anyOf": [{"type": "string", "pattern": "a?" * 10_000}, {"type": "null"}], **beside}
    with pytest.raises(ArgumentError, match="too big"):
        grammars.compile(StructuredOutputsParams(json=schema))


def test_forced_tokens_follow_the_constraint_up_to_the_end(start, tokenizer) -> None:
    cursor = start(json=PERSON)
    cursor.follow([], 0)
    assert tokenizer.decode(cursor.forced) == '{"name": "'
    token_ids = [7, *cursor.forced, *tokenizer.encode("ab", add_special_tokens=False)]
    cursor.follow(token_ids, 1)  # after a prompt of one token
    assert not cursor.forced, "the name may be longer"
    token_ids += tokenizer.encode('cd"', add_special_tokens=False)
    cursor.follow(token_ids, 1)
    assert tokenizer.decode(cursor.forced) == ', "is_old":'
    token_ids += [*cursor.forced, *tokenizer.encode(" t", add_special_tokens=False)]
    cursor.follow(token_ids, 1)
    assert tokenizer.decode(cursor.forced[:-1]) == "rue}" and cursor.forced[-1] == EOS
    cursor.reset()
    cursor.follow(token_ids[:1], 1)
    assert tokenizer.decode(cursor.forced) == '{"name": "'


def test_mask_allows_end_and_continuation(start, tokenizer) -> None:
    cursor = start(regex="a(bc)?")
    cursor.follow(tokenizer.encode("a", add_special_tokens=False), 0)
    assert not cursor.forced
    assert {tokenizer.decode([token_id]) for token_id in allowed(cursor)} == {"", "b"}


def test_mask_excludes_the_end_before_min_tokens_if_the_constraint_continues(
    start, tokenizer
) -> None:
    def id_of(character: str) -> int:
        [token_id] = tokenizer.encode(character, add_special_tokens=False)
        return token_id

    ends = {EOS: "end", id_of("b"): "b"}

    def ends_after(text: str, regex: str, **options) -> set[str]:
        """Return the ends that may follow a text, and "only" if no other token may follow."""
        params = SamplingParams(stop_token_ids=[id_of("b")], min_tokens=2, **options)
        cursor = start(regex=regex, params=params)
        cursor.follow([*map(id_of, text)], 0)
        found = set(cursor.forced[:1] or allowed(cursor))
        only = set() if found - ends.keys() else {"only"}
        return {ends[each] for each in found & ends.keys()} | only

    assert ends_after("a", "a[bc]*") == set()
    assert ends_after("ac", "a[bc]*") == {"end", "b"}
    assert ends_after("a", "a[bc]*", ignore_eos=True) == {"end"}
    # Only ends can follow, so min_tokens is ignored.
    assert ends_after("a", "ab?") == {"end", "b", "only"}
    assert ends_after("a", "a") == {"end", "only"}


def test_mask_allows_everything_after_the_end(start, tokenizer) -> None:
    ids = tokenizer.encode("a", add_special_tokens=False)
    for regex in ("a", "ab?"):  # the end is forced, or drawn
        cursor = start(regex=regex, params=SamplingParams(ignore_eos=True))
        cursor.follow(ids, 0)
        assert cursor.ends is (regex == "a")
        assert len(allowed(cursor)) == (V if cursor.ends else 2)
        cursor.follow([*ids, EOS, 7, EOS, 9], 0)
        assert cursor.is_over and not cursor.ends and cursor.failure is None
        cursor.reset()
        cursor.follow(ids, 0)
        assert not cursor.is_over


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        ({}, True),
        ({"required": ["name"]}, True),
        ({"required": ["other"]}, False),
        ({"additionalProperties": {"type": "null"}}, False),
        ({"allOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}]}, False),
        ({"allOf": [{"properties": {"name": {"const": "x"}}, "required": ["name"]}]}, True),
    ],
)
def test_objects_have_only_named_properties(start, tokenizer, schema, is_closed) -> None:
    """If other properties were allowed, an unsure model would write them without end."""
    schema = {"type": "object", "properties": {"name": {"const": "x"}}, **schema}
    cursor = start(json={"type": "array", "items": schema})
    before = '[{"name": "x"'
    cursor.follow(tokenizer.encode(before, add_special_tokens=False), 0)
    texts = [tokenizer.decode([t]) for t in cursor.forced[:1] or allowed(cursor)]
    assert texts == ["}"] if is_closed else "," in texts


def test_mask_allows_all_end_tokens(tokenizer) -> None:
    cursor = GrammarCursor(
        GrammarCompiler(tokenizer.backend, V, [EOS, 77]).compile(_constraint(regex="a+"))
    )
    cursor.follow(tokenizer.encode("a", add_special_tokens=False), 0)
    assert {EOS, 77} < set(allowed(cursor))


def test_compile_returns_the_same_grammar_for_equal_constraints(grammars) -> None:
    assert grammars.compile(_constraint(json=PERSON)) is grammars.compile(
        _constraint(json=dict(PERSON))
    )


def test_failure_of_a_grammar_forces_an_end_token(start) -> None:
    for finds in (lambda cursor: cursor.follow([7], 0), allowed):
        cursor = start(regex="[ab]+")
        cursor.follow([], 0)
        cursor._matcher.consume_token(V - 1)  # as if the grammar had become too complex
        finds(cursor)
        assert "fails parse" in cursor.failure
        assert (cursor.forced or allowed(cursor)) == [EOS]


NAMED = {
    "type": "object",
    "properties": {"Name of": {"const": "Ünï  X"}, "b": {"type": "boolean"}},
    "required": ["Name of", "b"],
    "additionalProperties": False,
}


def _is_named(text: str) -> bool:
    return json.loads(text)["Name of"] == "Ünï  X"


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.Lowercase(),
        normalizers.Replace(" ", ""),
        normalizers.Replace(Regex(" +"), " "),
        normalizers.NFKD(),
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    ],
    ids=lambda normalizer: type(normalizer).__name__,
)
@pytest.mark.parametrize(
    ("constraint", "is_good"),
    [
        ({"json": NAMED}, _is_named),
        (
            {"choice": ["  Hello World  ", "  Hello There"]},
            lambda text: text.startswith("  Hello "),
        ),
        ({"regex": "é  [a-z]{3} /D/"}, lambda text: re.fullmatch("é  [a-z]{3} /D/", text)),
        ({"grammar": 'start: "  A é" B\nB: /x+Y/'}, lambda text: text.startswith("  A éx")),
    ],
)
def test_texts_follow_the_constraint_if_the_tokenizer_changes_texts(
    tokenizer, normalizer, constraint, is_good
) -> None:
    """Such a tokenizer changes a text before it splits it, so the tokens spell another text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.normalizer = normalizer
    changed = Tokenizer(backend)
    grammar = GrammarCompiler(changed.backend, V, [EOS]).compile(_constraint(**constraint))
    for seed in range(3):
        cursor = GrammarCursor(grammar)
        assert is_good(changed.decode(walk(cursor, np.random.default_rng(seed))))
        assert cursor.failure is None


def test_tokens_that_spell_the_forced_text_stay_forced(start) -> None:
    cursor = start(json=NAMED)
    walk(cursor, np.random.default_rng(0))
    assert cursor._is_forced


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"type": "string", "not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
    ],
)
def test_compile_rejects_a_constraint_with_the_reason(grammars, constraint, reason) -> None:
    with pytest.raises(ArgumentError, match=re.escape(reason)) as refusal:
        grammars.compile(_constraint(**constraint))
    assert refusal.value.field == "structured_outputs" and "\n" not in str(refusal.value)


_NAMES = [f"r{index}" for index in range(5000)]
_CHAINS = {
    "rules": {"grammar": "start: r0\n" + "".join(f"{a}: {b}\n" for a, b in pairwise(_NAMES))},
    "references": {
        "json": {
            "$ref": "#/$defs/r0",
            "$defs": {a: {"$ref": f"#/$defs/{b}"} for a, b in pairwise(_NAMES[:3500])},
        }
    },
}
_CHAINS["rules"]["grammar"] += f'{_NAMES[-1]}: "z"'
_CHAINS["references"]["json"]["$defs"]["r3499"] = {"const": "z"}


@pytest.mark.parametrize("name", _CHAINS)
def test_compile_of_deeply_nested_constraints_does_not_crash(start, tokenizer, name) -> None:
    # In a thread with a small stack, as other servers use.
    cursor = start(**_CHAINS[name])
    assert tokenizer.decode(walk(cursor, np.random.default_rng(0))) in ("z", '"z"')


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": "a?" * 10_000}, "too big"),  # would need 200 MB
        ({"regex": "(a{1000}){1000}"}, "too many expressions"),
        ({"grammar": "start: a\n" + "//" * 2**16}, "must have at most 131072 characters, got "),
        ({"json": '{"items":' * 900 + "{}" + "}" * 900}, "nested too deeply"),
    ],
)
def test_compile_rejects_constraints_that_are_too_large(grammars, constraint, reason) -> None:
    with pytest.raises(ArgumentError, match=reason):
        grammars.compile(_constraint(**constraint))


def test_compile_keeps_long_constraints_while_they_are_used(tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer.backend, V, [EOS])
    constraints = [_constraint(regex="a" * 5000 + str(index)) for index in range(12)]
    used = grammars.compile(constraints[0])
    kept = [weakref.ref(grammars.compile(constraint)) for constraint in constraints]
    assert [each() is not None for each in kept] == [True] + [False] * 3 + [True] * 8
    assert grammars.compile(constraints[0]) is used
    short = [weakref.ref(grammars.compile(_constraint(regex=f"a{index}"))) for index in range(80)]
    assert [each() is not None for each in short] == [False] * 16 + [True] * 64


def test_compile_rejects_models_without_support(tokenizer, tiny_folder, monkeypatch) -> None:
    constraint = _constraint(regex="a")
    with pytest.raises(ArgumentError, match="no tokenizer"):
        GrammarCompiler(None, V, [EOS]).compile(constraint)
    with pytest.raises(ArgumentError, match="no end-of-sequence token"):
        GrammarCompiler(tokenizer.backend, V, []).compile(constraint)
    with pytest.raises(ArgumentError, match="cannot read the model's tokenizer"):
        GrammarCompiler(Tokenizer.from_folder(tiny_folder).backend, 42, [EOS]).compile(constraint)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ArgumentError, match=r'pip install "paged-jax\[structured\]"'):
        GrammarCompiler(tokenizer.backend, V, [EOS]).compile(constraint)


def _constraint(**constraint) -> StructuredOutputsParams:
    return StructuredOutputsParams(**constraint)
