"""Where the figures of a benchmark go: a file, and a picture where matplotlib is installed."""

import argparse
from pathlib import Path
from typing import Any


class PlotUnavailable(RuntimeError):
    """Matplotlib is not installed."""


def plotter() -> Any:
    """Matplotlib's pyplot, drawing into files.

    Raises:
      PlotUnavailable: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotUnavailable("matplotlib is missing. Run `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """The options --json and --plot, the latter refused at once where matplotlib is missing."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw them there, as PNG or SVG"
    )


def _picture(path: str) -> Path:
    try:
        plotter()
    except PlotUnavailable as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(path)
