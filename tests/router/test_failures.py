"""The table of what the error codes of nodes mean: complete, and alike for codes of one kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fake_nodes import fails, fake_cluster
from paths import ROOT
from pdserve.common.core.errors import Blame, NodeError
from pdserve.common.rpc.status import failure_from_pb, failure_to_pb
from pdserve.router.cluster.failures import EFFECTS, Effect, has

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
DEATHS = sorted(code for code in EFFECTS if has(code, Effect.DEATH) and code != "PEER_LOST")


def codes(heading: str) -> set[str]:
    part = re.split(r"^## ", PAGE.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    return {code for line in re.findall(r"^### (.+)$", part, re.M) for code in line.split(", ")}


def test_every_code_of_a_node_or_hand_off_has_a_row_and_no_other() -> None:
    """The page has every code (`tests/test_docs.py`)."""
    of_nodes = codes("Codes of nodes") | codes("Codes of hand-offs")
    of_routers = {"NODE_ID_TAKEN"}  # a registration's: no call ends with it
    assert len(of_nodes) > 30
    assert of_nodes - EFFECTS.keys() == of_routers
    assert set(EFFECTS) - of_nodes == {"NODE_FAILED", "INTERNAL", "CANCELLED", "MESSAGE_TOO_SLOW"}
    assert set(EFFECTS) - of_nodes <= codes("Codes of requests")


def test_a_node_that_has_ended_gets_no_request() -> None:
    ended = {code for code in EFFECTS if has(code, Effect.DEATH)} - {"NODE_FAILED"}
    assert all(has(code, Effect.LOST) for code in ended)


@pytest.mark.parametrize("role", [Blame.PREFILL, Blame.DECODE, Blame.BOTH])
def test_an_error_of_ranks_blames_the_node_that_reports_it(role: Blame) -> None:
    """Ranks do not know their node's role."""
    error = NodeError("rank 1 did not arrive in time", code="RANK_LOST")
    received = failure_from_pb(failure_to_pb(error), role)
    assert (received.code, received.blame) == ("RANK_LOST", role)


@pytest.mark.parametrize("role", ["p", "d"])
@pytest.mark.parametrize("code", DEATHS)
async def test_a_prompt_that_ends_ranks_does_not_end_every_node(
    tmp_path: Path, role: str, code: str
) -> None:
    names = [f"{each}{number}" for each in "pd" for number in range(4)]
    async with fake_cluster(tmp_path, names) as cluster:
        for number in range(4):
            cluster[f"{role}{number}"].on_token = {0: fails(NodeError("it hangs", code=code))}
        with pytest.raises(NodeError) as caught:
            await cluster.ask()
        await cluster.settled()
        assert caught.value.code == "POISON_REQUEST"
        assert cluster.jobs(role) == 3
