"""Benchmark of quantised KV caches: bytes per token, and the change of a model's loss.

    python -m benchmarks.kv_dtype --text book.txt --json kv-dtype.json

Every token of the text is scored through the paged cache, in windows of the context length of the
model. Keys and values are written in the dtype of the cache, quantised for int8 and fp8, and
attention reads them back. The difference in loss is therefore due to the cache. Without a text, the
model scores text that it has generated.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import environment
from paged_jax import LLM, Llama, SamplingParams, Tokenizer
from paged_jax.engine.config import KV_DTYPES
from paged_jax.models.loading.pretrained import bundled_folder

# Number of windows per batch: enough to fill the chunks of a step.
NUM_SLOTS = 4


def draw_windows(llm: LLM, count: int) -> list[list[int]]:
    """Generate texts as long as the model's context, i32[count][max_model_len]."""
    params = SamplingParams(temperature=1, seed=0, n=count, max_tokens=None, ignore_eos=True)
    start = {"prompt_token_ids": llm.tokenizer.encode("It is")} if llm.tokenizer else {}
    [output] = llm.generate(start or {"prompt_token_ids": [1]}, params, use_tqdm=False)
    return [[*output.prompt_token_ids, *sample.token_ids] for sample in output.outputs]


def cut_windows(token_ids: list[int], width: int, count: int) -> list[list[int]]:
    """Return the first `count` pieces of `width` tokens.

    Example:
      >>> cut_windows([1, 2, 3, 4, 5], width=2, count=3)
      [[1, 2], [3, 4]]
    """
    return [token_ids[i : i + width] for i in range(0, len(token_ids) - width + 1, width)][:count]


def loss(llm: LLM, windows: list[list[int]]) -> float:
    """Return the mean negative log-probability of tokens in nats, without first tokens."""
    # The last token of a window is only predicted, so that the window may fill the whole context.
    prompts = [{"prompt_token_ids": window[:-1]} for window in windows]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs = []
    for window, output in zip(windows, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(window[1:-1], output.prompt_logprobs[1:], strict=True)
        logprobs += [row[token].logprob for token, row in pairs if row is not None]
    return -float(np.mean(logprobs))


def measure(folder: Path | None, text: Path | None, num_windows: int, names: list[str]) -> Any:
    """Return the loss with each dtype of the cache, and the bytes of K and V per token."""
    model = Llama.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder or bundled_folder())
    exact = LLM(model, tokenizer=tokenizer, max_num_seqs=NUM_SLOTS, kv_dtype="float32")
    if text is None:
        windows = draw_windows(exact, num_windows)
    else:
        token_ids = tokenizer.encode(text.read_text(encoding="utf-8"))
        windows = cut_windows(token_ids, exact.max_model_len, num_windows)
        if not windows:
            raise SystemExit(
                f"kv_dtype: --text must have {exact.max_model_len} tokens, got {len(token_ids)}."
            )
    rows = []
    for name in names:
        llm = LLM(model, tokenizer=tokenizer, max_num_seqs=NUM_SLOTS, kv_dtype=name)
        num_tokens = llm.num_blocks * llm.block_size
        rows.append(
            {
                "kv_dtype": name,
                "bytes_per_token": llm.cache.nbytes / num_tokens,
                "loss": loss(llm, windows),
            }
        )
    base = rows[0]["loss"]
    for row in rows:
        row["loss_change"] = row["loss"] - base
    return {
        "text": text.name if text else "drawn",
        "num_tokens": sum(map(len, windows)),
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        description="What a narrower KV cache costs: bytes of a token, change of the loss."
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the bundled model")
    parser.add_argument("--text", type=Path, help="UTF-8 text to score; default: the model's own")
    parser.add_argument("--windows", type=int, default=16, help="of the model's context, at most")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    report = measure(args.model, args.text, args.windows, list(KV_DTYPES))
    print(f"{report['num_tokens']} tokens, text: {report['text']}")
    print(f"{'cache':<10}{'bytes a token':>15}{'loss':>10}{'change':>11}")
    for row in report["rows"]:
        print(
            f"{row['kv_dtype']:<10}{row['bytes_per_token']:>15.0f}{row['loss']:>10.5f}"
            f"{row['loss_change']:>+11.5f}"
        )
    if args.json:
        args.json.write_text(json.dumps({**environment(), **report}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
