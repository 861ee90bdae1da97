"""Selection of quantised modules by name: which module of a checkpoint has which format."""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paged_jax.models.codecs.config_entries import Entries
from paged_jax.models.codecs.module_matrix import ModuleFormat
from paged_jax.models.errors import UnsupportedConfigError

# Names in which no character has a special meaning, except that a dot separates two parts.
_PLAIN_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


@dataclass(frozen=True)
class ModuleRule:
    """Entry of a quantisation config that gives the modules of some names a format.

    Attributes:
      text: the entry as it is written in the config.
      format: format of the modules; None for modules that are not quantised.
      parts: consecutive parts of the names that the entry selects, as in `_split`; empty if `regex`
        selects the modules.
      regex: regular expression. It selects a module if it matches from the start of the name.
    """

    text: str
    format: ModuleFormat | None
    parts: tuple[str, ...] = ()
    regex: re.Pattern[str] = re.compile("")


@dataclass(frozen=True)
class Quantisation:
    """The quantised modules of a checkpoint, and their formats.

    Attributes:
      source: file and key of the quantisation config, for error messages.
      rules: the entries that select modules. The first that selects a module applies.
    """

    source: str
    rules: tuple[ModuleRule, ...]

    @property
    def formats(self) -> list[ModuleFormat]:
        """The formats of all rules."""
        return [rule.format for rule in self.rules if rule.format is not None]

    def format_of(self, module: str) -> ModuleFormat | None:
        """Return the format of a module; None if it is not quantised."""
        rule = self._find(module)
        return None if rule is None else rule.format

    def excluding(self, module: str) -> str | None:
        """Return the config entry that excludes a module from quantisation; None if none does."""
        rule = self._find(module)
        return rule.text if rule is not None and rule.format is None else None

    def names(self, module: str) -> bool:
        """Return whether the entry for a module is its own name, not a pattern or a group."""
        rule = self._find(module)
        return rule is not None and rule.text == module

    def _find(self, module: str) -> ModuleRule | None:
        index = self._index.find(module)
        return None if index is None else self.rules[index]

    @functools.cached_property
    def _index(self) -> "_RuleIndex":
        return _RuleIndex(self.rules)


class _RuleIndex:
    """Finds the first of many rules that selects a module.

    Configs list up to several hundred modules, and a mixture of experts has 100,000 of them, so
    plain names are looked up instead of compared one by one.
    """

    def __init__(self, rules: Sequence[ModuleRule]):
        self._by_parts: dict[tuple[str, ...], int] = {}
        for index, rule in enumerate(rules):
            if rule.parts:
                self._by_parts.setdefault(rule.parts, index)
        self._lengths = sorted({len(parts) for parts in self._by_parts})
        self._others = [(i, rule.regex) for i, rule in enumerate(rules) if not rule.parts]

    def find(self, module: str) -> int | None:
        parts = _split(module)
        indices = [
            self._by_parts[piece]
            for length in self._lengths
            for start in range(len(parts) - length + 1)
            if (piece := parts[start : start + length]) in self._by_parts
        ]
        first = min(indices, default=None)
        for index, regex in self._others:
            if first is not None and index > first:
                break
            if regex.match(module):
                return index
        return first


def all_modules(format: ModuleFormat) -> ModuleRule:
    """Return a rule that selects all modules."""
    return ModuleRule("Linear", format)


def whole_name(name: str, format: ModuleFormat | None) -> ModuleRule:
    """Return a rule that selects the module `name`."""
    return ModuleRule(name, format, _split(name))


def inside(name: str, format: ModuleFormat | None) -> ModuleRule:
    """Return a rule that selects the module `name` and all modules inside it."""
    return ModuleRule(name, format, _split(name)[:-1])


def expression(
    config: Entries, text: str, regex: str, format: ModuleFormat | None = None
) -> ModuleRule:
    """Return a rule that selects modules by a regular expression.

    Raises:
      UnsupportedConfigError: the expression is not valid.
    """
    try:
        return ModuleRule(text, format, regex=re.compile(regex))
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedConfigError(
            f"{config.where}: {text!r} must be a valid regular expression: {error}."
        ) from None


def part_of_name(name: str, format: ModuleFormat | None = None) -> ModuleRule | None:
    """Return a rule that selects modules by parts of names: "mlp" selects "layers.0.mlp.up".

    Returns:
      The rule; None if the name contains characters other than those of names.
    """
    if _PLAIN_NAME.fullmatch(name):
        return ModuleRule(name, format, tuple(name.split(".")))
    return None


def exclude(config: Entries, names: Iterable[str]) -> tuple[ModuleRule, ...]:
    """Return rules that exclude modules from quantisation, as transformers reads their names.

    A name is a part of a module's name, a regular expression for such a part, or a regular
    expression for the whole name, which begins with ``re:``.
    """
    return tuple(
        part_of_name(name)
        or expression(
            config,
            name,
            name[3:] if name.startswith("re:") else rf"(?:.*\.)?(?:{name})(?:\.|$)",
        )
        for name in names
    )


def _split(module: str) -> tuple[str, ...]:
    """Return the parts of a module's name, between empty parts that mark its ends.

    Example:
      >>> _split("layers.0.mlp")
      ('', 'layers', '0', 'mlp', '')
    """
    return ("", *module.split("."), "")
