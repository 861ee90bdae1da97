"""Loading of an engine's model, tokenizer and generation defaults."""

import concurrent.futures
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from paged_jax.engine.config import EngineConfig
from paged_jax.engine.numerics import apply_numerics
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.gguf_file import GgufFile, is_gguf
from paged_jax.models.hub import describe_missing_model, find_model
from paged_jax.models.loading.pretrained import bundled_folder, from_pretrained, read_config
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.tensor_parallel import TensorParallel
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.runner.weights import Weights
from paged_jax.sampling.token_bias import TokenBias


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model on its devices, with its tokenizer and its generation defaults.

    Attributes:
      weights: the weights on the devices.
      tokenizer: the tokenizer; None if there is none.
      generation_config: sampling defaults that come with the model, see `GenerationConfig`.
      eos_token_ids: ids of the end-of-sequence tokens.
      token_bias: biases that are added to the logits of every request.
      is_shared: whether the arrays of the weights belong to the caller. If so, the engine must not
        delete them.
    """

    weights: Weights
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    eos_token_ids: frozenset[int]
    token_bias: TokenBias
    is_shared: bool

    # The config is cached, because each step reads it and `layout_model` takes 60 us.
    @functools.cached_property
    def config(self) -> ModelConfig:
        """Configuration of the whole model."""
        return self.weights.layout_model.config

    @classmethod
    def load(cls, options: EngineConfig) -> "LoadedModel":
        """Load the model and the tokenizer that are given by the options of an engine.

        Raises:
          ValueError: an option is not possible with the model or the devices, or a file is damaged.
          OSError: files are missing, or cannot be read or downloaded.
        """
        options = find_files(options)
        if isinstance(options.model, Path) and is_gguf(options.model):
            # Read the header of the file into a cache, because both threads below need it.
            GgufFile.open(options.model)
        # Load the tokenizer in another thread while this thread loads the weights. For a small
        # model, the tokenizer takes half as long as the weights.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            future = thread.submit(load_tokenizer, options.model, options.tokenizer)
            weights = load_weights(options)
            tokenizer = future.result()
        generation_config = load_generation_config(options.model, tokenizer)
        config = weights.layout_model.config
        eos_token_ids = find_eos_token_ids(config, tokenizer, generation_config)
        return cls(
            weights=weights,
            tokenizer=tokenizer,
            generation_config=generation_config,
            eos_token_ids=eos_token_ids,
            token_bias=generation_config.token_bias(eos_token_ids, config.vocab_size),
            is_shared=isinstance(options.model, PagedModel),
        )


def find_files(options: EngineConfig) -> EngineConfig:
    """Replace names of models on the Hugging Face Hub by local paths, and return the options.

    Raises:
      OSError: a model is not in the local cache of the Hub, or cannot be downloaded.
      ValueError: `revision` is given although the model is a path, or the model is a Flax module
        that is not a `PagedModel`.
    """
    model, tokenizer = options.model, options.tokenizer
    if isinstance(model, nnx.Module) and not isinstance(model, PagedModel):
        raise ValueError(
            "Engine: model must be a folder or a PagedModel, got a module of "
            f"{type(model).__name__}. See 'A model of another package' in docs/new-models.md."
        )
    if isinstance(model, (str, Path)):
        requested_model = model
        model = find_model(requested_model, revision=options.revision, download=options.download)
        if not model.exists():
            raise FileNotFoundError(f"Engine: model {describe_missing_model(requested_model)}")
    if isinstance(tokenizer, (str, Path)):
        tokenizer = find_model(tokenizer, download=options.download)
    return dataclasses.replace(options, model=model, tokenizer=tokenizer)


def load_weights(options: EngineConfig) -> Weights:
    """Load weights onto one device, or divide them over the devices of a mesh.

    If the weights are divided, only the part of each device is read from the files.

    Raises:
      ValueError: the model cannot be divided over the devices, or its files are invalid, see
        `Decoder.from_pretrained`.
      OSError: files are missing or cannot be read.
    """
    model, backend = options.model, options.backend
    mesh = find_mesh(options.mesh, options.tensor_parallel_size)
    if isinstance(model, PagedModel):
        if mesh is not None and not isinstance(model, Decoder):
            raise ValueError(
                f"Engine: model must be a Decoder to be divided over devices, got "
                f"{type(model).__name__}."
            )
        parallel = None if mesh is None else TensorParallel.create("Engine", mesh, model.config)
        return Weights(
            apply_numerics(options, model), parallel, check_replicas=options.check_replicas
        )
    folder = bundled_folder() if model is None else Path(model)
    kwargs: Any = {
        "dtype": options.dtype,
        "dequantise": options.dequantise,
        "show_progress": options.show_progress,
    }
    # Also take this branch for a missing folder, because `from_pretrained` raises the error for it.
    if mesh is None or not folder.exists():
        if jax.default_backend() == "cpu":
            # The kernels for CPUs are fastest with stacked layers. Other backends would copy each
            # layer out of the stack.
            kwargs["scan_layers"] = None if backend in (None, "cpu") else False
        loaded = from_pretrained(Decoder, model, backend=backend, **kwargs)
        return Weights(apply_numerics(options, loaded))
    parallel = TensorParallel.create("Engine", mesh, read_config(folder))
    loaded = Decoder.from_pretrained(folder, sharding=parallel.model_sharding, **kwargs)
    # Use the config of the loaded model, because its dtype is the dtype of the loaded weights.
    parallel = dataclasses.replace(parallel, config=loaded.config)
    loaded = apply_numerics(options, loaded)
    return Weights(loaded, parallel, check_replicas=options.check_replicas)


def find_mesh(mesh: Mesh | None, tensor_parallel_size: int) -> Mesh | None:
    """Return the device mesh of an engine; None if the engine uses a single device.

    Args:
      mesh: the option `mesh` of the engine.
      tensor_parallel_size: the option `tensor_parallel_size` of the engine.

    Raises:
      ValueError: there are fewer devices than `tensor_parallel_size`, or both options are given.
    """
    if tensor_parallel_size == 1:
        return mesh
    if mesh is not None:
        raise ValueError(
            "Engine: tensor_parallel_size must be 1 if mesh is given, got "
            f"{tensor_parallel_size}. Pass only one of the two options."
        )
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"Engine: tensor_parallel_size must be at most {len(devices)}, the number of "
            f"{devices[0].platform} devices that JAX finds, got {tensor_parallel_size}."
        )
    # If all devices are used, let JAX order them so that neighbours have fast links. Otherwise use
    # the first devices.
    is_all = tensor_parallel_size == len(devices)
    return jax.make_mesh(
        (tensor_parallel_size,), ("tp",), devices=None if is_all else devices[:tensor_parallel_size]
    )


def load_tokenizer(
    model: str | Path | PagedModel | None, tokenizer: str | Path | Tokenizer | None
) -> Tokenizer | None:
    """Return the tokenizer given by `tokenizer`; if it is None, load it from the model's folder.

    The result is None if `tokenizer` is None and the model has no tokenizer, because it is a module
    or its folder has no tokenizer.json.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        return Tokenizer.from_folder(tokenizer)
    if isinstance(model, PagedModel):
        return None
    folder = bundled_folder() if model is None else Path(model)
    has_tokenizer = is_gguf(folder) or (folder / "tokenizer.json").exists()
    return Tokenizer.from_folder(folder) if has_tokenizer else None


def load_generation_config(
    model: str | Path | PagedModel | None, tokenizer: Tokenizer | None
) -> GenerationConfig:
    """Return the generation defaults in the model's folder, or else the tokenizer's defaults.

    If the `Tokenizer` was created with sampling defaults, they replace the sampling defaults in the
    folder.

    Raises:
      ValueError: see `GenerationConfig.from_folder`.
    """
    tokenizer_config = GenerationConfig() if tokenizer is None else tokenizer.generation_config
    if isinstance(model, PagedModel):
        return tokenizer_config
    config = GenerationConfig.from_folder(bundled_folder() if model is None else model)
    if config.path is None:
        return tokenizer_config
    if tokenizer_config.path is None and tokenizer_config.sampling_defaults:
        return dataclasses.replace(config, sampling_defaults=tokenizer_config.sampling_defaults)
    return config


def find_eos_token_ids(
    config: ModelConfig, tokenizer: Tokenizer | None, generation_config: GenerationConfig
) -> frozenset[int]:
    """Return the ids of all end-of-sequence tokens.

    They are listed by the config of the model, by the tokenizer and by the generation defaults.
    """
    token_ids = {*config.eos_token_ids, *generation_config.eos_token_ids}
    token_ids |= set(tokenizer.eos_token_ids if tokenizer else ())
    # A tokenizer may have tokens outside of the model's vocabulary.
    return frozenset(token_id for token_id in token_ids if 0 <= token_id < config.vocab_size)
