"""`GgufLayout`: how GGUF files of llama.cpp store the models of a family."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from paged_jax.models.layer_spec import LayerSpec

# Function that returns the order of rows or inputs in the files, given the layer of a tensor; or
# None, if they are in the order of Hugging Face checkpoints.
Order = Callable[[LayerSpec], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class GgufLayout:
    """How GGUF files store the models of a family. `Family.read_gguf` reads their metadata.

    In `tensor_names`, `row_orders` and `input_orders`, a parameter or a piece of one has the same
    key as in `Family.tensor_names`.

    Attributes:
      architecture: entry ``general.architecture`` of the files.
      has_experts: whether the models have experts, if two families share the architecture; None if
        the architecture belongs to one family.
      own_keys: keys of the metadata that all architectures have, but with another meaning in these
        files. Only `Family.read_gguf` reads them.
      tensor_names: GGUF names of parameters, if they differ from `Part.gguf_names` of their part or
        from the usual names outside of the layers.
      row_orders: for parameters whose rows llama.cpp reorders, the row in the file of each row of
        the Hugging Face tensor.
      input_orders: for matrices whose inputs llama.cpp reorders, the input of the Hugging Face
        tensor that each column in the file belongs to.
    """

    architecture: str
    has_experts: bool | None = None
    own_keys: tuple[str, ...] = ()
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    row_orders: Mapping[str, Order] = dataclasses.field(default_factory=dict)
    input_orders: Mapping[str, Order] = dataclasses.field(default_factory=dict)
