"""Train a small Llama on plain text and export it as a Hugging Face folder.

    python examples/train.py --data texts/ --out model/

Every ``*.txt`` file of the data folder is a text; the end of each text is held out. The script
trains a tokenizer and then the model, with the Flax model of this library, optax and Orbax. If it
is killed, it continues from the last checkpoint. With the same seed, machine and library versions,
the weights are identical bit for bit, even after a restart.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from paged_jax.models.decoder import Llama
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.saving import save_weights

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1

# The cost of attention per token grows with the window, and a small model mostly learns local
# patterns. So most steps use short windows, and the last steps use long windows.
SHORT_FRACTION = 0.8
SHORT_DIVISOR = 4


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of all texts in a row. Each text begins with BOS and ends with EOS.

    Attributes:
      train: i32 [N], training tokens.
      starts: i32, positions in `train` where a line begins.
      held_out: i32 [N], held-out tokens.
      held_out_bytes: length of the held-out text in UTF-8.
    """

    train: np.ndarray
    starts: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int


def read_texts(folder: Path) -> list[str]:
    """Read all ``*.txt`` files of a folder in the order of their names."""
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise FileNotFoundError(
            f"--data must be a folder with *.txt files, got {folder}. Put plain text files there."
        )
    return [strip_frame(path.read_text(encoding="utf-8")) for path in paths]


def strip_frame(text: str) -> str:
    """Remove the header and footer of Project Gutenberg, if there are any."""
    start = re.search(r"^\*\*\* ?START OF.*?\*\*\*[^\n]*\n", text, re.MULTILINE | re.DOTALL)
    end = re.search(r"^\*\*\* ?END OF", text, re.MULTILINE)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip() + "\n"


def split(text: str, held_out_fraction: float) -> tuple[str, str]:
    """Split a text at the first line that begins in its last `held_out_fraction`."""
    cut = text.find("\n", int(len(text) * (1 - held_out_fraction))) + 1
    return text[:cut], text[cut:]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer. Encoding any text is lossless and prepends BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size must be {tokenizer.get_vocab_size()} for this text, because there are "
            f"no more pairs to merge or more bytes are needed, got {vocab_size}."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def build_corpus(tokenizer: Tokenizer, parts: list[tuple[str, str]]) -> Corpus:
    """Encode the training part and the held-out part of each text."""
    train, held_out = [], []
    for text, rest in parts:
        train += [*tokenizer.encode(text).ids, EOS_ID]
        held_out += [*tokenizer.encode(rest).ids, EOS_ID]
    newline = np.array(
        ["Ċ" in (tokenizer.id_to_token(i) or "")[-1:] for i in range(tokenizer.get_vocab_size())]
    )
    train = np.array(train, np.int32)
    return Corpus(
        train=train,
        starts=(np.flatnonzero(newline[train]) + 1).astype(np.int32),
        held_out=np.array(held_out, np.int32),
        held_out_bytes=sum(len(rest.encode()) for _, rest in parts),
    )


def windows(corpus_ids: jax.Array, starts: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return inputs and targets, both i32 [B, length]. Inputs begin with BOS."""
    targets = corpus_ids[starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None]]
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID), targets


def optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Return AdamW with gradient clipping, linear warm-up and cosine decay to 1% of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        args.learning_rate,
        warmup_steps=min(args.warmup_steps, args.steps // 2),
        decay_steps=args.steps,
        end_value=args.learning_rate / 100,
    )

    def is_matrix(params: Any) -> Any:  # no weight decay for norms
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=args.weight_decay, mask=is_matrix),
    )


def losses(graphdef: Any, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the cross entropy in nats, f32 [B, T]."""
    logits = nnx.merge(graphdef, params)(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def make_train_step(graphdef: Any, corpus: Corpus, args: argparse.Namespace) -> Callable:
    """Return a function ``(params, opt_state, step, length) -> (params, opt_state, loss)``.

    Parameters and optimizer state are donated. The batch depends only on the seed and the step, so
    a resumed run uses the same batches.
    """
    train, starts = jnp.asarray(corpus.train), jnp.asarray(corpus.starts)
    update = optimizer(args).update

    @functools.partial(jax.jit, static_argnames="length", donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, step: jax.Array, *, length: int):
        key = jax.random.fold_in(jax.random.key(args.seed), step)
        batch_size = args.batch_size * (args.sequence_length // length)
        chosen = starts[jax.random.randint(key, (batch_size,), 0, starts.shape[0])]
        # Windows that would exceed the end of the text begin earlier.
        inputs, targets = windows(train, jnp.minimum(chosen, train.shape[0] - length), length)
        loss, gradients = jax.value_and_grad(
            lambda params: losses(graphdef, params, inputs, targets).mean()
        )(params)
        updates, opt_state = update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def make_evaluate(graphdef: Any, corpus: Corpus, args: argparse.Namespace) -> Callable:
    """Return a function from params to nats per token of the held-out text."""
    length = min(args.sequence_length, len(corpus.held_out))
    starts = np.arange(0, len(corpus.held_out), length)
    # The last window begins earlier. Tokens that are also in the window before do not count.
    overlap = np.maximum(starts + length - len(corpus.held_out), 0)
    held_out = jnp.asarray(corpus.held_out)

    @jax.jit
    def total(params: Any, starts: jax.Array, overlap: jax.Array) -> jax.Array:
        counted = jnp.arange(length)[None] >= overlap[:, None]
        return jnp.sum(losses(graphdef, params, *windows(held_out, starts, length)) * counted)

    def evaluate(params: Any) -> float:
        batches = range(0, len(starts), args.batch_size)
        rows = [slice(i, i + args.batch_size) for i in batches]
        sums = [float(total(params, (starts - overlap)[r], overlap[r])) for r in rows]
        return sum(sums) / len(corpus.held_out)

    return evaluate


def window_length(step: int, args: argparse.Namespace) -> int:
    """Return the window length of a step. All batches have the same number of tokens."""
    short = step < SHORT_FRACTION * args.steps
    return args.sequence_length // (SHORT_DIVISOR if short else 1)


def checkpoint_folder(args: argparse.Namespace) -> Path:
    """Return the folder of the checkpoints."""
    return args.checkpoints or args.out / "checkpoints"


def check_same_run(corpus: Corpus, args: argparse.Namespace) -> None:
    """Check that existing checkpoints have the same settings; store the settings otherwise.

    Raises:
      ValueError: the checkpoints belong to a run with other settings or another text.
    """
    free = ("data", "out", "checkpoints", "checkpoint_every")  # do not affect the weights
    settings = {name: value for name, value in sorted(vars(args).items()) if name not in free}
    settings["text"] = hashlib.sha256(corpus.train.tobytes()).hexdigest()
    path = checkpoint_folder(args) / "settings.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in settings if settings[name] != stored.get(name)]
        if changed:
            raise ValueError(
                f"{path.parent} holds a run with another {changed[0].replace('_', '-')}, "
                f"{stored.get(changed[0])}. Use that value, delete the folder, or choose another "
                "with --checkpoints."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_sizes(corpus: Corpus, args: argparse.Namespace) -> None:
    """Raise a ValueError if the text is too short for the windows."""
    if args.sequence_length % SHORT_DIVISOR:
        raise ValueError(
            f"--sequence-length must be a multiple of {SHORT_DIVISOR}, got {args.sequence_length}."
        )
    if len(corpus.train) < args.sequence_length or not corpus.held_out_bytes:
        raise ValueError(
            f"--data must have more than --sequence-length {args.sequence_length} tokens and some "
            f"held out, got {len(corpus.train)} tokens and {corpus.held_out_bytes} bytes held out. "
            "Use more text or a shorter sequence."
        )


def fit(model: Llama, corpus: Corpus, args: argparse.Namespace) -> tuple[Any, float]:
    """Train until `args.steps`, starting with the last checkpoint if there is one.

    Returns:
      The trained parameters, and the loss of the last step in nats per token.
    """
    graphdef, params = nnx.split(model)
    opt_state = optimizer(args).init(params)
    train_step = make_train_step(graphdef, corpus, args)
    evaluate = make_evaluate(graphdef, corpus, args)
    # Asynchronous saving could read buffers that the next step overwrites.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(checkpoint_folder(args).absolute(), options=options) as manager:
        state = {"params": params, "opt_state": opt_state, "loss": jnp.zeros(())}
        first = manager.latest_step() or 0
        if first:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(first, args=ocp.args.StandardRestore(target))
            print(f"resumed at step {first}", flush=True)
        params, opt_state, loss = state["params"], state["opt_state"], state["loss"]
        with tqdm(total=args.steps, initial=first, mininterval=5, unit="step") as progress:
            for step in range(first, args.steps):
                start = time.perf_counter()
                params, opt_state, loss = train_step(
                    params, opt_state, step, length=window_length(step, args)
                )
                nats = float(loss)
                rate = args.batch_size * args.sequence_length / (time.perf_counter() - start)
                done = step + 1
                if done % args.checkpoint_every == 0 or done == args.steps:
                    held_out = evaluate(params)
                    progress.write(f"step {done}: loss {nats:.3f}, held-out loss {held_out:.3f}")
                    state = {"params": params, "opt_state": opt_state, "loss": loss}
                    manager.save(done, args=ocp.args.StandardSave(state))
                progress.set_postfix_str(f"loss {nats:.3f}, {rate:.0f} tokens/s", refresh=False)
                progress.update()
    return params, float(loss)


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with config, weights, tokenizer and sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    for name, content in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. The defaults are the settings of the bundled model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])

    def add(name: str, default: float, text: str) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} [%(default)s]")

    parser.add_argument("--data", type=Path, required=True, help="folder with *.txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder to continue from [OUT/checkpoints]"
    )
    add("--seed", 0, "seed of the initial weights and the batches")
    add("--steps", 1500, "optimizer steps")
    add("--batch-size", 4, "windows of full length in a batch")
    add("--sequence-length", 512, "tokens in a window, and the context of the model")
    add("--learning-rate", 3e-3, "peak learning rate")
    add("--warmup-steps", 100, "steps before the peak")
    add("--weight-decay", 0.1, "weight decay of matrices")
    add("--held-out-fraction", 0.05, "fraction of each text to hold out")
    add("--checkpoint-every", 250, "steps between checkpoints, each with a held-out loss")
    add("--vocab-size", 1536, "tokens in the vocabulary")
    add("--hidden-size", 256, "width of the residual stream")
    add("--intermediate-size", 576, "width of the MLP")
    add("--layers", 5, "decoder layers")
    add("--heads", 4, "query heads")
    add("--kv-heads", 2, "key and value heads")
    add("--head-dim", 64, "width of a head")
    return parser.parse_args(arguments)


def build_model(args: argparse.Namespace) -> Llama:
    """Return a randomly initialised model with the given sizes."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.sequence_length,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_ids=(EOS_ID,),
    )
    return Llama(config, rngs=nnx.Rngs(args.seed))


def run(args: argparse.Namespace) -> None:
    """Train the tokenizer and the model, and export both."""
    parts = [split(text, args.held_out_fraction) for text in read_texts(args.data)]
    tokenizer = train_tokenizer([text for text, _ in parts], args.vocab_size)
    corpus = build_corpus(tokenizer, parts)
    model = build_model(args)
    graphdef, initial = nnx.split(model)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(initial))
    print(
        f"{num_parameters:,} parameters, {len(corpus.train):,} training tokens, "
        f"{len(corpus.held_out):,} held-out tokens",
        flush=True,
    )
    check_sizes(corpus, args)
    check_same_run(corpus, args)
    params, loss = fit(model, corpus, args)

    exported = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    export(nnx.merge(graphdef, exported), tokenizer, args.out)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), exported)
    held_out = make_evaluate(graphdef, corpus, args)(rounded)
    bits = held_out * len(corpus.held_out) / corpus.held_out_bytes / math.log(2)
    print(f"last batch: {loss:.4f} nats per token")
    print(f"held out, as exported: {held_out:.4f} nats per token, {bits:.4f} bits per byte")
    print(f"exported to {args.out}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; expected errors print one line."""
    try:
        run(parse_args(arguments))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
