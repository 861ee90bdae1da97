"""Progress bars and status lines on stderr, and profiles of `jax.profiler`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax

_LOADING_DELAY = 0.5


def is_interactive() -> bool:
    """Return whether stderr is a terminal or the output of a notebook."""
    return sys.stderr.isatty() or _is_notebook()


class Status:
    """Progress bar and status line on stderr.

    While a bar is shown, `say` writes the status line at the left end of the bar. Call `clear`
    before other text is written to stderr.

    Args:
      is_shown: whether bars are shown; None shows them on a terminal and in a notebook.
      has_lines: whether `say` also writes status lines while no bar is shown. On a terminal, each
        status line replaces the previous one; elsewhere, each is written on a line of its own.

    Example:
      >>> status = Status(is_shown=False)
      >>> with status.bar("requests", unit="req", total=2):
      ...     status.advance(1)
    """

    def __init__(self, *, is_shown: bool | None = None, has_lines: bool = False):
        self._stream = sys.stderr
        self._is_shown = is_interactive() if is_shown is None else is_shown
        self._has_lines = has_lines
        self._width = 0
        self._is_muted = False
        self._bar: Any = None
        self._title = ""

    @contextlib.contextmanager
    def bar(
        self,
        title: str,
        *,
        unit: str,
        total: int | None = None,
        delay: float = 0.0,
        leave: bool = True,
    ) -> Iterator[None]:
        """Show a progress bar during the ``with`` statement.

        Args:
          title: text at the left end of the bar.
          unit: unit of `total`. Bytes (``"B"``) are shown with prefixes such as ``M``.
          total: number of units; None if it is not known yet.
          delay: seconds before the bar appears, so that no bar is shown for work that ends sooner.
          leave: whether the bar stays visible after the ``with`` statement.
        """
        if not self._is_shown:
            yield
            return
        # Import tqdm.auto only here: it checks at its import whether this is a notebook.
        from tqdm.auto import tqdm

        self.clear()
        self._title = title
        try:
            with tqdm(
                total=total,
                desc=title,
                unit=unit,
                unit_scale=unit == "B",
                delay=delay,
                leave=leave,
                file=_file(self._stream),
            ) as self._bar:
                yield
        finally:
            self._bar = None

    def advance(self, num: int, note: Callable[[float], str] | None = None) -> None:
        """Advance the bar by `num` units.

        Args:
          num: number of units done since the last call.
          note: function that takes the seconds since the bar was created, and returns a text for
            the right end of the bar, such as the speed.
        """
        if self._bar is None:
            return
        self._bar.update(num)
        if self._bar.desc != self._title:
            self._bar.set_description_str(self._title)
        elapsed = self._bar.format_dict["elapsed"]
        if note is not None and elapsed:
            self._bar.set_postfix_str(note(elapsed), refresh=False)

    def move_to(self, num_done: int, total: int, name: str) -> None:
        """Set the bar to `num_done` of `total` units, and show `name` at its right end."""
        if self._bar is None:
            return
        if self._bar.total != total:
            self._bar.reset(total)
        self._bar.set_postfix_str(name, refresh=False)
        self._bar.update(num_done - self._bar.n)

    def say(self, line: str) -> None:
        """Show a status line, in the bar if a bar is shown. It replaces the previous one."""
        if self._is_muted:
            return
        if self._bar is not None:
            self._bar.set_description_str(line)
        elif self._has_lines:
            self.clear()
            self._width = len(line) + 4
            end = "" if self._stream.isatty() else "\n"
            print(f"{line} ...", end=end, file=self._stream, flush=True)

    def clear(self) -> None:
        """Erase the bar or the status line. The bar appears again at its next update."""
        if self._bar is not None:
            self._bar.clear()
        if self._width and self._stream.isatty():
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
        self._width = 0

    def mute(self) -> None:
        """Make `say` do nothing until `unmute`, so that it cannot overwrite text on the line."""
        self._is_muted = True

    def unmute(self) -> None:
        """Undo `mute`."""
        self._is_muted = False

    def leave_line(self) -> None:
        """Move the cursor to an empty line, so that an error message can be written.

        This erases the bar or the status line. After `mute`, the line has other text, and the
        cursor moves to the next line.
        """
        self.clear()
        if self._is_muted and self._stream.isatty():
            print(file=self._stream, flush=True)
        self.unmute()


@contextlib.contextmanager
def loading_bar(num_bytes: int, *, is_shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while weights are loaded. Only process 0 shows it.

    Args:
      num_bytes: total number of bytes to load.
      is_shown: whether the bar is shown; None shows it on a terminal and in a notebook, if loading
        takes longer than `_LOADING_DELAY` seconds.

    Yields:
      A function that advances the bar. Its argument is the number of bytes loaded since the last
      call.
    """
    if is_shown is False or jax.process_index():
        yield lambda num: None
        return
    status = Status(is_shown=is_shown)
    delay = _LOADING_DELAY if is_shown is None else 0.0
    with status.bar("loading weights", unit="B", total=num_bytes, delay=delay, leave=False):
        yield status.advance


def _is_notebook() -> bool:
    """Return whether this process is a Jupyter kernel. `tqdm` uses the same test."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    return "IPKernelApp" in getattr(shell, "config", ())


def _file(stream: TextIO) -> TextIO | None:
    """Return the `file` argument of tqdm for a stream.

    For stderr this is None, tqdm's default: with an explicit file, notebooks would show no widget.
    """
    return None if stream is sys.stderr else stream


def check_profile_folder(folder: str) -> None:
    """Create the folder of ``--profile``. A bad path then fails before the model is loaded.

    Raises:
      ValueError: the folder cannot be created.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--profile must be a folder to write to, got {folder}: {error.strerror}."
        ) from None


def start_profile(folder: str) -> None:
    """Start to record a profile of all threads.

    `jax.profiler.stop_trace` ends the recording and writes the files.

    Args:
      folder: folder for the files.

    Raises:
      RuntimeError: a profile is being recorded already.
    """
    options = jax.profiler.ProfileOptions()
    # Do not record Python calls: they would hide the annotations of the engine's work.
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)


@contextlib.contextmanager
def profiled(folder: str | None) -> Iterator[None]:
    """Record a profile into `folder` during the ``with`` statement. None records nothing."""
    if folder is None:
        yield
        return
    start_profile(folder)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
