"""Promises and turns through real processes: a key that floods, a body of many prompts and prompts
as long as the model takes, beside a key that asks for little."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pdserve.common.rpc.pb import inference_pb2, inference_pb2_grpc
from warm import WarmCluster, run_roles

FLOOD, POLITE = "a-key-that-floods", "a-polite-key"
LONG = 1000  # tokens: the window is 1024
TTFT, TPOT = "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    # So few tokens a step that the longest prompt takes 32, and so little in hand that the router
    # decides whose turn it is.
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 2048}
    router = {
        "api_key": f"{FLOOD},{POLITE}",
        "api_key_weights": "1,2",
        "admin_api_key": "an-operator-s",
        "prefill_backlog": 0.05,
        "queue_timeout": 120,
        "heartbeat_timeout": 30,
        "slo_ttft": 100,
        "slo_itl": 100,
    }
    with WarmCluster("llama-gqa", 0, 1, router, **options) as cluster:
        cluster.start_held("prefill")
        cluster.wait_nodes()
        for number in range(8):  # it measures what prompts take
            assert ask(cluster, POLITE, prompt(100 * number + 10, number))[0] == 200
        yield cluster


def prompt(tokens: int, number: int) -> list[int]:
    """Shares no block with another one."""
    return [5 + number % 250, 5 + number // 250, *[9] * (tokens - 2)]


def ask(
    cluster: WarmCluster, key: str, prompt: Any, max_tokens: int = 1, **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns status, answer and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", cluster.ports["http"], timeout=120)
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **named},
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read()), dict(response.getheaders())
    finally:
        connection.close()


def metric(cluster: WarmCluster, name: str, label: str = "") -> float:
    lines = cluster.get("/metrics").text.splitlines()
    found = (line for line in lines if line.startswith(name) and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_a_flood_and_a_large_body_delay_another_key_by_little(cluster: WarmCluster) -> None:
    def asked() -> int:
        state = cluster.state()
        return int(state["running"] + state["waiting"])

    body = [prompt(LONG - 10, 300 + number) for number in range(6)]
    with ThreadPoolExecutor(18) as pool:
        with cluster.standing_still("prefill"):
            flood = [pool.submit(ask, cluster, FLOOD, body)]
            flood += [pool.submit(ask, cluster, FLOOD, prompt(LONG, n)) for n in range(12)]
            cluster.wait_for(lambda: asked() == 18)
            polite = [pool.submit(ask, cluster, POLITE, prompt(60, 600 + n)) for n in range(5)]
            cluster.wait_for(lambda: asked() == 23)
        answers = [each.result() for each in (*flood, *polite)]
    assert [status for status, _, _ in answers] == [200] * 18  # and none starves
    tokens = re.findall(r" finished: (\d+) prompt tokens", cluster.log())[-23:]
    assert tokens[-12:].count("60") == 0, "it waited until the others had ended"


def least_slo(cluster: WarmCluster) -> int:
    """Returns the milliseconds of an SLO that a long prompt keeps alone, by the router's word."""
    for power in range(20):
        status, answer, _ = ask(cluster, POLITE, prompt(LONG, 700), X_SLO_TTFT_Ms=str(2**power))
        if status == 200:
            return 2**power
        assert status == 429, answer
    raise AssertionError("no SLO is long enough")


def flood(cluster: WarmCluster, number: int, slo: int) -> list[tuple[int, Any, Any]]:
    """Returns the answers to 24 long prompts at a time."""
    with ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(ask, cluster, FLOOD, prompt(LONG, number + each), X_SLO_TTFT_Ms=str(slo))
            for each in range(24)
        ]
        return [each.result() for each in asked]


def test_requests_that_would_be_late_are_refused_at_once(cluster: WarmCluster) -> None:
    counter = "pdserve_requests_total", 'code="SLO_TTFT"'
    for number, times in enumerate((4, 2, 8, 1, 16)):  # it may be faster, or slower, by then
        slo = times * least_slo(cluster)
        before = metric(cluster, *counter)
        found = flood(cluster, 1000 + 24 * number, slo)
        refused = [each for each in found if each[0] == 429]
        assert {each[0] for each in found} <= {200, 429}
        if 1 <= len(refused) < 24:
            break
    assert 1 <= len(refused) < 24
    for _, answer, headers in refused:
        assert answer["error"]["code"] == "slo_ttft", answer
        assert int(headers["Retry-After"]) >= 1
    assert metric(cluster, *counter) == before + len(refused)
    assert metric(cluster, "pdserve_slo_requests_total") > 0
    assert metric(cluster, "pdserve_time_to_first_token_over_predicted_count") > 0


def test_answers_are_counted_by_the_limits_of_their_headers(cluster: WarmCluster) -> None:
    def count(slo: str, outcome: str) -> float:
        labels = f'outcome="{outcome}",promise="limit",slo="{slo}"'
        return metric(cluster, "pdserve_slo_requests_total", labels)

    cells = [("itl", "missed"), ("itl", "unmeasured"), ("ttft", "met")]
    before = [count(*each) for each in cells]
    limits = {"X_SLO_TTFT_Ms": "1000000", "X_SLO_TPOT_Ms": "0.001"}
    for number, max_tokens in enumerate((4, 4, 1)):
        assert ask(cluster, POLITE, prompt(20, 900 + number), max_tokens, **limits)[0] == 200
    found = [count(*each) - earlier for each, earlier in zip(cells, before, strict=True)]
    assert found == [2, 1, 3]


@pytest.mark.parametrize("name", [TTFT, TPOT])
@pytest.mark.parametrize("value", ["soon", "0", "-5", "nan", "1e99", "1\u00b2"])
def test_headers_that_cannot_be(cluster: WarmCluster, name: str, value: str) -> None:
    status, answer, _ = ask(cluster, POLITE, [5, 6], **{name: value})
    assert status == 400 and answer["error"]["param"] == name, answer


def test_grpc_metadata_says_the_same(cluster: WarmCluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.ports['grpc']}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt(500, 800)),
            sampling=inference_pb2.SamplingParams(max_tokens=1),
        )
        for value, code in (("0.001", "SLO_TTFT"), ("x", "INVALID_REQUEST")):
            metadata = (("authorization", f"Bearer {POLITE}"), (TTFT.lower(), value))
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, metadata=metadata))
            found = dict(caught.value.trailing_metadata() or ())
            assert found["pdserve-error-code"] == code


@pytest.mark.slow  # a worker imports all of a router: seconds of CPU each
def test_each_of_several_workers_keeps_its_word() -> None:
    router = {"router_workers": 2, "api_key": f"{FLOOD},{POLITE}", "slo_ttft": 100}
    router |= {"admin_api_key": "an-operator-s", "prefill_backlog": 0.05, "max_client_share": 1}
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 2048}
    key = {"cluster_key": "k" * 32}
    with WarmCluster("llama-gqa", 1, 1, {**router, **key}, **options, **key) as cluster:
        with ThreadPoolExecutor(16) as pool:
            first = [pool.submit(ask, cluster, POLITE, prompt(300, i)) for i in range(32)]
            assert {each.result()[0] for each in first} == {200}
            flood = [
                pool.submit(ask, cluster, FLOOD, prompt(LONG, 40 + i), X_SLO_TTFT_Ms="20")
                for i in range(16)
            ]
            polite = [ask(cluster, POLITE, prompt(60, 80 + i))[0] for i in range(4)]
        found = [each.result()[0] for each in flood]
        assert 429 in found and set(found) <= {200, 429} and polite == [200] * 4
        refused = metric(cluster, "pdserve_requests_total", 'code="SLO_TTFT"')
        assert refused == found.count(429)  # the workers' counts, added up


def test_options_that_cannot_be(tmp_path: Any) -> None:
    model = ["--model", "x"]
    found = run_roles(
        tmp_path,
        [
            ["router", *model, "--slo-ttft=-1"],
            ["router", *model, "--slo-itl=nan"],
            ["router", *model, "--prefill-backlog=soon"],
            ["router", *model, "--api-key-weights=1"],
        ],
    )
    assert [code for code, _ in found] == [2] * 4
    for (_, log), name in zip(found, ("ttft", "itl", "backlog", "weights"), strict=True):
        assert name in log.splitlines()[-1], log
