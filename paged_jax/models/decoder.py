# pyright: strict, reportUnknownMemberType=false
"""`Decoder`: a decoder of any family as a Flax module, with and without a paged cache."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from paged_jax.arguments import names_arguments
from paged_jax.kernels.embedding import look_up, look_up_differentiably
from paged_jax.kernels.exact import rounded
from paged_jax.kernels.linear import Weight, linear
from paged_jax.kernels.op import is_exact
from paged_jax.kernels.rows import scan_slices
from paged_jax.models.causal_attention import CausalAttention
from paged_jax.models.codecs.dtype_formats import float_type
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer import Layer
from paged_jax.models.layer_attention import Attend, Carry
from paged_jax.models.matrices import Sharding, get_matrix
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.matrix_modules import add_matrix, random_matrix, separate_matrices
from paged_jax.models.paged_model import OutputHead, PagedModel
from paged_jax.models.parts.streams import merge_streams, split_streams
from paged_jax.models.rope import all_rotations
from paged_jax.models.step_arrays import as_token_ids
from paged_jax.models.tensor_parallel import DeviceShard, TensorParallel


class Decoder(PagedModel):
    """A decoder of any family in `families.registry.FAMILIES`, with or without a paged KV cache.

    The methods that use a cache (`prefill`, `score`, `decode`, `create_cache`) are inherited from
    `PagedModel`.

    Args:
      config: configuration of the model. With `shard`, the configuration of one device, see
        `ModelConfig.divide`.
      dtype: floating-point dtype of the weights, or a quantised format such as ``"int8"``, see
        `dtype_formats.DTYPE_FORMATS`. With a quantised format, only large matrices are quantised,
        and other parameters have ``config.dtype``. Activations and logits are float32.
      formats: storage format of each matrix; None for the formats that `dtype` implies.
      scan_layers: whether to stack the layers along a leading dimension ``L`` and scan over them.
        Stacked layers compile fastest. They are recommended on TPUs, and on CPUs with this
        library's kernels, which read weights directly from the stack. On GPUs, XLA copies each
        layer's weights out of the stack, so separate layers are faster. Matrices whose formats
        differ between layers are not stacked. For them, each step of the scan selects the matrix of
        its layer.
      shard: this device's share of a tensor-parallel model that runs in `jax.shard_map`; None
        without tensor parallelism.
      rngs: random keys for the initial weights.

    Raises:
      ValueError: `scan_layers` is true, but the config describes layers that differ from each
        other.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.array([[1, 2, 3]])).shape
      (1, 3, 32)
    """

    norm: nnx.Param[jax.Array]

    def __repr__(self) -> str:
        # Inside a JAX transformation, leaves may be placeholders without size and dtype.
        arrays = [x for x in jax.tree.leaves(self) if hasattr(x, "size") and hasattr(x, "dtype")]
        config, num_parameters = self.config, sum(x.size for x in arrays)
        dtype = max(arrays, key=lambda x: x.size).dtype if arrays else config.dtype
        return (
            f"Decoder({config.model_type}, {num_parameters:,} parameters, {dtype}, "
            f"{config.num_hidden_layers} layers, hidden_size={config.hidden_size}, "
            f"vocab_size={config.vocab_size})"
        )

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        formats: MatrixFormats | None = None,
        scan_layers: bool = False,
        shard: DeviceShard | None = None,
        rngs: nnx.Rngs,
    ):
        if scan_layers and not config.can_scan_layers:
            raise ValueError(
                "Decoder: scan_layers must be False for a config with different layers (for "
                "example with different sliding windows or rotary embeddings), got True."
            )
        floats = float_type(dtype, config.dtype)
        if formats is None:
            config_of_floats = dataclasses.replace(config, dtype=floats.name)
            formats = MatrixFormats.of_dtype(dtype, config_of_floats)
        self.config = config
        self.formats = formats
        self.scan_layers = scan_layers
        self.shard = shard
        outer = functools.partial(self._add_outer, floats=floats, rngs=rngs)
        outer("embed_tokens")
        deviation, L = config.initializer_range, config.num_hidden_layers
        layer = functools.partial(
            Layer,
            hidden_size=config.hidden_size,
            dtype=floats,
            deviation=deviation,
            # Smaller, so that the variance of the residual stream does not grow with the number of
            # layers (GPT-2, section 2.3).
            output_deviation=deviation / (2 * L) ** 0.5,
            shard=shard,
        )
        if scan_layers:

            @nnx.split_rngs(splits=L)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Layer:
                return layer(config.layers[0], formats=formats.of_layer(None), rngs=rngs)

            self.layers = stack(rngs)
            separate_matrices(self.layers, formats, L)
        else:
            self.layers = nnx.List(
                layer(spec, formats=formats.of_layer(index), rngs=rngs)
                for index, spec in enumerate(config.layers)
            )
        for name in config.outer_parameters:
            if name != "embed_tokens":
                outer(name)

    def _add_outer(self, name: str, *, floats: np.dtype, rngs: nnx.Rngs) -> None:
        """Add a parameter outside of the layers."""
        parameter = self.config.outer_parameters[name]
        if parameter.initial is None:
            initial = random_matrix(rngs, parameter.shape, floats, self.config.initializer_range)
            add_matrix(self, name, initial, self.formats[name])
        else:
            setattr(self, name, nnx.Param(parameter.initial(rngs, parameter.shape, floats)))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return the logits of whole sequences, computed without a cache.

        The function is differentiable with respect to the weights.

        Args:
          token_ids: i32 ``[B, T]``. Padding at the end of a row does not change the logits of the
            tokens before it.

        Returns:
          float32 ``[B, T, V]``.

        Raises:
          ValueError: `token_ids` has another shape or dtype or, outside of `jit`, contains a token
            that is not in the vocabulary.
        """
        token_ids = as_token_ids("Decoder", self.config.vocab_size, token_ids)
        B, T = token_ids.shape
        if self.numerics == "exact":
            return self.logits(self.final_states(token_ids, jnp.full(B, T, jnp.int32)))
        steps = jnp.arange(T, dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(steps, token_ids.shape)
        attend = CausalAttention(self.config)
        return self.logits(self.run_sequences(token_ids, positions, attend, None))

    def run_sequences(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Any],
        backend: str | None,
    ) -> jax.Array:
        """Embed whole sequences and run the layers, see `PagedModel.run_sequences`."""
        x = look_up_differentiably(self._table("embed_tokens"), token_ids)
        x = self._scale_embeddings(x, backend)
        if is_exact(backend):  # as in `hidden_states`
            x = jnp.where(positions[..., None] < 0, 0, x)
        per_layer = self._per_layer_inputs(x, positions, token_ids, look_up_differentiably, backend)
        return self._run_layers(x, positions, attend, (), per_layer, backend)[0]

    def exact_refusal(self) -> str | None:
        """Return why the model does not support exact numerics, see `PagedModel`."""
        arrays = [x for x in jax.tree.leaves(self) if isinstance(x, jax.Array)]
        concrete = (x for x in arrays if not isinstance(x, Tracer))
        platforms = {device.platform for x in concrete for device in x.devices()}
        accelerators = ", ".join(sorted(platforms - {"cpu"}))
        return f"on a device of {accelerators}" if accelerators else None

    @classmethod
    @names_arguments
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        *,
        dtype: DTypeLike = "auto",
        scan_layers: bool | None = None,
        sharding: Sharding = None,
        dequantise: bool = False,
        show_progress: bool | None = None,
    ) -> "Decoder":
        """Load a Hugging Face folder, a checkpoint of `save_checkpoint`, or a GGUF file.

        Weights are read from the files and put on their devices one after the other, so that memory
        never holds a second copy of the model.

        Args:
          folder: a folder with ``config.json`` and safetensors files, the folder of a checkpoint,
            or the path of a GGUF file; None for the small model that is part of this library.
          dtype: float32, bfloat16 or float16; ``"auto"`` for the dtype of the files. Matrices that
            the files store in a quantised format keep that format. With ``"int8"``, ``"fp8"``,
            ``"int4"`` or ``"int4-symmetric"``, all large matrices are quantised while they are
            loaded.
          scan_layers: see `Decoder`; None to choose the faster option for the device that holds the
            weights.
          sharding: one `jax.sharding.Sharding` for all parameters, or a function of a parameter's
            name (``"layers.0.qkv_proj"``, or ``"layers.qkv_proj"`` if stacked) and shape; None for
            the default device.
          dequantise: whether to convert matrices that the files store in a quantised format to the
            float dtype `dtype`.
          show_progress: whether to show a progress bar on stderr; None shows it on a terminal and
            in a notebook, if loading takes longer than half a second.

        Raises:
          FileNotFoundError: the folder, or its ``config.json``, does not exist.
          UnsupportedConfigError: the config needs an unsupported feature.
          WeightsError: the files do not contain the weights that the config describes.

        Example:
          >>> model = Decoder.from_pretrained()
          >>> model.config.num_hidden_layers, model.config.vocab_size
          (5, 1536)
        """
        # This import is not at the top of the module, because a model that is not loaded from files
        # needs neither orbax nor safetensors.
        from paged_jax.models.loading.pretrained import from_pretrained

        return from_pretrained(
            cls,
            folder,
            dtype=dtype,
            scan_layers=scan_layers,
            sharding=sharding,
            dequantise=dequantise,
            show_progress=show_progress,
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model as ``config.json`` and safetensors files that transformers can load.

        Quantised matrices are written in the formats of compressed-tensors, which vLLM can read
        too.

        Raises:
          ValueError: compressed-tensors has no equivalent of a matrix's format, or transformers
            cannot represent this config.
        """
        from paged_jax.models.loading.saving import save_weights

        save_weights(self, folder)

    def make_shard(self, parallel: TensorParallel) -> "Decoder":
        """Return the model that each device runs on its share of the weights.

        The parameters of the result are only shapes, without values.
        """
        return nnx.eval_shape(
            lambda: Decoder(
                parallel.device_config,
                dtype=self.float_dtype,
                formats=self.formats,
                scan_layers=self.scan_layers,
                shard=parallel.shard,
                rngs=nnx.Rngs(0),
            )
        )

    def hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Embed the tokens and run the layers, see `PagedModel.hidden_states`."""
        backend = self.resolve_backend(backend)
        find = look_up if self.shard is None else self.shard.look_up
        x = self._scale_embeddings(find(self._table("embed_tokens"), token_ids), backend)
        # Set the embeddings of padding rows (position -1) to zero. In models without biases, all
        # activations of these rows then stay zero, and the CPU kernels skip rows of zeros.
        x = jnp.where(positions[..., None] < 0, 0, x)
        per_layer = self._per_layer_inputs(x, positions, token_ids, find, backend)
        return self._run_layers(x, positions, attend, carry, per_layer, backend)

    def logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        """Return the logits for rows of hidden states, see `PagedModel.logits`."""
        backend = self.resolve_backend(backend)
        head = self.output_head(x, backend)
        logits = linear(head.x, head.weight, backend=backend)
        if self.shard is not None:
            logits = self.shard.gather_logits(logits)
        return head.finish(logits)

    def output_head(self, x: jax.Array, backend: str | None = None) -> OutputHead:
        """Return the steps of `logits`, see `PagedModel.output_head`."""
        backend = self.resolve_backend(backend)
        table = self._table("embed_tokens" if self.config.tie_word_embeddings else "lm_head")
        normed = self.config.norm.apply("norm", x, self._vector, backend)
        return OutputHead(normed, table, functools.partial(_finish_logits, self.config, backend))

    @property
    def float_dtype(self) -> np.dtype:
        """Dtype of the floating-point parameters."""
        return self.norm.dtype

    @property
    def weight_dtype(self) -> np.dtype:
        """Dtype of the output head's values, which may be quantised."""
        head = "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return getattr(self, head).dtype

    @property
    def matrix_formats(self) -> MatrixFormats:
        """Storage format of each matrix."""
        return self.formats

    def _vector(self, name: str) -> jax.Array:
        """Return a parameter outside of the layers that is not a matrix."""
        return getattr(self, name)[...]

    def _table(self, name: str) -> Weight:
        format, int8_inputs = self.formats[name], self.int8_activations
        return get_matrix(self, name, format, self.float_dtype, int8_inputs=int8_inputs)

    def _scale_embeddings(self, embeddings: jax.Array, backend: str | None = None) -> jax.Array:
        return self._scale(embeddings, self.config.embedding_multiplier, backend)

    def _scale(self, embeddings: jax.Array, factor: float, backend: str | None) -> jax.Array:
        if factor == 1:
            return embeddings
        # Round the factor to the dtype of the weights, because Gemma was trained with a bfloat16
        # factor.
        factors = jnp.asarray(factor, self.float_dtype).astype(jnp.float32)
        return rounded(embeddings * factors, backend)

    def _per_layer_inputs(
        self,
        x: jax.Array,
        positions: jax.Array,
        token_ids: jax.Array,
        find: Callable[[Weight, jax.Array], jax.Array],
        backend: str | None,
    ) -> jax.Array | None:
        """Return the per-layer embeddings of tokens, ``[..., L, d]``; None if the model has none.

        The embedding of a token for a layer is the sum of an entry of the table
        ``embed_tokens_per_layer`` and a normalised projection of `x`, divided by sqrt(2).

        ``x [..., E]`` is the input of the first layer. Positions and token ids are i32 ``[...]``,
        with position -1 for padding. `find` looks up rows of an embedding table.
        """
        config = self.config
        if config.per_layer is None:
            return None
        d, size = config.per_layer
        shape = (*token_ids.shape, config.num_hidden_layers, d)
        table, projection = (
            self._table(name) for name in ("embed_tokens_per_layer", "per_layer_model_proj")
        )
        if size:
            size *= 1 if self.shard is None else self.shard.num_devices
            token_ids = jnp.where(token_ids < size, token_ids, 0)
        of_tokens = self._scale(find(table, token_ids).reshape(shape), d**0.5, backend)
        of_tokens = jnp.where(positions[..., None, None] < 0, 0, of_tokens)
        if not is_exact(backend):
            backend = None
        projected = linear(x, projection, backend=backend) * config.hidden_size**-0.5
        projected = projected.reshape(shape)
        normed = config.norm.apply("per_layer_norm", projected, self._vector, backend)
        return rounded((normed + of_tokens) * 2**-0.5, backend)

    def _run_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        per_layer: jax.Array | None,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        has_streams = self.config.streams is not None
        if has_streams:
            x = split_streams(x, self._table("stream_proj"), backend)
        kinds = [spec.attention and spec.attention.rotation for spec in self.config.layers]
        rotations = all_rotations(positions, kinds, backend)
        is_token = positions >= 0 if self.config.num_experts else None
        options: Any = {
            "attend": attend, "positions": positions, "is_token": is_token, "backend": backend,
            "int8_inputs": self.int8_activations,
        }  # fmt: skip
        if isinstance(self.layers, nnx.List):
            for index, layer in enumerate(self.layers):
                if per_layer is not None:
                    options["per_layer_input"] = per_layer[..., index, :]
                options["rotation"] = rotations[index]
                x, carry = layer(x, index=index, carry=carry, **options)
            if has_streams:
                x = merge_streams(x, self._table("stream_out_proj"), backend)
            return x, carry
        options["rotation"] = rotations[0]
        stack = self.layers
        graphdef, stacked, separate = cast(
            tuple[Any, Any, Any], nnx.split(stack, lambda path, _: len(path) == 1, ...)
        )

        # Pass the pools in the scan's carry. If they were inputs and outputs that the scan slices
        # (`xs`, `ys`), XLA would copy them.
        def run_layer(
            state: tuple[jax.Array, Carry], weights: Any, index: jax.Array
        ) -> tuple[jax.Array, Carry]:
            x, carry = state
            layer = nnx.merge(graphdef, weights, separate)
            return layer(x, index=index, carry=carry, stack=stack, **options)

        return scan_slices(run_layer, (x, carry), stacked)


def _finish_logits(config: ModelConfig, backend: str | None, logits: jax.Array) -> jax.Array:
    """Scale the results of the output matmul, and apply the soft cap."""
    if config.logit_scale != 1:
        logits = rounded(logits * config.logit_scale, backend)
    cap = config.final_logit_softcapping
    if cap is None:
        return logits
    return rounded(cap * jnp.tanh(rounded(logits / cap, backend)), backend)


Llama = Decoder
"""`Decoder` under the name that users of Llama know. Models of all families are of this class."""
