"""Donated steps of a whole model as shapes alone: lowered or compiled, never run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paged_jax import Llama, PagedCache
from paged_jax.models.config import LlamaConfig
from paged_jax.models.shards import shard_config, widen_config
from paged_jax.models.tensor_parallel import AXIS, TensorParallel, parameter_names
from paged_jax.runner import DecodeState, Sizes, decode_steps
from paged_jax.runner.placement import Division
from paged_jax.runner.programs import Call, Structure, list_programs
from paged_jax.sampling import MAX_LOGPROBS
from tests.support.kernel_cases import lower, lowering_for

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)
LLAMA_3_70B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
)
LLAMA_3_405B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
)
SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
QWEN_3_1B7 = LlamaConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """`Llama.decode`, by default in bfloat16, over pools of about `pool_gigabytes`."""

    config: LlamaConfig
    pool_gigabytes: float
    block_size: int = 16
    batch: int = 64
    max_blocks_per_slot: int = 512
    scan_layers: bool = True
    dtype: str = "bfloat16"  # of the weights
    pool_dtype: str = "bfloat16"

    @property
    def num_blocks(self) -> int:
        config = self.config
        heads = 2 * config.num_hidden_layers * config.num_key_value_heads
        block_bytes = (
            heads * self.block_size * config.head_dim * jnp.dtype(self.pool_dtype).itemsize
        )
        return int(self.pool_gigabytes * 10**9) // block_bytes

    @property
    def num_pool_heads(self) -> int:
        """K, heads that the pools have."""
        return self.config.num_key_value_heads

    def function(self) -> Callable[..., Any]:
        """The step, to be jitted with its second argument donated."""

        def decode_step(model: Llama, cache: PagedCache, token_ids: jax.Array, slots: jax.Array):
            return Llama.decode(model, cache, token_ids, slots)

        return decode_step

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Model, cache, tokens and slots as `jax.ShapeDtypeStruct`."""
        model, cache = self._model(), self._cache()
        rows = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return _placed((model, cache, rows, rows), sharding)

    def lower(self, platform: str, sharding: Any = None) -> jax.stages.Lowered:
        """The step for ``"cuda"`` or ``"tpu"``, with its cache or state donated."""
        shapes = self.shapes(sharding)
        return lower(self.function(), *shapes, platform=platform, donate_argnums=1)

    def _model(self) -> Llama:
        config, dtype, scan_layers = self.config, self.dtype, self.scan_layers
        return nnx.eval_shape(
            lambda: Llama(config, dtype=dtype, scan_layers=scan_layers, rngs=nnx.Rngs(0))
        )

    def _cache(self) -> PagedCache:
        config = self.config
        return jax.eval_shape(
            lambda: PagedCache.create(
                num_layers=config.num_hidden_layers,
                num_blocks=self.num_blocks,
                num_kv_heads=self.num_pool_heads,
                block_size=self.block_size,
                head_dim=config.head_dim,
                num_slots=self.batch,
                max_blocks_per_slot=self.max_blocks_per_slot,
                dtype=self.pool_dtype,
            )
        )


@dataclasses.dataclass(frozen=True)
class PrefillStep(DecodeStep):
    """`Llama.prefill` of `chunk` tokens for each sequence of the batch."""

    chunk: int = 2048

    def function(self) -> Callable[..., Any]:
        """The step, to be jitted with its second argument donated."""

        def prefill_step(
            model: Llama,
            cache: PagedCache,
            token_ids: jax.Array,
            slots: jax.Array,
            num_tokens: jax.Array,
        ):
            return Llama.prefill(model, cache, token_ids, slots, num_tokens)

        return prefill_step

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Model, cache, tokens, slots and their numbers as `jax.ShapeDtypeStruct`."""
        token_ids = jax.ShapeDtypeStruct((self.batch, self.chunk), jnp.int32)
        rows = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return _placed((self._model(), self._cache(), token_ids, rows, rows), sharding)


@dataclasses.dataclass(frozen=True)
class DecodeLoop(DecodeStep):
    """`decode_steps`: up to `max_steps` of these steps, with the choice of tokens."""

    max_steps: int = 8

    def function(self) -> Callable[..., Any]:
        """The loop, to be jitted with its second argument donated."""
        max_steps = self.max_steps

        def decode_loop(model: Llama, state: DecodeState, slots: jax.Array, num_steps: jax.Array):
            return decode_steps(model, state, slots, num_steps, max_steps=max_steps)

        return decode_loop

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Model, state, slots and number of steps as `jax.ShapeDtypeStruct`."""
        cache, vocab_size = self._cache(), self.config.vocab_size
        state = jax.eval_shape(lambda cache: DecodeState.create(cache, vocab_size), cache)
        slots = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        num_steps = jax.ShapeDtypeStruct((), jnp.int32)
        return _placed((self._model(), state, slots, num_steps), sharding)


@dataclasses.dataclass(frozen=True)
class EngineDecode(DecodeLoop):
    """The program that an engine decodes with on a GPU, its compiler's options included."""

    def lower(self, platform: str, sharding: Any = None) -> jax.stages.Lowered:
        """The engine's own program, which donates its state."""
        graphdef, weights = nnx.split(self._model())
        arrays, treedef = jax.tree.flatten(weights)
        structure = Structure(graphdef, treedef, cascade=False, backend=None, platform="gpu")
        _, state, *args = self.shapes()
        call = self.call(structure, *args)
        shapes = _placed((arrays, state, *call.args), sharding)
        return _lower_call(call, platform, *shapes)

    def call(self, structure: Structure, slots: Any, num_steps: Any) -> Call:
        """A call of the program, of shapes."""
        sizes = Sizes(
            block_size=self.block_size,
            num_slots=self.batch,
            max_model_len=self.block_size * self.max_blocks_per_slot,
            max_chunk=512,
            max_steps=self.max_steps,
            num_drafts=0,
            max_logit_bias=32,
            max_stop_ids=16,
        )
        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        return list_programs(structure, sizes, MAX_LOGPROBS).decode.call(
            slots, num_steps, flag, flag
        )


@dataclasses.dataclass(frozen=True)
class ParallelDecode(EngineDecode):
    """The program that an engine decodes with on several devices; `pool_gigabytes` are of each.

    Attributes:
      num_devices: N.
      topology: how they are connected, by the name that XLA has for that.
    """

    num_devices: int = 2
    topology: str = ""

    @property
    def num_blocks(self) -> int:
        shard = shard_config("ParallelDecode", self.config, self.num_devices)
        return DecodeStep(shard, self.pool_gigabytes, block_size=self.block_size).num_blocks

    @property
    def num_pool_heads(self) -> int:
        return widen_config(self.config, self.num_devices).num_key_value_heads

    def lower_over(self, platform: str, devices: Any) -> jax.stages.Lowered:
        """The engine's own program for these devices, which need only be described."""
        mesh = Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))
        parallel = TensorParallel(mesh, self.config)
        assert parallel.num_devices == self.num_devices
        model = dataclasses.replace(self, config=parallel.wide)._model()
        leaves, treedef = jax.tree.flatten(nnx.state(model))
        names = parameter_names(nnx.state(model))
        specs = tuple(parallel.spec(name, x.ndim) for name, x in zip(names, leaves, strict=True))
        division = Division(parallel.mesh, specs)
        graphdef = nnx.graphdef(parallel.model_of_part(model))
        options = "gpu" if platform == "cuda" else platform
        structure = Structure(graphdef, treedef, False, None, division, options)
        _, state, *args = self.shapes()
        call = self.call(structure, *args)
        places = [NamedSharding(parallel.mesh, spec) for spec in specs]
        whole = NamedSharding(parallel.mesh, PartitionSpec())
        return _lower_call(
            call,
            platform,
            jax.tree.map(_place, leaves, places),
            jax.tree.map(_place, state, division.shardings(state)),
            *_placed(call.args, whole),
        )


def _lower_call(call: Call, platform: str, *shapes: Any) -> jax.stages.Lowered:
    with lowering_for(platform):
        traced = call.program.trace(*shapes, **call.static)
        return traced.lower(lowering_platforms=(platform,))


def _place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _placed(shapes: tuple[Any, ...], sharding: Any) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: _place(x, sharding), shapes)
