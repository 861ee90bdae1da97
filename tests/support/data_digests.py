"""Digests of all files of tests/data, so that no file changes unnoticed.

    python -m tests.support.data_digests        # writes tests/data/SHA256SUMS

The file has the format of sha256sum: `cd tests/data && sha256sum --check SHA256SUMS`.
"""

import hashlib
from pathlib import Path

from tests.support import DATA

DIGESTS = DATA / "SHA256SUMS"
# The results of ahead-of-time compilation have a digest each, and a command that adds new ones.
WITHOUT_DIGEST = (DIGESTS.name, "aot.json")
COMMAND = "python -m tests.support.data_digests"


def compute_digests(folder: Path = DATA) -> dict[str, str]:
    """Return the SHA-256 of each file by its path, without `WITHOUT_DIGEST` and bytecode."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in WITHOUT_DIGEST and path.parent.name != "__pycache__"
    }


def read_digests(path: Path = DIGESTS) -> dict[str, str]:
    """Return the digests that are stored in a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def write_digests(folder: Path = DATA) -> None:
    """Write the digests of a folder to its file SHA256SUMS."""
    lines = [f"{digest}  {name}\n" for name, digest in compute_digests(folder).items()]
    (folder / DIGESTS.name).write_text("".join(lines), encoding="utf-8")


def describe_changes(folder: Path = DATA) -> list[str]:
    """Return a line for each file that is new, missing, or differs from its stored digest."""
    stored, found = read_digests(folder / DIGESTS.name), compute_digests(folder)
    lines = [f"{name} is missing" for name in sorted(stored.keys() - found.keys())]
    lines += [f"{name} has no digest" for name in sorted(found.keys() - stored.keys())]
    both = sorted(stored.keys() & found.keys())
    return lines + [f"{name} has changed" for name in both if stored[name] != found[name]]


if __name__ == "__main__":
    write_digests()
