"""The page at `/ui` in Chromium: what somebody sees who kills a node and watches."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from deaths import MORE_BLOCKS
from pdserve import __version__
from warm import WarmCluster

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium on the path: apt-get install chromium", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api")

KEY = "k-1"
EVIL = "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script>"
TIMEOUT = 120_000  # ms


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """It forgets a lost node after ten time-outs, which must be seen until then."""
    router = {"heartbeat_timeout": 5}
    with WarmCluster("llama-gqa", 2, 1, router=router) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Page:
    """The page in a window of its own, and what went wrong in it."""

    def __init__(self, browser: api.Browser, url: str) -> None:
        self.context = browser.new_context()
        self.context.set_default_timeout(TIMEOUT)
        api.expect.set_options(timeout=TIMEOUT)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.url = url

    def _heard(self, message: api.ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self) -> api.Page:
        self.page.goto(f"{self.url}/ui")
        return self.page


@pytest.fixture
def window(browser: api.Browser, cluster: WarmCluster) -> Iterator[Page]:
    window = Page(browser, cluster.url)
    yield window
    window.context.close()
    assert not window.errors
    assert window.hosts == {urlsplit(cluster.url).netloc}


def card(page: api.Page, cluster: WarmCluster, name: str) -> api.Locator:
    def find() -> str | None:
        nodes = cluster.state()["nodes"]
        return next((node["node_id"] for node in nodes if node["name"] == name), None)

    return page.locator(".lane > li", has_text=str(cluster.wait_for(find)))


def ask(page: api.Page, question: str) -> api.Locator:
    """By the keyboard alone; the answer, once it is there."""
    page.get_by_label("Your message").focus()
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    answer = page.locator("#answers > li").last
    api.expect(answer.locator(".timeline, .bad")).to_be_visible()
    return answer


def test_an_answer_streams_and_a_killed_node_is_red_until_another_comes(
    cluster: WarmCluster, window: Page
) -> None:
    expect = api.expect
    page = window.open()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".lane > li.good")).to_have_count(3)
    page.get_by_label("At most").fill("8")

    answer = ask(page, "the small fox")
    expect(answer.locator(".said")).not_to_be_empty()
    expect(answer.locator("figcaption")).to_contain_text("8 tokens in")
    stages = answer.locator(".legend li").all_inner_texts()
    assert any(stage.startswith("prefill compute on prefill-") for stage in stages), stages
    assert any(stage.startswith("decode compute on decode-") for stage in stages), stages
    assert answer.locator(".bar span").count() == len(stages)
    expect(page.locator("#flows td").first).to_contain_text("prefill-")
    expect(page.locator("#ttft-now")).to_have_text(re.compile("p50 [0-9.]+ m?s, p95 [0-9.]+ m?s"))
    expect(page.locator("#ttft .grid")).to_have_count(5)
    expect(page.locator("#ttft text").first).to_have_text("0 s")
    expect(page.locator("#tokens-rate")).to_have_text(re.compile(r"[0-9.]+ /s"))
    expect(page.locator("#uptime")).to_have_text(re.compile("[0-9]+ (s|min)"))
    expect(page.locator("#version")).to_have_text(__version__)

    cluster.start_held("decode", num_gpu_blocks_override=MORE_BLOCKS)
    cluster.wait_nodes()
    with cluster.standing_still("decode"):  # the answer is not over before it is stopped
        page.get_by_label("Your message").fill("go on")
        page.keyboard.press("Enter")
        expect(page.locator("#answers .said").last).not_to_be_empty()
        expect(page.locator("#stop")).to_be_enabled()  # there is text, and more comes
        expect(page.locator("#arrows text", has_text="B/s").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#answers > li").last.get_by_role("alert")).to_have_text("stopped")
    expect(page.locator("#running")).to_have_text("0")

    cluster.kill("prefill-1")
    dead = card(page, cluster, "prefill-1")
    expect(dead).to_have_class("bad")
    expect(dead.locator(".state")).to_have_text(re.compile("^lost: silent for [0-9]+ s$"))
    expect(page.locator("#events .bad").first).to_have_text(
        re.compile("prefill-[0-9a-f]+ is lost$")
    )
    expect(dead.locator(".why p")).to_be_hidden()
    dead.get_by_text("Details").click()
    expect(dead.locator(".why p")).not_to_be_empty()
    expect(ask(page, "and then").locator(".said")).not_to_be_empty()

    cluster.kill("prefill-2")
    expect(page.locator("#status")).to_have_class("badge warn")  # in a few seconds
    expect(page.locator("#status")).to_have_text("ready: decode nodes prefill")
    expect(ask(page, "without it").locator(".said")).not_to_be_empty()
    name = cluster.start_node("prefill")
    expect(card(page, cluster, name)).to_have_class("good")
    expect(page.locator("#status")).to_have_text("ready")
    expect(ask(page, "in the end").locator(".said")).not_to_be_empty()


def test_recent_requests_are_listed_filtered_and_open_to_their_timelines(
    cluster: WarmCluster, window: Page
) -> None:
    cluster.complete("the small fox", max_tokens=4)
    expect, page = api.expect, window.open()
    rows = page.locator("#requests tr")
    expect(rows.first).to_contain_text("finished")
    page.get_by_label("Filter").fill("no such request")
    expect(rows).to_have_count(0)
    page.get_by_label("Filter").fill("FINISHED decode-")
    expect(rows.first).to_contain_text("decode-")
    rows.first.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".legend li", has_text="prefill compute on prefill-")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


def test_nothing_is_cut_off_or_a_letter_wide_on_a_phone(cluster: WarmCluster, window: Page) -> None:
    page = window.page
    page.set_viewport_size({"width": 390, "height": 844})
    window.open()
    api.expect(page.locator(".lane > li.good").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in page.locator(".lane dt:visible").all():
        box = name.bounding_box()
        assert box is not None and box["width"] > 30 > box["height"] - 10, name.inner_text()


def test_the_page_shows_nodes_and_answers_as_text(cluster: WarmCluster, window: Page) -> None:
    """However it is put: an answer of the router is replaced by one of an attacker."""
    page = window.page
    node = cluster.state()["nodes"][0] | {"node_id": EVIL, "address": EVIL, "model": EVIL}
    node |= {"state": "lost", "reason": EVIL}
    flows = [{"prefill": EVIL, "decode": EVIL, "transfers": 1, "bytes": 1, "seconds": 1}]
    state = {"ready": False, "reason": EVIL, "nodes": [node], "flows": flows}
    page.route("**/v1/cluster", lambda route: route.fulfill(json=state))
    window.open()
    api.expect(page.locator(".lane strong")).to_have_text(EVIL)
    api.expect(page.locator("#status")).to_contain_text(EVIL)
    api.expect(page.locator("#flows td").first).to_have_text(EVIL)

    events = [{"choices": [{"delta": {"content": EVIL}}]}, {"error": {"message": EVIL}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    answer = ask(page, EVIL)
    api.expect(page.locator("#answers .said").first).to_have_text(EVIL)
    api.expect(answer.locator(".said")).to_have_text(EVIL)
    api.expect(answer.get_by_role("alert")).to_have_text(EVIL)
    api.expect(page.locator("img, #answers script, .lane script")).to_have_count(0)
    assert page.title() == "pdserve"


def test_it_asks_for_a_key_and_keeps_it_for_the_tab(
    cluster: WarmCluster, browser: api.Browser
) -> None:
    """A router that knows one key; `test_ui_files.py` has the real one's answers."""

    def guard(route: api.Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "No API key"}})

    window = Page(browser, cluster.url)
    page = window.page
    page.route("**/v1/**", guard)
    window.open()
    field = page.get_by_label("Key", exact=True)
    field.fill("schlüssel")  # no header can carry it, so no server would refuse it
    page.keyboard.press("Enter")
    assert field.evaluate("field => field.validity.patternMismatch")
    field.fill("")
    for key in ("wrong", KEY):
        api.expect(field).to_be_focused()
        page.keyboard.type(key)
        page.keyboard.press("Enter")
        if key != KEY:
            api.expect(page.locator("#key-why")).to_have_text("The server does not know this key.")
    api.expect(page.locator("#status")).to_have_text("ready")
    page.get_by_label("At most").fill("4")
    api.expect(ask(page, "a").locator(".timeline")).to_be_visible()
    page.reload()
    api.expect(page.locator("#status")).to_have_text("ready")
    api.expect(page.locator("#ask-key")).to_be_hidden()
    window.context.close()


def test_b8_it_asks_once_for_an_operators_key(cluster: WarmCluster, browser: api.Browser) -> None:
    """A user who closes the dialogue can chat."""
    why = "this is for operators: it needs a key of --admin-api-key"

    def guard(route: api.Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.continue_()
        else:
            route.fulfill(status=403, json={"error": {"message": why}})

    window = Page(browser, cluster.url)
    page = window.page
    page.route("**/v1/cluster", guard)
    window.open()
    api.expect(page.locator("#key-why")).to_have_text(why)
    page.keyboard.press("Escape")
    api.expect(page.locator("#status")).to_have_text(why)
    page.get_by_label("At most").fill("4")
    api.expect(ask(page, "a").locator(".timeline")).to_be_visible()
    api.expect(page.locator("#ask-key")).to_be_hidden()
    page.reload()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    api.expect(page.locator("#status")).to_have_text("ready")
    window.context.close()
