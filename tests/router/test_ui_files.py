"""The page at `/ui` over HTTP: who gets its files and under which policy, and what it reads."""

from __future__ import annotations

import math
import re
from pathlib import Path

from test_router_policy import add

from fakes_pipeline import byte_level_folder
from http_site import serve
from paths import ROOT
from pdserve.common.config.router import RoutingConfig
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.api.auth import APIKeys
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.health import MAX_FLOWS, Flow, Flows
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.stages import _REST, STAGES, Phase

STATIC = ROOT / "router" / "http" / "static"
SCRIPTS = (
    *("app.js", "charts.js", "chat.js", "cluster.js", "dom.js", "history.js", "requests.js"),
    "timeline.js",
)
FILES = {"/ui": "index.html", **{f"/ui/{name}": name for name in (*SCRIPTS, "style.css")}}


async def test_the_page_needs_no_key_and_the_cluster_s_state_does(
    tmp_path: Path,
) -> None:
    folder = byte_level_folder(tmp_path)
    async with serve(folder, root_path="/llm", keys=APIKeys("secret")) as site:
        for path, name in FILES.items():
            for prefix in ("", "/llm"):
                async with site.session.get(site.url + prefix + path) as response:
                    assert response.status == 200
                    assert await response.read() == (STATIC / name).read_bytes()
                    policy = response.headers["Content-Security-Policy"]
                    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
                    assert "http" not in policy and "*" not in policy
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
                    assert response.charset == "utf-8"
            async with site.session.head(site.url + path) as response:
                assert response.status == 200
        for path in ("/ui/../v1/cluster", "/ui/%2e%2e/v1/cluster", "/ui/ui.py", "/v1/cluster"):
            async with site.session.get(site.url + path) as response:
                assert response.status in (401, 404), path


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


async def test_the_root_leads_a_browser_to_the_page_and_names_it_to_other_clients(
    tmp_path: Path,
) -> None:
    folder = byte_level_folder(tmp_path)
    async with serve(folder, root_path="/llm", keys=APIKeys("secret")) as site:
        for path in ("/", "/llm", "/llm/"):
            for method in ("GET", "HEAD"):
                async with site.session.request(
                    method, site.url + path, headers=BROWSER, allow_redirects=False
                ) as response:
                    assert (response.status, response.headers["Location"]) == (302, "/llm/ui")
            async with site.session.get(site.url + path, headers=BROWSER) as response:
                assert await response.read() == (STATIC / "index.html").read_bytes()
            async with site.session.get(site.url + path) as response:
                found = await response.json()
            assert (found["name"], found["api"], found["page"]) == ("pdserve", "/llm/v1", "/llm/ui")
            async with site.session.head(site.url + path) as response:
                assert response.status == 200
            async with site.session.post(site.url + path) as response:
                assert response.status == 405
        for path in ("/llmx", "/llm/v1/models", "/llm//"):
            async with site.session.get(site.url + path, headers=BROWSER) as response:
                assert response.status in (401, 404), path


async def test_without_the_page_there_is_no_trace_of_it(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), ui=False) as site:
        async with site.session.get(site.url, headers=BROWSER, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, "/docs")
        async with site.session.get(site.url) as response:
            assert "/ui" not in await response.text()
        for path in FILES:
            async with site.session.get(site.url + path) as response:
                assert response.status == 404
        async with site.session.get(site.url + "/openapi.json") as response:
            assert "/ui" not in await response.text()


def test_the_page_is_its_files_and_makes_no_markup_of_text() -> None:
    assert {path.name for path in STATIC.iterdir()} == set(FILES.values())
    page, style = ((STATIC / name).read_text() for name in ("index.html", "style.css"))
    script = "\n".join((STATIC / name).read_text() for name in SCRIPTS)
    assert set(re.findall(r'from "\./(.+)"', script)) < set(SCRIPTS)
    assert not re.search(r"https?://|//\w", page + style)
    assert re.findall(r"https?://[^\"]*", script) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert not re.search(r"<style|\bstyle=|\bon\w+=", page)  # the policy would refuse them
    named = set(re.findall(r'\bid="([^"]+)"', page))
    used = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert used <= named
    assert set(re.findall(r'\bfor="([^"]+)"', page)) <= named


def test_every_stage_has_one_colour_and_is_documented() -> None:
    """The names are those of the router, in the page's style and in the reference."""
    assert {name for phase in Phase for name in [_REST.get(phase, phase.value)]} <= set(STAGES)
    style = (STATIC / "style.css").read_text()
    coloured = re.findall(r"\.stage-(\w+)", style)
    assert sorted(coloured) == sorted(STAGES)
    table = (ROOT / "docs" / "reference" / "timeline.md").read_text().partition("## Other keys")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(STAGES)


def test_the_page_names_no_way_to_kill_by_name() -> None:
    text = (ROOT / "docs" / "ui.md").read_text()
    assert not re.search(r"pkill|killall|pgrep", text) and "kill -9" in text


# ---- what `/v1/cluster` has for it -----------------------------------------------------------


async def test_flows_are_those_between_nodes_that_are_there() -> None:
    registry = Registry(RoutingConfig(), now=lambda: 0.0)
    for name, role in (("p0", pb.ROLE_PREFILL), ("d0", pb.ROLE_DECODE)):
        add(registry, name, role)
    for prefill in ("p0", "gone"):
        registry.flows.landed(prefill, "d0", 1000)
        for seconds in (0.5, -1.0, math.nan, math.inf):  # a node may say anything
            registry.flows.sent(prefill, "d0", seconds)
    expected = {"prefill": "p0", "decode": "d0", "transfers": 1, "bytes": 1000, "seconds": 0.5}
    assert ClusterView(registry).describe()["flows"] == [expected]


def test_flows_are_bounded_and_those_in_use_stay() -> None:
    flows = Flows()
    for number in range(3 * MAX_FLOWS):
        flows.landed("busy", "d", 1)
        flows.landed(f"p{number}", "d", 1)
    kept = dict(flows.items())
    assert len(kept) == MAX_FLOWS
    assert kept["busy", "d"] == Flow(3 * MAX_FLOWS, 3 * MAX_FLOWS)


def test_prefix_hits_are_no_more_than_the_prompt() -> None:
    registry = Registry(RoutingConfig(), now=lambda: 0.0)
    add(registry, "p0", pb.ROLE_PREFILL)
    (node,) = registry.nodes()
    node.prefilled(10, 4)
    node.prefilled(10, 2**31)
    assert (node.prompt_tokens, node.cached_tokens) == (20, 14)


async def test_the_last_requests_are_listed(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path)) as site:
        for limit in ("0", "1001", "-1", "x", "", "²"):
            async with site.session.get(f"{site.url}/v1/timelines?limit={limit}") as response:
                assert response.status == 400, limit
                assert (await response.json())["error"]["param"] == "limit"
        async with site.session.get(f"{site.url}/v1/timelines") as response:
            assert await response.json() == {"object": "list", "data": []}
