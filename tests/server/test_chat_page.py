"""Tests of the page for chats in a browser."""

from pathlib import Path

import pytest

from tests.server.test_cache_page import ARGUMENTS, CHROMIUM
from tests.support.reasoning_server import reasoning_server


@pytest.fixture(scope="module")
def server():
    with reasoning_server(model_name="a model", steps_per_dispatch=1) as server:
        # Compile the programs first, because the browser does not wait for long.
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        yield server


def test_page_loads_only_its_own_files(server) -> None:
    page = server.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("chat/chat.js", "chat/chat.css"):
        assert f'"{name}"' in page.text and server.get(f"/{name}").status_code == 200
    assert "http" not in page.text.lower()


@pytest.mark.slow
def test_page_chats_in_a_browser(server, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.locator("#model", has_text="a model").wait_for()

        page.locator("summary", has_text="Settings").click()
        page.fill("#max-tokens", "24")
        page.fill("#text", "<b>Well</b>?")
        page.keyboard.press("Enter")
        page.locator("#again").wait_for()
        assert page.locator(".user").inner_text() == "<b>Well</b>?"  # not read as markup
        assert page.locator(".assistant .content").inner_text().strip()
        assert page.locator(".reasoning").count() == 1
        assert "24 tokens" in page.locator("#stats").inner_text()

        first = page.locator(".assistant").inner_text()
        page.locator("#again").click()
        page.locator("#again").wait_for()
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
        browser.close()
        assert errors == []
