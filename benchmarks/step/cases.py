"""Steps to time: models, sizes, and the bytes and operations that a step needs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax.numpy as jnp

from benchmarks.common.shapes import SHAPES
from paged_jax.engine import footprint
from paged_jax.engine.pool_size import resolve_kv_dtype
from paged_jax.models.config import ModelConfig
from paged_jax.models.llama_config import LlamaConfig

# Number of tokens of a prompt chunk.
CHUNK = 2048
# Maximum number of tokens of a sequence, which determines block tables and splits of long contexts.
MAX_MODEL_LEN = 8192
BLOCK_SIZE = 16

MODELS: dict[str, ModelConfig] = {
    # Two layers of stories15M, for a run of seconds.
    "quick": LlamaConfig.from_dict({**SHAPES["15M"], "num_hidden_layers": 2}),
    # SmolLM2.
    "135M": LlamaConfig.from_dict(SHAPES["135M"]),
    # Llama 3.2.
    "1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
    # Llama 3.
    "8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
}
"""Configurations by name."""


@dataclass(frozen=True)
class Case:
    """A kind of step.

    Attributes:
      model: a key of `MODELS`.
      batch: number of sequences of a decode step.
      context: number of cached tokens of each sequence before the step.
      chunk: number of prompt tokens of a sequence; 0 for a decode step.
      dtype: dtype of the weights.
      kv_dtype: dtype of K and V, as in `Engine`.
    """

    model: str
    batch: int = 1
    context: int = 128
    chunk: int = 0
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return MODELS[self.model]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads, each once; only a few rows of embeddings."""
        num_read = self._num_layer_weights
        if not self.chunk:  # chunks are not scored
            num_read += self.config.vocab_size * self.config.hidden_size
        return num_read * jnp.dtype(self.dtype).itemsize

    def kv_bytes(self, platform: str, num_steps: int = 1) -> int:
        """Return the bytes of K and V that a step reads and writes, averaged over some steps.

        Args:
          platform: determines the dtype of ``kv_dtype="auto"``.
          num_steps: number of decode steps; each has one token more than the previous step.
        """
        kv_dtype = resolve_kv_dtype(self.kv_dtype, self.dtype, platform)
        token = footprint.block_bytes(self.config, 1, kv_dtype, platform)
        if self.chunk:
            return (self.context + self.chunk) * token
        return round(self.batch * (self.context + (num_steps + 1) / 2) * token)

    def flops(self, num_steps: int = 1) -> int:
        """Operations of all matrix multiplications, for pairs that are not masked."""
        config = self.config
        pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        if self.chunk:
            pairs = self.chunk * self.context + self.chunk * (self.chunk + 1) // 2
            return 2 * self._num_layer_weights * self.chunk + pair * pairs
        head = config.vocab_size * config.hidden_size
        pairs = round(self.batch * (self.context + (num_steps + 1) / 2))
        return 2 * (self._num_layer_weights + head) * self.batch + pair * pairs

    @property
    def _num_layer_weights(self) -> int:
        config = self.config
        tables = 1 if config.tie_word_embeddings else 2
        num_all = footprint.num_parameters(config)
        return num_all - tables * config.vocab_size * config.hidden_size

    def __str__(self) -> str:
        what = f"chunk of {self.chunk}" if self.chunk else f"decode, batch {self.batch}"
        kinds = self.dtype if self.kv_dtype == "auto" else f"{self.dtype}, {self.kv_dtype} pools"
        return f"{self.model}, {what} at {self.context} ({kinds})"


def goal_cases() -> list[Case]:
    """Return the cases of the goals, which are timed first."""
    return [
        Case("8B", batch=64),
        Case("8B", batch=1),
        Case("8B", chunk=CHUNK, context=0),
        Case("135M", batch=1),
    ]


def gpu_cases() -> list[Case]:
    """Return the cases for a GPU or TPU, the most informative first."""
    models = ("8B", "135M", "1B")
    long = Case("8B", batch=16, context=4096)
    cases = [
        *goal_cases(),
        *(Case(model, batch=batch) for batch in (64, 1, 16) for model in models),
        *(Case(model, chunk=CHUNK, context=0) for model in models),
        *(replace(long, kv_dtype=kv_dtype) for kv_dtype in ("auto", "int8", "fp8")),
    ]
    return _unique(cases)


def cpu_cases() -> list[Case]:
    """Return the cases for a CPU: the small model."""
    base = Case("135M", dtype="float32")
    return [base, replace(base, batch=16), replace(base, chunk=256, context=0)]


def quick_cases(dtype: str) -> list[Case]:
    """Return a few small steps, for a run of seconds."""
    base = Case("quick", batch=2, context=32, dtype=dtype)
    return [base, replace(base, batch=1, chunk=64, context=0)]


def _unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))
