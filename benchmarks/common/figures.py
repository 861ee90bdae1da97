"""Matplotlib, where it is installed."""

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
        raise PlotUnavailable("--plot needs matplotlib. Run `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
