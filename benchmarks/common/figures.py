"""Output of benchmarks: a file, and a plot if matplotlib is installed."""

import argparse
from pathlib import Path
from typing import Any


class PlotUnavailable(RuntimeError):
    """Matplotlib is not installed."""


def plotter() -> Any:
    """Return Matplotlib's pyplot, with a backend that writes files.

    Raises:
      PlotUnavailable: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotUnavailable("matplotlib is missing. Run `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options --json and --plot. --plot is an error if matplotlib is missing."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw the results, as PNG or SVG"
    )


def _picture(path: str) -> Path:
    try:
        plotter()
    except PlotUnavailable as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(path)
