"""JSON files with a wrong entry, for tests that each file is rejected with a one-line error."""

import copy
from collections.abc import Iterator
from typing import Any

# One value of each type, so that every entry gets a wrong type, and numbers out of range.
DAMAGED: tuple[Any, ...] = ("x", None, -1, 0, 1.5, True, [], {}, [None], {"a": {}}, 10**30)


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each entry: of objects in objects, and the first of each list."""
    children: Any = ()
    if isinstance(content, dict):
        children = content.items()
    elif isinstance(content, list):
        children = enumerate(content[:1])
    for key, child in children:
        yield (key,)
        yield from ((key, *place) for place in places(child))


def damage(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a place of `places`."""
    content = copy.deepcopy(content)
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    return content
