"""A sequence that cannot be computed ends alone, with an error that names its request: the node,
and all that share its steps, go on. Here on a decode node in this process; `e2e/test_poison.py` has
both roles, with ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import live_node
from benchmarks.soak.asks import POISON
from benchmarks.soak.poisoned import poisoned
from live_node import decode_node, eventually, run_job
from pdserve.common.core.errors import Blame, InvalidRequest, NodeError
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.sequence import Sequence
from pdserve.common.rpc.tokens import JobTokens
from pdserve.decode_node.node import DecodeNode
from pdserve.decode_node.session import DecodeSession

PROMPT = tuple(range(3, 40))
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
GOOD = GenerateJob("good", PROMPT, PARAMS)
FORCED = replace(PARAMS, logit_bias={POISON: 100.0})


@pytest.fixture(params=["mistral"])
async def node(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[tuple[DecodeNode, grpc.aio.Channel]]:
    """Runs a node of a poisoned model."""
    folder = live_node.MODEL.with_name(request.param)
    monkeypatch.setattr(live_node, "MODEL", poisoned(folder, tmp_path / "model"))
    async with decode_node() as (node, _, _), grpc.aio.insecure_channel(node.address) as channel:
        yield node, channel


async def run(channel: grpc.aio.Channel, job: GenerateJob) -> dict[int, list[int]]:
    """The tokens of each choice. Raises the node's typed error."""
    tokens: dict[int, list[int]] = {choice.index: [] for choice in job.choices}
    async for event in run_job(channel, job):
        if isinstance(event, JobTokens):
            tokens[event.choice] += event.token_ids
    return tokens


@pytest.mark.parametrize("node", ["mistral", "mixtral"], indirect=True)
async def test_a_failed_row_ends_its_request_and_no_other(
    node: tuple[DecodeNode, grpc.aio.Channel],
) -> None:
    """Whatever is left in the blocks of those that failed."""
    decode, channel = node
    alone = await run(channel, GOOD)
    names = ("in-the-prompt", "generated", "one-of-three")
    choices = (Choice(0), Choice(1), Choice(2))
    results = await asyncio.gather(
        run(channel, GOOD),
        run(channel, GenerateJob("in-the-prompt", (*PROMPT[:20], POISON), PARAMS)),
        run(channel, GOOD),
        run(channel, GenerateJob("generated", PROMPT, FORCED)),
        run(channel, GenerateJob("one-of-three", PROMPT, FORCED, choices)),
        return_exceptions=True,
    )
    assert results[0] == results[2] == alone
    for failed, name in zip((results[1], results[3], results[4]), names, strict=True):
        assert isinstance(failed, NodeError), failed
        assert (failed.code, failed.blame, failed.retryable) == (
            "SEQUENCE_FAILED", Blame.DECODE, True,
        )  # fmt: skip
        assert name in failed.message and "NaN" in failed.message
    (replica,) = decode.replicas
    assert replica.scheduler.num_failed >= 3
    await eventually(lambda: replica.scheduler.pool.num_free == replica.scheduler.pool.num_blocks)
    assert await run(channel, GOOD) == alone and decode.ready() == (True, "ok")


EVERY_TOKEN = tuple(token for token in range(512) if token not in (0, 2))  # but its ends


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"min_tokens": 3, "stop_token_ids": EVERY_TOKEN}, "no token is allowed"),
        ({"temperature": float("nan")}, "temperature"),  # another version's router lets it through
    ],
    ids=["forbidden", "odd"],
)
async def test_a_request_that_makes_no_sense_is_its_clients_mistake(
    node: tuple[DecodeNode, grpc.aio.Channel], odd: dict[str, Any], says: str
) -> None:
    """No node's: a router neither tries another one nor counts it against this one."""
    _, channel = node
    with pytest.raises(InvalidRequest, match=says) as caught:
        await run(channel, replace(GOOD, sampling=replace(PARAMS, **odd)))
    assert (caught.value.blame, caught.value.retryable) == (Blame.CLIENT, False)
    await run(channel, GOOD)


@pytest.mark.parametrize("event", ["admitted", "computed", "sampled"])
async def test_a_defect_in_one_requests_work_is_not_the_nodes_end(
    node: tuple[DecodeNode, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    decode, channel = node
    hear = getattr(DecodeSession, event)

    def trips(session: DecodeSession, sequence: Sequence, *news: object) -> None:
        hear(session, sequence, *news)
        begun = event == "admitted" or sequence.num_tokens > len(PROMPT)
        if sequence.request_id == "bad" and begun:
            raise KeyError("a defect")

    monkeypatch.setattr(DecodeSession, event, trips)
    bad, *good = await asyncio.gather(
        run(channel, replace(GOOD, request_id="bad")),
        *(run(channel, GOOD) for _ in range(2)),
        return_exceptions=True,
    )
    assert isinstance(bad, NodeError) and (bad.code, bad.blame) == ("INTERNAL", Blame.DECODE)
    assert "request bad" in bad.message and "a defect" not in bad.message
    assert good[0] == good[1] == await run(channel, GOOD)
    (replica,) = decode.replicas
    await eventually(lambda: replica.scheduler.pool.num_free == replica.scheduler.pool.num_blocks)
    assert decode.ready() == (True, "ok")
