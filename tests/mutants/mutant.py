"""A defect of the package, and the tests that must find it."""

import ast
from pathlib import Path
from typing import NamedTuple

from tests.mutants import change
from tests.support import ROOT


class Mutant(NamedTuple):
    """A defect, and the tests that must find it.

    Attributes:
      name: what the package does wrong.
      part: the part of the package that the tests cover, such as ``cache``.
      path: module and function, such as ``paged_jax.cache.block_pool:find``.
      before: see `change.changed_module`.
      after: see `change.changed_module`.
      tests: test files or tests, in the order in which they run.
    """

    name: str
    part: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def function(self) -> str:
        return self.path.partition(":")[2]

    def check(self, root: Path = ROOT) -> None:
        """Raise `change.OutdatedError` if the change no longer fits the source text.

        It also compiles the changed function, or the class of the changed method.
        """
        file = root.joinpath(*self.module.split("."))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if not file.is_file():
            raise change.OutdatedError(f"there is no module {self.module}")
        tree = change.changed_module(file.read_text(), self.function, self.before, self.after)
        changed = [*change.definitions(tree, self.function.partition(".")[0])]
        compile(ast.Module(changed, []), str(file), "exec", dont_inherit=True)


def mutant(name: str, part: str, path: str, before: str, after: str, *tests: str) -> Mutant:
    """Return a `Mutant`; its tests are the last arguments."""
    return Mutant(name, part, path, before, after, tests)
