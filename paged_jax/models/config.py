# pyright: strict, reportUnknownMemberType=false
"""`ModelConfig`: the configuration of a decoder, with the layers that share keys and values.

It derives from its layers what concerns several of them: the groups of the cache, and `kv_sources`,
the layers whose keys and values other layers read.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache.retention import AllTokens
from paged_jax.formatting import cut, shortened
from paged_jax.models.config_json import ConfigEntries
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_attention import Reach
from paged_jax.models.layer_groups import (
    CacheSpec,
    KVShape,
    LayerGroup,
    RecurrentLayers,
    StateShape,
    group_layers,
    group_states,
)
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.matrix_formats import is_stacked, matrix_name
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import AttentionPart, Parameter, check_factor, matrix
from paged_jax.models.parts.streams import ResidualStreams
from paged_jax.models.rope import Rope

# Dtypes of weights in files, except those of quantised matrices.
FLOAT_DTYPES = ("float32", "bfloat16", "float16")


class PerLayerTable(NamedTuple):
    """Sizes of the table of per-layer embeddings (Gemma 3n), see `PerLayerEmbedding`.

    Attributes:
      size: elements of the embedding of a token in a layer (d).
      vocab_size: number of tokens with a per-layer embedding, from token 0; 0 if all tokens of the
        vocabulary have one. Other tokens use the embedding of token 0.
    """

    size: int
    vocab_size: int = 0


# Limit far above any real model. It rejects a mistyped number before it exhausts the memory.
_MAX_LAYERS = 10_000
# Defaults by model type, see `Family`.
DEFAULTS_FILE = Path(__file__).parent / "families" / "defaults.json"


@functools.cache
def _read_defaults() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))


def stored_defaults(model_type: str) -> Mapping[str, Any] | None:
    """Return the stored default values of a `model_type`; None if it has none."""
    return _read_defaults().get(model_type)


class Family:
    """A model family: its ``config.json``, its GGUF files, and the names of its tensors.

    Subclasses read and write the ``config.json``. `families.registry.FAMILIES` has an instance of
    each.

    Attributes:
      model_type: entry ``model_type`` of the file.
      architecture: class of the model in transformers.
      defaults: default values in transformers of keys that may be missing in the file. `read` gets
        entries that are completed by them. A family of this package has those of
        ``families/defaults.json``, which ``python -m tests.support.write_references defaults``
        writes from transformers.
      tensor_names: parameters mapped to the names of their tensors, if these differ from
        `Part.tensor_names` of their part, also of `ModelConfig.outer_parameters`, such as the last
        norm (``norm``). If a parameter is stored
        as several tensors, the name of a piece follows a dot (``mixer_conv.q``). ``mixer_conv.*``
        stands for all pieces that are not listed, and a * in the tensor's name is replaced by the
        name of the piece. A fused parameter such as ``qkv_proj`` is one tensor in the files if it
        is listed here. In the names of experts, a * stands for the number of an expert.
        ``shared_expert`` is the module of the shared expert.
      renamed: substrings of tensor names that occur in some files, mapped to their replacements.
      in_memory: substrings of names in `tensor_names`, mapped to their replacements in the state
        dict of transformers' model, which may fuse several tensors of the files.
      prefixes: prefixes of tensor names, mapped to their replacements, or to None if these tensors
        are not read. Those of multimodal models are removed before, see `families.multimodal`.
      written_prefixes: prefixes of tensor names that this library reads, mapped to the prefixes in
        files that it writes.
      has_draft_layers: whether files may contain additional layers for multi-token prediction.
        These layers are not read.
      is_mxfp4: whether checkpoints may store experts in MXFP4, see `Mxfp4Experts`.
      ignored: keys of the file that do not change the computation of this family.
      gguf: how GGUF files store the family's models; None if they are not supported.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = {}
    tensor_names: Mapping[str, str] = {}
    renamed: Mapping[str, str] = {}
    in_memory: Mapping[str, str] = {}
    prefixes: Mapping[str, str | None] = {}
    written_prefixes: Mapping[str, str] = {}
    has_draft_layers: bool = False
    is_mxfp4: bool = False
    ignored: tuple[str, ...] = ()
    gguf: GgufLayout | None = None

    def __init_subclass__(cls) -> None:
        """Take the stored defaults of the family, unless the class has its own."""
        stored = stored_defaults(vars(cls).get("model_type", ""))
        if stored is not None and "defaults" not in vars(cls):
            cls.defaults = stored

    def read(self, entries: ConfigEntries) -> "ModelConfig":
        """Return the config that the content of a ``config.json`` describes.

        Entries that this method does not read are an error if they are known to change the
        computation, and otherwise a warning.

        Raises:
          UnsupportedConfigError: the config needs an unsupported feature. The message names it.
          ValueError: a required key is missing, or a value has the wrong type or is out of range.
        """
        raise NotImplementedError

    def write(self, config: "ModelConfig") -> dict[str, Any]:
        """Return the content of a ``config.json`` that transformers and `read` can read.

        The caller checks that `read` returns the same config.
        """
        raise NotImplementedError

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a ``config.json`` that the metadata of a GGUF file describes.

        Args:
          metadata: the metadata.
          entries: entries that all architectures share, see `gguf_config`. The result replaces and
            completes them.

        Raises:
          UnsupportedConfigError: an entry is not supported. The message names it.
          ValueError: an entry is missing, or has the wrong type or range.
        """
        del metadata, entries
        return {}


@names_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder: its layers, and what is before and after them.

    `LlamaConfig` builds one from fields like those of a Hugging Face ``config.json``. Fields that
    exist there have the same names here.

    Attributes:
      vocab_size, hidden_size: vocabulary size (V), and width of the residual stream (E).
      layers: parts of each layer (L of them). Equal layers should be the same object.
      norm: norm after the last layer.
      max_position_embeddings: maximum length of a sequence in tokens. It also becomes that of the
        rotary embeddings in `layers`, see `Rope`.
      tie_word_embeddings: whether the embedding table is also the output head.
      embedding_multiplier: factor of the embeddings. The factor itself is rounded to the dtype of
        the weights.
      logit_scale: factor of the logits.
      final_logit_softcapping: logits become ``cap * tanh(logits / cap)``; None for no cap.
      streams: number and options of the residual streams; None for a single stream.
      per_layer: sizes of the per-layer embeddings; None for models without them.
      initializer_range: standard deviation of initial weights.
      bos_token_id, eos_token_ids: special tokens.
      model_type: name of the family in ``config.json``.
      dtype: dtype of the weights in the files: float32, bfloat16 or float16.
      family: reader and writer of the family's files; None for a model without files.
      num_copies: number of devices that keep a copy of what is not divided over them, see `widen`.

    Raises:
      ValueError: a value is out of range.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    streams: ResidualStreams | None = None
    per_layer: PerLayerTable | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    dtype: str = "float32"
    num_copies: int = 1
    family: Family | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive(
            "ModelConfig",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            num_hidden_layers=len(self.layers),
        )
        check_factor(
            "ModelConfig",
            embedding_multiplier=self.embedding_multiplier,
            logit_scale=self.logit_scale,
            final_logit_softcapping=self.final_logit_softcapping,
        )
        if self.dtype not in FLOAT_DTYPES:
            raise UnsupportedConfigError(
                f"ModelConfig: dtype must be one of {', '.join(FLOAT_DTYPES)}, got {self.dtype!r}."
            )
        ropes = [spec.attention and spec.attention.rope for spec in {*self.layers}]
        lengths = {rope.max_position_embeddings for rope in ropes if rope is not None}
        if lengths - {0, self.max_position_embeddings}:
            object.__setattr__(self, "layers", self.map_layers(self._set_length))

    def __str__(self) -> str:
        """Return a short text with the fields that differ from their defaults.

        Instead of the layers, it has their number.
        """
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.repr and getattr(self, field.name) != field.default
        }
        values.pop("layers", None)
        values["num_hidden_layers"] = self.num_hidden_layers
        shown = (f"{name}={shortened(value)}" for name, value in values.items())
        return cut(f"{type(self).__name__}({', '.join(shown)})")

    @functools.cached_property
    def num_hidden_layers(self) -> int:
        """Number of layers (L)."""
        return len(self.layers)

    @functools.cached_property
    def _attention(self) -> AttentionPart | None:
        return next((spec.attention for spec in self.layers if spec.attention is not None), None)

    @functools.cached_property
    def num_attention_heads(self) -> int:
        """Number of query heads (H) in the first layer with attention; 0 without attention."""
        return 0 if self._attention is None else self._attention.num_heads

    @functools.cached_property
    def num_key_value_heads(self) -> int:
        """Number of KV heads (K) in the first layer with attention; 0 without attention."""
        return 0 if self._attention is None else self._attention.kv.num_kv_heads

    @functools.cached_property
    def head_dim(self) -> int:
        """Head dimension (D) of the first layer with attention; 0 without attention."""
        return 0 if self._attention is None else self._attention.head_dim

    @functools.cached_property
    def num_experts(self) -> int:
        """Number of experts in the layers that have most of them; 0 without experts."""
        return max(0 if spec.experts is None else spec.experts.num_experts for spec in self.layers)

    @functools.cached_property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Sliding window or chunk size of each layer, in tokens; None for layers without either."""
        return tuple(self.reach(layer).sliding_window for layer in range(len(self.layers)))

    @functools.cached_property
    def attention_chunks(self) -> tuple[int | None, ...]:
        """Chunk size of each layer with chunked attention, in tokens; None for other layers."""
        return tuple(self.reach(layer).chunk for layer in range(len(self.layers)))

    def reach(self, layer: int | jax.Array) -> Reach:
        """Return the limits on the tokens that a layer's queries attend to.

        The index `layer` may be traced if all layers have the same limits.
        """
        if not isinstance(layer, int):
            assert len({*self.sliding_windows}) == 1
            layer = 0
        attention = self.layers[layer].attention
        return Reach(None, None) if attention is None else attention.reach

    @functools.cached_property
    def kv_shapes(self) -> tuple[KVShape | None, ...]:
        """Shape of a token's keys and values in each layer; None for layers without attention."""
        return tuple(spec.kv for spec in self.layers)

    @functools.cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer, index of the layer that computes its keys and values (often itself)."""
        sources = (spec.attention and spec.attention.source for spec in self.layers)
        return tuple(layer if source is None else source for layer, source in enumerate(sources))

    def is_read_by_others(self, layer: int) -> bool:
        """Return whether other layers read the keys and values of a layer."""
        return self.kv_sources.count(layer) > 1

    @functools.cached_property
    def state_shapes(self) -> tuple[tuple[StateShape, ...], ...]:
        """For each layer, the arrays of a sequence's state; empty for attention layers."""
        return tuple(spec.states for spec in self.layers)

    @functools.cached_property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Rotary embedding of each layer; None for layers that do not rotate queries and keys."""
        return tuple(spec.attention and spec.attention.rope for spec in self.layers)

    @functools.cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers with the same rule and KV shape, see `layer_groups.group_layers`.

        A model without attention has a group without layers.
        """
        cached_shapes = [
            kv if source == layer else None
            for layer, (kv, source) in enumerate(zip(self.kv_shapes, self.kv_sources, strict=True))
        ]
        if any(cached_shapes):
            rules = [self.reach(layer).retention for layer in range(len(self.layers))]
            return group_layers(rules, cached_shapes)
        return (LayerGroup(AllTokens(), (), KVShape(self.num_copies, 1, 0)),)

    @functools.cached_property
    def state_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of recurrent layers with states of equal shapes; empty without such layers."""
        return group_states(self.state_shapes)

    @functools.cached_property
    def cache_groups(self) -> tuple[CacheSpec, ...]:
        """All groups of the cache: `layer_groups`, then the recurrent layers, if any."""
        states = (RecurrentLayers(self.state_groups),) if self.state_groups else ()
        return *self.layer_groups, *states

    @functools.cached_property
    def can_scan_layers(self) -> bool:
        """Whether all layers are equal, so that the model supports `scan_layers`."""
        return len({*self.layers}) == 1 and self.layers[0].can_stack

    def parameter(self, name: str) -> Parameter:
        """Return the description of a parameter of the model.

        Args:
          name: such as ``"layers.3.qkv_proj"``, ``"layers.qkv_proj"`` if the layers are stacked, or
            ``"embed_tokens"``. Scales and other arrays of a matrix have the description of the
            matrix.

        Raises:
          KeyError: the model has no such parameter.
        """
        name = matrix_name(name)
        if not name.startswith("layers."):
            return self.outer_parameters[name]
        _, *index, kind = name.split(".")
        layer = 0 if is_stacked(name) else int(index[0])
        return self._layer_parameters[self.layers[layer]][kind]

    @functools.cached_property
    def _layer_parameters(self) -> dict[LayerSpec, dict[str, Parameter]]:
        return {spec: spec.parameters(self.hidden_size) for spec in {*self.layers}}

    @functools.cached_property
    def outer_parameters(self) -> dict[str, Parameter]:
        """Parameters outside of the layers, by name.

        ::

            embed_tokens            [V, E]         lm_head   [V, E]    norm  [E]
            embed_tokens_per_layer  [rows, L * d]  per_layer_model_proj  [L * d, E]
            per_layer_norm          [d]
            stream_proj             [n - 1, E, E]  stream_out_proj       [n - 1, E, E]
        """
        V, E, L = self.vocab_size, self.hidden_size, len(self.layers)
        parameters = {"embed_tokens": matrix(V, E, divided=2)}
        if self.per_layer is not None:
            d = self.per_layer.size
            rows = self.per_layer.vocab_size or V
            parameters |= {
                "embed_tokens_per_layer": matrix(rows, L * d, divided=2, stays_float=True),
                "per_layer_model_proj": matrix(L * d, E, stays_float=True),
                **self.norm.parameters("per_layer_norm", d),
            }
        if self.streams is not None:
            shape = self.streams.count - 1, E, E
            parameters["stream_proj"] = matrix(*shape, stays_float=True)
            parameters["stream_out_proj"] = matrix(*shape, stays_float=True)
        parameters |= self.norm.parameters("norm", E)
        if not self.tie_word_embeddings:
            parameters["lm_head"] = matrix(V, E, divided=2)
        return parameters

    def matrices(self) -> Iterator[tuple[str, Parameter]]:
        """Yield all matrices with their names, such as ``"layers.o_proj"``.

        Layers are not numbered. Matrices of equal layers are yielded once.
        """
        named = list(self.outer_parameters.items())
        for parameters in self._layer_parameters.values():
            named += [(f"layers.{name}", parameter) for name, parameter in parameters.items()]
        return ((name, parameter) for name, parameter in named if parameter.is_matrix)

    def widen(self, num_devices: int) -> "ModelConfig":
        """Return a config with copies of heads, so that each device has at least one of each kind.

        The additional heads are copies, so the model computes the same function. With latent
        attention, each device keeps all latent vectors.
        """

        def widen(spec: LayerSpec) -> LayerSpec:
            return spec.map(lambda step: step.widen(num_devices))

        return self.replace(layers=self.map_layers(widen), num_copies=num_devices)

    def divide(self, function: str, num_devices: int) -> "ModelConfig":
        """Return the config of the model that each device runs, see `shard_config`.

        Raises:
          ValueError: the model cannot be divided. The message begins with `function`.
        """
        for spec in dict.fromkeys(self.layers):
            for step in spec.steps:
                step.check_divides(function, num_devices)
        per_layer = self.per_layer
        if per_layer is not None and per_layer.vocab_size:
            for size in (self.vocab_size, per_layer.vocab_size):
                if size % num_devices:
                    raise ValueError(
                        f"{function}: tensor_parallel_size must divide the model's vocabulary "
                        f"sizes, one of which is {size}, got {num_devices}."
                    )
            per_layer = per_layer._replace(vocab_size=per_layer.vocab_size // num_devices)

        def divide(spec: LayerSpec) -> LayerSpec:
            return spec.map(lambda step: step.widen(num_devices).divide(num_devices))

        return self.replace(
            layers=self.map_layers(divide),
            vocab_size=-(-self.vocab_size // num_devices),
            per_layer=per_layer,
        )

    def _set_length(self, spec: LayerSpec) -> LayerSpec:
        """Let the maximum length select the factors of rotary embeddings, see `Rope`."""
        length = self.max_position_embeddings

        def set_length(part: Any) -> Any:
            if isinstance(part, AttentionPart) and part.rope and part.rope.max_position_embeddings:
                rope = dataclasses.replace(part.rope, max_position_embeddings=length)
                return dataclasses.replace(cast(Any, part), rope=rope)
            return part.map_inner(set_length)

        return spec.map(set_length)

    def map_layers(self, function: Callable[[LayerSpec], LayerSpec]) -> tuple[LayerSpec, ...]:
        """Apply a function once to each distinct layer."""
        changed = {spec: function(spec) for spec in dict.fromkeys(self.layers)}
        return tuple(changed[spec] for spec in self.layers)

    def replace(self, **changes: Any) -> "ModelConfig":
        """Return a config with other values of the fields of `ModelConfig`.

        The result is a `ModelConfig`, also if this is a `LlamaConfig`.
        """
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)
        }
        return ModelConfig(**fields | changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` that transformers can read.

        Raises:
          ValueError: the family `model_type` cannot represent this config, or is unknown.
        """
        if self.family is None:
            raise ValueError(
                f"ModelConfig: family must be set to write a config.json, got None in {self}."
            )
        config = self.replace()
        written = self.family.write(config)
        parsed = self.family.read(ConfigEntries(written).complete(self.family.defaults))
        if difference := find_difference(config, parsed):
            name, value, expected = difference
            raise ValueError(
                f"ModelConfig: {name} must be {expected!r} for model_type {self.model_type!r}, "
                f"because its config.json cannot express another value, got {value!r}."
            )
        return written


def check_num_layers(num_layers: int) -> None:
    """Check that the number of layers is plausible, before lists of this length are made.

    Raises:
      ValueError: the number is not positive, or exceeds `_MAX_LAYERS`.
    """
    check_positive("LlamaConfig", num_hidden_layers=num_layers)
    if num_layers > _MAX_LAYERS:
        raise ValueError(
            f"LlamaConfig: num_hidden_layers must be at most {_MAX_LAYERS}, got {num_layers}."
        )


def find_difference(a: Any, b: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Find the first difference of two configs, also inside of their parts.

    Floats may differ by rounding, because some values are stored as their reciprocal.

    Returns:
      The name of a value, such as ``"layers[0].steps[0].part.num_heads"``, and the two values; None
      without a difference.
    """
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            if field.compare:
                inner = f"{name}.{field.name}".removeprefix(".")
                x, y = getattr(a, field.name), getattr(b, field.name)
                if difference := find_difference(x, y, inner):
                    return difference
        return None
    if isinstance(a, tuple) and isinstance(b, tuple):
        xs, ys = cast(tuple[Any, ...], a), cast(tuple[Any, ...], b)
        if len(xs) != len(ys):
            return name, xs, ys
        pairs = enumerate(zip(xs, ys, strict=True))
        differences = (find_difference(x, y, f"{name}[{index}]") for index, (x, y) in pairs)
        return next(filter(None, differences), None)
    is_close = isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-12)
    return None if a == b or is_close else (name, cast(Any, a), cast(Any, b))
