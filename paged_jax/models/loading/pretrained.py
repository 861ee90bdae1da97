"""One way to load any model: a Hugging Face folder, an Orbax checkpoint, or the bundled model."""

from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paged_jax.kernels import cpu
from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.huggingface import load_weights
from paged_jax.models.loading.orbax import is_checkpoint, load_checkpoint
from paged_jax.models.loading.parameters import Model, ModelClass, Sharding, resolve_sharding


def from_pretrained(
    model_class: ModelClass[Model],
    folder: str | Path | None = None,
    *,
    dtype: Any = "auto",
    scan_layers: bool | None = None,
    sharding: Sharding = None,
) -> Model:
    """Load a model of a class, see `Llama.from_pretrained`."""
    folder = bundled_folder() if folder is None else Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"from_pretrained: folder must exist, got {folder}. Nothing is downloaded: fetch it "
            "first, as with `hf download ORG/NAME --local-dir DIR`."
        )
    config = LlamaConfig.from_file(folder)
    if scan_layers is None:
        scan_layers = config.can_scan_layers and _scans_best(config, sharding)
    load = load_checkpoint if is_checkpoint(folder) else load_weights
    return load(
        model_class, folder, config, dtype=dtype, scan_layers=scan_layers, sharding=sharding
    )


def bundled_folder() -> Path:
    """Where the small model that comes with this library is."""
    return Path(str(resources.files("paged_jax.models") / "bundled"))


def _scans_best(config: LlamaConfig, sharding: Sharding) -> bool:
    """Whether layers are better stacked: XLA copies weights out of a stack on CPU and GPU."""
    platform = _platform(config, sharding)
    if platform == "tpu":
        return not config.num_experts  # which a kernel reads, and XLA would copy for it
    # The kernels for CPUs read weights in the stack; they are not for programs that XLA divides.
    return platform == "cpu" and sharding is None and cpu.is_available()


def _platform(config: LlamaConfig, sharding: Sharding) -> str:
    placement = (
        resolve_sharding(sharding, "embed_tokens", (config.vocab_size, config.hidden_size))
        or jax.device_put(np.zeros(())).sharding  # without a program to compile
    )
    return next(iter(placement.device_set)).platform
