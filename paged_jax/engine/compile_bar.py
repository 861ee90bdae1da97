"""Shows on a terminal how many programs are compiled."""

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm


@contextlib.contextmanager
def compile_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, and the function that moves it: ``(programs done, all, name of the last)``.

    Where stderr is no terminal, nothing is shown.
    """
    with tqdm(desc="compiling", unit="program", disable=None) as bar:

        def show(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        yield show
