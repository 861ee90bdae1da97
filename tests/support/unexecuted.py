"""Print the coverage of the package, and the functions that no test executes.

python -m coverage json -o FILE && python -m tests.support.unexecuted FILE
"""

import json
import sys
from pathlib import Path
from typing import Any


def unexecuted(report: dict[str, Any]) -> list[str]:
    """Return ``file: function`` for each function of a report that no test executes."""
    return [
        f"{file}: {name}"
        for file, measured in sorted(report["files"].items())
        for name, function in sorted(measured.get("functions", {}).items())
        if name and function["summary"]["num_statements"] and not function["executed_lines"]
    ]


def main(path: Path) -> None:
    """Print one line with the coverage, and one for each function."""
    report = json.loads(path.read_text())
    names = unexecuted(report)
    percent = report["totals"]["percent_covered"]
    print(
        f"{percent:.1f}% of the lines of the package are executed, {len(names)} functions are not:"
    )
    print("\n".join(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
