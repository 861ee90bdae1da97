"""One way to load any model: a Hugging Face folder, an Orbax checkpoint, or the bundled model."""

from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama
from paged_jax.models.loading.huggingface import Sharding, load_weights, resolve_sharding
from paged_jax.models.loading.orbax import is_checkpoint, load_checkpoint


def from_pretrained(
    folder: str | Path | None = None,
    *,
    dtype: Any = "auto",
    scan_layers: bool | None = None,
    sharding: Sharding = None,
) -> Llama:
    """Load a Llama, see `Llama.from_pretrained`."""
    folder = bundled_folder() if folder is None else Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"from_pretrained: folder must exist, got {folder}. Nothing is downloaded: fetch it "
            "first, as with `hf download ORG/NAME --local-dir DIR`."
        )
    config = LlamaConfig.from_file(folder)
    if scan_layers is None:
        # On CPU and GPU a scan copies every layer's weights out of the stack.
        scan_layers = _platform(config, sharding) == "tpu"
    if is_checkpoint(folder):
        return load_checkpoint(folder, dtype=dtype, scan_layers=scan_layers, sharding=sharding)
    return load_weights(folder, config, dtype=dtype, scan_layers=scan_layers, sharding=sharding)


def bundled_folder() -> Path:
    """Where the small model that comes with this library is."""
    return Path(str(resources.files("paged_jax.models") / "bundled"))


def _platform(config: LlamaConfig, sharding: Sharding) -> str:
    placement = (
        resolve_sharding(sharding, "embed_tokens", (config.vocab_size, config.hidden_size))
        or jnp.zeros(()).sharding
    )
    return next(iter(placement.device_set)).platform
