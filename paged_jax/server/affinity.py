"""What tells a router which of several servers has a prompt's blocks, from the body alone.

Each server has a prefix cache of its own. Requests whose prompts begin alike belong to the same
one, so a router sends all with one `prompt_key` there. It needs no tokenizer: texts that begin with
the same characters have the same first tokens, but for one at the cut.
"""

import hashlib
import json
from typing import Any

# Characters of a block of 16 tokens, about, in English.
BLOCK_CHARS = 64
# Blocks that count. More of them tell prompts apart that share a long beginning, such as the
# instructions of an application, and so divide them between servers; what begins a conversation
# must be longer than that to stay where it began.
NUM_BLOCKS = 4


def prompt_text(body: bytes) -> str:
    """The prompt in the JSON body of a request, as text; empty if there is none.

    A chat is its tools and messages as JSON, tokens are numbers, and of several prompts the first
    counts.

    Example:
      >>> prompt_text(b'{"prompt": [[5, 17], [8]]}'), prompt_text(b"no JSON")
      ('5 17', '')
    """
    return _prompt(_load(body))


def prompt_key(
    body: bytes, *, block_chars: int = BLOCK_CHARS, num_blocks: int = NUM_BLOCKS
) -> str | None:
    """A digest of the first blocks of a request's prompt, the same for prompts that share them.

    Of a prompt with fewer blocks all whole ones count, or all of it if it has none. OpenAI's
    ``prompt_cache_key`` is part of the digest: with it clients tell prompts apart that begin alike.

    Args:
      body: the JSON body of a request.
      block_chars: characters of a block.
      num_blocks: most blocks that count.

    Returns:
      Hexadecimal digits, or None if there is no prompt.

    Example:
      >>> story = "Once upon a time there was a castle on a hill. " * 8
      >>> keys = [prompt_key(json.dumps({"prompt": story + end}).encode()) for end in ("A", "B")]
      >>> keys[0] == keys[1] != prompt_key(b'{"prompt": "Twice"}'), prompt_key(b"{}")
      (True, None)
    """
    data = _load(body)
    text = _prompt(data)
    if not text:
        return None
    whole = min(len(text) // block_chars, num_blocks) * block_chars
    beginning = json.dumps([data.get("prompt_cache_key"), text[: whole or len(text)]])
    return hashlib.sha256(beginning.encode()).hexdigest()


def _load(body: bytes) -> dict[str, Any]:
    """The object that a body is; empty if it is none, which the server will refuse."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _prompt(data: dict[str, Any]) -> str:
    if messages := data.get("messages"):
        parts = [data["tools"], messages] if data.get("tools") else [messages]
        return "".join(json.dumps(part, sort_keys=True, ensure_ascii=False) for part in parts)
    return _text(data.get("prompt") or data.get("prompt_token_ids"))


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        return _text(prompt[0]) if isinstance(prompt[0], str | list) else " ".join(map(str, prompt))
    return ""
