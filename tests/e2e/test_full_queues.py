"""One client fills what all wait in, and the requests of another one are served all the same."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest

from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from warm import WarmCluster

GREEDY, HONEST = "the-greedy-one-s", "the-honest-one-s"
PLACES, QUEUE = 4, 16
KIB = 1024


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    router = {
        "api_key": f"{GREEDY},{HONEST}",
        "admin_api_key": "an-operator-s",
        "max_concurrent_requests": PLACES,
        "max_queued_requests": QUEUE,
        "max_body_size": 512 * KIB,
        "queue_timeout": 120,
        "heartbeat_timeout": 30,
    }
    with WarmCluster("llama-gqa", 1, 0, router) as cluster:
        cluster.start_held("decode")
        cluster.wait_nodes()
        yield cluster


class Client:
    def __init__(self, cluster: WarmCluster, key: str, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{cluster.ports['http']}"
        self._authorization = f"Bearer {key}"
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{cluster.ports['grpc']}", [("grpc.use_local_subchannel_pool", 1)]
        )

    async def close(self) -> None:
        await self._channel.close()

    async def over_http(self, max_tokens: int, size: int = 0, **body: Any) -> str:
        """`size`: bytes of the body, at least."""
        body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, **body}
        data = json.dumps(body).ljust(size).encode()
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        async with self._session.post(
            f"{self._url}/v1/completions", data=data, headers=headers
        ) as response:
            await response.read()
            assert response.status != 429 or "Retry-After" in response.headers
            return str(response.status)

    async def over_grpc(self, max_tokens: int) -> str:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7]),
            sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        metadata = (("authorization", self._authorization),)
        call = inference_pb2_grpc.InferenceStub(self._channel).Generate(request, metadata=metadata)
        try:
            return "200" if [each async for each in call] else "none"
        except grpc.aio.AioRpcError as error:
            return error.code().name


@asynccontextmanager
async def two_clients(cluster: WarmCluster) -> AsyncIterator[tuple[Client, Client]]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = [Client(cluster, key, session) for key in (GREEDY, HONEST)]
        yield clients[0], clients[1]
        await asyncio.gather(*(each.close() for each in clients))


async def said(cluster: WarmCluster, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in await asyncio.to_thread(cluster.log):
            await asyncio.sleep(0.02)


async def no_more_refused(cluster: WarmCluster) -> None:
    """A second without a line: the next refusal gets one."""
    counts = [-1, 0]
    while counts[-1] != counts[-2]:
        await asyncio.sleep(1.5)
        counts.append((await asyncio.to_thread(cluster.log)).count("a client is refused"))


async def test_the_client_that_fills_the_queue_gives_way(cluster: WarmCluster) -> None:
    """The queue's share of a client is twelve, and the other one needs more than is left."""
    async with two_clients(cluster) as (greedy, honest):
        with cluster.standing_still("decode"):
            flood = [
                asyncio.create_task(greedy.over_grpc(9) if i % 2 else greedy.over_http(9, n=3))
                for i in range(30)
            ]
            await said(cluster, "12 requests of this client are waiting already")
            await no_more_refused(cluster)
            honests = [
                asyncio.create_task(
                    honest.over_http(2, stream=i % 2 == 0) if i < 5 else honest.over_grpc(2)
                )
                for i in range(9)
            ]
            await said(cluster, f"{QUEUE} requests are waiting already")
        answers = await asyncio.gather(*honests)
        assert answers == ["200"] * 9
        ends = Counter(await asyncio.gather(*flood))
    # Some were refused as they came, and those that gave way in the same words.
    assert set(ends) == {"200", "429", "RESOURCE_EXHAUSTED"}
    assert ends["200"] >= PLACES


async def test_a_client_that_fills_the_room_for_bodies_gives_way(cluster: WarmCluster) -> None:
    """Its bodies never end; more of them than may wait are declared."""
    async with two_clients(cluster) as (_, honest):
        writers = []
        size = 128 * KIB
        for _ in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", cluster.ports["http"])
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {GREEDY}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
            )
            writers.append(writer)
        answers = await asyncio.gather(*(honest.over_http(1, size) for _ in range(8)))
        assert answers == ["200"] * 8
        for writer in writers:
            writer.transport.abort()
