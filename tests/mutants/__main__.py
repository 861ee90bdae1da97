"""Run mutants: `python -m tests.mutants` prints which mutants the tests kill.

Each mutant runs the tests that its line in `listed` names. The exit status is 0 if all are killed.
"""

import argparse
import collections
import fnmatch
import json
import sys
import tempfile
from pathlib import Path

from tests.mutants.listed import MUTANTS
from tests.mutants.run import Result, Workshop, run_all

_OUTCOMES = ("killed", "survived", "timeout", "outdated", "error")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="name of a mutant, or a pattern")
    parser.add_argument("--part", action="append", help="run the mutants of a part, or a pattern")
    parser.add_argument(
        "--marker",
        choices=["core", "all"],
        default="all",
        help="core: the tests of `make test`; all: these, and then those of `make test-all`",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="per run")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in MUTANTS
        if _matches(mutant.name, options.names) and _matches(mutant.part, options.part)
    ]
    if not mutants:
        parser.error("no mutant has this name or part")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.part:24} {mutant.name}\n{'':24} {mutant.path}")
        return 0
    shown: dict[str, Result] = {}

    def show(result: Result) -> None:
        """Print a result, and write the file, so that a run that is stopped leaves results."""
        _show(result)
        shown[result.mutant.name] = result
        if options.json:
            rows = [each.as_json() for each in shown.values()]
            options.json.write_text(json.dumps(rows, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="paged_jax_mutants_") as folder:
        workshop = Workshop(Path(folder), limit=options.limit)
        tiers = ["core"] if options.marker == "core" else ["core", "rest"]
        results = run_all(mutants, tiers, workshop, options.jobs, show)
    print(summary(results))
    return int(any(result.outcome != "killed" for result in results))


def _matches(text: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


def _show(result: Result) -> None:
    outcome = f"{result.outcome} ({result.tier})" if result.outcome == "killed" else result.outcome
    text = f"{outcome:14} {result.mutant.part}: {result.mutant.name} ({result.cpu_seconds:.0f} s)"
    print(text + (f"\n    {result.detail}" if result.detail else ""), flush=True)


def summary(results: list[Result]) -> str:
    """Return a table with the number of mutants of each part by outcome."""
    columns = ("killed (core)", "killed (rest)", *_OUTCOMES[1:])
    table = collections.defaultdict(collections.Counter)
    for result in results:
        is_killed = result.outcome == "killed"
        column = f"killed ({result.tier})" if is_killed else result.outcome
        table[result.mutant.part][column] += 1
        table["all"][column] += 1
    lines = ["| Part | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for part in [*sorted(set(table) - {"all"}), "all"]:
        lines.append(f"| {part} | " + " | ".join(str(table[part][c]) for c in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
