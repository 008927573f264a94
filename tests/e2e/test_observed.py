"""A cluster shows of itself: metrics, and where the time of each request went."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests

from cluster import events, node_metrics
from deaths import MORE_BLOCKS
from otlp import Receiver
from pdserve.cli.main import main
from pdserve.common.obs.exposition import NODE_NAMES, ROUTER_NAMES
from pdserve.common.rpc.pb import inference_pb2, inference_pb2_grpc
from warm import WarmCluster

MODEL = "llama-gqa"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Decode nodes can be held. One that dies is noticed by its connections; one whose heartbeats
    are late is not lost."""
    router = {"heartbeat_timeout": 10}
    with WarmCluster(MODEL, prefill=2, decode=0, router=router) as cluster:
        for _ in range(2):
            cluster.start_held("decode")
        cluster.wait_nodes()
        yield cluster
        cluster.wait_idle()


def pages(cluster: WarmCluster) -> dict[str, str]:
    """Returns what every process shows, by role."""
    addresses = {node["role"]: f"http://{node['metrics_address']}" for node in cluster.nodes()}
    return {
        role: requests.get(f"{url}/metrics", timeout=60).text
        for role, url in ({"router": cluster.url} | addresses).items()
    }


# ---- metrics --------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")
def test_promtool_finds_no_fault(cluster: WarmCluster) -> None:
    for role, page in pages(cluster).items():
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=page,
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), role


def test_vllm_s_names_are_there_once(cluster: WarmCluster) -> None:
    names = {
        role: {
            name.removesuffix("_total") for name in re.findall(r"^# TYPE pdserve_(\w+)", page, re.M)
        }
        for role, page in pages(cluster).items()
    }
    with_adapters = {"lora_requests_info"}
    assert ROUTER_NAMES.keys() - with_adapters <= names["router"]
    for role in ("prefill", "decode"):
        assert NODE_NAMES.keys() <= names[role]


def test_every_process_shows_its_memory_and_cpu(cluster: WarmCluster) -> None:
    for page in pages(cluster).values():
        for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds"):
            (found,) = re.findall(rf"^process_{name}{{.*}} (\S+)$", page, re.M)
            assert float(found) > 0


def test_refused_requests_are_counted(cluster: WarmCluster) -> None:
    def count(code: str) -> float:
        page = requests.get(f"{cluster.url}/metrics", timeout=60).text
        found = re.search(rf'^pdserve_requests_total{{code="{code}",.*}} (\S+)', page, re.M)
        return float(found[1]) if found else 0.0

    def http_count(status: str) -> float:
        page = requests.get(f"{cluster.url}/metrics", timeout=60).text
        labels = f'handler="/v1/completions",method="POST",model_name=".*",status="{status}"'
        found = re.search(rf"^http_requests_total{{{labels}}} (\S+)", page, re.M)
        return float(found[1]) if found else 0.0

    url = f"{cluster.url}/v1/completions"
    for code, status, body, headers in (
        ("INVALID_REQUEST", 400, '{"prompt": "a", "temperature": -1}', {}),
        ("MODEL_NOT_FOUND", 404, '{"prompt": "a", "model": "other"}', {}),
        ("UNSUPPORTED_MEDIA_TYPE", 415, "a", {"Content-Type": "text/plain"}),
    ):
        before, answered = count(code), http_count("4xx")
        assert requests.post(url, data=body, headers=headers, timeout=30).status_code == status
        assert (count(code), http_count("4xx")) == (before + 1, answered + 1)


# ---- where the time went --------------------------------------------------------------------

REQUESTS, CLIENTS = 48, 8  # so many at least
STAGES = {
    "receive", "tokenize", "queue", "network", "decode_slot", "prefill_queue", "prefill_compute",
    "first_token", "kv_transfer", "verification", "decode_compute", "decode_queue", "preempted",
    "migration", "detokenize_stream",
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 12, "stream": True},
    {"max_tokens": 1},
    {"max_tokens": 40, "stream": True, "n": 2},
    {"max_tokens": 40, "stop": ["e"], "ignore_eos": False},
    {"max_tokens": 6, "prompt": ["One day", "Once upon a time"]},
]


def ask(cluster: WarmCluster, number: int, **more: Any) -> dict[str, Any]:
    """A request's timeline, checked: its stages follow each other, and are all of its time."""
    body = {"prompt": f"Day {number}. " * 20, "ignore_eos": True, "timeline": True}
    body |= KINDS[number % len(KINDS)] | more
    begun = time.monotonic()
    answer = requests.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
    if body.get("stream"):
        *_, last = events(iter(filter(None, answer.content.splitlines())))
    else:
        last = answer.json()
    return checked(last, time.monotonic() - begun)


def checked(last: dict[str, Any], wall: float) -> dict[str, Any]:
    line: dict[str, Any] = last["pdserve"]["timeline"]
    at = 0.0
    for stage in line["stages"]:
        assert stage["name"] in STAGES and stage["seconds"] > 0
        assert stage["start"] == pytest.approx(at, abs=1e-6)
        at = stage["start"] + stage["seconds"]
    assert sum(each["seconds"] for each in line["stages"]) == pytest.approx(
        line["total_seconds"], abs=1e-3
    )
    assert line["finished"] <= line["total_seconds"] <= wall
    return line


def seconds(line: dict[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for stage in line["stages"]:
        found[stage["name"]] += stage["seconds"]
    return found


def test_stages_tile_every_request_whatever_dies(cluster: WarmCluster) -> None:
    """A node of each role is killed while they are served, and replaced."""
    numbers, replaced = itertools.count(), threading.Event()

    def ask_on() -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        while len(lines) < REQUESTS / CLIENTS or not replaced.is_set():
            lines.append(ask(cluster, next(numbers)))
        return lines

    def replace(role: str) -> None:
        cluster.kill(cluster.busy(role))
        cluster.start_node(role)

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask_on) for _ in range(CLIENTS)]
        try:
            with cluster.standing_still("decode"):  # what it has is not over before it is dead
                replace("decode")
            cluster.wait_nodes()
            replace("prefill")
            cluster.wait_nodes()
        finally:
            replaced.set()
        lines = [line for each in asked for line in each.result()]
    moved = [line for line in lines if line["migrations"]]
    # One that a node has handed over already has lost nothing with it.
    assert any("migration" in seconds(line) for line in moved)
    assert not any("migration" in seconds(line) for line in lines if not line["migrations"])
    # A short answer may be over before its prefill node has told of it.
    kept = [
        line
        for line in lines
        if not line["migrations"] and line["transferred"] and line["prefill_seconds"]
    ]
    assert len(kept) > REQUESTS / 4
    for stage in ("receive", "tokenize", "queue", "decode_slot", "prefill_compute"):
        assert all(seconds(line)[stage] > 0 for line in kept), stage
    stages = [stage for line in kept for stage in line["stages"]]
    roles = {each["name"]: each["node"].partition("-")[0] for each in stages}
    assert roles["prefill_compute"] == "prefill" and roles["tokenize"] == "router"
    assert roles["decode_slot"] == roles["decode_compute"] == roles["verification"] == "decode"


def traced(cluster: WarmCluster, name: str) -> list[dict[str, Any]]:
    answer = cluster.get(f"/v1/timelines/{name}")
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def test_a_request_is_found_while_it_is_served_and_afterwards(
    cluster: WarmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """While decode nodes stand still it is to be seen where it waits."""
    still = cluster.start_held("decode", num_gpu_blocks_override=MORE_BLOCKS)
    cluster.wait_nodes()
    mine = {"X-Request-Id": "mine-1"}
    body = {"prompt": ["One day"], "max_tokens": 30, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool, cluster.standing_still("decode"):
        url = f"{cluster.url}/v1/completions"
        answer = pool.submit(requests.post, url, json=body, headers=mine, timeout=120)
        assert cluster.busy("decode") == still

        cluster.wait_for(lambda: traced(cluster, "mine-1")[0]["timeline"]["transferred"])
        (found,) = traced(cluster, "mine-1")
        assert found["status"] == "running" and found["error"] is None
        last = found["timeline"]["stages"][-1]
        assert last["node"].startswith(("decode-", "router")), last
        assert found["standing"]["node"]["node_id"] in found["standing"]["waits_for"]
        assert found["standing"]["gives_up_in"] > 0 and found["standing"]["last_error"] is None
        assert main(["trace", "mine-1", "--url", cluster.url]) == 0
        assert "to make the next token; without progress it fails in" in capsys.readouterr().out
        assert main(["trace", "--url", cluster.url]) == 0
        assert "1 running" in (shown := capsys.readouterr().out) and "mine-1" in shown
        cluster.kill(still)
    assert answer.result().status_code == 200
    (found,) = traced(cluster, "mine-1")
    assert (found["status"], found["completion_tokens"]) == ("finished", 30)
    assert found["timeline"]["migrations"] >= 1  # or more: a late node may be lost, too
    assert "migration" in seconds(found["timeline"])
    assert traced(cluster, found["id"]) == [found]
    assert main(["trace", "--url", cluster.url]) == 0
    running, _, ended = capsys.readouterr().out.partition("the last to end")
    assert "mine-1" not in running
    (row,) = (line.split() for line in ended.splitlines() if line.startswith("mine-1 "))
    assert row[1] == "llama-gqa" and row[2].endswith("+30") and row[-1] == "length"
    assert row[4] == "ms" and row[6] == "s" and float(row[5]) * 1e3 > float(row[3]) > 0
    assert main(["trace", "--url", cluster.url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["data"]
    assert "finished" in {each["status"] for each in listed if each["request_id"] == "mine-1"}
    assert main(["trace", "mine-1", "--url", cluster.url]) == 0
    shown = capsys.readouterr().out
    assert "finished" in shown and "migration" in shown and "prefill queue" in shown
    assert main(["trace", "mine-1", "--url", cluster.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == [found]
    assert main(["trace", "cmpl", "--url", cluster.url]) == 1
    assert "no request in flight" in capsys.readouterr().err


def test_each_prompt_of_a_body_is_found(cluster: WarmCluster) -> None:
    body = {"prompt": ["One day", "Once"], "max_tokens": 3}
    url = f"{cluster.url}/v1/completions"
    answer = requests.post(url, json=body, timeout=60).json()
    assert [each["id"] for each in traced(cluster, answer["id"])] == [
        f"{answer['id']}-{number}" for number in range(2)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {"input": "One day"}),
        ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "One day"}]}),
    ],
)
def test_other_apis_tell_of_it(
    cluster: WarmCluster, path: str, body: dict[str, Any], stream: bool
) -> None:
    begun = time.monotonic()
    body = {"timeline": True, "stream": stream, **body}
    answer = requests.post(f"{cluster.url}/v1/{path}", json=body, timeout=120)
    line = checked(json.loads(answer.text.rpartition("\ndata: ")[2]), time.monotonic() - begun)
    assert seconds(line)["prefill_compute"] > 0


DELAY = 0.4  # seconds, before each run of KV


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KV stands still while this file is there."""
    return tmp_path_factory.mktemp("held") / "kv"


@pytest.fixture(scope="module")
def slow(receiver: Receiver, held: Path) -> Iterator[WarmCluster]:
    """KV crawls, a decode node has few blocks, and spans are sent."""
    router = {"otlp_traces_endpoint": receiver.url}
    options = {
        "otlp_endpoint": receiver.url,
        "kv_connector": "slow_connector:SlowTCP",
        "kv_connector_config": json.dumps({"delay": DELAY, "held": str(held)}),
        "num_gpu_blocks_override": 21,
        "max_model_len": 320,
    }
    with WarmCluster(MODEL, decode=0, router=router, **options) as cluster:
        cluster.start_held("decode")
        cluster.wait_nodes()
        yield cluster
        cluster.wait_idle()


def test_a_slow_link_is_kv_transfer(slow: WarmCluster, held: Path) -> None:
    """Its KV is late by more and more: on a busy machine other stages take long, too."""
    found = []
    for number, late in enumerate((DELAY, 2, 8, 32)):
        held.touch()
        with ThreadPoolExecutor(1) as pool:
            try:
                asked = pool.submit(ask, slow, 600 + 6 * number)
                slow.wait_for(lambda: has_first_token(slow))
                time.sleep(late)
            finally:
                held.unlink()
        line = asked.result()
        longest, took = seconds(line).most_common(1)[0]
        found.append((longest, took, line["exposed_seconds"]))
        if longest == "kv_transfer" and min(took, line["exposed_seconds"]) >= 0.9 * late:
            return
    pytest.fail(f"{found}")


def has_first_token(cluster: WarmCluster) -> bool:
    """Whether the one request that is served has got so far."""
    found = cluster.get("/v1/timelines?standing=true").json()["data"]
    return bool(found) and found[0]["first_token"] is not None


@pytest.mark.slow
def test_too_few_blocks_are_decode_slot_and_preempted(slow: WarmCluster) -> None:
    """Answers that do not fit together. When two of them have begun, others find no block."""

    def crowded() -> bool:
        slow.let("decode", 1)  # the next step has all whose KV is there
        values = node_metrics(slow.nodes("decode")[0])
        return (
            values["pdserve_num_requests_running"] >= 2
            and values["pdserve_num_requests_waiting"] >= 1
        )

    with ThreadPoolExecutor(6) as pool:
        with slow.standing_still("decode"):
            asked = [pool.submit(ask, slow, number, max_tokens=200) for number in range(6, 42, 6)]
            slow.wait_for(crowded)
            since = time.monotonic()
            slow.wait_for(lambda: time.monotonic() > since + DELAY)
        lines = [seconds(each.result()) for each in asked]
    assert max(line["decode_slot"] for line in lines) > DELAY, lines
    assert any(line["preempted"] > line["decode_compute"] / 10 for line in lines), lines
    assert node_metrics(slow.nodes("decode")[0])["pdserve_num_preemptions_total"] > 0


# ---- spans ----------------------------------------------------------------------------------


def test_spans_nest_from_the_client_to_the_decode_node(
    slow: WarmCluster, receiver: Receiver
) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4}
    url = f"{slow.url}/v1/chat/completions"
    by_name: dict[str, Any] = {}
    stages = {"tokenize", "prefill_compute", "kv_transfer", "decode_compute"}
    for number in range(5):  # a router that hears of the first token late sees no transfer
        trace_id = f"{number + 1:032x}"
        client = {"traceparent": f"00-{trace_id}-{'cd' * 8}-01"}
        answer = requests.post(url, json=body, headers=client, timeout=60).json()
        sent = {f"chat {MODEL}", "decode", "prefill", "commit"}
        trace = slow.wait_for(partial(receiver.trace, trace_id, sent))
        by_name = {span.name: span for span in trace}
        if stages <= by_name.keys():
            break
    request = by_name[f"chat {MODEL}"]
    assert request.parent == "cd" * 8
    parents = {"prefill": request, "decode": request, "commit": by_name["prefill"]}
    for name, parent in parents.items():
        assert by_name[name].parent == parent.id, name
        assert by_name[name].service == f"pdserve-{'decode' if name == 'commit' else name}"
    assert stages <= by_name.keys()
    for name in STAGES & by_name.keys():
        stage = by_name[name]
        assert stage.parent == request.id and request.start <= stage.start
    said = request.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.response.id"] == answer["id"]
    assert said["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert said["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    assert {"reserved", "landed"} <= set(by_name["decode"].events)


def test_a_client_over_grpc_names_its_span_too(slow: WarmCluster, receiver: Receiver) -> None:
    with grpc.insecure_channel(slow.grpc) as channel:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), timeline=True
        )
        parent = ("traceparent", f"00-{'12' * 16}-{'34' * 8}-01")
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        *_, last = generate(request, metadata=(parent,), timeout=60)
    assert sum(each.seconds for each in last.timeline.stages) == pytest.approx(
        last.timeline.total_seconds, abs=1e-3
    )
    trace = slow.wait_for(lambda: receiver.trace("12" * 16, {f"text_completion {MODEL}"}))
    assert "34" * 8 in {span.parent for span in trace}


def test_an_absent_receiver_delays_no_request(slow: WarmCluster, receiver: Receiver) -> None:
    receiver.stop()
    answers = (seconds(ask(slow, number)) for number in range(700 - 700 % 6, 750, 6))
    # A machine that stands still lengthens a stage of one answer, a receiver those of all.
    assert any(f["queue"] + f["detokenize_stream"] < f["kv_transfer"] for f in answers)
