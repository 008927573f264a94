"""Two routers of the same nodes: both serve, and the death of one is the other's gain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import Any

import grpc
import pytest
import requests

import reference
from benchmarks.chaos import NODE_OPTIONS, Soak, learn_and_run
from benchmarks.soak.asks import make_asks
from benchmarks.soak.load import clients
from callers import KINDS, call, fresh_prompt
from cluster import node_metrics
from pdserve.client.resuming import KEY_HEADER, AsyncResumingClient, ResumingClient
from pdserve.client.resuming_grpc import ResumingStub
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from thinned import thinned
from warm import WarmCluster

MODEL = "llama-gqa"
ASKS = make_asks(21, seed=0, max_tokens=(6, 20), vocab_size=512)
IN_FLIGHT = 16
PLACES, QUEUE = 16, 32
OTHER = "router-2"
KEY = {"cluster_key": "k" * 32}
LEASE = 120.0  # seconds: who takes an answer over comes sooner, on a busy machine too
SHORT_LEASE = 5.0
SOME = 20  # steps of an answer that goes on for longer


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    places = {"max_concurrent_requests": PLACES, "max_queued_requests": QUEUE}
    router = {**places, "max_client_share": 1, **KEY}
    with WarmCluster(MODEL, routers=2, decode=0, router=router, **NODE_OPTIONS, **KEY) as made:
        made.start_held("decode", orphan_lease=LEASE)
        made.wait_nodes()
        yield made


def test_each_knows_of_the_other_what_nodes_report(cluster: WarmCluster) -> None:
    """The page shows sums over both routers where they are known, and says that there are two."""
    other = cluster.at(OTHER)
    cluster.wait_for(lambda: cluster.state()["routers"] == 2)

    def sampled() -> bool:
        events = other.get("/v1/cluster/history").json()["events"]
        return len([each for each in events if "registered" in each["text"]]) == 2

    cluster.wait_for(sampled)
    before = other.get("/v1/cluster/history").json()["samples"][-1]["at"]
    cluster.complete(fresh_prompt(24), max_tokens=12, ignore_eos=True)

    def counted() -> bool:
        samples = other.get(f"/v1/cluster/history?since={before - 1}").json()["samples"]
        assert not any(each["codes"] for each in samples)
        return sum(each["nodes_tokens"] for each in samples) >= 12

    cluster.wait_for(counted)


def test_both_serve_the_same_nodes_at_once(cluster: WarmCluster) -> None:
    both = [cluster, cluster.at(OTHER)]
    ids = [{node["node_id"] for node in each.nodes()} for each in both]
    assert len(ids[0]) == 2 and ids[0] == ids[1]
    prompts = [tuple(fresh_prompt(40 + number)) for number in range(8)]
    bodies = {"max_tokens": 12, "logprobs": 0, "return_tokens_as_token_ids": True}

    def ask(number: int) -> tuple[int, ...]:
        answer = both[number % 2].complete(list(prompts[number]), ignore_eos=True, **bodies)
        tokens = answer["choices"][0]["logprobs"]["tokens"]
        return tuple(int(token.removeprefix("token_id:")) for token in tokens)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [reference.greedy(cluster.model, prompt, 12) for prompt in prompts]
    cluster.wait_idle()


def test_a_router_dies_under_load(cluster: WarmCluster) -> None:
    """Through the other nothing is lost; the nodes free what the dead one's requests held, and find
    the one that takes its place."""
    with cluster.standing_still("decode"):
        interrupted = [call(cluster, kind, 100, 400) for kind in KINDS]
        cluster.wait_for(lambda: sum(node["running"] for node in cluster.nodes("decode")) == 3)

    async def die_and_return() -> None:
        cluster.kill("router")
        await asyncio.sleep(1.0)
        await asyncio.to_thread(cluster.start_router)
        await asyncio.to_thread(cluster.wait_for, lambda: cluster.get("/health").ok)
        await asyncio.to_thread(cluster.wait_nodes)

    async def run() -> None:
        async with clients(cluster, ASKS, [OTHER]) as load:
            await load.learn()
            tally = await load.during(die_and_return(), IN_FLIGHT)
        assert not tally.lost and not tally.wrong and not tally.hung, tally
        assert tally.completed >= IN_FLIGHT and not tally.migrations

    asyncio.run(run())
    for caller in interrupted:
        caller.hang_up()
    cluster.wait_idle()
    assert cluster.crashed() == []


def test_routers_know_each_other_s_load(cluster: WarmCluster) -> None:
    """While one holds all places the other has its half of them and its queue; what is more, it
    refuses at once. Nothing that it took is lost."""
    other = cluster.at(OTHER)

    def ask(through: WarmCluster) -> int:
        body = {"prompt": fresh_prompt(20), "max_tokens": 4, "ignore_eos": True}
        return through.post("/v1/completions", **body).status_code

    def load(through: WarmCluster) -> tuple[int, int]:
        state = through.get("/v1/cluster").json()
        return state["running"], state["waiting"]

    with ThreadPoolExecutor(PLACES + PLACES + QUEUE) as pool:
        with cluster.standing_still("decode"):
            first = [pool.submit(ask, cluster) for _ in range(PLACES)]
            cluster.wait_for(lambda: other.nodes("decode")[0]["others"] == PLACES)
            cluster.wait_for(lambda: other.get("/v1/cluster").json()["places"] == PLACES // 2)
            assert cluster.nodes("decode")[0]["others"] == 0
            second = [pool.submit(ask, other) for _ in range(PLACES + QUEUE)]
            cluster.wait_for(lambda: load(other) == (PLACES // 2, QUEUE))
            refused = PLACES // 2
            cluster.wait_for(lambda: sum(each.done() for each in second) == refused)
        codes = sorted(each.result() for each in second)
        assert codes == [200] * (PLACES // 2 + QUEUE) + [429] * refused
        assert [each.result() for each in first] == [200] * PLACES
    cluster.wait_idle()


def test_a_node_that_drains_leaves_both(cluster: WarmCluster) -> None:
    new = cluster.start_node("prefill")
    cluster.wait_nodes()
    pid = cluster.drain(new)
    cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
    assert cluster.exit_code(pid) == 0
    for router in cluster.routers:
        assert new not in {node["name"] for node in cluster.state(router)["nodes"]}


@pytest.mark.slow  # the death of one under load is above; of many, in benchmarks/chaos.py
def test_routers_die_in_a_soak(cluster: WarmCluster) -> None:
    """Streams over HTTP go on elsewhere; of the rest, what a killed router served ends with it."""
    kill = ("router-kill",)
    soak = Soak(2.0, IN_FLIGHT, len(ASKS), (6, 20), 0.0, kill, period=0.5, longest=0.5)
    report = asyncio.run(learn_and_run(cluster, soak, ASKS))
    assert not any(report.failures.values()), f"{report}\n{cluster.log()[-6000:]}"
    assert report.faults.keys() == {"router-kill router"}, report
    assert report.completed > IN_FLIGHT


# ---- streams that outlive their router ----

WAYS = ("/v1/completions", "/v1/chat/completions")


def bodies(path: str, **options: Any) -> dict[str, Any]:
    """A request whose answer takes a while."""
    body = {"max_tokens": 100, "ignore_eos": True, **options}
    if path == WAYS[0]:
        return {"prompt": fresh_prompt(20), **body}
    return {"messages": [{"role": "user", "content": "a b c"}], **body}


STYLES: list[tuple[str, dict[str, Any]]] = [
    (WAYS[0], {"temperature": 0}),
    (WAYS[0], {"temperature": 1, "seed": 5, "n": 2, "presence_penalty": 0.5}),
    (WAYS[0], {"temperature": 1, "seed": 6, "logprobs": 2, "return_token_ids": True}),
    (
        WAYS[1],  # text that begins a stop string is held back for a while
        {
            "temperature": 1,
            "seed": 7,
            "stop": ["softly on the moon", "zz"],
            "stream_options": {"include_usage": True},
        },
    ),
]


def gathered(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a client makes of a stream: all of each choice, and what must be the same
    throughout."""
    found: dict[str, Any] = {"ids": set(), "usage": None}
    for chunk in chunks:
        found["ids"].add((chunk["id"], chunk["created"]))
        if usage := chunk.get("usage"):
            found["usage"] = usage["prompt_tokens"], usage["completion_tokens"]
        for each in chunk["choices"]:
            choice = found.setdefault(each["index"], {"text": "", "tokens": [], "finish": []})
            choice["text"] += each.get("text") or each.get("delta", {}).get("content") or ""
            choice["tokens"] += each.get("token_ids") or []
            choice["finish"] += [each["finish_reason"]] if each["finish_reason"] else []
            logprobs = each.get("logprobs") or {}
            choice.setdefault("offsets", []).extend(logprobs.get("text_offset", []))
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert len(one["ids"]) == len(other["ids"]) == 1, "one answer"
    return {**one, "ids": 0} == {**other, "ids": 0}


@pytest.mark.parametrize(("path", "options"), thinned(STYLES, 4, first=1))
def test_a_stream_outlives_its_router(
    cluster: WarmCluster, path: str, options: dict[str, Any]
) -> None:
    """It goes on at the next token, of another router, and so does the next one when that dies."""
    urls = [cluster.url, cluster.at(OTHER).url]
    client, body = ResumingClient(urls), bodies(path, **options)
    expected = gathered(client.stream(path, body))
    chunks: list[dict[str, Any]] = []
    stream = client.stream(path, body)
    with cluster.standing_still("decode"):
        for turn, name in enumerate(cluster.routers):
            cluster.let("decode", SOME)
            while client._turn < turn:
                chunks.append(next(stream))  # the last of the router before this one
            chunks.append(next(stream))
            cluster.kill(name)
            cluster.start_router(name=name)
            cluster.wait_nodes()
    chunks += stream
    assert client._turn >= 2, "it broke off"
    assert same(gathered(chunks), expected), (gathered(chunks), expected)
    cluster.wait_idle()


async def test_an_event_id_is_of_one_request_and_key(cluster: WarmCluster) -> None:
    """Changed, left out, moved, or of another body, it is refused; and by any router."""
    body = bodies(WAYS[0], max_tokens=4, stream=True, resumable=True)
    response = cluster.post(WAYS[0], **body)
    ids = [line[4:] for line in response.text.splitlines() if line.startswith("id: ")]
    assert response.status_code == 200 and len(ids) >= 3
    other = cluster.at(OTHER)
    again = other.post(WAYS[0], **body, resume=ids)
    assert again.status_code == 200 and again.text.endswith("data: [DONE]\n\n")
    forged = ids[1][:-2] + ("AA" if ids[1][-2:] != "AA" else "BB")
    for wrong in (["x"], ids[1:], [ids[0], ids[2]], [ids[0], forged], [ids[1], ids[0]]):
        refused = other.post(WAYS[0], **body, resume=wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_event_id")
    refused = other.post(WAYS[0], **body | {"max_tokens": 5}, resume=ids)
    assert refused.status_code == 403
    for bad, why in (
        ({"resumable": None}, "`resume` needs"),
        ({"stream": False}, "`stream`"),
        ({"echo": True}, "echo"),
    ):
        refused = other.post(WAYS[0], **body | bad, resume=ids)
        assert refused.status_code == 400 and why in refused.text
    async with AsyncResumingClient([cluster.url]) as client:
        chunks = [chunk async for chunk in client.stream(WAYS[0], body)]
    assert gathered(chunks)[0]["finish"] == ["length"]


# ---- the same over gRPC ----


def collected(responses: Iterable[pb.GenerateResponse]) -> dict[Any, Any]:
    """Returns what a client makes of a stream: all of each choice, and what must be the same
    throughout."""
    found: dict[Any, Any] = {"ids": set(), "prompt": [], "usage": []}
    for each in responses:
        found["ids"].add(each.request_id)
        found["prompt"] += each.prompt_token_ids
        if each.HasField("usage"):
            found["usage"].append((each.usage.prompt_tokens, each.usage.completion_tokens))
            continue
        choice = found.setdefault(each.index, {"text": "", "tokens": [], "finish": 0})
        choice["text"] += each.text
        choice["tokens"] += [token.id for token in each.tokens]
        choice["finish"] = each.finish_reason
    return found


def test_a_grpc_stream_outlives_its_router(cluster: WarmCluster) -> None:
    sampling = pb.SamplingParams(max_tokens=100, ignore_eos=True, temperature=1, seed=5, n=2)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=fresh_prompt(20)), sampling=sampling, return_token_ids=True
    )
    with ResumingStub([cluster.grpc, cluster.at(OTHER).grpc]) as stub:
        expected = collected(stub.generate(request))
        responses: list[pb.GenerateResponse] = []
        stream = stub.generate(request)
        with cluster.standing_still("decode"):
            for turn, name in enumerate(cluster.routers):
                cluster.let("decode", SOME)
                while stub._turn < turn:
                    responses.append(next(stream))
                responses.append(next(stream))
                cluster.kill(name)
                cluster.start_router(name=name)
                cluster.wait_nodes()
        responses += stream
        assert stub._turn >= 2, "it broke off"
    found = collected(responses)
    assert len(found["ids"]) == 1 and len(found["usage"]) == 1
    assert {**found, "ids": 0} == {**expected, "ids": 0}
    cluster.wait_idle()


def test_a_grpc_event_id_is_of_one_request_and_key(cluster: WarmCluster) -> None:
    chat = pb.Chat(messages=[pb.Message(role="user", content="a b c")])
    sampling = pb.SamplingParams(max_tokens=16, ignore_eos=True)
    request = pb.GenerateRequest(chat=chat, sampling=sampling, resumable=True)
    with (
        grpc.insecure_channel(cluster.grpc) as first,
        grpc.insecure_channel(cluster.at(OTHER).grpc) as second,
    ):
        whole = list(pb_grpc.InferenceStub(first).Generate(request))
        ids = [each.event_id for each in whole if each.event_id]
        assert len(ids) == len(whole) - 1 >= 3
        other = pb_grpc.InferenceStub(second)

        def resumed(**changed: Any) -> list[pb.GenerateResponse]:
            again = pb.GenerateRequest()
            again.CopyFrom(request)
            again.MergeFrom(pb.GenerateRequest(**changed))
            return list(other.Generate(again))

        rest = resumed(resume=ids[:2])
        # How many tokens a message has depends on the host.
        assert "".join(each.text for each in whole[2:]) == "".join(each.text for each in rest)
        forged = ids[1][:-1] + bytes([ids[1][-1] ^ 1])
        wrong = [[b"x"], ids[1:], [ids[0], ids[2]], [ids[0], forged], [ids[1], ids[0]]]
        changes: list[dict[str, Any]] = [{"resume": each} for each in wrong]
        for change in (*changes, {"resume": ids, "priority": 0, "cache_salt": "other"}):
            with pytest.raises(grpc.RpcError) as refused:
                resumed(**change)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "FOREIGN_EVENT_ID" in str(refused.value.trailing_metadata())
        request.resumable = False
        with pytest.raises(grpc.RpcError, match="`resume` needs"):
            resumed(resume=ids)


# ---- answers that are not streamed ----


@pytest.mark.parametrize(("path", "sampling"), thinned(STYLES[:3], 3, first=1))
def test_a_whole_answer_is_taken_over(
    cluster: WarmCluster, path: str, sampling: dict[str, Any]
) -> None:
    """Its router dies while it is computed; the next one gives all of it, and nothing of it has
    been computed twice."""
    body = bodies(path, **sampling)
    other = cluster.at(OTHER)
    before, key = transfers(other), f"a key of my own for {sampling}"
    with ThreadPoolExecutor() as pool:
        client = ResumingClient([cluster.url, other.url])
        with cluster.standing_still("decode", SOME):
            answer = pool.submit(client.complete, path, body, key)
            cluster.wait_for(lambda: has_kv(other, sampling.get("n", 1)))
            cluster.kill("router")
            cluster.wait_for(lambda: client._turn >= 1)
        found = answer.result()
    assert transfers(other) == before + 1
    for _ in range(2):  # kept for a while, and perhaps made again
        assert whole(found) == whole(keyed(other, key, path, body).json())
    cluster.start_router()
    cluster.wait_nodes()
    cluster.wait_idle()


def transfers(cluster: WarmCluster) -> float:
    """Prompts whose KV has come to the decode node."""
    (decode,) = cluster.nodes("decode")
    return node_metrics(decode).get('pdserve_kv_transfers_total{outcome="OK"}', 0.0)


def keyed(cluster: WarmCluster, key: str, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(cluster.url + path, json=body, headers={KEY_HEADER: key}, timeout=60)


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("id", "choices")}


def test_an_orphan_of_a_dead_router_ends_with_its_lease(cluster: WarmCluster) -> None:
    """It goes on meanwhile, and is freed when no client asks for it."""
    other, body = cluster.at(OTHER), bodies(WAYS[0], max_tokens=400)
    renew_decode_node(cluster, SHORT_LEASE)
    with ThreadPoolExecutor() as pool, cluster.standing_still("decode"):
        ask = pool.submit(keyed, cluster, "left", WAYS[0], body)
        cluster.wait_for(lambda: has_kv(other) and other.nodes("decode")[0]["running"])
        since = monotonic()  # a client may hear late of it
        cluster.kill("router")
        assert ask.exception() is not None
        cluster.wait_for(lambda: not other.nodes("decode")[0]["running"])
        assert monotonic() - since > SHORT_LEASE
    cluster.start_router()
    cluster.wait_nodes()
    renew_decode_node(cluster, LEASE)
    cluster.wait_idle()


def renew_decode_node(cluster: WarmCluster, lease: float) -> None:
    """Another one, with another lease, takes the place of the decode node."""
    (old,) = cluster.names("decode")
    pid = cluster.drain(old)
    cluster.wait_for(lambda: cluster.exit_code(pid) is not None)
    new = cluster.start_held("decode", orphan_lease=lease)

    def known() -> set[str]:
        nodes = [node for router in cluster.routers for node in cluster.state(router)["nodes"]]
        return {node["name"] for node in nodes if node["role"] == "decode"}

    cluster.wait_for(lambda: known() == {new})
    cluster.wait_nodes()


def has_kv(cluster: WarmCluster, choices: int = 1) -> bool:
    """Whether the decode node could compute its one request, whose KV it waits for no more."""
    (node,) = cluster.nodes("decode")
    values = node_metrics(node)
    names = ("pdserve_num_requests_running", "pdserve_num_requests_waiting")
    return sum(values[name] for name in names) == choices


def test_a_key_at_both_routers_at_once_is_computed_once(cluster: WarmCluster) -> None:
    """Both give the same answer."""
    both, before = [cluster, cluster.at(OTHER)], transfers(cluster)
    with ThreadPoolExecutor(4) as pool:
        for number in range(20):
            path, key = WAYS[number % 2], f"at once {number}"
            body = bodies(path, max_tokens=4, temperature=1)
            asked = [pool.submit(keyed, each, key, path, body) for each in both * 2]
            answers = [each.result().json() for each in asked]
            assert all(whole(each) == whole(answers[0]) for each in answers), answers
    assert transfers(cluster) == before + 20
    cluster.wait_idle()


def test_a_key_is_of_one_request(cluster: WarmCluster) -> None:
    """While it is computed, others join it, streamed or gRPC's, too; another body is refused."""
    other, body = cluster.at(OTHER), bodies(WAYS[0], max_tokens=30)
    streamed = bodies(WAYS[0], max_tokens=30, stream=True, temperature=1)
    before, joined = transfers(cluster), len(made_elsewhere(cluster))
    with ThreadPoolExecutor(8) as pool:
        with cluster.standing_still("decode"):
            asked = [pool.submit(keyed, each, "mine", WAYS[0], body) for each in (cluster, other)]
            texts = [pool.submit(streamed_text, each, streamed) for each in (cluster, other)]
            said = [pool.submit(grpc_text, each) for each in (cluster, other)]
            cluster.wait_for(lambda: len(made_elsewhere(cluster)) >= joined + 3)
            for each in (cluster, other):
                refused = keyed(each, "mine", WAYS[0], body | {"max_tokens": 29})
                assert refused.status_code == 422, refused.text
                assert refused.json()["error"]["code"] == "idempotency_key_reused"
        first, again = (each.result().json() for each in asked)
        assert whole(first) == whole(again)
        for pair in (texts, said):
            assert pair[0].result() == pair[1].result() != ""
    assert transfers(cluster) == before + 3
    another = keyed(other, "another", WAYS[0], body).json()
    assert another["id"] != again["id"]
    refused = keyed(other, "k" * 256, WAYS[0], body)
    assert refused.status_code == 400 and "1 to 255" in refused.text
    cluster.wait_idle()


def test_a_client_that_leaves_a_shared_answer_does_not_end_it_for_others(
    cluster: WarmCluster,
) -> None:
    """When the last one has left it ends."""
    body = bodies(WAYS[0], max_tokens=100, stream=True, temperature=1, seed=9)
    expected, joined = streamed_text(cluster, body), len(made_elsewhere(cluster))
    longer, other = body | {"max_tokens": 101}, cluster.at(OTHER)
    with ThreadPoolExecutor() as pool, cluster.standing_still("decode", SOME):
        with begun(cluster, longer, "shared"):
            second = pool.submit(streamed_text, other, longer, "shared")
            cluster.wait_for(lambda: len(made_elsewhere(cluster)) == joined + 1)
        cluster.wait_for(lambda: not running(cluster))
        assert running(other) == 1
        cluster.let("decode", 200)
        assert second.result().startswith(expected)
        with begun(cluster, body | {"max_tokens": 400}, "left"):
            pass
    cluster.wait_idle()


@contextmanager
def begun(cluster: WarmCluster, body: dict[str, Any], key: str) -> Iterator[None]:
    """Its client, who leaves at the end, has the first event of a stream."""
    headers, url = {KEY_HEADER: key}, cluster.url + WAYS[0]
    with requests.post(url, json=body, headers=headers, stream=True, timeout=60) as response:
        assert next(response.iter_lines())
        yield


def running(cluster: WarmCluster) -> int:
    return int(cluster.get("/v1/cluster").json()["running"])


def made_elsewhere(cluster: WarmCluster) -> list[str]:
    """Requests since the cluster's start that joined the job of another one."""
    return [line for line in cluster.log().splitlines() if "is made by another request" in line]


def streamed_text(cluster: WarmCluster, body: dict[str, Any], key: str = "streamed") -> str:
    answer = keyed(cluster, key, WAYS[0], body)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def grpc_text(cluster: WarmCluster) -> str:
    sampling = pb.SamplingParams(max_tokens=30, ignore_eos=True, temperature=1)
    request = pb.GenerateRequest(text="a b c", sampling=sampling)
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        responses = stub.Generate(request, metadata=[(KEY_HEADER.lower(), "over gRPC")])
        return "".join(each.text for each in responses)
