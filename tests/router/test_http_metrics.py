"""The metrics of HTTP requests, as `/metrics` shows them, and of the nodes that a router knows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from fake_nodes import fake_cluster
from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, serve
from pdserve.common.core.errors import Overloaded, Unavailable
from pdserve.router.api.auth import APIKeys
from pdserve.router.server import PipelineCollector
from waiting import eventually

Labels = tuple[str, str, str]  # method, status, handler
COMPLETIONS = "/v1/completions"


async def series(site: Site, name: str) -> dict[tuple[str, ...], float]:
    """Returns labels (in the order of their names) → value, without zeros."""
    async with site.session.get(site.url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [each for family in families for each in family.samples if each.name == name]
    found = {
        tuple(each.labels[label] for label in sorted(each.labels)): each.value for each in samples
    }
    assert len(found) == len(samples)
    return {labels: value for labels, value in found.items() if value}


async def counted(site: Site) -> dict[Labels, float]:
    found = await series(site, "http_requests_total")  # sorted: handler, method, status
    return {(method, status, handler): n for (handler, method, status), n in found.items()}


async def test_requests_count_by_method_status_and_route(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), root_path="/base") as site:
        await site.complete()
        await site.post("/base/v1/chat/completions", {"messages": CHAT, "stream": True})
        for path in (
            "/v1/models/tiny/model",
            "/v1/models/none",
            "/nothing/here",
            "/v1/completions",
        ):
            async with site.session.get(site.url + path):
                pass
        async with site.session.request("PROPFIND", site.url + "/v1/models"):
            pass
        assert await counted(site) == {
            ("POST", "2xx", COMPLETIONS): 1,
            ("POST", "2xx", "/v1/chat/completions"): 1,
            ("GET", "2xx", "/v1/models/{model}"): 1,
            ("GET", "4xx", "/v1/models/{model}"): 1,
            ("GET", "4xx", "none"): 2,  # no such path; no such method there
            ("_OTHER", "4xx", "none"): 1,
        }


async def test_whatever_clients_send_the_labels_stay_few(site: Site) -> None:
    for number in range(50):
        async with site.session.get(f"{site.url}/{number}?{number}"):
            pass
        async with site.session.get(f"{site.url}/v1/models/{number}"):
            pass
        await site.post(f"/v1/%2e%2e/{number}\u00e9", {})
    assert await counted(site) == {
        ("GET", "4xx", "none"): 50,
        ("GET", "4xx", "/v1/models/{model}"): 50,
        ("POST", "4xx", "none"): 50,
    }


async def test_refused_requests_count_too(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), keys=APIKeys("a-key"), limit=1000) as site:
        key = {"Authorization": "Bearer a-key"}

        async def status(body: Any = None, **headers: str) -> int:
            body = {"prompt": "a"} if body is None else body
            return (await site.post(COMPLETIONS, body, **headers)).status

        assert await status() == 401
        assert await status(b"x" * 2000, **key) == 413
        assert await status({"prompt": 3}, **key) == 400
        site.generator.error = Overloaded("full")
        assert await status(**key) == 429
        assert await counted(site) == {("POST", "4xx", COMPLETIONS): 4}
        site.generator.error = Unavailable("no node")
        assert await status(**key) == 503
        site.generator.error = RuntimeError("a defect")
        assert await status(**key) == 500
        assert (await counted(site))["POST", "5xx", COMPLETIONS] == 2


async def test_a_client_that_leaves_counts_as_4xx(site: Site) -> None:
    site.generator.delay = 60
    for stream in (False, True):
        async with ClientSession() as session:
            body = {"prompt": "a", "stream": stream}
            asking = asyncio.create_task(session.post(site.url + COMPLETIONS, json=body))
            await eventually(lambda: site.generator.open == 1)
            asking.cancel()
        await eventually(lambda: site.generator.open == 0)
    async with asyncio.timeout(30):
        while (await counted(site)).get(("POST", "4xx", COMPLETIONS)) != 2:
            await asyncio.sleep(0.01)


async def test_probes_and_scrapes_are_not_counted(site: Site) -> None:
    for path in ("/health", "/ping", "/ready", "/load", "/version", "/metrics"):
        async with site.session.get(site.url + path) as answer:
            assert answer.status == 200
    assert await counted(site) == {}
    assert await series(site, "http_request_duration_highr_seconds_count") == {}


async def test_durations_reach_to_the_end_of_a_stream_and_sizes_are_of_bodies(site: Site) -> None:
    site.generator.delay = 0.02  # before each of eight tokens
    await site.events(COMPLETIONS, {"prompt": "a"})
    assert await series(site, "http_request_duration_seconds_count") == {(COMPLETIONS, "POST"): 1}
    for name in ("http_request_duration_seconds_sum", "http_request_duration_highr_seconds_sum"):
        ((_, seconds),) = (await series(site, name)).items()
        assert 8 * 0.02 < seconds < 30
    assert await series(site, "http_response_size_bytes_sum") == {}  # streams have no length
    answer = await site.post(COMPLETIONS, {"prompt": "a"})
    length = len(await answer.read())
    assert await series(site, "http_response_size_bytes_sum") == {(COMPLETIONS,): length}
    sent = await series(site, "http_request_size_bytes_sum")
    assert sent[(COMPLETIONS,)] > 2 * len('{"prompt"')
    text = (await (await site.session.get(site.url + "/metrics")).text()).splitlines()
    name = "http_request_duration_seconds_bucket"
    assert [line.split('le="')[1].split('"')[0] for line in text if line.startswith(name)] == [
        *("0.1", "0.5", "1.0", "+Inf")
    ]


async def test_a_role_without_nodes_has_none_ready(tmp_path: Path) -> None:
    """Else an alert could not see that its last node has gone."""

    def ready() -> dict[str, float]:
        families = PipelineCollector(cluster.pipeline).collect()
        samples = [each for family in families for each in family.samples]
        nodes = [each for each in samples if each.name == "pdserve_nodes"]
        return {n.labels["role"]: n.value for n in nodes if n.labels["state"] == "ready"}

    async with fake_cluster(tmp_path, ("d0",)) as cluster:
        assert ready() == {"prefill": 0, "decode": 1, "both": 0}
