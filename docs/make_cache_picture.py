"""Picture of the cache page of a server with traffic, taken in Chromium.

    python docs/make_cache_picture.py         # writes docs/cache-page.png

The server has the bundled model and a small pool. First some requests end, and their blocks stay in
the prefix cache. Then requests with several samples run, which share blocks. The picture marks the
blocks of a sequence.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURE = Path(__file__).resolve().parent / "cache-page.png"
OPTIONS = ("--num-blocks", "330", "--max-num-seqs", "8", "--steps-per-dispatch", "1")
SYSTEM = "You are a helpful assistant who answers every question in a few short and simple words. "
QUESTIONS = ("Who lives in the house?", "Where is the garden?", "What did the old man say to her?")
# Chromium must be headless and must send requests to the server only.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic")


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def generate(url: str, prompt: str, n: int, max_tokens: int) -> None:
    """Send a request, and wait for its end."""
    body = {"prompt": SYSTEM + prompt, "n": n, "max_tokens": max_tokens, "ignore_eos": True}
    data = json.dumps({"model": "bundled", **body}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers)).read()


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    """Wait until the server accepts requests."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready")
            return
        except OSError:
            time.sleep(0.3)
    raise SystemExit("the server has ended")


def take_picture(page: Page, path: Path) -> None:
    """Mark a sequence, point at one of its blocks, and take the picture."""
    page.wait_for_function(
        """() => state !== null && state.sequences.length === 6
            && state.sequences.every((each) => each.num_tokens > 110)"""
    )
    # The page keeps this state from now on. The server describes the block immediately.
    page.evaluate("""() => {
      const [kept, real] = [{ ...state, events: [] }, ask];
      ask = async (path) => (path.startsWith("cache/state") ? kept : real(path));
      point(kept.sequences.find((each) => each.num_samples === 3).block_ids[1]);
    }""")
    page.wait_for_timeout(700)
    page.evaluate("mark(keyOf(state.sequences.find((each) => each.num_samples === 3)))")
    page.locator("#block code").first.wait_for()
    page.screenshot(path=path)


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="default: docs/cache-page.png")
    parser.add_argument("--dark", action="store_true", help="take the picture in dark mode")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("Chromium is missing: install Debian's package chromium")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "paged_jax.serve", "--port", str(port), *OPTIONS]
    server = subprocess.Popen([*command, "--served-model-name", "bundled"])
    jobs = [
        threading.Thread(target=generate, args=(url, question, n, 480))
        for question, n in zip(QUESTIONS, (3, 2, 1), strict=True)
    ]
    try:
        wait_until_ready(url, server)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=[*ARGUMENTS])
            scheme = "dark" if args.dark else "light"
            page = browser.new_page(
                viewport={"width": 1280, "height": 720}, color_scheme=scheme, bypass_csp=True
            )
            page.goto(f"{url}/cache")
            # The blocks of these requests stay in the prefix cache.
            for number, question in enumerate(QUESTIONS * 2):
                generate(url, f"{number} {question}", 1, 160)
            for job in jobs:
                job.start()
            take_picture(page, args.out)
            browser.close()
    finally:
        for job in jobs:
            if job.is_alive():
                job.join()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
