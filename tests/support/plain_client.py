"""Client of all APIs over plain HTTP, with the names of OpenAI's and Anthropic's clients."""

import functools
import json
from types import SimpleNamespace
from typing import Any

import httpx


class Fields(dict[str, Any]):
    """JSON object with its fields as attributes. Missing fields are None, as in the clients."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class PlainClient:
    """Sends requests to a server. Any status but 200 is an error.

    Args:
      url: address of the server.
      headers: headers of all requests.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600)
        self.completions = self._at("/v1/completions")
        self.chat = SimpleNamespace(completions=self._at("/v1/chat/completions"))
        self.responses = self._at("/v1/responses")
        self.responses.input_tokens = self._at("/v1/responses/input_tokens")
        self.messages = self._at("/v1/messages")
        self.messages.count_tokens = functools.partial(self.create, "/v1/messages/count_tokens")

    def __enter__(self) -> "PlainClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def _at(self, path: str) -> SimpleNamespace:
        create = functools.partial(self.create, path)
        return SimpleNamespace(create=create, count=create)

    def create(self, path: str, *, extra_body: dict[str, Any] | None = None, **body: Any) -> Any:
        """Return the answer, or a list of the events if the body asks for a stream."""
        response = self._http.post(path, json={**body, **(extra_body or {})})
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return _parse(response.text)
        lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
        data = [line.removeprefix("data: ") for line in lines]
        return [_parse(each) for each in data if each != "[DONE]"]


def _parse(text: str) -> Any:
    return json.loads(text, object_hook=Fields)
