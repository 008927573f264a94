"""Corrupt KV is never used: more than 100,000 faults of every kind, over every connector that runs
here; each of them is found, and nothing else is ever suspected. These sinks read again what has
landed; those that hash it as it lands are in `test_landing.py`. What follows from a fault is in
`test_transfer.py`, and in `tests/e2e/test_corrupt_kv.py` for live servers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cpu_ipc import CpuIpcConnector
from kv_fakes import FINGERPRINT, FakeNode, Geometry, Pair
from kv_faults import Place, spoil
from pdserve.kv_transfer.commands import Reply, Verify, decode_command, encode_command
from pdserve.kv_transfer.connector import BlockRun, RunDigest
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.rank.digester import Digester
from thinned import EXAMPLES, only
from transfers import FAKE, pair

CPU_IPC = "cpu_ipc:CpuIpcConnector"  # the logic of cuda_ipc
SHM, TCP = "reread:RereadShm", "reread:RereadTCP"
CONNECTORS = (SHM, TCP, "nccl", f"{SHM},tcp", CPU_IPC, FAKE)
FAULTS_IN_PLACE = min(18_000, 360 * EXAMPLES)  # for each connector
GEOMETRY = Geometry(layers=2, num_blocks=320)
STATES = replace(GEOMETRY, planes=1, block_size=1, head_dim=50)
LATENTS = replace(GEOMETRY, planes=1, heads=1, head_dim=40)
CASES = (
    (GEOMETRY, (1, 1)), (GEOMETRY, (2, 1)), (GEOMETRY, (1, 2)),
    (STATES, (2, 1)), (LATENTS, (1, 2)),
)  # fmt: skip
"""A cache, and the ranks of the source and of the sink."""


reply_of = msgspec.msgpack.Decoder(Reply).decode


@pytest.fixture(autouse=True)
def forget_cpu_ipc() -> Iterator[None]:
    yield
    CpuIpcConnector.shared.clear()


def faulty_pair(
    connector: str, tp: tuple[int, int] = (1, 1), geometry: Geometry = GEOMETRY, **options: Any
) -> Any:
    """Its caches are full: stale blocks are not empty ones."""
    faults: dict[str, Any] | None = {} if connector == FAKE else None
    return pair(connector, *tp, geometry=geometry, faults=faults, **options)


def view_of(node: FakeNode, rank: int) -> CacheView:
    return CacheView(node.caches[rank], node.rects[rank])


class Transfer:
    """Blocks that go from anywhere to anywhere, in runs of one to four."""

    def __init__(self, rng: random.Random, num_blocks: int, among: Sequence[int]) -> None:
        self.source_ids = tuple(rng.sample(range(GEOMETRY.num_blocks), num_blocks))
        self.sink_ids = tuple(rng.sample(among, num_blocks))
        self.runs: list[BlockRun] = []
        while (first := sum(run.count for run in self.runs)) < num_blocks:
            self.runs.append(BlockRun(first, min(rng.randint(1, 4), num_blocks - first)))

    async def reserve(self, made: Pair) -> Ticket:
        tokens = len(self.sink_ids) * made.sink_node.geometry.block_size
        return await made.reserve(tokens, 0, self.sink_ids, made.note_sink_free)

    async def hand_off(self, made: Pair, ticket: Ticket) -> None:
        handoff = made.begin(ticket)
        for run in self.runs:
            ids = self.source_ids[run.first : run.first + run.count]
            handoff.ready(run, ids, last=run is self.runs[-1])
        await handoff.commit("token")

    def check(self, made: Pair, full: torch.Tensor, before: Sequence[torch.Tensor]) -> None:
        """It has landed, and nothing beside it was written."""
        node = made.sink_node
        for cache, rect, old in zip(node.caches, node.rects, before, strict=True):
            wanted = old.clone()
            heads = full[:, :, :, rect.head_start : rect.head_end]
            wanted[:, :, self.sink_ids] = heads[:, :, self.source_ids]
            assert torch.equal(cache, wanted)


# ---- in place: one transfer, verified many times ----


class Trials:
    """Between landing and verification of `transfer`: spoils runs where they lie, has the rank
    verify them, and repairs them; `wanted` faults in all."""

    def __init__(self, made: Pair, rng: random.Random, transfer: Transfer, wanted: int) -> None:
        self.faults = 0
        self.kinds: Counter[str] = Counter()
        self.made, self.rng, self.transfer = made, rng, transfer
        self.share = wanted // len(made.sink_node.ranks)
        self.call = made.sink.ranks.call
        self.before = [cache.clone() for cache in made.sink_node.caches]
        made.sink.ranks.call = self.verify_often  # type: ignore[method-assign]

    async def verify_often(self, rank: int, message: bytes) -> bytes:
        command = decode_command(message)[1]
        if isinstance(command, Verify):
            wanted = self.faults + self.share
            while self.faults < wanted:
                self.try_once(rank, message, command)
        return await self.call(rank, message)

    def try_once(self, rank: int, message: bytes, command: Verify) -> None:
        share = self.rng.choice((0.02, 0.5, 0.9, 1.0, 1.0))
        spoilt = [each for each in command.digests if self.rng.random() < share]
        repairs = [self.spoil(rank, each) for each in spoilt]
        reply = reply_of(self.made.sink_node.ranks[rank].handle(message))
        assert reply.error is None
        assert list(reply.digests) == spoilt  # all of them and no other
        for place, right in repairs:
            place.write(right)
        self.faults += len(spoilt)

    def spoil(self, rank: int, sent: RunDigest) -> tuple[Place, np.ndarray]:
        ids = self.transfer.sink_ids[sent.run.first : sent.run.first + sent.run.count]
        place = Place(view_of(self.made.sink_node, rank), sent.rect, ids)
        right = place.read()
        wrong = right.copy()
        self.kinds[spoil(self.rng, wrong, self.strange(rank, sent, ids)).__name__] += 1
        place.write(wrong)
        return place, right

    def strange(self, rank: int, sent: RunDigest, ids: Sequence[int]) -> np.ndarray:
        """Returns what was in the blocks before; or what other blocks hold, of this transfer and of
        one that had landed before."""
        if self.rng.random() < 0.5:
            old = CacheView(self.before[rank], self.made.sink_node.rects[rank])
            return Place(old, sent.rect, ids).read()
        others = self.rng.sample(range(GEOMETRY.num_blocks), len(ids))
        return Place(view_of(self.made.sink_node, rank), sent.rect, others).read()


@pytest.mark.parametrize("connector", only(CONNECTORS, (TCP, CPU_IPC)))
async def test_every_fault_in_place_is_found(connector: str) -> None:
    """In keys and values, in states and in latents."""
    rng = random.Random(0)
    found: Counter[str] = Counter()
    for geometry, tp in CASES:
        async with faulty_pair(connector, tp, geometry, lease_s=60.0) as made:
            full = made.source_node.fill_random()
            made.sink_node.fill_random(seed=1)
            blocks = range(GEOMETRY.num_blocks)
            earlier = Transfer(rng, 40, blocks[:40])
            await earlier.hand_off(made, await earlier.reserve(made))
            transfer = Transfer(rng, 250, blocks[40:])
            trials = Trials(made, rng, transfer, FAULTS_IN_PLACE // len(CASES))
            await transfer.hand_off(made, await transfer.reserve(made))
            transfer.check(made, full, trials.before)
            found += trials.kinds
            assert made.sink.counts["stopped/DIGEST_MISMATCH"] == 0  # no false alarm
    print(f"\n{connector}: {found.total()} faults found: {dict(found)}")
    assert found.total() >= FAULTS_IN_PLACE
    assert min(found.values()) > FAULTS_IN_PLACE // 20 and len(found) == 7


async def test_digests_of_other_transfers_epochs_and_places_do_not_pass() -> None:
    """Though the bytes are the very same."""
    async with faulty_pair(SHM) as made:
        made.source_node.fill_random()
        rng, transfer = random.Random(0), Transfer(random.Random(0), 60, range(60))
        asked: list[Verify] = []
        call, rank = made.sink.ranks.call, made.sink_node.ranks[0]

        async def check(number: int, message: bytes) -> bytes:
            command = decode_command(message)[1]
            if isinstance(command, Verify):
                asked.append(command)
                for _ in range(20):
                    mixed, wrong = strangers(command, transfer, view_of(made.sink_node, 0), rng)
                    reply = reply_of(rank.handle(encode_command(0, mixed)))
                    assert list(reply.digests) == wrong
            return await call(number, message)

        made.sink.ranks.call = check  # type: ignore[method-assign]
        await transfer.hand_off(made, await transfer.reserve(made))
        assert len(asked) == 1


def strangers(
    right: Verify, transfer: Transfer, view: CacheView, rng: random.Random
) -> tuple[Verify, list[RunDigest]]:
    """Half of the digests made for something else, and which."""
    mixed, wrong = [], []
    for each in right.digests:
        run = each.run
        ids = transfer.sink_ids[run.first : run.first + run.count]
        for_others = (
            (FINGERPRINT, b"o" * 16, 1, run),
            (FINGERPRINT, right.transfer_id, 2, run),
            (FINGERPRINT, right.transfer_id, 1, BlockRun(run.first + 1, run.count)),
            ("e" * 24, right.transfer_id, 1, run),
        )
        if rng.random() < 0.5:
            fingerprint, transfer_id, epoch, other = rng.choice(for_others)
            digester = Digester(view, fingerprint)
            digest = digester.digest(transfer_id, epoch, each.rect, other, ids)
            each = replace(each, digest=digest)
            wrong.append(each)
        mixed.append(each)
    return Verify(right.transfer_id, right.epoch, tuple(mixed)), wrong
