"""Tests of the page for chats in a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_cache_page import ARGUMENTS, CHROMIUM
from tests.support.live_server import bearer
from tests.support.reasoning_server import reasoning_server

KEY = "a-key"


@pytest.fixture(scope="module")
def server():
    with reasoning_server(model_name="a model", steps_per_dispatch=1, api_keys=(KEY,)) as server:
        # Compile the programs first, because the browser does not wait for long.
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = server.post("/v1/chat/completions", chat, headers=bearer(KEY))
        assert answer.status_code == 200
        yield server


@pytest.fixture
def page(server) -> Iterator[Any]:
    """Page of a new browser before the key is known."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        yield page
        browser.close()
        assert errors == []


def give_key(page: Any) -> None:
    page.fill("#key", KEY)
    page.keyboard.press("Tab")
    page.locator("#model", has_text="a model").wait_for()


def test_page_loads_only_its_own_files(server) -> None:
    page = server.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("chat/chat.js", "chat/chat.css"):
        assert f'"{name}"' in page.text and server.get(f"/{name}").status_code == 200
    assert "http" not in page.text.lower()


@pytest.mark.peers
@pytest.mark.slow
def test_page_chats_in_a_browser(server, page, tmp_path: Path) -> None:
    page.locator("#stats", has_text="needs an API key").wait_for()
    give_key(page)
    page.fill("#max-tokens", "24")
    page.fill("#text", "<b>Well</b>?")
    page.keyboard.press("Enter")
    page.locator("#send").wait_for()
    assert page.locator(".user").inner_text() == "<b>Well</b>?"  # not read as markup
    assert page.locator(".assistant .content").inner_text().strip()
    assert page.locator(".reasoning").count() == 1
    assert "24 tokens" in page.locator("#stats").inner_text()
    assert "cut off" in page.locator("#stats").inner_text()

    first = page.locator(".assistant").inner_text()
    page.locator("#again").click()
    page.locator("#send").wait_for()
    assert page.locator(".assistant").count() == 1
    assert page.locator(".assistant").inner_text() != first
    assert "from the cache" in page.locator("#stats").inner_text()

    page.fill("#max-tokens", "")
    page.fill("#text", "More")
    # The click must come before the short answer ends.
    page.evaluate("send(); byId('stop').click()")
    page.locator("#send").wait_for()
    server.wait_until_idle()
    assert page.locator(".message").count() == 4

    picture = tmp_path / "chat.png"
    page.screenshot(path=picture)
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 800})
        overflow = page.locator("html").evaluate("e => e.scrollWidth - e.clientWidth")
        assert overflow <= 0, width
    page.locator("#clear").click()
    assert page.locator(".message").count() == 0


@pytest.mark.peers
@pytest.mark.slow
def test_page_keeps_the_chat_of_a_tab(server, page) -> None:
    give_key(page)
    page.fill("#max-tokens", "8")
    page.fill("#text", "Well?")
    # Stopped before the first token, the answer can be generated again.
    page.evaluate("send(); byId('stop').click()")
    page.locator("#again").click()
    page.locator("#send").wait_for()
    assert page.locator(".message").count() == 2
    roles = "messages.map((each) => each.role)"
    assert page.evaluate(roles) == ["user", "assistant"]
    page.reload()
    page.locator("#model", has_text="a model").wait_for()
    assert page.evaluate(roles) == ["user", "assistant"]
    assert page.locator(".message").count() == 2

    # Cleared while the second answer is generated.
    assert page.evaluate(
        """async () => {
          byId("text").value = "More";
          send();
          const view = byId("messages").lastElementChild;
          while (running && !view.textContent) await new Promise((done) => setTimeout(done, 1));
          const wasRunning = running !== null;
          clear();
          return wasRunning;
        }"""
    )
    server.wait_until_idle()
    assert page.evaluate(roles) == [] and page.locator(".message").count() == 0


@pytest.mark.peers
@pytest.mark.slow
def test_page_shows_code_and_markdown(page) -> None:
    text = "# A *plan*\nUse `x < 1` and **both**:\n```py\nif a < b:\n    **c**\n```\nEnd <i>"
    page.evaluate("(content) => new MessageView({ role: 'assistant', content })", text)
    assert page.locator("pre").inner_text() == "if a < b:\n    **c**"
    assert page.locator("code").inner_text() == "x < 1"
    assert page.locator(".content b").all_inner_texts() == ["A *plan*", "both"]
    assert page.locator(".content").inner_text().endswith("End <i>")
    # While a text grows, it equals the text that was written at once.
    whole = page.locator(".content").evaluate("(element) => element.innerHTML")
    page.evaluate(
        """(content) => {
          const message = { role: 'assistant', content: '' }, view = new MessageView(message);
          for (const character of content) { message.content += character; view.update(); }
        }""",
        text,
    )
    grown = page.locator(".content").nth(1).evaluate("(element) => element.innerHTML")
    assert grown == whole
