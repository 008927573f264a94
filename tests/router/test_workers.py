"""The questions that the processes of one router ask each other, and how their answers become
one."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.common.config.router import RouterConfig, ServerConfig
from pdserve.router.supervisor import HUNG, HUNG_AT_START, RouterWorker, Supervisor
from pdserve.router.workers.link import Link
from pdserve.router.workers.merge import counts_of_dead, merged_clusters, merged_metrics
from pdserve.router.workers.siblings import SERVING

TEXT = """\
# TYPE pdserve_request_success_total counter
pdserve_request_success_total{{finished_reason="stop",model_name="m"}} {0}.0
# TYPE pdserve_request_success_created gauge
pdserve_request_success_created{{finished_reason="stop",model_name="m"}} {0}00.0
# TYPE vllm:ttft histogram
vllm:ttft_bucket{{le="0.5",model_name="m"}} {0}.0
vllm:ttft_bucket{{le="+Inf",model_name="m"}} 7.0
vllm:ttft_count{{model_name="m"}} 7.0
vllm:ttft_sum{{model_name="m"}} 1.25
# TYPE pdserve_num_requests_running gauge
pdserve_num_requests_running{{model_name="m"}} {0}.0
# TYPE pdserve_ready gauge
pdserve_ready{{model_name="m"}} {1}.0
# TYPE pdserve_nodes gauge
pdserve_nodes{{model_name="m",role="decode",state="ready"}} 5.0
"""
OTHER = """\
# TYPE pdserve_request_success_total counter
pdserve_request_success_total{finished_reason="length",model_name="m"} 4.0
"""


def samples(text: str) -> dict[Any, float]:
    families = text_string_to_metric_families(text)
    found = [sample for family in families for sample in family.samples]
    values = {(each.name, *each.labels.values()): each.value for each in found}
    assert len(values) == len(found), "each is there once"
    return values


def test_counters_are_added_and_what_all_see_is_said_once() -> None:
    merged = merged_metrics((TEXT.format(2, 1), TEXT.format(3, 0), OTHER)).decode()
    assert samples(merged) == {
        ("pdserve_request_success_total", "stop", "m"): 5,
        ("pdserve_request_success_total", "length", "m"): 4,
        ("pdserve_request_success_created", "stop", "m"): 200,
        ("vllm:ttft_bucket", "0.5", "m"): 5,
        ("vllm:ttft_bucket", "+Inf", "m"): 14,
        ("vllm:ttft_count", "m"): 14,
        ("vllm:ttft_sum", "m"): 2.5,
        ("pdserve_num_requests_running", "m"): 5,
        ("pdserve_ready", "m"): 0,
        ("pdserve_nodes", "m", "decode", "ready"): 5,
    }
    types = {each.name: each.type for each in text_string_to_metric_families(merged)}
    assert types["pdserve_request_success"] == "counter" and types["vllm:ttft"] == "histogram"


def test_processes_are_added_up_and_the_first_start_counts() -> None:
    text = """\
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total {0}.0
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes {0}000.0
# TYPE process_open_fds gauge
process_open_fds {0}0.0
# TYPE process_max_fds gauge
process_max_fds 1024.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds {0}00.0
# TYPE http_requests_total counter
http_requests_total{{method="POST",status="2xx",handler="/v1/completions"}} {0}.0
# TYPE http_request_size_bytes summary
http_request_size_bytes_count{{handler="none"}} 1.0
http_request_size_bytes_sum{{handler="none"}} {0}0.0
"""
    dead = counts_of_dead(text.format(4))
    merged = merged_metrics((text.format(2), text.format(3), dead)).decode()
    assert samples(merged) == {
        ("process_cpu_seconds_total",): 9,
        ("process_resident_memory_bytes",): 5000,
        ("process_open_fds",): 50,
        ("process_max_fds",): 2048,
        ("process_start_time_seconds",): 200,
        ("http_requests_total", "/v1/completions", "POST", "2xx"): 9,
        ("http_request_size_bytes_count", "none"): 3,
        ("http_request_size_bytes_sum", "none"): 90,
    }


def test_of_the_dead_only_what_they_counted_stays() -> None:
    kept = samples(counts_of_dead(TEXT.format(2, 1)))
    assert {name for name, *_ in kept} == {
        "pdserve_request_success_total", "vllm:ttft_bucket", "vllm:ttft_count", "vllm:ttft_sum"
    }  # fmt: skip
    assert samples(merged_metrics(("", counts_of_dead(""))).decode()) == {}


def test_a_node_of_which_workers_think_otherwise_is_one() -> None:
    def text(**states: int) -> str:
        lines = [f'pdserve_nodes{{role="decode",state="{s}"}} {n}.0' for s, n in states.items()]
        return "\n".join(["# TYPE pdserve_nodes gauge", *lines, ""])

    merged = merged_metrics((text(ready=1), text(ready=1, lost=1), text(ready=2))).decode()
    assert samples(merged) == {
        ("pdserve_nodes", "decode", "ready"): 1,
        ("pdserve_nodes", "decode", "lost"): 1,
    }


def test_a_death_is_counted() -> None:
    text = (
        "# TYPE pdserve_router_worker_deaths_total counter\n"
        'pdserve_router_worker_deaths_total{model_name="m"} 0.0\n'
    )
    twice = merged_metrics((text, counts_of_dead(text), counts_of_dead(text))).decode()
    assert samples(twice) == {("pdserve_router_worker_deaths_total", "m"): 2}


async def test_a_worker_that_nodes_do_not_reach_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor = Supervisor(
        RouterConfig(server=ServerConfig(port=0, grpc_port=0, registry_port=0, router_workers=2))
    )
    await supervisor.take_ports()
    first, second = supervisor.workers
    first.metrics = second.metrics = OTHER
    for _ in range(3):
        supervisor.compare()
    assert not caplog.messages, "no nodes are there yet"
    first.metrics = TEXT.format(1, 1)
    for _ in range(3):
        supervisor.compare()
    (message,) = caplog.messages
    assert "not with worker 1: let them reach port" in message
    second.metrics = TEXT.format(1, 1)
    supervisor.compare()
    assert second.alone == 0
    await supervisor.stop()


async def seated(worker: RouterWorker, *command: str) -> asyncio.subprocess.Process:
    """A process in the worker's place, which serves and answers nothing."""
    worker.process = await asyncio.create_subprocess_exec(*command)
    worker.link = Link(AsyncMock())
    worker.serving.set()
    return worker.process


async def test_a_worker_that_hangs_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor(RouterConfig(server=ServerConfig(router_workers=2)))
    worker = supervisor.workers[0]
    process = await seated(worker, "sleep", "600")
    ours, theirs = socket.socketpair()
    other_end = Link(AsyncMock(return_value=b""))
    await other_end.open(theirs)
    for _ in range(HUNG - 1):
        await supervisor.check(worker)
    silent, worker.link = worker.link, Link(AsyncMock())
    await worker.link.open(ours)
    await supervisor.check(worker)
    assert worker.silent == 0, "it has answered, if late"
    worker.link = silent
    for _ in range(HUNG):
        assert process.returncode is None and not caplog.messages
        await supervisor.check(worker)
    assert await process.wait() == -signal.SIGKILL
    assert "worker 0" in caplog.text and "has not answered for 42 s; it is killed" in caplog.text
    await supervisor.check(worker)
    assert worker.silent == 0, "the next one begins anew"


async def test_a_worker_that_hangs_when_it_is_started_again_is_killed_later() -> None:
    supervisor = Supervisor(RouterConfig(server=ServerConfig(router_workers=2)))
    worker = supervisor.workers[0]
    process = await seated(worker, "sleep", "600")
    worker.serving.clear()
    for _ in range(HUNG_AT_START - 1):
        await supervisor.check(worker)
    assert process.returncode is None, "it may read a large tokenizer"
    await supervisor._answer(worker, SERVING, b"")
    assert worker.silent == 0, "it serves at last"
    worker.serving.clear()
    for _ in range(HUNG_AT_START):
        assert process.returncode is None
        await supervisor.check(worker)
    assert await process.wait() == -signal.SIGKILL


async def test_no_worker_is_started_while_the_others_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(RouterConfig(server=ServerConfig(router_workers=2)))
    dies, drains = supervisor.workers
    waits = asyncio.Event()

    async def start(worker: RouterWorker) -> None:
        await seated(worker, "true")
        waits.set()

    monkeypatch.setattr(supervisor, "_start", start)
    await seated(dies, "true")
    await seated(drains, "sleep", "600")
    watching = asyncio.create_task(supervisor._watch(dies))
    supervisor._tasks.append(watching)
    await waits.wait()  # it is started again at once, dies, and would be again in a second
    await supervisor._drain()
    assert drains.process is not None and drains.process.returncode == -signal.SIGTERM
    await asyncio.wait([watching])
    assert watching.cancelled()


def view(pid: int, running: int, others: int, **more: Any) -> dict[str, Any]:
    node = {"node_id": "d0", "state": "ready", "in_flight": running, "others": others}
    node |= {"prefill_tokens": 0, "prompt_tokens": 10, "cached_tokens": 1}
    flow = {"prefill": "p0", "decode": "d0", "transfers": running, "bytes": 8, "seconds": 0.5}
    refused = {"reason": "no", "port": "registry", "count": pid, "seconds_ago": 1.0}
    return {
        "pid": pid, "ready": True, "reason": "ok", "running": running, "waiting": 1, "places": 9,
        "uptime_seconds": 5.0, "first_token_seconds": None, "first_token_measured_ago": None,
        "routers": 3, "nodes": [node], "pairings": [],
        "flows": [flow], "broken_links": [], "refused": [refused], **more,
    }  # fmt: skip


def test_a_cluster_of_workers_has_each_node_once() -> None:
    """Four of the node's requests are another router's: each worker counts the other one's, too."""
    link = {"prefill": "p1", "decode": "d0", "reason": "no route"}
    merged = merged_clusters([view(1, 2, 3 + 4), view(2, 3, 2 + 4, broken_links=[link])])
    (node,) = merged["nodes"]
    assert (node["in_flight"], node["others"], node["prompt_tokens"]) == (5, 4, 20)
    assert (merged["running"], merged["waiting"], merged["places"]) == (5, 2, 9)
    assert [(each["pid"], each["running"]) for each in merged["workers"]] == [(1, 2), (2, 3)]
    assert merged["routers"] == 2  # this one, of two workers, and another one
    assert merged["broken_links"] == [link] and [each["count"] for each in merged["refused"]] == [2]
    (flow,) = merged["flows"]
    assert (flow["transfers"], flow["bytes"], flow["seconds"]) == (5, 16, 1.0)


async def test_calls_cross_and_what_is_gone_or_fails_says_so() -> None:
    async def answer(what: str, argument: bytes) -> bytes:
        if what == "slow":
            await asyncio.Event().wait()
        if what == "broken":
            raise ValueError("a defect")
        return argument * 2

    ends = socket.socketpair()
    one, other = Link(answer), Link(answer)
    with pytest.raises(ConnectionError):
        await one.call("early")
    reading = [await link.open(end) for link, end in zip((one, other), ends, strict=True)]
    large = bytes(2**20)
    found = await asyncio.gather(one.call("a", b"x"), other.call("b", large), one.call("c"))
    assert found == [b"xx", large * 2, b""]
    with pytest.raises(TimeoutError):
        await one.call("slow", timeout=0.01)
    with pytest.raises(ConnectionError):
        await one.call("broken")
    waiting = asyncio.create_task(one.call("slow"))
    await asyncio.sleep(0)
    reading[1].cancel()  # the other process dies
    with pytest.raises(ConnectionError):
        await waiting
    await asyncio.wait(reading)
    with pytest.raises(ConnectionError):
        await one.call("late")
