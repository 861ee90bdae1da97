"""Values of other libraries, written to tests/data, and defaults of families.

    python -m tests.support.write_references [NAME ...]        # all by default

It needs the group `peers`, and renews the digests of the folder. The tests themselves only read the
files. Each name is a folder of tests/data, and a module of tests/support whose function `write`
computes its files; ``defaults`` is a file of the package.

If a model fails, the others are written, and the files keep what they have about this model. The
last lines name such models, and the exit status is 1.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import (
    DATA,
    bundled_reference,
    family_defaults,
    family_references,
    saved_configs,
)
from tests.support.attempts import compute_each
from tests.support.data_digests import write_digests

# Functions that write a folder, and return a line for each failure.
WRITERS: dict[str, Callable[[Path], list[str]]] = {
    "defaults": lambda folder: family_defaults.write(),
    "bundled": bundled_reference.write,
    "families": family_references.write,
    "saved_configs": saved_configs.write,
}


def main(*names: str) -> int:
    """Write the named references, or all, and return the exit status."""
    for name in names or WRITERS:
        if name not in WRITERS:
            raise SystemExit(f"write_references: a name must be one of {', '.join(WRITERS)}")

    def write(name: str) -> list[str]:
        return WRITERS[name](DATA / name)

    written, failures = compute_each(names or WRITERS, write, lambda name: None)
    failures += [f"{name}: {line}" for name, lines in written.items() for line in lines]
    write_digests()
    print("\n".join(f"failed: {line}" for line in failures) or "all values are written")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
