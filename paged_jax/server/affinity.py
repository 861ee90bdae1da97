"""Prefix affinity: a key by which a router groups requests with equal prompt prefixes.

Each server has its own prefix cache, so a router should send all requests with the same
`prompt_key` to the same server. The key is computed from characters, without a tokenizer. Texts
that begin with the same characters also begin with the same tokens, except perhaps for the last
token.
"""

import hashlib
import json
from typing import Any

# Approximate number of characters in a block of 16 tokens of English.
BLOCK_CHARS = 64
# Number of blocks in a key. More blocks distinguish prompts that share a long prefix, such as the
# instructions of an application, and distribute them over servers. But a conversation only stays on
# its server if its first messages are longer than the key's blocks.
NUM_BLOCKS = 4


def prompt_text(body: bytes) -> str:
    """Return the prompt in the JSON body of a request as text; empty if there is none.

    A chat becomes its tools and messages as JSON, token ids become numbers, and only the first of
    several prompts is used.

    Example:
      >>> prompt_text(b'{"prompt": [[5, 17], [8]]}'), prompt_text(b"no JSON")
      ('5 17', '')
    """
    return _prompt(_load(body))


def prompt_key(
    body: bytes, *, block_chars: int = BLOCK_CHARS, num_blocks: int = NUM_BLOCKS
) -> str | None:
    """Return a digest of the first blocks of a request's prompt; None if there is no prompt.

    A prompt with fewer blocks contributes all its full blocks, or its whole text if it has no full
    block. OpenAI's ``prompt_cache_key`` is part of the digest; clients use it to distinguish
    prompts with equal prefixes.

    Args:
      body: JSON body of a request.
      block_chars: characters per block.
      num_blocks: maximum number of blocks.

    Returns:
      Hexadecimal digits.

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
    beginning = json.dumps([data.get("prompt_cache_key"), text[: full or len(text)]])
    return hashlib.sha256(beginning.encode()).hexdigest()


def _load(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; empty for other bodies, which the server will reject."""
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
