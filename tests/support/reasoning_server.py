"""Server of a model that reasons before it answers, for tests of all APIs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from paged_jax import Engine
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.reasoning import FORMATS, ReasoningFormat
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.server import Settings
from tests.support.live_server import LiveServer
from tests.support.structured import HERMES_TEMPLATE, SIZES
from tests.support.tiny_model import EOS

TEMPLATE = HERMES_TEMPLATE + "{% if enable_thinking | default(true) %}<t>{% endif %}"


def tokenizer_of(chat_template: str) -> Tokenizer:
    """Return the tokenizer of the bundled model with another chat template."""
    backend = tokenizers.Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    return Tokenizer(backend, eos_token_ids=[EOS], chat_template=chat_template)


@contextlib.contextmanager
def reasoning_server(
    *, model_name: str = "bundled", api_keys: tuple[str, ...] = (), **options: Any
) -> Iterator[LiveServer]:
    """Serve the bundled model. The first "e" of an answer ends the reasoning.

    Args:
      model_name: name of the model for clients.
      api_keys: keys of the clients; none for a server without keys.
      **options: options of the engine, in addition to `SIZES`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "test", ReasoningFormat("<t>", "e"))
        settings = Settings(model_name=model_name, reasoning_format="test", api_keys=api_keys)
        engine = Engine(tokenizer=tokenizer_of(TEMPLATE), **SIZES, **options)
        with LiveServer(engine, settings) as server:
            yield server
