"""Random two-layer Llama and a tokenizer of letters: quick to compile, with varied output."""

import functools
import json
import shutil
from pathlib import Path

import jax
import tokenizers
from flax import nnx
from tokenizers import decoders, processors

from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig

BOS, EOS = 0, 1
# Merged pairs make some tokens longer than a letter.
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), (" ", "s"), ("o", "u")]
_VOCAB = ["<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,:!?'\n"]
_VOCAB += [left + right for left, right in _MERGES]

# Common sizes of all test engines, so that they share compiled programs, with fewer blocks than the
# slots could use.
SIZES = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 4, "max_chunk": 16}

CONFIG = LlamaConfig(
    vocab_size=len(_VOCAB),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_ids=(EOS,),
)


def save_tiny_model(
    folder: Path, *, chat_template: str | None = None, context: int | None = None
) -> Path:
    """Write a Hugging Face folder without sampling defaults, and return it.

    For tests that cannot use the fixture `tiny_folder`: another chat template, a longer context, or
    modified files.
    """
    _model().save_pretrained(folder)
    if context is not None:
        sizes = json.loads((folder / "config.json").read_text())
        sizes["max_position_embeddings"] = context
        (folder / "config.json").write_text(json.dumps(sizes))
    _backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_tokenizer_for_forms(tiny_folder: Path, folder: Path) -> Path:
    """Copy the folder of the tiny model, with an equivalent decoder that llguidance supports."""
    shutil.copytree(tiny_folder, folder)
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


@functools.cache
def _model() -> Decoder:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    # Far from zero, so that the next token depends on all previous tokens.
    leaves, treedef = jax.tree.flatten(nnx.state(model))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [
        x + 0.4 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(treedef, leaves))
    return model


def _backend() -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(_VOCAB)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=_MERGES, unk_token="<unk>")
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return backend
