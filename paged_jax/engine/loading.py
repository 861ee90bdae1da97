"""Loads what an engine runs: a model, its tokenizer, and the tokens that end its sequences."""

from pathlib import Path

from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.tokenizer import Tokenizer


def load_tokenizer(
    model: str | Path | Llama | None, tokenizer: str | Path | Tokenizer | None
) -> Tokenizer | None:
    """The tokenizer that is given or lies in a given folder, else that of the model's folder."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        return Tokenizer.from_folder(tokenizer)
    if isinstance(model, Llama):
        return None
    folder = bundled_folder() if model is None else Path(model)
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def find_eos_token_ids(config: LlamaConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The end tokens of the configuration and of the tokenizer."""
    token_ids = {*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
    # A tokenizer may have tokens that the model does not.
    return frozenset(token_id for token_id in token_ids if 0 <= token_id < config.vocab_size)
