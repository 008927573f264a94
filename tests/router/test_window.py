"""The context that the router offers where nodes hold different ones, and their requests."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext

import pytest

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Unavailable
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.placement import NodeSelector, load_policies
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.role_policy import PlacementRequest

ROLES = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE, "b": pb.ROLE_BOTH}


def registry_of(**windows: int) -> Registry:
    """Returns a registry of nodes by name; the first letter is the role."""
    registry = Registry(RoutingConfig())
    for name, window in windows.items():
        register(registry, name, window)
    return registry


def register(registry: Registry, name: str, window: int) -> None:
    info = pb.NodeInfo(
        node_id=name, role=ROLES[name[0]], address=f"{name}:1", fingerprint="f",
        kv_connectors=["tcp"], max_model_len=window,
    )  # fmt: skip
    registry.register(info, pb.NodeLoad(healthy=True, reason="ok"))


@pytest.mark.parametrize(
    ("windows", "offered"),
    [
        ({}, None),
        ({"p1": 0, "d1": 0}, None),  # they do not say
        ({"p1": 8000, "d1": 6000}, 6000),
        ({"p1": 8000, "p2": 64, "d1": 8000, "d2": 8000}, 8000),
        ({"p1": 8000, "d1": 8000, "d2": 64}, 8000),
        ({"p1": 8000, "d1": 8000, "b1": 64}, 8000),
        ({"p1": 8000, "d1": 8000, "d2": 64, "d3": 64}, 64),  # most hold that
        ({"p1": 64, "d1": 8000, "d2": 8000}, 64),  # every prompt passes it
        ({"b1": 8000, "b2": 7990, "b3": 8010}, 7990),  # memory differs a little: all count
        ({"b1": 8000, "b2": 8000, "b3": 80000}, 8000),  # one big node does not get them all
    ],
)
def test_nodes_that_hold_much_less_than_the_usual_do_not_count(
    windows: dict[str, int], offered: int | None
) -> None:
    assert registry_of(**windows).window == offered


def test_the_window_follows_nodes_that_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of(p1=8000, d1=8000)
    with caplog.at_level(logging.WARNING):
        register(registry, "d2", 64)
        register(registry, "d2", 64)
    assert caplog.text.count("d2: it holds 64 tokens of context") == 1
    reasons = {
        node["node_id"]: node["reason"] for node in ClusterView(registry).describe()["nodes"]
    }
    assert reasons["d1"] == "ok" and reasons["d2"].startswith("it holds 64 tokens of context")
    registry.deregister("d1")
    assert registry.window == 64, "no other node answers"
    assert not any(node.short for node in registry.nodes() if node.id == "d2")


class Placing:
    def __init__(self, registry: Registry, patience: float = 0.0) -> None:
        config = RoutingConfig(prefill_policy="least-load", decode_policy="least-load")
        view = ClusterView(registry)
        self._selector = NodeSelector(config, view, load_policies(config), now=lambda: 0.0)
        self._patience = patience

    async def place(self, prompt: int, longest: int) -> tuple[str, str | None, PromptPath]:
        request = PlacementRequest(
            request_id="r", num_tokens=prompt, longest=longest, adapter="", version=None, avoid=(),
            local_prefill=False, last_chance=lambda role: False,
            waiting=lambda what: nullcontext(self._patience), blocks=lambda size: (),
        )  # fmt: skip
        decode, path = await self._selector.decode(request)
        if path is not PromptPath.TRANSFERRED:
            return decode.id, None, path
        prefill = await self._selector.prefill(request, decode)
        return decode.id, prefill and prefill.id, path


async def test_a_node_gets_the_requests_that_fit() -> None:
    placing = Placing(registry_of(d1=64, d2=8000, p1=64, p2=8000))
    transferred = PromptPath.TRANSFERRED
    assert await placing.place(9, 64) == ("d1", "p1", transferred), "by load the first is taken"
    assert await placing.place(9, 65) == ("d2", "p1", transferred)
    assert await placing.place(64, 65) == ("d2", "p2", transferred), "a prompt and one token"


async def test_a_decode_node_stands_in_for_prefill_nodes_that_are_too_small() -> None:
    registry = registry_of(d1=8000, p1=64, p2=8000)
    next(node for node in registry.nodes() if node.id == "p2").load.healthy = False
    for node in registry.nodes():
        registry.kinds.changed(node)
    assert await Placing(registry).place(100, 200) == ("d1", None, PromptPath.STAND_IN)


async def test_the_error_says_that_the_big_nodes_are_gone() -> None:
    registry = registry_of(b1=64, b2=8000)
    registry.deregister("b2")
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="no registered node holds 200 tokens any more"):
            await Placing(registry).place(100, 200)
