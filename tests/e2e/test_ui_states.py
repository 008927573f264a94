"""The page at `/ui` over answers that a test gives in the router's place, an attacker's too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from browser_window import Window, api, ask, launched
from pdserve.router.http import info

URL = "http://page.test"  # of no server: every request is answered here
EVIL = "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script>"
NODE = {
    "state": "ready", "reason": "ok", "address": "h:1", "running": 5, "waiting": 0, "in_flight": 2,
    "others": 0, "total_blocks": 9, "kv_cache_usage": 0.5, "prompt_tokens": 0, "cached_tokens": 0,
    "model": "m",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    with launched() as browser:
        yield browser


def serve_files(route: api.Route) -> None:
    """Answers with the page's files and their policy, as `info.ui_file`."""
    name = route.request.url.rpartition("/")[2].replace("ui", "index.html", 1)
    name = name if name in info.UI_FILES else name.replace("index.html", "ui")
    headers = {**info._UI_HEADERS, "Content-Type": f"{info.type_of(name)}; charset=utf-8"}
    route.fulfill(body=info.UI_FILES[name], headers=headers)


@pytest.fixture
def window(browser: api.Browser) -> Iterator[Window]:
    window = Window(browser, URL)
    page = window.page
    page.route("**/v1/timelines?*", lambda route: route.fulfill(json={"data": []}))
    page.route("**/version", lambda route: route.fulfill(json={"version": "1"}))
    page.route(re.compile(f"{URL}/ui"), serve_files)
    yield window
    window.context.close()
    assert not window.errors


def sample(at: int, **counts: Any) -> dict[str, Any]:
    names = ("running", "waiting", "tokens", "nodes_tokens", "prompt_tokens", "cached_tokens")
    kinds = ("codes", "slo", "ttft", "itl", "hand_off")
    return {"at": at, **dict.fromkeys(names, 0), **{name: {} for name in kinds}, **counts}


def show(
    window: Window, *, samples: Any = (), events: Any = (), served: int = 0, **state: Any
) -> None:
    """Answers in the router's place."""
    bounds = {name: [0.1, 0.2, 0.4] for name in ("ttft", "itl", "hand_off")}
    history = {"bounds": bounds, "served": served, "samples": list(samples), "events": list(events)}
    cluster = {"ready": True, "reason": "ok", "routers": 1, "pid": 7, "nodes": [], **state}
    window.page.route("**/v1/cluster", lambda route: route.fulfill(json=cluster))
    window.page.route("**/v1/cluster/history?*", lambda route: route.fulfill(json=history))


@pytest.mark.parametrize(
    ("served", "text"), [(0, "no requests yet"), (9, "none in the last two minutes")]
)
def test_an_idle_chart_has_a_sensible_axis_and_says_so(
    window: Window, served: int, text: str
) -> None:
    show(window, samples=[sample(100 + i) for i in range(20)], served=served)
    page = window.open()
    for name, top in (
        ("ttft", "1 s"),
        ("itl", "100 ms"),
        ("hand_off", "100 ms"),
        ("tokens", "100 /s"),
    ):
        labels = page.locator(f"#{name} text")
        api.expect(page.locator(f"#{name} .nothing")).to_have_text(text)
        assert top in labels.all_text_contents()
    api.expect(page.locator("#first-token-age")).to_have_text("no request in the last minute")


def test_a_prediction_is_called_one_and_has_an_age(window: Window) -> None:
    show(window, first_token_seconds=4.38, first_token_measured_ago=12.3)
    page = window.open()
    tile = page.locator("#totals div", has=page.locator("#first-token"))
    api.expect(tile).to_have_text(
        re.compile(r"First token, predicted now\s*4.38 s\s*by a request 12 s ago")
    )


def test_one_of_two_routers_says_so_and_shows_what_is_known_of_both(window: Window) -> None:
    node = NODE | {"node_id": "decode-1", "role": "decode", "others": 3}
    samples = [sample(100 + i, tokens=40, nodes_tokens=100) for i in range(20)]
    show(window, samples=samples, nodes=[node], running=2, routers=2)
    page = window.open()
    api.expect(page.locator("#scope")).to_have_text(
        re.compile("^2 routers serve these nodes; this is one")
    )
    api.expect(page.locator("#scope")).to_contain_text("pid 7")
    api.expect(page.locator("#running")).to_have_text("5")
    api.expect(page.locator("#running-here")).to_have_text("2 through this router")
    api.expect(page.locator("#tokens-rate")).to_have_text("100 /s")
    api.expect(page.locator("#tokens-here")).to_have_text("40 /s in this router")
    api.expect(page.locator("#charts-scope")).to_contain_text("this router alone")
    api.expect(page.locator(".lane dd").first).to_have_text("2 in flight, 3 of other routers")


def test_an_idle_link_shows_no_speed_and_a_lost_node_s_link_is_lost(window: Window) -> None:
    nodes = [
        NODE | {"node_id": name, "role": name[:-2], "state": state, "seconds_since_heartbeat": 75}
        for name, state in (("prefill-1", "ready"), ("prefill-2", "lost"), ("decode-1", "ready"))
    ]
    link = {"decode": "decode-1", "transfers": 3, "bytes": 3e6, "seconds": 1.0}
    show(window, nodes=nodes, flows=[link | {"prefill": f"prefill-{i}"} for i in (1, 2)])
    page = window.open()
    api.expect(page.locator("#arrows path.gone")).to_have_count(1)
    api.expect(page.locator("#arrows path")).to_have_count(2)
    api.expect(page.locator("#arrows text")).to_have_count(0)
    page.get_by_text("KV transfers as a table").click()
    now = page.locator("#flows td:nth-child(5)")
    api.expect(now).to_have_text(["0 B/s", "lost"])
    api.expect(page.locator(".lane .bad .state")).to_have_text("lost: last heard 1 min 15 s ago")


def test_slo_errors_hand_offs_and_hits_are_drawn(window: Window) -> None:
    one = {
        "codes": {"OK": 3, "OVERLOADED": 1}, "slo": {"ttft/met": 3, "ttft/missed": 1},
        "hand_off": {"1": 4}, "prompt_tokens": 100, "cached_tokens": 25,
    }  # fmt: skip
    show(window, samples=[sample(100 + i, **one) for i in range(120)], served=480)
    page = window.open()
    api.expect(page.locator("#slo-now")).to_have_text(re.compile("TTFT 75 %, +between tokens –"))
    api.expect(page.locator("#hits-now")).to_have_text("25 %")
    api.expect(page.locator("#hand_off-now")).to_have_text(re.compile("p50 150 ms, +p95 195 ms"))
    api.expect(page.locator("#errors-now")).to_have_text("120 OVERLOADED")
    api.expect(page.locator("#errors rect")).to_have_count(12)
    fill = page.locator("#errors rect").first.get_attribute("fill")
    assert {rect.get_attribute("fill") for rect in page.locator("#errors rect").all()} == {fill}


def test_the_page_shows_all_of_it_as_text(window: Window) -> None:
    page = window.page
    node = NODE | {"node_id": EVIL, "address": EVIL, "model": EVIL, "state": "lost", "reason": EVIL}
    node |= {"role": EVIL, "pid": EVIL}
    flows = [{"prefill": EVIL, "decode": EVIL, "transfers": 1, "bytes": 1, "seconds": 1}]
    state = {"ready": False, "reason": EVIL, "nodes": [node], "flows": flows}
    events = [{"at": 99.5, "tone": EVIL, "text": EVIL}]
    samples = [sample(100, codes={EVIL: 1})]
    show(window, samples=samples, events=events, served=1, **state)
    request = {
        "id": EVIL, "request_id": EVIL, "status": "failed", "created": 99, "seconds": 1,
        "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 0, "first_token": None,
        "tpot": None, "finish_reasons": [EVIL], "http_status": 500, "nodes": [EVIL], "path": EVIL,
        "prefill_node": EVIL, "decode_node": EVIL, "error": {"code": EVIL, "message": EVIL},
    }  # fmt: skip
    stages = [{"name": EVIL, "node": EVIL, "start": 0, "seconds": 1}]
    line = {"stages": stages, "path": EVIL, "cached_tokens": 0}
    chosen = [{"role": EVIL, "node": EVIL, "why": EVIL}]
    page.route("**/v1/timelines?*", lambda route: route.fulfill(json={"data": [request]}))
    part = request | {"timeline": line, "chosen": chosen}
    page.route("**/v1/timelines/*", lambda route: route.fulfill(json={"data": [part]}))
    window.open()
    api.expect(page.locator("#events li").first).to_contain_text(EVIL)
    api.expect(page.locator("#errors-now")).to_have_text(f"1 {EVIL}")
    page.locator("#requests tr").click()
    api.expect(page.locator("#request-title")).to_have_text(EVIL)
    for where in (".placement dt", ".placement dd", ".waterfall th[scope=row]", ".bad"):
        api.expect(page.get_by_role("dialog").locator(where).first).to_contain_text(EVIL)
    page.get_by_role("button", name="Close").click()
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
    api.expect(page.locator("img, body script")).to_have_count(0)
    assert page.title() == "pdserve"
