"""The page at `/ui` in Chromium: what somebody sees who kills a node and watches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from browser_window import Window, api, ask, launched
from deaths import MORE_BLOCKS
from pdserve import __version__
from warm import WarmCluster

KEY = "k-1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """It forgets a lost node after ten time-outs, which must be seen until then."""
    router = {"heartbeat_timeout": 5}
    with WarmCluster("llama-gqa", 2, 1, router=router) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def window(browser: api.Browser, cluster: WarmCluster) -> Iterator[Window]:
    window = Window(browser, cluster.url)
    yield window
    window.context.close()
    assert not window.errors
    assert window.hosts == {urlsplit(cluster.url).netloc}


def card(page: api.Page, cluster: WarmCluster, name: str) -> api.Locator:
    def find() -> str | None:
        nodes = cluster.state()["nodes"]
        return next((node["node_id"] for node in nodes if node["name"] == name), None)

    return page.locator(".lane > li", has_text=str(cluster.wait_for(find)))


def test_an_answer_streams_and_a_killed_node_is_red_until_another_comes(
    cluster: WarmCluster, window: Window
) -> None:
    expect = api.expect
    page = window.open()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".lane > li.good")).to_have_count(3)
    page.get_by_label("At most").fill("8")

    answer = ask(page, "the small fox")
    expect(answer.locator(".said")).not_to_be_empty()
    expect(answer.locator("figcaption")).to_contain_text("8 tokens in")
    stages = answer.locator(".waterfall tbody tr").all_inner_texts()
    assert any(stage.startswith("prefill compute\tprefill-") for stage in stages), stages
    assert any(stage.startswith("decode compute\tdecode-") for stage in stages), stages
    assert answer.locator(".track .stage").count() == len(stages)
    expect(page.locator("#flows td").first).to_contain_text("prefill-")
    expect(page.locator("#ttft-now")).to_have_text(re.compile("p50 [0-9.]+ m?s, +p95 [0-9.]+ m?s"))
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
    expect(dead).to_have_class("bad gone")
    expect(dead.locator(".state")).to_have_text(re.compile("^lost: last heard [0-9]+ s ago$"))
    expect(page.locator("#events .bad").first).to_have_text(
        re.compile("prefill-[0-9a-f]+ is lost$")
    )
    expect(dead.locator("meter")).to_be_hidden()
    assert dead.locator("dd").all_inner_texts()[1:4] == ["–"] * 3  # its last values are old
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
    cluster: WarmCluster, window: Window
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
    expect(dialog.locator(".waterfall tr", has_text="prefill compute")).to_be_visible()
    expect(dialog.locator(".placement dt").first).to_have_text(re.compile("^decode: decode-"))
    expect(dialog.locator(".placement dd").first).to_contain_text("least load")
    page.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


def test_a_row_has_path_cached_tokens_tpot_and_end(cluster: WarmCluster, window: Window) -> None:
    cluster.complete("the old fox", max_tokens=4, ignore_eos=True)
    row = window.open().locator("#requests tr", has_text="finished").first
    cells: dict[str, str] = {}
    while not cells:  # the page draws its rows anew each second
        api.expect(row).to_be_visible()
        all_cells = "cells => cells.map(c => [c.dataset.name, c.innerText])"
        cells = dict(row.locator("td").evaluate_all(all_cells))
    assert (cells["output"], cells["end"], cells["path"]) == ("4", "length", "hand-off")
    assert re.fullmatch("prefill-[0-9a-f]+ → decode-[0-9a-f]+", cells["nodes"])
    assert re.fullmatch(r"[0-9.]+ (µs|m?s)", cells["TPOT"]) and cells["cached"].isdigit()


def test_refused_requests_are_listed_with_their_codes(cluster: WarmCluster, window: Window) -> None:
    answer = cluster.post("/v1/completions", prompt="a", max_tokens=-1)
    assert answer.status_code == 400
    row = window.open().locator("#requests tr", has_text="400 INVALID_REQUEST").first
    api.expect(row.locator("td").first).to_have_text("400 INVALID_REQUEST")
    row.click()
    api.expect(window.page.get_by_role("dialog").locator(".bad")).to_contain_text("max_tokens")


def test_a_stage_has_the_same_colour_in_every_answer(cluster: WarmCluster, window: Window) -> None:
    page = window.open()
    page.get_by_label("At most").fill("4")
    colours: dict[str, set[str]] = {}
    for question in ("the small fox", "the small fox and the old mill"):
        for stage in ask(page, question).locator(".stage").all():
            name = str(stage.get_attribute("class"))
            colour = stage.evaluate("bar => getComputedStyle(bar).backgroundColor")
            colours.setdefault(name, set()).add(colour)
    assert len(colours) > 5 and all(len(each) == 1 for each in colours.values()), colours


def test_events_and_charts_outlive_a_reload(cluster: WarmCluster, window: Window) -> None:
    cluster.complete("the small fox", max_tokens=8)
    page = window.open()
    drawn = re.compile("M .*L ")
    for _ in range(2):
        api.expect(page.locator("#ttft path").first).to_have_attribute("d", drawn)
        api.expect(page.locator("#hand_off path").first).to_have_attribute("d", drawn)
        api.expect(page.locator("#events li", has_text="registered: ready").first).to_be_visible()
        page.reload()


def test_old_numbers_are_dimmed_when_the_router_is_gone(window: Window) -> None:
    page = window.open()
    api.expect(page.locator("#status")).to_have_text("ready")
    page.route("**/v1/**", lambda route: route.abort())
    api.expect(page.locator("#status")).to_contain_text("the router does not answer")
    api.expect(page.locator("body")).to_have_class("stale")
    window.errors.clear()  # of the requests that were cut off


def test_a_client_without_an_operator_s_key_sees_its_requests(
    cluster: WarmCluster, browser: api.Browser
) -> None:
    cluster.complete("the small fox", max_tokens=4)
    window = Window(browser, cluster.url)
    refusal = {"error": {"message": "this is for operators"}}
    window.page.route("**/v1/cluster", lambda route: route.fulfill(status=403, json=refusal))
    page = window.open()
    page.keyboard.press("Escape")
    api.expect(page.locator("#status")).to_have_text("this is for operators")
    api.expect(page.locator("#requests tr").first).to_be_visible()
    window.context.close()


def test_a_cluster_of_nodes_of_both_roles_has_no_empty_lanes(window: Window) -> None:
    page = window.open()
    api.expect(page.locator("#lanes li.good").first).to_be_visible()
    lanes = page.locator("#lanes")
    lanes.evaluate("lanes => lanes.querySelectorAll('li').forEach(node => node.remove())")
    assert lanes.evaluate("lanes => getComputedStyle(lanes).display") == "none"


def test_nothing_is_cut_off_or_a_letter_wide_on_a_phone(
    cluster: WarmCluster, window: Window
) -> None:
    page = window.page
    page.set_viewport_size({"width": 390, "height": 844})
    window.open()
    api.expect(page.locator(".lane > li.good").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("Your message").scroll_into_view_if_needed()
    status = page.locator("#status").bounding_box()
    assert status is not None and 0 <= status["y"] < 100, "it is above whatever is read"
    row = page.locator("#requests tr").first.locator("td")
    assert row.evaluate_all(
        "cells => cells.every(cell => cell.getBoundingClientRect().right <= 390)"
    )
    for name in page.locator(".lane dt:visible").all():
        box = name.bounding_box()
        assert box is not None and box["width"] > 30 > box["height"] - 10, name.inner_text()


def test_it_asks_for_a_key_and_keeps_it_for_the_tab(
    cluster: WarmCluster, browser: api.Browser
) -> None:
    """A router that knows one key; `test_ui_files.py` has the real one's answers."""

    def guard(route: api.Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "No API key"}})

    window = Window(browser, cluster.url)
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


def test_it_asks_once_for_an_operators_key(cluster: WarmCluster, browser: api.Browser) -> None:
    """A user who closes the dialogue can chat."""
    why = "this is for operators: it needs a key of --admin-api-key"

    def guard(route: api.Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.continue_()
        else:
            route.fulfill(status=403, json={"error": {"message": why}})

    window = Window(browser, cluster.url)
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
