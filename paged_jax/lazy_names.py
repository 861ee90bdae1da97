"""Packages whose public names are imported at their first use."""

from collections.abc import Callable
from typing import Any

import lazy_loader


def attach_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package with lazy names.

    An `AttributeError` while the module of a name is imported becomes an `ImportError` with its
    text. Python would report only that it "cannot import name".

    Args:
      package: name of the package.
      file: path of its ``__init__.py``. ``__init__.pyi`` lists the names and their modules.
    """
    get, list_names, names = lazy_loader.attach_stub(package, file)

    def get_or_explain(name: str) -> Any:
        try:
            return get(name)
        except AttributeError as error:
            if name not in names:
                raise
            raise ImportError(
                f"{package}: {name} cannot be imported: {error}. Check that the installed "
                "libraries fit together.",
                name=package,
            ) from error

    return get_or_explain, list_names, names
