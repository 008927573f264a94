"""The list of the last requests: the path, end and nodes of each, and why it was refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_nodes import fake_cluster
from fakes_pipeline import byte_level_folder
from http_site import Site, serve
from pdserve.common.core.errors import Overloaded, PdserveError
from pdserve.router.api.auth import APIKeys
from pdserve.router.cluster.cost import Cost
from pdserve.router.cluster.policies import BUILT_IN


async def recent(site: Site, **headers: str) -> list[dict[str, Any]]:
    async with site.session.get(f"{site.url}/v1/timelines", headers=headers) as response:
        assert response.status == 200
        return (await response.json())["data"]


async def test_a_finished_request_tells_its_path_tokens_and_end(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        await cluster.ask(max_tokens=8)
        (found,) = cluster.pipeline.timelines.recent(1)
    assert (found["status"], found["path"]) == ("finished", "transferred")
    assert (found["prefill_node"], found["decode_node"]) == ("p0", "d0")
    assert found["finish_reasons"] == ("length",) and found["http_status"] is None
    assert found["tpot"] > 0 and found["cached_tokens"] >= 0


async def test_a_request_of_one_token_has_no_tpot(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        await cluster.ask(max_tokens=1)
        (found,) = cluster.pipeline.timelines.recent(1)
    assert found["tpot"] is None


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
async def test_it_tells_why_each_node_was_chosen(tmp_path: Path, policy: str) -> None:
    options = {"prefill_policy": policy, "decode_policy": policy}
    async with fake_cluster(tmp_path, ("p0", "p1", "d0"), **options) as cluster:
        await cluster.ask()
        (found,) = cluster.pipeline.timelines.recent(1)
    decode, prefill = found["chosen"]
    assert (decode["role"], decode["node"]) == ("decode", "d0")
    assert prefill["role"] == "prefill" and prefill["node"] in ("p0", "p1")
    assert all(0 < len(each["why"]) < 160 for each in (decode, prefill))
    if policy == "cost":
        assert "the next best node" in prefill["why"] and "no other node fits" in decode["why"]


async def test_a_policy_without_a_reason_fails_no_request(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), prefill_policy=f"{__name__}:Speechless") as it:
        await it.ask()
        (found,) = it.pipeline.timelines.recent(1)
    assert found["status"] == "finished" and found["chosen"][1]["why"] == ""


class Speechless(Cost):
    def why(self, request: Any, node: Any) -> str:
        raise RuntimeError("none")


async def test_refused_requests_are_listed_with_their_codes(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path)) as site:
        await site.post("/v1/completions", {"prompt": 5}, **{"X-Request-Id": "mine"})
        await site.post("/v1/completions", b"{" + b" " * 70_000)
        await site.post("/v1/chat/completions", {"messages": [], "model": "<b>none</b>"})
        await site.post("/v1/embeddings", {})
        site.generator.error = Overloaded("full")  # of the fake, which lists nothing by itself
        await site.post("/v1/completions", {"prompt": "a"})
        found = await recent(site)
        found_by_id = await site.session.get(f"{site.url}/v1/timelines/mine")
    assert [each["http_status"] for each in found] == [429, 404, 404, 413, 400]
    assert {each["status"] for each in found} == {"refused"}
    assert [each["error"]["code"] for each in found][-2:] == [
        "REQUEST_TOO_LARGE",
        "INVALID_REQUEST",
    ]
    assert found[-1]["request_id"] == "mine" and found_by_id.status == 200
    assert len({each["id"] for each in found}) == 5


async def test_a_refusal_is_listed_once(tmp_path: Path) -> None:
    """The pipeline lists what it refuses, and the doors list the rest."""
    async with fake_cluster(tmp_path, ("p0",), queue_timeout=0.1) as cluster:
        with pytest.raises(PdserveError):
            await cluster.ask()
        (found,) = cluster.pipeline.timelines.recent(9)
    assert (found["status"], found["http_status"]) == ("refused", 503)
    assert found["error"]["code"] == "NO_NODE"


async def test_requests_without_a_valid_key_are_not_listed(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), keys=APIKeys("secret")) as site:
        for key in range(20):
            response = await site.post("/v1/completions", {}, Authorization=f"Bearer {key}")
            assert response.status == 401
        assert await recent(site, Authorization="Bearer secret") == []


async def test_a_client_sees_its_own_refusals_only(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), keys=APIKeys("one, two")) as site:
        await site.post("/v1/completions", {"prompt": 5}, Authorization="Bearer one")
        assert len(await recent(site, Authorization="Bearer one")) == 1
        assert await recent(site, Authorization="Bearer two") == []


async def test_refusals_do_not_drive_out_other_clients(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), keys=APIKeys("one, two")) as site:
        await site.post("/v1/completions", {"prompt": 5}, Authorization="Bearer one")
        for _ in range(20):
            await site.post("/v1/completions", {"prompt": 5}, Authorization="Bearer two")
        assert len(await recent(site, Authorization="Bearer one")) == 1
        assert len(await recent(site, Authorization="Bearer two")) == 7  # of 8 that are kept
