"""Tokens and logits of the bundled model by transformers, stored in tests/data/bundled."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paged_jax.models.loading.pretrained import bundled_folder
from tests.support import DATA

FOLDER = DATA / "bundled"
# Prompts of the four works in the training texts, and the number of generated tokens. Some prompts
# have pieces that the tokenizer has not seen.
PROMPTS = {
    "": 24,
    "ROMEO:\nWhat light is this, that": 40,
    "It is a truth universally acknowledged, that a single man in possession of": 64,
    "Dorothy lived in the midst of the great Kansas prairies, with Uncle Henry, who was a farmer, "
    "and Aunt Em, who was the farmer's wife. 🙂 Überall 42!\n\nIt was": 200,
}
# Logits of all positions are stored for every 24th token.
COLUMNS = slice(0, None, 24)
# Texts for the tokenizer.
TEXTS = (
    "", " ", "a", "It is a truth", "  two spaces", "tabs\tand\r\nlines\n\n\n", "don't we'll I'M",
    "naïve café, Übergröße", "日本語", "1234567890", "x" * 40, "<s>", "a</s>b", "<|im_start|>",
    "\U0001f642\U0001f469\u200d\U0001f680", "\x00\x7f\u200b\ufeff", "ﬁ ½ ²", "e\u0301",
)  # fmt: skip
CHATS = (
    [{"role": "user", "content": "Who are you?"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "Pear."},
        {"role": "user", "content": "Another?\n"},
    ],
)
# Smallest difference of the best two logits of a generated token. Sums in other orders change
# logits by 1e-5, so greedy tokens in float32 do not depend on the order.
MIN_GAP = 1e-3


class Continuation(NamedTuple):
    """Greedy continuation of a prompt, with logits of all tokens but the last."""

    prompt: str
    prompt_ids: list[int]
    generated_ids: list[int]
    text: str  # of the prompt and the continuation
    columns: np.ndarray  # logits at each position for the tokens COLUMNS
    last: np.ndarray  # logits after the prompt, for all tokens

    @property
    def token_ids(self) -> list[int]:
        """All tokens but the last, which has no logits."""
        return self.prompt_ids + self.generated_ids[:-1]


@cache
def read_continuations() -> tuple[Continuation, ...]:
    """Return the stored continuations, in the order of `PROMPTS`."""
    items = read_json()["continuations"]
    with np.load(FOLDER / "logits.npz") as logits:
        return tuple(
            Continuation(**item, columns=logits[f"columns_{i}"], last=logits[f"last_{i}"])
            for i, item in enumerate(items)
        )


def read_json() -> dict[str, Any]:
    """Return the stored tokens and texts."""
    return json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))


def compute() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what is stored, from transformers: tokens and texts, and logits by name."""
    import torch
    import transformers

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for a small model, threads cost more than they save
    folder = bundled_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits_of(token_ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].numpy()

    def continue_greedily(token_ids: list[int], num_tokens: int) -> list[int]:
        inputs = torch.tensor([token_ids])
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, temperature=None,
            top_p=None, min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0,
        )  # fmt: skip
        return output[0].tolist()

    continuations, logits = [], {}
    for i, (prompt, num_tokens) in enumerate(PROMPTS.items()):
        prompt_ids = tokenizer.encode(prompt)
        token_ids = continue_greedily(prompt_ids, num_tokens)
        rows = logits_of(token_ids[:-1])
        check_greedy(rows[len(prompt_ids) - 1 :], token_ids[len(prompt_ids) :])
        logits[f"columns_{i}"] = rows[:, COLUMNS].copy()
        logits[f"last_{i}"] = rows[len(prompt_ids) - 1].copy()
        continuations.append(
            {
                "prompt": prompt,
                "prompt_ids": prompt_ids,
                "generated_ids": token_ids[len(prompt_ids) :],
                "text": tokenizer.decode(token_ids, skip_special_tokens=True),
            }
        )
    texts = [
        {
            "text": text,
            "ids": tokenizer.encode(text),
            "plain_ids": tokenizer.encode(text, add_special_tokens=False),
            "decoded": tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True),
        }
        for text in TEXTS
    ]
    chats = [
        {
            "messages": messages,
            "text": tokenizer.apply_chat_template(messages, tokenize=False),
            "ids": tokenizer.apply_chat_template(messages, return_dict=False),
        }
        for messages in CHATS
    ]
    torch.set_num_threads(num_threads)
    return {"continuations": continuations, "texts": texts, "chats": chats}, logits


def check_greedy(logits: np.ndarray, token_ids: list[int]) -> None:
    """Check that tokens are greedy whatever the order of sums in float32."""
    best = np.sort(logits, axis=-1)[:, -2:]
    gap = float((best[:, 1] - best[:, 0]).min())
    if logits.argmax(-1).tolist() != token_ids or gap < MIN_GAP:
        raise ValueError(f"bundled_reference: two tokens are too close, got {gap}. Change PROMPTS.")


def write(folder: Path) -> list[str]:
    """Write the values of transformers to a folder. The result is always empty."""
    tokens, logits = compute()
    folder.mkdir(exist_ok=True)
    text = json.dumps(tokens, ensure_ascii=False, separators=(",", ":"))
    (folder / "reference.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(folder / "logits.npz", **logits)
    return []
