"""Tests of refused skips and of the report of failures."""

import pytest

from tests.support import ROOT

OPTIONS = ("-p", "tests.support.verdicts", "-p", "no:cacheprovider")


@pytest.mark.parametrize("processes", [0, 1])
def test_skips_fail_unless_their_reason_is_allowed(pytester, monkeypatch, processes) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        test_a="""
        import pytest
        def test_right(): pytest.skip("no Docker here")
        def test_wrong(): pytest.skip("no time")
        @pytest.mark.skipif(True, reason="too old")
        def test_marked(): pass
        @pytest.mark.xfail(strict=True)
        def test_expected(): assert False
        """,
        test_b="import pytest; pytest.importorskip('no_such_package')",
    )
    # Without this option, an error of the collection ends a run in one process.
    proceed = "--continue-on-collection-errors"
    result = pytester.runpytest_subprocess(*OPTIONS, proceed, "-n", str(processes))
    result.assert_outcomes(skipped=1, failed=1, errors=2, xfailed=1)
    result.stdout.fnmatch_lines(["FAILED test_a.py::test_wrong (call)", "skipped*no time"])
    result.stdout.fnmatch_lines(["FAILED test_b.py (collection)"])


def test_failures_are_written_when_they_happen(pytester) -> None:
    pytester.makepyfile("""
        from pathlib import Path
        def test_one(): assert 1 == 2, "one is not two"
        def test_two(): assert "one is not two" in Path("failures").read_text()
    """)
    result = pytester.runpytest_inprocess(*OPTIONS, "--failures-to", "failures")
    result.assert_outcomes(failed=1, passed=1)
