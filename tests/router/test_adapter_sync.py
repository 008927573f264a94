"""Nodes are told of adapters until they have them, whatever becomes of one call or its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from adapters import make_adapter
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import InvalidRequest, ModelNotFound, NodeError, Unavailable
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster import adapter_sync
from pdserve.router.cluster.adapter_sync import AdapterSync
from pdserve.router.cluster.adapters import Adapter, AdaptersCollector, ServedAdapters
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.served_model import load_served_model
from waiting import eventually

MODEL = MODELS / "llama-gqa"


class Sync(AdapterSync):
    """Its one node answers when it is let, and is told what is in `told`."""

    def __init__(self, folder: Path) -> None:
        self.registry, self.adapters = Registry(RoutingConfig()), ServedAdapters()
        self.told: list[dict[str, str]] = []
        self.answers = asyncio.Event()
        self.error: NodeError | None = None
        self.has: dict[str, str] | None = None  # None: what it is told
        self.failures: dict[str, str] = {}
        model = load_served_model(ModelConfig(model=str(MODEL)))
        config = LoRAConfig(enable_lora=True, max_loras=2)
        channels: Any = None
        super().__init__(config, str(folder), model, self.adapters, self.registry, channels)
        info = pb.NodeInfo(node_id="both-1", role=pb.ROLE_BOTH, takes_adapters=True, instance="i")
        self.registry.register(info, pb.NodeLoad(healthy=True))

    @property
    def node(self) -> Node:
        return self.registry.nodes()[0]

    async def _ask(self, node: Node, wanted: dict[str, str]) -> pb.SetAdaptersResponse:
        self.told.append(wanted)
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        has = wanted if self.has is None else self.has
        return pb.SetAdaptersResponse(digests=has, failures=self.failures)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_adapter(tmp_path / "a", MODEL, seed=0, rank=1, targets=("q_proj",))
    return tmp_path


async def test_a_client_that_leaves_leaves_no_half(folder: Path) -> None:
    """A change that has begun is done; another one is not begun."""
    sync = Sync(folder)
    clients = [asyncio.create_task(sync.load(name, "a", False)) for name in ("a", "b")]
    await eventually(lambda: len(sync.told) >= 1)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    sync.answers.set()
    await eventually(lambda: sync.adapters.find("a"))
    assert sync.node.adapters == sync.adapters.wanted().keys() != set()
    assert (await sync.load("c", "a", False)).name == "c"
    assert [each.name for each in sync.adapters.served()] == ["a", "c"]


async def test_a_node_that_did_not_answer_is_told_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_sync, "RETRY", 0.01)
    sync = Sync(folder)
    sync.answers.set()
    sync.error = NodeError("it is gone", code="PEER_LOST")
    with pytest.raises(Unavailable, match="both-1: it is gone"):
        await sync.load("a", "a", False)
    assert sync.adapters.wanted() == {} and len(sync.told[0]) == 1
    sync.adapters.add(Adapter("b", "/b", "d"))
    keeping = asyncio.create_task(sync.keep())
    await eventually(lambda: len(sync.told) >= 3)
    assert not sync.node.adapters
    sync.error = None
    await eventually(lambda: sync.node.adapters == {"d"})
    count = len(sync.told)
    # Another router had it drop that one, as a request has found.
    sync.registry.lacks_adapter(sync.node, "d")
    await eventually(lambda: len(sync.told) >= count + 1)
    keeping.cancel()
    assert sync.told[1:] == [{"d": "/b"}] * count


async def test_a_node_that_stands_still_holds_up_no_client(folder: Path) -> None:
    sync = Sync(folder)
    client = asyncio.create_task(sync.load("a", "a", False))
    await eventually(lambda: len(sync.told) >= 1)
    sync.adapters.add(Adapter("b", "/b", "d"))
    sync.unload("b")
    for on_lost in list(sync.node.on_lost):
        on_lost(NodeError("both-1 is silent", code="PEER_SILENT"))
    with pytest.raises(Unavailable, match="both-1 is silent"):
        await client
    sync.answers.set()
    assert (await sync.load("a", "a", False)).name == "a"


@asynccontextmanager
async def calls(behaviour: Any) -> AsyncIterator[tuple[AdapterSync, Registry, Channels]]:
    """A node's calls come to `behaviour`, which takes and gives bytes."""
    method = grpc.unary_unary_rpc_method_handler(behaviour)
    server, channels, registry = grpc.aio.server(), Channels(), Registry(RoutingConfig())
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("pdserve.v1.Adapters", {"Set": method}),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    info = pb.NodeInfo(
        node_id="both-1", role=pb.ROLE_BOTH, address=address, takes_adapters=True, instance="i"
    )
    registry.register(info, pb.NodeLoad(healthy=True))
    model = load_served_model(ModelConfig(model=str(MODEL)))
    config, adapters = LoRAConfig(enable_lora=True), ServedAdapters([Adapter("a", "/a", "d")])
    try:
        yield AdapterSync(config, None, model, adapters, registry, channels), registry, channels
    finally:
        await channels.close()
        await server.stop(0)


async def test_a_node_that_leaves_while_it_is_told_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its channel is closed, and those who use it are cancelled."""
    monkeypatch.setattr(adapter_sync, "RETRY", 0.01)
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def behaviour(request: bytes, context: Any) -> bytes:
        asked.set()
        await go_on.wait()
        return pb.SetAdaptersResponse(digests=["d"]).SerializeToString()

    async with calls(behaviour) as (sync, registry, channels):
        keeping = asyncio.create_task(sync.keep())
        await asked.wait()
        (node,) = registry.nodes()
        registry.deregister("both-1", "i")
        await channels.keep([])
        go_on.set()
        registry.register(node.info, pb.NodeLoad(healthy=True))
        await eventually(lambda: keeping.done() or registry.nodes()[0].adapters == {"d"})
        assert not keeping.done()
        keeping.cancel()


async def test_an_answer_that_does_not_parse_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_sync, "RETRY", 0.01)
    answers = [b"\xff", pb.SetAdaptersResponse(digests=["d"]).SerializeToString()]

    async def behaviour(request: bytes, context: Any) -> bytes:
        return answers.pop(0)

    async with calls(behaviour) as (sync, registry, _):
        keeping = asyncio.create_task(sync.keep())
        await eventually(lambda: keeping.done() or registry.nodes()[0].adapters == {"d"})
        assert not keeping.done()
        keeping.cancel()


async def test_a_place_that_will_come_free_is_no_mistake_of_the_client(folder: Path) -> None:
    sync = Sync(folder)
    sync.answers.set()
    b, c = Adapter("b", "/b", "d"), Adapter("c", "/c", "e")
    sync.adapters.add(b)
    sync.adapters.add(c)
    with pytest.raises(InvalidRequest, match="unload one"):
        await sync.load("a", "a", False)
    with sync.adapters.using(c):
        sync.unload("c")
        with pytest.raises(Unavailable, match="still use unloaded adapters") as error:
            await sync.load("a", "a", False)
        assert error.value.code == "ADAPTERS_IN_USE" and error.value.retry_after
    assert not sync.told
    # On a node, by another router's.
    sync.has = {"d": "/b", "f": "/f"}
    (digest,) = {sync._read("a", "a").digest}
    sync.failures = {digest: "2 adapters are in use, as many as --max-loras allows"}
    with pytest.raises(Unavailable, match="both-1: 2 adapters are in use") as error:
        await sync.load("a", "a", False)
    assert error.value.code == "ADAPTERS_IN_USE" and error.value.retry_after
    sync.has = {"d": "/b"}
    with pytest.raises(InvalidRequest, match="both-1: 2 adapters"):
        await sync.load("a", "a", False)


async def test_requests_keep_what_is_served_no_more() -> None:
    """Also those that begin just after it has gone, or after another one took its name."""
    old, new = Adapter("a", "/a", "d"), Adapter("a", "/b", "e")
    adapters = ServedAdapters([old])
    with adapters.using(old), adapters.using(old), adapters.using(None):
        adapters.add(new)
        assert adapters.find("a") is new and adapters.wanted() == {"d": "/a", "e": "/b"}
        adapters.remove("a")
        assert adapters.find("a") is None and adapters.wanted() == {"d": "/a"}
    assert adapters.wanted() == {}
    with adapters.using(old):
        assert adapters.wanted() == {"d": "/a"}
    with pytest.raises(ModelNotFound):
        adapters.remove("a")


def test_metrics_name_those_at_work() -> None:
    a, b, again = Adapter("a", "/a", "d"), Adapter("b", "/b", "e"), Adapter("a", "/c", "f")
    adapters = ServedAdapters([a, b])
    labels = {"max_lora": "3"}

    def shown() -> tuple[str, str]:
        (metric,) = AdaptersCollector(adapters, 3).collect()
        (sample,) = metric.samples
        assert sample.name == "pdserve_lora_requests_info" and sample.value > 1e9
        assert labels.items() <= sample.labels.items()
        return sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]

    assert shown() == ("", "")
    with adapters.using(a), adapters.using(again), adapters.using(b), adapters.using(None):
        assert shown() == ("", "a,b")
        with adapters.running(b), adapters.running(a), adapters.running(None):
            assert shown() == ("a,b", "a")
    assert shown() == ("", "")
