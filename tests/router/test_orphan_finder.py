"""Which decode node has the job that a dead router left, when nodes are slow to say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from pdserve.router.cluster.orphans import OrphanFinder

from fake_nodes import fake_cluster, hangs, once
from pdserve.common.core.errors import Conflict
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster import orphans

KEY = b"k"


async def test_a_node_whose_answer_is_late_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it computed is not computed a second time because it was busy."""
    monkeypatch.setattr(orphans, "ASK_TIMEOUT", 0.3)
    monkeypatch.setattr(orphans, "PATIENCE", 60.0)
    async with fake_cluster(tmp_path, ("p0", "d0", "d1")) as cluster:
        cluster["d1"].orphan = pb.FindOrphanResponse(found=True, local_prefill=True)
        cluster["d1"].on_find = once(hangs)
        found = await OrphanFinder(cluster.registry, cluster.channels).find(KEY)
    assert found is not None
    assert (found[0].info.node_id, found[1]) == ("d1", PromptPath.LOCAL)


async def test_a_node_that_never_answers_is_not_waited_for_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "ASK_TIMEOUT", 0.1)
    monkeypatch.setattr(orphans, "PATIENCE", 0.2)
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        cluster["d0"].on_find = hangs
        assert await OrphanFinder(cluster.registry, cluster.channels).find(KEY) is None


async def test_a_job_whose_router_lives_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "PATIENCE", 0.2)
    async with fake_cluster(tmp_path, ("p0", "d0", "d1")) as cluster:
        cluster["d0"].orphan = pb.FindOrphanResponse(found=True, attached=True)
        with pytest.raises(Conflict, match="is being served"):
            await OrphanFinder(cluster.registry, cluster.channels).find(KEY)
