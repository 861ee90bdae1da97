"""Tests of the script that writes the values of other libraries."""

import json

from tests.support import family_references, references, write_references
from tests.support.attempts import compute_each


def fail(name: object = "") -> list[str]:
    raise ValueError(f"no {name}\nand more")


def test_compute_each_goes_on_after_failures() -> None:
    def compute(name: str) -> list[str]:
        return fail(name) if name in ("b", "c") else [name]

    values, failures = compute_each("abcd", compute, {"a": ["old"], "b": ["old"]}.get)
    assert values == {"a": ["a"], "b": ["old"], "d": ["d"]}
    assert failures == ["b: ValueError: no b", "c: ValueError: no c"]


def test_a_model_that_fails_keeps_its_stored_values_and_their_versions(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(family_references.families, "initial_models", lambda: {"llama": fail})
    monkeypatch.setattr(family_references, "unchanged", lambda name: None)
    monkeypatch.setattr(family_references, "_versions", lambda: {"transformers": "99"})
    assert family_references.write(tmp_path) == ["llama: ValueError: no "]
    written, stored = (
        json.loads((folder / references.JSON_NAME).read_text())
        for folder in (tmp_path, references.FOLDER)
    )
    assert written["models"] == {"llama": stored["models"]["llama"]}
    assert written["transformers"] == stored["transformers"]


def test_main_runs_all_writers_and_names_failures_last(monkeypatch, capsys) -> None:
    renewed: list[bool] = []
    writers = {"one": fail, "two": lambda folder: ["a model: ValueError"], "three": lambda _: []}
    monkeypatch.setattr(write_references, "WRITERS", writers)
    monkeypatch.setattr(write_references, "write_digests", lambda: renewed.append(True))
    assert write_references.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"failed: one: ValueError: no {write_references.DATA / 'one'}",
        "failed: two: a model: ValueError",
    ]
    assert write_references.main("three") == 0
    assert renewed == [True, True]
