# pyright: strict, reportUnknownMemberType=false
"""`Option`: a value that users set, declared once, as a field of a dataclass.

A field that is declared by `option` has bounds, a help text, a flag and a name in vLLM. Checks of
arguments, command lines, schemas of HTTP bodies, the memory planner and the documentation read them
with `options_of`. These classes have such fields::

    EngineConfig     engine.config      options of an engine
    SamplingParams   sampling.params    parameters of a request
    Limits           server.limits      limits of the server
    ServerOptions    serve              other options of the server

This module does not import JAX.
"""

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from paged_jax.arguments import ArgumentError, check_positive, is_int, is_real

T = TypeVar("T", bound=type)

_NO_LIMITS: Mapping[str, float] = types.MappingProxyType({})


class Bounds(NamedTuple):
    """Rule for the values of an option.

    Attributes:
      words: description of the rule; it follows "must be" in error messages.
      contains: function that takes a value and returns whether the rule accepts it.
      choices: the accepted strings; empty if the values are not strings from a fixed list.
      limits: the limits of a number. The keys are the names ge, gt, le and lt of functions in
        `operator`: ``{"ge": 0}`` means value >= 0.
    """

    words: str
    contains: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    limits: Mapping[str, float] = _NO_LIMITS


def one_of(*choices: str) -> Bounds:
    """Return bounds that accept only the strings in `choices`."""
    return Bounds(f"one of {', '.join(choices)}", choices.__contains__, choices)


def integer(words: str, **limits: float) -> Bounds:
    """Return bounds that accept integers within `limits`, see `Bounds.limits`."""

    def contains(value: Any) -> bool:
        return is_int(value) and _is_within(value, limits)

    return Bounds(words, contains, limits=limits)


def number(words: str, **limits: float) -> Bounds:
    """Return bounds that accept finite numbers within `limits`, see `Bounds.limits`."""

    def contains(value: Any) -> bool:
        return is_real(value) and _is_within(value, limits)

    return Bounds(words, contains, limits=limits)


def _is_within(value: float, limits: Mapping[str, float]) -> bool:
    return all(getattr(operator, name)(value, limit) for name, limit in limits.items())


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


POSITIVE = integer("a positive integer", ge=1)
NOT_NEGATIVE = integer("an integer, at least 0", ge=0)
SEED = integer("an integer in 0..2**63 - 1", ge=0, lt=2**63)
FRACTION = number("above 0 and at most 1", gt=0, le=1)
SECONDS = number("a finite number of seconds >= 0", ge=0)
GIB = number("a finite number of GiB, at least 0", ge=0)
SWITCH = Bounds("True or False", _is_bool)
FUNCTION = Bounds("a function or None", callable)


class Option(NamedTuple):
    """A field of a dataclass that was declared by `option`.

    Attributes:
      name: the name of the field.
      type: the type of its values, without None: int, float, bool, str or another class. For a
        sequence of values, the type of one value.
      default: the default value.
      help: description of the option.
      is_optional: whether the value may be None.
      is_repeated: whether the value may be a sequence; its flag may then be repeated.
      default_help: description of the default value; by default the value itself.
      bounds: rule for the values; None if a value is only checked when it is used.
      advice: the last sentence of the error message of a value out of bounds.
      choices: the accepted strings; empty if the values are not from a fixed list. By default these
        are the choices of `bounds`.
      flag: the command-line flag; None if the option has no flag. By default it is derived from the
        name, such as ``--block-size``. The flag of a bool takes no value and sets the opposite of
        the default.
      metavar: placeholder for the value in the help text of a command line.
      vllm: the name of the corresponding option in vLLM; None if vLLM has none. By default it is
        the name of the field.
      decides_memory: whether the option is an argument of the memory planner.
      is_recommended: whether ``generation_config.json`` may recommend a value.
    """

    name: str
    type: Any
    default: Any
    help: str
    is_optional: bool = False
    is_repeated: bool = False
    default_help: str = ""
    bounds: Bounds | None = None
    advice: str = ""
    choices: tuple[str, ...] = ()
    flag: str | None = ""
    metavar: str | None = None
    vllm: str | None = ""
    decides_memory: bool = False
    is_recommended: bool = False

    def allows(self, value: Any) -> bool:
        """Return whether the value is within the bounds, if there are any, or an allowed None."""
        if self.bounds is None:
            return True
        return self.is_optional if value is None else self.bounds.contains(value)

    def problem(self, value: Any) -> str:
        """Return the error message of a value out of bounds, after the name of the option."""
        assert self.bounds is not None
        advice = f" {self.advice}" if self.advice else ""
        return f"must be {self.bounds.words}, got {value!r}.{advice}"

    def check(self, function: str, value: Any) -> None:
        """Raise an `ArgumentError` of `function` if the value is not allowed."""
        if self.allows(value):
            return
        if self.bounds is POSITIVE:
            check_positive(function, **{self.name: value})
        raise ArgumentError(function, self.problem(value), self.name)


def option(
    default: Any, help: str, *, hash: bool | None = None, repr: bool = True, **details: Any
) -> Any:
    """Declare a field of a dataclass.

    Args:
      default: the default value.
      help: description of the option, without a full stop.
      hash: see `dataclasses.field`.
      repr: see `dataclasses.field`.
      **details: other attributes of its `Option`.
    """
    metadata = {"help": help, **details}
    return dataclasses.field(default=default, hash=hash, repr=repr, metadata=metadata)


@functools.cache
def options_of(config: type[Any]) -> tuple[Option, ...]:
    """Return an `Option` for each field of a dataclass that was declared by `option`, in order."""
    fields = dataclasses.fields(config)
    return tuple(_read_option(field) for field in fields if "help" in field.metadata)


def _read_option(field: dataclasses.Field[Any]) -> Option:
    name, types_ = field.name, cast(list[Any], [field.type])
    if isinstance(field.type, types.UnionType):
        types_ = list(get_args(field.type))
    is_optional = types.NoneType in types_
    types_ = [each for each in types_ if each is not types.NoneType]
    sequences = [each for each in types_ if get_origin(each) in (Sequence, tuple)]
    value_type: Any = get_args(sequences[0])[0] if sequences else types_[0]
    if get_origin(value_type) is Literal:
        value_type = str
    details = cast(dict[str, Any], dict(field.metadata))
    found = Option(name, value_type, field.default, is_optional=is_optional, **details)
    choices = found.choices or (found.bounds.choices if found.bounds else ())
    placeholder = None if choices else {int: "N", float: "X"}.get(value_type)
    return found._replace(
        is_repeated=bool(sequences),
        default_help=found.default_help or str(field.default),
        choices=choices,
        flag=f"--{name.replace('_', '-')}" if found.flag == "" else found.flag,
        metavar=found.metavar or placeholder,
        vllm=name if found.vllm == "" else found.vllm,
    )


def check_options(function: str, options: Mapping[str, Any], config: type[Any]) -> None:
    """Check the value of each option.

    Args:
      function: the name that error messages begin with.
      options: maps names of options to values. For missing options, the default is checked.
      config: the dataclass that declares the options.

    Raises:
      ArgumentError: a value is out of bounds.
    """
    for each in options_of(config):
        each.check(function, options.get(each.name, each.default))


def documented(config: T) -> T:
    """Append the options of a dataclass to its docstring, so that `help` and IPython show them."""
    lines = [inspect.cleandoc(config.__doc__ or ""), "", "Attributes:"]
    for each in options_of(config):
        lines.append(f"  {each.name}: {each.help}; default: {each.default_help}.")
    config.__doc__ = "\n".join(lines)
    return config
