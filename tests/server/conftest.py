"""Fixtures of tests that send requests to the `shared_server` of their file."""

from pathlib import Path

import pytest

from paged_jax.cache.blocks import check_invariants
from tests.support.live_server import CHAT_TEMPLATE
from tests.support.plain_client import PlainClient
from tests.support.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("serve"), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def server(shared_server):
    """Server that must have no running request and no leaked block after the test."""
    yield shared_server
    shared_server.wait_until_idle()
    check_invariants(shared_server.engine.cache.tables)


@pytest.fixture
def client(server):
    with PlainClient(server.url) as client:
        yield client


@pytest.fixture
def openai_client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
