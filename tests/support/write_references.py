"""Values of other libraries, written to tests/data, and defaults of families.

    python -m tests.support.write_references [NAME ...]        # all by default

It needs the group `peers`, and renews the digests of the folder. The tests themselves only read the
files. Each name is a folder of tests/data, and a module of tests/support whose function `write`
computes its files; ``defaults`` is a file of the package.
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
from tests.support.data_digests import write_digests

WRITERS: dict[str, Callable[[Path], None]] = {
    "defaults": lambda folder: family_defaults.write(),
    "bundled": bundled_reference.write,
    "families": family_references.write,
    "saved_configs": saved_configs.write,
}


def main(*names: str) -> None:
    """Write the named references, or all."""
    for name in names or WRITERS:
        if name not in WRITERS:
            raise SystemExit(f"write_references: a name must be one of {', '.join(WRITERS)}")
    for name in names or WRITERS:
        WRITERS[name](DATA / name)
    write_digests()


if __name__ == "__main__":
    main(*sys.argv[1:])
