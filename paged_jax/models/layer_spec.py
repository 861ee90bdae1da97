"""`LayerSpec`: the parts of a decoder layer."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from paged_jax.models.layer_groups import KVShape, StateShape
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.part import AttentionPart, Parameter, Part
from paged_jax.models.tensor_mapping import ExpertLayout, Mappings

Kind = TypeVar("Kind", bound=Part)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: steps that run one after the other on the residual stream.

    Most layers have two steps, each a `Sublayer` with attention or an MLP in it. Equal layers have
    equal specs. The cache, tensor parallelism, storage formats, the tensors in files and memory
    plans are derived from them.

    Attributes:
      steps: the steps. Each is a `Part` that maps the residual stream to the new residual stream.

    Raises:
      ValueError: two parts have a parameter of the same name, or the layer has several parts that
        pass keys and values, or states, to the cache.
    """

    steps: tuple[Part, ...]

    def __post_init__(self) -> None:
        names = [name for part in self.walk() for name in part.parameters(1)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"LayerSpec: steps must have parameters of different names, got {repeated[0]} in "
                "several parts."
            )
        for kind, keeps in ("attention", lambda part: part.kv), ("recurrence", lambda p: p.states):
            if (count := sum(bool(keeps(part)) for part in self.walk())) > 1:
                raise ValueError(f"LayerSpec: steps must have at most one {kind}, got {count}.")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.steps)

    def walk(self) -> Iterator[Part]:
        """Yield all parts, also those inside of others."""
        for step in self.steps:
            yield from step.walk()

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the first part of a class; None if the layer has none."""
        return next((part for part in self.walk() if isinstance(part, kind)), None)

    def get(self, kind: type[Kind]) -> Kind:
        """Return the first part of a class.

        Raises:
          ValueError: the layer has none.
        """
        if (part := self.find(kind)) is None:
            raise ValueError(f"LayerSpec: steps must have a part {kind.__name__}, got {self}.")
        return part

    @functools.cached_property
    def attention(self) -> AttentionPart | None:
        """The part that attends to keys and values; None in layers without attention."""
        return self.find(AttentionPart)

    @functools.cached_property
    def experts(self) -> Experts | None:
        """The experts; None in layers without experts."""
        return self.find(Experts)

    @property
    def kv(self) -> KVShape | None:
        """Shape of a token's keys and values; None in layers without attention."""
        return None if self.attention is None else self.attention.kv

    @functools.cached_property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays that the layer keeps for each sequence; empty in layers without a recurrence."""
        return next((part.states for part in self.walk() if part.states), ())

    @functools.cached_property
    def name_of_dtype(self) -> str:
        """Name of a parameter that has the floating-point dtype of the model."""
        parameters = self.parameters(1).items()
        return next(
            name for name, parameter in parameters if parameter.initial and not parameter.dtype
        )

    @property
    def can_stack(self) -> bool:
        """Whether layers like this one can be stacked, so that a scan runs over them."""
        return all(part.can_stack for part in self.walk())

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return all parameters by name, for hidden states of `hidden_size` elements."""
        return {
            name: parameter
            for part in self.walk()
            for name, parameter in part.parameters(hidden_size).items()
        }

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, see `Part.tensors`.

        Args:
          hidden_size: size of hidden states.
          names: tensor names that replace `Part.tensor_names`.
          layout: how the files store experts.
        """
        mappings: dict[str, Mappings] = {}
        for part in self.walk():
            mappings |= part.tensors(hidden_size, {**part.tensor_names, **names}, layout)
        return mappings

    @property
    def modules(self) -> set[str]:
        """Names of the Python modules that define the layer's parts, and the parts of these."""
        return _find_modules(self)

    def map(self, function: Callable[[Part], Part]) -> "LayerSpec":
        """Replace each step, for example by its share on one device."""
        return LayerSpec(tuple(map(function, self.steps)))

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the number of values per token in each all-reduce, see `Part.all_reduces`."""
        return [size for part in self.walk() for size in part.all_reduces(hidden_size, num_devices)]


def _find_modules(value: Any) -> set[str]:
    """Return the modules of the classes of a value and of everything in it."""
    if isinstance(value, tuple):
        return set[str]().union(*map(_find_modules, cast(tuple[Any, ...], value)))
    if not dataclasses.is_dataclass(value):
        return set()
    inner = (getattr(value, field.name) for field in dataclasses.fields(value))
    return {type(value).__module__}.union(*map(_find_modules, inner))
