"""Options for the model of a benchmark, and its folder."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.process import run_module
from benchmarks.common.shapes import SHAPES
from paged_jax.models.loading.pretrained import bundled_folder


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--shape``."""
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--model", type=Path, metavar="FOLDER", help="model; default: the bundled one"
    )
    weights.add_argument("--shape", choices=SHAPES, help="random weights with this shape")


@contextlib.contextmanager
def model_folder(options: argparse.Namespace, dtype: str = "float32") -> Iterator[Path]:
    """Yield the folder of the model. The folder for a shape is temporary."""
    if options.shape is None:
        yield options.model or bundled_folder()
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.shape
        # Run this in another process, because the tensors would stay in the memory of this process.
        run_module("benchmarks.common.shapes", options.shape, folder, "--dtype", dtype, check=True)
        yield folder


def model_name(options: argparse.Namespace) -> str:
    """Return the name of the model in a report."""
    return options.shape or str(options.model or "bundled")
