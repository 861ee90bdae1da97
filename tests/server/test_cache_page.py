"""Tests of the cache page: its data, and its display in a browser."""

import re
import shutil
import threading
from pathlib import Path

import pytest

from paged_jax import Engine
from paged_jax.server import Settings
from tests.support.live_server import LiveServer, wait_until
from tests.support.tiny_model import SIZES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Chromium must be headless and must send requests to the server only.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PROMPT = "the cat sat on a mat"


@pytest.fixture(scope="module")
def server(tiny_folder):
    engine = Engine(tiny_folder, **SIZES, steps_per_dispatch=1)
    with LiveServer(engine, Settings(model_name="tiny")) as server:
        # Compile the programs first: a longer step would make the page count as closed.
        for n in (1, 3):
            generate(server, n=n)
        generate_at_once(server)
        server.wait_until_idle()
        yield server


def generate(server: LiveServer, **options) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "ignore_eos": True, "max_tokens": 4, **options}
    assert server.post("/generate", body).status_code == 200


def state(server: LiveServer, since: int = 0) -> dict:
    return server.get("/cache/state", params={"since": since}).json()


def test_state_reports_blocks_and_events(server) -> None:
    before = state(server)
    assert before["model"] == "tiny" and before["num_blocks"] == SIZES["num_blocks"]
    assert before["ref_counts"] == [0] * SIZES["num_blocks"] and before["sequences"] == []
    assert before["events"] == []
    generate(server, n=3, max_tokens=12)
    events = state(server)["events"]
    kinds = {event["kind"] for event in events}
    assert {"admit", "copy_on_write", "finish"} <= kinds
    last = events[-1]["number"]
    assert state(server, since=last)["events"] == []


def generate_at_once(server: LiveServer) -> None:
    """Generate more text than the pool has blocks for."""
    jobs = [
        threading.Thread(
            target=generate,
            args=(server,),
            kwargs={"prompt": f"{PROMPT} {name}", "max_tokens": 30},
        )
        for name in ("ann", "bob", "cat", "dan")
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()


def test_state_reports_evictions_and_preemptions(server) -> None:
    state(server)
    generate_at_once(server)
    assert {"evict", "preempt"} <= {event["kind"] for event in state(server)["events"]}


def test_recent_reports_counts_of_the_last_minutes(server) -> None:
    """The counts are kept even if no page was open."""
    generate(server)
    before, now = (server.get("/cache/recent").json()[at] for at in (0, -1))
    assert before["generated"] < now["generated"] and before["age"] > now["age"] >= 0
    assert now["queried"] >= now["cached"] > 0 and now["waiting"] == now["used"] == 0
    stats = server.engine.stats
    assert (now["generated"], now["cached"]) == (
        stats.num_generated_tokens,
        stats.num_cached_tokens,
    )


def test_block_reports_its_tokens(server) -> None:
    generate(server)
    cached = state(server)["is_cached"]
    [entry] = server.get(f"/cache/blocks/{cached.index(True)}").json()
    assert entry["request_id"] is None and len(entry["token_ids"]) == SIZES["block_size"]
    assert entry["text"]
    response = server.get(f"/cache/blocks/{SIZES['num_blocks']}")
    message = response.json()["error"]["message"]
    assert (response.status_code, message) == (404, "The block must be in 0..19, got 20.")
    assert server.get("/cache/state?since=x").status_code == 400


def test_page_loads_only_its_own_files(server) -> None:
    page = server.get("/cache")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert server.get(f"/{name}").status_code == 200
    assert "http" not in page.text.lower()


@pytest.fixture
def page(server):
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(f"{server.url}/cache")
        page.locator("#status", has_text="live").wait_for()
        yield page
        browser.close()
        assert errors == []


def heights(curve) -> set[str]:
    return {point.split(",")[1] for point in curve.get_attribute("points").split()}


@pytest.mark.peers
@pytest.mark.slow
def test_page_shows_requests_in_a_browser(server, page, tmp_path: Path) -> None:
    num_blocks = SIZES["num_blocks"]
    # The curves begin with requests from before the page was opened.
    wait_until(lambda: len(heights(page.locator("#rates polyline").first)) > 2)
    server.post(
        "/generate", {"prompt": "<b>it</b> is", "max_tokens": 2}
    )  # text must not be interpreted as markup
    is_seen = threading.Event()

    def keep_generating() -> None:
        while not is_seen.is_set():
            generate(server, n=3, max_tokens=40)

    job = threading.Thread(target=keep_generating)
    job.start()
    try:
        page.locator("#sequences tr").nth(2).wait_for()
        wait_until(lambda: int(page.locator("#num-shared").inner_text()) > 0)
    finally:
        is_seen.set()
        job.join()
    wait_until(lambda: page.locator("#num-used").inner_text() == "0")
    assert "0 in slots" in page.locator("#totals").inner_text()
    counts = [int(page.locator(f"#num-{kind}").inner_text()) for kind in ("free", "cached")]
    assert sum(counts) == num_blocks
    assert page.locator("#events", has_text="copy on write").count() > 0
    # The events are to the right of the map, visible without scrolling.
    events, canvas = (page.locator(name).bounding_box() for name in ("#events", "#map"))
    assert events["x"] >= canvas["x"] + canvas["width"] and events["y"] < canvas["y"] + 50
    curves = page.locator("#rates polyline")
    assert curves.count() == 4
    for index in (0, 3):  # tokens per second and blocks in use have risen and fallen
        wait_until(lambda index=index: len(heights(curves.nth(index))) > 1)

    # The next block to be evicted is paler than the last.
    order = [b for b in state(server)["free_order"] if state(server)["is_cached"][b]]
    alpha = "x => Number(recency()[x])"
    assert page.evaluate(alpha, order[0]) < page.evaluate(alpha, order[-1]) == 1

    block = state(server)["is_cached"].index(True)
    page.locator("#map").focus()
    for _ in range(block + 1):
        page.keyboard.press("ArrowRight")
    page.locator("#block h3", has_text=f"Block {block}: cached").wait_for()
    page.locator("#block code").first.wait_for()

    page.mouse.move(0, 0)
    page.hover("#map", position={"x": 5, "y": 5})
    page.locator("#block h3", has_text="Block 0").wait_for()
    picture = tmp_path / "cache.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000
    # Nothing overflows, even in a narrow window.
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 800})
        overflow = page.locator("html").evaluate("e => e.scrollWidth - e.clientWidth")
        assert overflow <= 0, width


# The kind of each block, and the opacity in its middle, 0 to 255. One call draws and reads, so that
# both belong to the same state.
DRAWN = """() => {
  draw();
  const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return [...Array(state.num_blocks).keys()].map((block) => {
    const [x, y] = cornerOf(block).map((each) => Math.floor(each + (cell - GAP) / 2));
    return [kindOf(block), data[4 * (y * width + x) + 3]];
  });
}"""


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_free_and_cached_blocks_differ(server, page, scheme) -> None:
    """A free block is an outline, and the palest cached block is filled."""
    generate(server)
    server.wait_until_idle()
    last = state(server)["num_generated_tokens"]
    page.emulate_media(color_scheme=scheme)
    shown = "state.num_used === 0 && state.num_generated_tokens"
    wait_until(lambda: page.evaluate(shown) == last)
    found: dict[str, set[int]] = {}
    for kind, opacity in page.evaluate(DRAWN):
        found.setdefault(kind, set()).add(opacity)
    assert found.keys() == {"free", "cached"} and found["free"] == {0} and min(found["cached"]) > 90


def running(request_id: str, sample: int, block_ids: list[int]) -> dict:
    """Return a sequence as the page receives it."""
    return {
        "request_id": request_id, "sample": sample, "num_samples": 2, "slot": sample,
        "priority": 0, "num_prompt_tokens": 8, "num_tokens": 11, "num_computed": 10,
        "num_preemptions": 0, "is_fork": sample > 0, "block_ids": block_ids, "state": "decode",
    }  # fmt: skip


@pytest.mark.peers
@pytest.mark.slow
def test_click_marks_the_blocks_of_a_sequence(server, page) -> None:
    name = "gen-0123456789abcdef-0"
    sequences = [running(name, 0, [7, 3, 5]), running(name, 1, [7, 3, 6])]
    counts = [{7: 2, 3: 2, 5: 1, 6: 1}.get(block, 0) for block in range(SIZES["num_blocks"])]
    given = state(server) | {"ref_counts": counts, "sequences": sequences, "events": []}
    holders = [
        {
            "request_id": name,
            "sample": i,
            "start": 0,
            "token_ids": [1],
            "text": "a",
            "is_cached": True,
        }
        for i in range(2)
    ]
    page.route("**/cache/state*", lambda route: route.fulfill(json=given))
    page.route("**/cache/blocks/*", lambda route: route.fulfill(json=holders))
    rows = page.locator("#sequences tr")
    rows.nth(1).wait_for()
    button = rows.nth(1).locator("button")
    button.focus()
    page.keyboard.press("Enter")
    assert rows.nth(1).get_attribute("class") == "marked"
    assert page.evaluate("[...placesOf(marked)]") == [[7, 0], [3, 1], [6, 2]]
    page.wait_for_timeout(700)  # the focus and the mark survive new states
    assert button.evaluate("each => document.activeElement === each")
    assert button.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert page.evaluate("marked") is None

    # Clicks on a shared block mark its sequences one after the other.
    x, y = page.evaluate("cornerOf(7)")
    marked = []
    for _ in range(3):
        page.locator("#map").click(position={"x": x + 4, "y": y + 4})
        marked.append(page.evaluate("marked"))
    assert marked == [f'["{name}",0]', f'["{name}",1]', None]
    assert page.evaluate("canvas.getContext('2d').globalAlpha") == 1

    # The box and the table name a request in the same way, and the title has the whole id.
    box = page.locator("#block p").first
    box.wait_for()
    assert box.inner_text().startswith(f"request {button.inner_text()}, sample 0")
    assert box.get_attribute("title") == button.get_attribute("title") == name
    assert len(button.inner_text()) < len(name)

    # The mark ends with the sequence.
    rows.nth(0).click()
    assert page.evaluate("marked") is not None
    given["sequences"] = []
    wait_until(lambda: page.evaluate("marked") is None)


@pytest.mark.peers
@pytest.mark.slow
def test_events_of_a_kind_share_a_row(page) -> None:
    page.evaluate("refresh = () => {}")
    page.wait_for_timeout(700)
    events = [
        {"number": 10**6 + i, "time": time, "kind": kind, "request_id": None, "text": f"{kind} {i}"}
        for i, (kind, time) in enumerate(
            [("evict", 1.0), ("evict", 1.5), ("copy_on_write", 1.6), ("evict", 2.0), ("evict", 9.0)]
        )
    ]
    page.evaluate(
        "events => { byId('events').replaceChildren(); folds = []; log(events); }", events
    )
    rows = page.locator("#events > li")
    kinds = page.locator("#events .kind").all_inner_texts()
    assert kinds == ["evict", "copy on write", "evict × 3"]
    assert rows.nth(2).locator("summary").inner_text().endswith("evict 3")
    assert not rows.nth(2).locator("p").first.is_visible()
    rows.nth(2).locator("summary").click()
    assert rows.nth(2).locator("p").all_inner_texts() == ["evict 1", "evict 0"]
    # A row stays open when another event joins it.
    for number in (1, 2):
        event = {"number": 10**7 + number, "time": 9.5, "kind": "evict", "request_id": None}
        page.evaluate("event => log([event])", event | {"text": f"more {number}"})
        assert rows.count() == 3
        assert rows.first.locator(".kind").inner_text() == f"evict × {1 + number}"
        if number == 1:
            rows.first.locator("summary").click()
    assert rows.first.locator("p").all_inner_texts() == ["more 1", "evict 4"]
