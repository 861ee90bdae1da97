"""Prefix affinity: a key that lets a router send equal prefixes to the same server.

Each server has its own prefix cache. So a router should send all requests with the same
`prompt_key` to the same server. The key is computed from the characters of the prompt, without a
tokenizer: prompts that begin with the same characters also begin with the same tokens, except
perhaps for the last token of the common beginning.
"""

import hashlib
import json
from typing import Any

# Number of characters in a block of the key. 16 tokens of English have about 64 characters.
BLOCK_CHARS = 64
# Maximum number of blocks in a key. With more blocks, prompts that share a long prefix, such as the
# instructions of an application, get different keys and are distributed over the servers. But then
# a conversation changes its key, and its server, until its messages are longer than the blocks.
NUM_BLOCKS = 4


def prompt_text(body: bytes) -> str:
    """Return the prompt in the JSON body of a request as text; "" if there is none.

    For a chat, the text is the JSON of its tools and messages. Token ids are joined with spaces. If
    there are several prompts, the first is used.

    Example:
      >>> prompt_text(b'{"prompt": [[5, 17], [8]]}'), prompt_text(b"no JSON")
      ('5 17', '')
    """
    return _prompt(_load(body))


def prompt_key(
    body: bytes, *, block_chars: int = BLOCK_CHARS, num_blocks: int = NUM_BLOCKS
) -> str | None:
    """Return a digest of the beginning of a request's prompt; None if there is no prompt.

    The digest covers the first `num_blocks` full blocks, or all full blocks if there are fewer. If
    the prompt is shorter than a block, it covers the whole prompt. It also covers OpenAI's field
    ``prompt_cache_key``. Clients use this field to separate prompts that have equal prefixes.

    Args:
      body: JSON body of a request.
      block_chars: number of characters in a block.
      num_blocks: maximum number of blocks.

    Returns:
      The digest as hexadecimal digits.

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
    full = min(len(text) // block_chars, num_blocks) * block_chars
    prefix = json.dumps([data.get("prompt_cache_key"), text[: full or len(text)]])
    return hashlib.sha256(prefix.encode()).hexdigest()


def _load(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; {} for other bodies, which the server will reject."""
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
