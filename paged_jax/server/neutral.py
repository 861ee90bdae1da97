"""Fields of other servers' APIs that are accepted where they ask for nothing.

Clients send them by habit, with their defaults. A value that would change the answer is refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Hints for caches, routers and records, and for models that reason. No answer depends on them,
# except that chats pass the reasoning effort to the template.
_ADVISORY = frozenset({
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "rid",
    "safety_identifier",
    "separate_reasoning",
    "stream_reasoning",
    "verbosity",
})  # fmt: skip

# Values, besides null, that leave an answer as it is: the defaults of OpenAI, vLLM and SGLang.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_params": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "vllm_xargs": ({},),
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a field that this server does not have may be ignored.

    Example:
      >>> asks_for_nothing("no_stop_trim", False), asks_for_nothing("no_stop_trim", True)
      (True, False)
      >>> asks_for_nothing("anything", None)
      True
    """
    return value is None or name in _ADVISORY or value in _NEUTRAL.get(name, ())


def refusal(name: str) -> str:
    """The sentence for a field with a value that would change the answer."""
    values = _NEUTRAL.get(name)
    if values is None:
        return f"{name} is not supported here"
    return f"{name} is supported here only as {' or '.join(map(json.dumps, [None, *values]))}"


def schemas() -> dict[str, Any]:
    """JSON schemas of these fields, by name."""
    advisory = {name: {"description": "Accepted and ignored."} for name in sorted(_ADVISORY)}
    return advisory | {name: {"enum": [None, *values]} for name, values in _NEUTRAL.items()}
