"""Matmuls and decode steps with quantised weights as shapes, to compile without running them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.weight_formats_time import FORMATS
from paged_jax import Llama
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.linear import linear
from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.parts.mlp import Dense
from tests.support.decode_step import DecodeStep
from tests.support.kernel_cases import H200, lower
from tests.support.weights import weight_shapes

# Formats of models on GPUs and TPUs. Formats with values of 5 bits are left out, because they
# become int8 there, like Q8_0.
MODEL_FORMATS = {
    name: format.widened
    for name, format in FORMATS.items()
    if format.is_quantised and format.code == format.widened.code
}


@dataclasses.dataclass(frozen=True)
class QuantisedCase:
    """A matmul with a quantised weight.

    Attributes:
      format: format of the weight.
      num_rows: rows of `x`.
      num_outputs: outputs of the weight.
      num_inputs: inputs of the weight.
    """

    format: WeightFormat
    num_rows: int
    num_outputs: int = 4096
    num_inputs: int = 4096

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight as it is stored."""
        return self.format.num_bytes((self.num_outputs, self.num_inputs))

    @property
    def float_bytes(self) -> int:
        """Bytes of the weight in bfloat16."""
        return 2 * self.num_outputs * self.num_inputs

    def lower(self, platform: str, sharding: Any = None, gpu: GpuInfo = H200) -> jax.stages.Lowered:
        """Lower the matmul for ``"cuda"`` or ``"tpu"``."""
        x = jax.ShapeDtypeStruct((self.num_rows, self.num_inputs), jnp.float32, sharding=sharding)
        shape = self.num_outputs, self.num_inputs
        w = weight_shapes(self.format, shape, "bfloat16", sharding)
        return lower(linear, x, w, platform=platform, gpu=gpu)


@dataclasses.dataclass(frozen=True)
class QuantisedStep(DecodeStep):
    """A decode step of a model with quantised layers; embeddings and output head are bfloat16.

    Attributes:
      format: format of the matrices of the layers.
      scan_layers: whether the layers are stacked.
    """

    format: WeightFormat = MODEL_FORMATS["q4_0"]
    scan_layers: bool = False

    @property
    def layer_bytes(self) -> int:
        """Bytes of the matrices of a layer as they are stored."""
        return sum(map(self.format.num_bytes, self._shapes()))

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest matrix of a layer as it is stored."""
        return max(map(self.format.num_bytes, self._shapes()))

    @property
    def float_bytes(self) -> int:
        """Bytes of the matrices of a layer in bfloat16."""
        return sum(2 * outputs * inputs for outputs, inputs in self._shapes())

    @property
    def other_bytes(self) -> int:
        """Bytes of the output head and the norms, which a step reads too."""
        config = self.config
        norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
        return 2 * (config.vocab_size * config.hidden_size + norms)

    def _shapes(self) -> list[tuple[int, int]]:
        config = self.config
        features = config.layers[0].get(Dense).features
        E, F, D = config.hidden_size, features, config.head_dim
        heads = config.num_attention_heads
        qkv = (heads + 2 * config.num_key_value_heads) * D
        return [(qkv, E), (E, heads * D), (2 * F, E), (E, F)]

    def _model(self) -> Llama:
        floats = WeightFormat(self.dtype)
        others = (("embed_tokens", floats), ("lm_head", floats))
        formats = MatrixFormats(self.format, others)
        config = dataclasses.replace(self.config, dtype=self.dtype)
        return nnx.eval_shape(
            lambda: Llama(
                config,
                dtype=self.dtype,
                formats=formats,
                scan_layers=self.scan_layers,
                rngs=nnx.Rngs(0),
            )
        )
