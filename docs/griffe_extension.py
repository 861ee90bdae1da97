"""Extension of Griffe, which reads the docstrings and signatures of the API reference.

Griffe parses the source. This extension does four things:

- Docstrings become Markdown: characters outside code that Markdown would interpret are escaped, a
  block of code may follow a ``::``, and a section may be named "Example".
- Names of classes, and of functions at the top of the package, become links.
- A field that is declared by `option` has its default, and its help as a docstring.
- A constructor with `takes_options` has the fields of `EngineConfig` as its arguments.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    ExprCall,
    Extension,
    Function,
    GriffeLoader,
    Module,
    Object,
)

from paged_jax.options import options_of

API = Path(__file__).resolve().parent / "api"
OPTIONS = "paged_jax.engine.config.EngineConfig"
# Code, and the names of arguments such as ``**options`` at the beginning of an entry.
_CODE = re.compile(r"(``.+?``|`[^`]+`|^ +\*+\w+(?=:))", re.DOTALL | re.MULTILINE)
_MARKUP = re.compile(r"([*<|\[\]])")


def documented() -> list[str]:
    """Return the full names of the objects on the pages of the reference."""
    texts = [page.read_text() for page in sorted(API.glob("*.md"))]
    return [name for text in texts for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]


def linked_names() -> dict[str, str]:
    """Return the names that become links, with the full name of each."""
    pairs = [(path.rpartition(".")[2], path) for path in documented()]
    return {name: path for name, path in pairs if name[0].isupper() or path.count(".") == 1}


def as_markdown(docstring: str, links: dict[str, str]) -> str:
    """Return a docstring in Google style whose text is Markdown.

    Args:
      docstring: the text.
      links: full names of objects, by the names that the text has in backticks.
    """
    lines = re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE).splitlines()
    result: list[str] = []
    text: list[str] = []
    literal_indent = -1  # of the text before a literal block; -1 outside such blocks
    section, in_examples = "", False

    def escape() -> None:
        if text:
            parts = _CODE.split("\n".join(text))
            parts[::2] = [_MARKUP.sub(r"\\\1", part) for part in parts[::2]]
            names = [part.strip("`") for part in parts]
            parts[1::2] = [
                f"[`{name}`][{links[name]}]" if name in links else part
                for name, part in zip(names[1::2], parts[1::2], strict=True)
            ]
            result.extend("".join(parts).split("\n"))
            text.clear()

    for line in lines:
        indent = len(line) - len(line.lstrip())
        if match := re.fullmatch(r"([A-Z]\w+):", line):
            section = match[1]
        elif line and not indent:
            section = ""
        in_examples = section == "Examples"
        if literal_indent >= 0 and line and indent <= literal_indent:
            literal_indent = -1
        if literal_indent >= 0 or in_examples:
            escape()
            result.append(line)
            continue
        if line.endswith("::"):
            literal_indent, line = indent, line[:-1]
        text.append(line)
    escape()
    return "\n".join(result)


class DocstringExtension(Extension):
    """Adapt docstrings and constructors, see above."""

    def __init__(self) -> None:
        self.links = linked_names()

    def on_object(self, *, obj: Object, loader: GriffeLoader, **kwargs: Any) -> None:
        """Convert the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value, self.links)

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Take the default of an option as the value of its field, and describe the field."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "option":
            attr.value = attr.value.arguments[0]
            assert isinstance(attr.parent, Class)
            config = getattr(importlib.import_module(attr.module.path), attr.parent.name)
            [text] = [option.help for option in options_of(config) if option.name == attr.name]
            text = as_markdown(f"{text[0].upper()}{text[1:]}.", self.links)
            attr.docstring = Docstring(text, parent=attr)

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Give the fields of `EngineConfig` to the constructors that take them."""
        config = pkg[OPTIONS.partition(".")[2]]
        for each in _classes(pkg):
            init = each.members.get("__init__")
            if isinstance(init, Function) and any(
                "takes_options" in str(decorator.value) for decorator in init.decorators
            ):
                init.parameters = config.members["__init__"].parameters


def _classes(module: Module) -> list[Class]:
    """Return the classes that a module and its submodules define."""
    found: list[Class] = []
    for member in module.members.values():
        if isinstance(member, Class):
            found.append(member)
        elif isinstance(member, Module):
            found += _classes(member)
    return found
