"""`pdserve doctor --cluster` proves that prefill and decode are apart, and names what is wrong with
a cluster that is put together wrongly: each within ten seconds, in one sentence."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

from benchmarks import hosts
from misdeployments import KEY, MISDEPLOYMENTS, Misdeployment
from paths import MODELS
from pdserve.cli.doctor import main
from pdserve.cli.doctor_cluster import cluster as examine
from pdserve.cli.finding import Finding
from warm import WarmCluster, networked

MODEL = "llama-gqa"
SOON = 60.0  # seconds
IN_MAKE_TEST = ("decode nodes alone", "the roles have different dtypes")


def test_a_right_cluster_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    """Every pair moves KV; and a header, the timeline and counters say so of any answer."""
    with WarmCluster(MODEL, 2, 2) as cluster:
        assert main(["--cluster", cluster.url, "--json"]) == 0
        found = {each["subject"]: each["seen"] for each in json.loads(capsys.readouterr().out)}
        ids = [node["node_id"] for node in cluster.nodes("prefill")]
        seen = [found[subject] for subject in found if subject.split(" → ")[0] in ids]
        assert {" → " in subject for subject in found} == {True, False}
        assert seen and all(re.search(r"[1-9][\d,]* bytes of KV by shm, [1-9]", s) for s in seen)
        answer = cluster.post(
            "/v1/completions", prompt=list(range(5, 75)), max_tokens=2, timeline=True
        )
        line = answer.json()["pdserve"]["timeline"]
        assert answer.headers["X-PDServe-Path"] == (
            f"prefill={line['prefill_node']};decode={line['decode_node']};path=transferred;"
            f"kv=shm:{line['transfer_bytes']};recomputed=0"
        )
        assert line["verified_runs"] > 0 and line["prefill_node"] in ids
        quiet = cluster.post("/v1/completions", prompt=[5], max_tokens=1)
        assert "X-PDServe-Path" not in quiet.headers, "nodes' names are for those who ask"
        metrics = cluster.get("/metrics").text
        assert re.search(r'prompts_total{.*path="transferred"} [1-9]', metrics)
        assert re.search(r'prompts_total{.*path="stand_in"} 0', metrics)


def cases() -> list[Any]:
    found = []
    for each in MISDEPLOYMENTS:
        marks = () if each.wrong.startswith(IN_MAKE_TEST) else (pytest.mark.slow,)
        found.append(pytest.param(each, id=each.wrong, marks=marks))
    return found


@pytest.mark.parametrize("case", cases())
def test_it_is_named(case: Misdeployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with misdeployed(case, tmp_path, monkeypatch) as url:
        began, findings = time.monotonic(), list[Finding]()
        while not any(fits(case, each) for each in findings):
            assert time.monotonic() - began < SOON, findings
            findings = list(examine(url()))
        assert all(each.fix for each in findings if each.verdict != "ok")


def fits(case: Misdeployment, finding: Finding) -> bool:
    said = ".*".join(map(re.escape, case.says.split("…")))
    return finding.verdict == case.verdict and bool(re.search(said, finding.seen))


@contextmanager
def misdeployed(
    case: Misdeployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], str]]:
    """Starts it; gives the URL to ask."""
    with ExitStack() as stack:
        if case.then == "one-way network":
            yield stack.enter_context(one_way())
            return
        hasty = case.then == "freeze the decode node"
        cluster = stack.enter_context(WarmCluster(MODEL, 0, 0, case.router, hasty=hasty))
        for role, options in case.nodes:
            before = ()
            if case.then == "a wrong clock" and role == "decode":
                (clock := tmp_path / "clock").write_text("120")
                before = ("mortal:clock", str(clock))
            cluster.start_node(role, before, **filled(options, cluster, tmp_path))
        yield stack.enter_context(then(case.then, cluster, monkeypatch))
        for name in cluster.names(""):  # some never registered
            if cluster.exit_code(cluster.pids[name]) is None and name != "router":
                cluster.kill(name)


def filled(options: dict[str, Any], cluster: WarmCluster, tmp_path: Path) -> dict[str, Any]:
    options = dict(options)
    if options.get("router") == "GRPC":
        options["router"] = cluster.grpc
    if options.get("model") == "OTHER WEIGHTS":
        options["model"] = shutil.copytree(MODELS / MODEL, tmp_path / MODEL)
        weights = options["model"] / "model.safetensors"
        changed = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
        save_file(changed, weights)
    if "corrupt" in str(options.get("kv_connector")):
        config = {"probability": 1, "seed": 0, "ledger": str(tmp_path / "ledger")}
        options["kv_connector_config"] = json.dumps(config)
    return options


@contextmanager
def then(
    what: str, cluster: WarmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], str]]:
    url = lambda: cluster.url  # noqa: E731
    if what == "freeze the decode node":
        cluster.wait_nodes()
        (name,) = cluster.names("decode")
        cluster.send(name, signal.SIGSTOP)
        yield url
    elif what == "ask with a wrong key":
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        yield url
    elif what == "ask another server":
        cluster.wait_nodes()
        address = cluster.nodes("decode")[0]["metrics_address"]
        yield lambda: f"http://{address}"
    elif what.startswith("ask through a proxy"):
        cluster.wait_nodes()
        with proxy(cluster.url, broken="502" in what) as through:
            yield lambda: through
    else:
        yield url


@contextmanager
def proxy(url: str, broken: bool) -> Iterator[str]:
    """A server that passes everything on when it has all of it, or answers 502."""

    async def handle(request: web.Request) -> web.Response:
        if broken:
            return web.Response(status=502, text="<html>bad gateway</html>")
        body, headers = await request.read(), {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path, data=body, headers=headers) as it,
        ):
            return web.Response(
                body=await it.read(), status=it.status, content_type=it.content_type
            )

    loop, ports = asyncio.new_event_loop(), list[int]()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        await (runner := web.AppRunner(app)).setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def one_way() -> Iterator[Callable[[], str]]:
    """Drops what prefill nodes send to decode nodes."""
    if why := hosts.unavailable():
        pytest.skip(why)
    key = {"cluster_key": KEY}
    with networked(MODEL, key, kv_lease=1, **key) as (network, cluster):
        places = []
        for role in ("prefill", "decode"):
            host, before = network.add()
            router = f"{hosts.ROUTER}:{cluster.ports['registry']}"
            options = {"host": host, "kv_host": host, "kv_connector": "tcp", "router": router}
            cluster.start_node(role, before, **options)
            places.append(host)
        cluster.wait_nodes()
        network.drop(*places)
        yield lambda: cluster.url
        network.drop(*places, False)
