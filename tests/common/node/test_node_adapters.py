"""The LoRA adapters of a node, whose ranks are told what to load and to drop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from adapters import make_adapter
from paths import MODELS
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.core.errors import Blame, ConfigError, NodeError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.engine.messages import LOADED, DropAdapter, LoadAdapter, decode_adapter_call
from pdserve.common.node import adapters
from pdserve.common.node.adapters import NodeAdapters


class Rank:
    """Is asked twice for each. Cannot load those whose folder is `bad`; of `slow` it never
    says that they are loaded."""

    def __init__(self) -> None:
        self.has: set[str] = set()
        self.loading: set[str] = set()

    async def __call__(self, message: bytes) -> bytes:
        match decode_adapter_call(message):
            case LoadAdapter(digest, path):
                assert digest not in self.has
                if digest not in self.loading:
                    self.loading.add(digest)
                    return b""
                if path == "/slow":
                    return b""
                self.loading.remove(digest)
                if path == "/bad":
                    raise ConfigError("it is bad")
                self.has.add(digest)
                return LOADED
            case DropAdapter(digest):
                self.has.discard(digest)
                self.loading.discard(digest)
        return b""


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With places for two."""
    monkeypatch.setattr(adapters, "POLL", 0.0)
    spec = ModelSpec.from_folder(MODELS / "llama-gqa")
    config = LoRAConfig(enable_lora=True, max_loras=2)
    made = NodeAdapters(config, spec, Blame.DECODE)
    await made.start([Rank(), Rank()])
    return made


def has(node: NodeAdapters) -> set[str]:
    for rank in node._ranks:
        assert rank.has == set(node.present)  # type: ignore[attr-defined]
    for digest in node.present:
        node.check(digest)
    return set(node.present)


async def test_a_router_does_not_unload_another_router_s_adapters(node: NodeAdapters) -> None:
    assert await node.set({"a": "/a"}) == {} == await node.set({"b": "/b"})
    assert has(node) == {"a", "b"}
    assert await node.set({"a": "/a"}) == {} == await node.set({})  # a router that starts again
    assert has(node) == {"a", "b"}
    assert await node.set({"c": "/c"}) == {}  # in the place of the one not wanted for longest
    assert has(node) == {"a", "c"}
    with pytest.raises(NodeError, match="is not loaded"):
        node.check("b")


async def test_nothing_goes_that_a_job_has(node: NodeAdapters) -> None:
    await node.set({"a": "/a", "b": "/b"})
    node.take(1, "a")
    node.take(2, "a")
    assert await node.set({"c": "/c"}) == {}
    assert has(node) == {"a", "c"}
    setting = asyncio.create_task(node.set({"c": "/c", "d": "/d"}))
    for user in (1, 2):
        await asyncio.sleep(0)
        assert not setting.done() and has(node) == {"a", "c"}
        node.give_back(user)
    assert await setting == {}
    assert has(node) == {"c", "d"}


async def test_an_adapter_that_does_not_fit_changes_nothing(
    node: NodeAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PATIENCE", 0.01)
    assert await node.set({"a": "/a", "x": "/bad", "b": "/b"}) == {"x": "it is bad"}
    assert has(node) == {"a", "b"}
    failed = await node.set({"a": "/a", "b": "/b", "c": "/c"})
    assert list(failed) == ["c"] and "as many as --max-loras allows" in failed["c"]
    node.take(1, "a")
    node.take(2, "b")
    assert (await node.set({"c": "/c"})).keys() == {"c"}
    assert has(node) == {"a", "b"}


async def test_jobs_that_come_and_go_do_not_prolong_the_wait(
    node: NodeAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PATIENCE", 0.1)
    await node.set({"a": "/a", "b": "/b"})
    node.take(0, "a")
    setting = asyncio.create_task(node.set({"b": "/b", "c": "/c"}))
    async with asyncio.timeout(20):
        while not setting.done():
            node.take(1, "b")
            await asyncio.sleep(0.01)
            node.give_back(1)
    assert "as many as --max-loras allows" in setting.result()["c"]
    assert has(node) == {"a", "b"}


async def test_a_file_that_is_never_read_keeps_no_other_adapter_waiting(
    node: NodeAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "TIMEOUT", 0.05)
    async with asyncio.timeout(20):
        failed = await node.set({"a": "/slow", "b": "/b"})
    assert list(failed) == ["a"] and "a rank was not done with it" in failed["a"]
    assert has(node) == {"b"}


async def test_a_rank_that_dies_at_the_start_is_no_error_of_the_configuration(
    tmp_path: Path,
) -> None:
    """With that exit code a supervisor would not start the node again."""

    async def dead(message: bytes) -> bytes:
        raise NodeError("rank 0 was killed", code="RANK_DIED")

    model = MODELS / "llama-gqa"
    make_adapter(tmp_path / "a", model, seed=1)
    config = LoRAConfig(enable_lora=True, lora_modules=[f"a={tmp_path}/a"])
    made = NodeAdapters(config, ModelSpec.from_folder(model), Blame.DECODE)
    with pytest.raises(NodeError, match="was killed"):
        await made.start([dead])
