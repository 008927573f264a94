"""Corrupt KV is never used: more than 100,000 faults of every kind, at both ends, over every
connector that runs here; each of them is found, and nothing else is ever suspected."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_connectors_pull import CpuIpcConnector
from test_transfer import FAKE, pair

from kv_fakes import FINGERPRINT, FakeNode, Geometry, Pair
from kv_faults import Place, spoil
from pdserve.common.core.errors import TransferError
from pdserve.kv_transfer.commands import Command, Ready, Reply, Submit, Verify
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.rank.digester import Digester
from thinned import only

CPU_IPC = "test_connectors_pull:CpuIpcConnector"  # the logic of cuda_ipc
CONNECTORS = ("shm", "tcp", "nccl", "shm,tcp", CPU_IPC, FAKE)
FAULTS_IN_PLACE = 18_000  # for each connector: 108,000 altogether
GEOMETRY = Geometry(layers=2, num_blocks=320)
LAYOUTS = ((1, 1), (2, 1), (1, 2))  # ranks of the source and of the sink

decode = msgspec.msgpack.Decoder(Command).decode
reply_of = msgspec.msgpack.Decoder(Reply).decode


@pytest.fixture(autouse=True)
def forget_cpu_ipc() -> Iterator[None]:
    yield
    CpuIpcConnector.shared.clear()


def faulty_pair(connector: str, tp: tuple[int, int] = (1, 1), **options: Any) -> Any:
    """Its caches are full: stale blocks are not empty ones."""
    faults: dict[str, Any] | None = {} if connector == FAKE else None
    return pair(connector, *tp, geometry=GEOMETRY, faults=faults, **options)


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
        tokens = len(self.sink_ids) * GEOMETRY.block_size
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


def assert_nothing_is_held(made: Pair) -> None:
    assert not made.sink._live and not made.source._live
    for node in (made.source_node, made.sink_node):
        for rank in node.ranks:
            assert not rank._sinks and not rank._sources


# ---- in place: one transfer, verified many times ----


class Trials:
    """Between landing and verification: spoils runs where they lie, has the rank verify them,
    and mends them; `wanted` faults in all. `before` is what the caches held."""

    def __init__(self, made: Pair, rng: random.Random, wanted: int) -> None:
        self.faults = 0
        self.kinds: Counter[str] = Counter()
        self._made, self._rng, self._wanted = made, rng, wanted
        self._call = made.sink.ranks.call
        self._before = [cache.clone() for cache in made.sink_node.caches]
        made.sink.ranks.call = self.call  # type: ignore[method-assign]

    async def call(self, rank: int, message: bytes) -> bytes:
        command = decode(message)
        if isinstance(command, Verify):
            wanted = self.faults + self._wanted // len(self._made.sink_node.ranks)
            while self.faults < wanted:
                self._trial(rank, message, command)
        return await self._call(rank, message)

    def _trial(self, rank: int, message: bytes, command: Verify) -> None:
        share = self._rng.choice((0.02, 0.5, 0.9, 1.0, 1.0))
        spoilt = [each for each in command.digests if self._rng.random() < share]
        mend = [self._spoil(rank, command.transfer_id, each) for each in spoilt]
        reply = reply_of(self._made.sink_node.ranks[rank].handle(message))
        assert reply.error is None
        assert list(reply.digests) == spoilt  # all of them and no other
        for place, right in mend:
            place.write(right)
        self.faults += len(spoilt)

    def _spoil(self, rank: int, transfer_id: bytes, sent: RunDigest) -> tuple[Place, np.ndarray]:
        block_ids = self._made.sink._live[transfer_id].block_ids
        ids = block_ids[sent.run.first : sent.run.first + sent.run.count]
        place = Place(view_of(self._made.sink_node, rank), sent.rect, ids)
        right = place.read()
        wrong = right.copy()
        self.kinds[spoil(self._rng, wrong, self._strange(rank, sent, ids)).__name__] += 1
        place.write(wrong)
        return place, right

    def _strange(self, rank: int, sent: RunDigest, ids: Sequence[int]) -> np.ndarray:
        """What was in the blocks before; or what other blocks hold, of this transfer and of
        one that had landed before."""
        if self._rng.random() < 0.5:
            old = CacheView(self._before[rank], self._made.sink_node.rects[rank])
            return Place(old, sent.rect, ids).read()
        others = self._rng.sample(range(GEOMETRY.num_blocks), len(ids))
        return Place(view_of(self._made.sink_node, rank), sent.rect, others).read()


@pytest.mark.parametrize("connector", only(CONNECTORS, ("tcp", CPU_IPC)))
async def test_every_fault_in_place_is_found(connector: str) -> None:
    rng = random.Random(0)
    found: Counter[str] = Counter()
    for tp in LAYOUTS:
        async with faulty_pair(connector, tp, lease_s=60.0) as made:
            full = made.source_node.fill_random()
            made.sink_node.fill_random(seed=1)
            blocks = range(GEOMETRY.num_blocks)
            earlier = Transfer(rng, 40, blocks[:40])
            await earlier.hand_off(made, await earlier.reserve(made))
            trials = Trials(made, rng, FAULTS_IN_PLACE // len(LAYOUTS))
            before = [cache.clone() for cache in made.sink_node.caches]
            transfer = Transfer(rng, 250, blocks[40:])
            await transfer.hand_off(made, await transfer.reserve(made))
            transfer.check(made, full, before)
            found += trials.kinds
            assert made.sink.counts["stopped/DIGEST_MISMATCH"] == 0  # no false alarm
    print(f"\n{connector}: {found.total()} faults found: {dict(found)}")
    assert found.total() >= FAULTS_IN_PLACE
    assert min(found.values()) > FAULTS_IN_PLACE // 20 and len(found) == 7


async def test_digests_of_other_transfers_epochs_and_places_do_not_pass() -> None:
    """Though the bytes are the very same."""
    async with faulty_pair("shm") as made:
        made.source_node.fill_random()
        rng, transfer = random.Random(0), Transfer(random.Random(0), 60, range(60))
        asked: list[Verify] = []
        call, rank = made.sink.ranks.call, made.sink_node.ranks[0]

        async def check(number: int, message: bytes) -> bytes:
            command = decode(message)
            if isinstance(command, Verify):
                asked.append(command)
                for _ in range(20):
                    mixed, wrong = strangers(command, transfer, view_of(made.sink_node, 0), rng)
                    reply = reply_of(rank.handle(msgspec.msgpack.encode(mixed)))
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


# ---- complete hand-offs ----


class Saboteur:
    """Stands between both nodes and their ranks. In the first `epochs` epochs of each transfer
    it spoils some runs, at the sink once they have landed, or at the source between digest and
    sending; and checks that the sink's ranks name exactly those."""

    def __init__(self, made: Pair, rng: random.Random, end: str, epochs: int) -> None:
        self.faults = 0
        self._made, self._rng, self._end, self._epochs = made, rng, end, epochs
        self._shares: dict[tuple[bytes, int], Submit] = {}
        self._held: dict[int, list[Any]] = {}
        self._spoilt: set[tuple[bytes, Rect, BlockRun]] = set()
        self._mend: list[tuple[bytes, Place, np.ndarray]] = []
        self._call_source, self._call_sink = made.source.ranks.call, made.sink.ranks.call
        made.source.ranks.call, made.sink.ranks.call = self.source, self.sink  # type: ignore[method-assign]
        if end == "source":
            for number, rank in enumerate(made.source_node.ranks):
                self._hold(number, rank._connector)

    def _hold(self, number: int, connector: Any) -> None:
        """The connector begins to send when all digests of its rank are made."""
        held = self._held[number] = []
        ready = connector.ready
        connector.ready = lambda *args: held.append(partial(ready, *args))

    def _bad(self, transfer_id: bytes, end: str) -> bool:
        epoch = self._made.sink._live[transfer_id].machine.epoch
        return end == self._end and epoch <= self._epochs

    async def source(self, rank: int, message: bytes) -> bytes:
        command = decode(message)
        if isinstance(command, Submit):
            self._shares[command.transfer.transfer_id, rank] = command
        reply = await self._call_source(rank, message)
        if isinstance(command, Ready) and self._end == "source":
            if self._bad(command.transfer_id, "source"):
                for piece, _ in self._shares[command.transfer_id, rank].transfer.pieces:
                    where = (rank, piece.rect, command.block_ids)
                    self._perhaps(self._made.source_node, command, command.run, *where)
            if command.last:
                for send in self._held[rank]:
                    send()
                self._held[rank].clear()
        return reply

    async def sink(self, rank: int, message: bytes) -> bytes:
        command = decode(message)
        if not isinstance(command, Verify):
            return await self._call_sink(rank, message)
        for transfer_id, place, right in self._mend:
            if transfer_id == command.transfer_id:
                place.write(right)
        if self._bad(command.transfer_id, "sink"):
            block_ids = self._made.sink._live[command.transfer_id].block_ids
            for each in command.digests:
                ids = block_ids[each.run.first : each.run.first + each.run.count]
                self._perhaps(self._made.sink_node, command, each.run, rank, each.rect, ids)
        reply = await self._call_sink(rank, message)
        keys = {(command.transfer_id, each.rect, each.run): each for each in command.digests}
        spoilt = [each for key, each in keys.items() if key in self._spoilt]
        assert list(reply_of(reply).digests) == spoilt
        self._spoilt -= set(keys)
        return reply

    def _perhaps(
        self,
        node: FakeNode,
        command: Ready | Verify,
        run: BlockRun,
        rank: int,
        rect: Rect,
        ids: Sequence[int],
    ) -> None:
        if run.first and self._rng.random() < 0.5:  # the first run is spoilt always
            return
        place = Place(view_of(node, rank), rect, ids)
        right = place.read()
        wrong = right.copy()
        others = self._rng.sample(range(GEOMETRY.num_blocks), len(ids))
        spoil(self._rng, wrong, Place(view_of(node, rank), rect, others).read())
        place.write(wrong)
        self._spoilt.add((command.transfer_id, rect, run))
        self.faults += 1
        if node is self._made.source_node:
            self._mend.append((command.transfer_id, place, right))


@pytest.mark.parametrize(
    ("end", "connector"),
    only(
        itertools.product(("source", "sink"), CONNECTORS),
        [("source", "shm"), ("source", FAKE), ("sink", "tcp"), ("sink", CPU_IPC)],
    ),
)
async def test_what_was_spoilt_once_is_sent_again(connector: str, end: str) -> None:
    rng, faults = random.Random(0), 0
    for tp in LAYOUTS:
        async with faulty_pair(connector, tp) as made:
            full = made.source_node.fill_random()
            made.sink_node.fill_random(seed=1)
            saboteur = Saboteur(made, rng, end, epochs=1)
            for number in (1, 2):
                before = [cache.clone() for cache in made.sink_node.caches]
                transfer = Transfer(rng, 100, range(GEOMETRY.num_blocks))
                ticket = await transfer.reserve(made)
                await transfer.hand_off(made, ticket)
                assert (await made.landed(ticket.transfer_id)).first_token == "token"
                transfer.check(made, full, before)
                assert made.source.counts["repulled"] == number
            assert made.sink.counts["stopped/DIGEST_MISMATCH"] == 2
            assert made.freed == ["source"] * 2
            faults += saboteur.faults
            await made.sink.close()  # until the ranks have let go
            assert_nothing_is_held(made)
    print(f"\n{connector}, at the {end}: {faults} faults found in complete hand-offs")
    assert faults > 150


@pytest.mark.parametrize(
    ("end", "connector"),
    only(
        itertools.product(("source", "sink"), CONNECTORS),
        [("source", "shm"), ("source", FAKE), ("sink", "tcp"), ("sink", CPU_IPC)],
    ),
)
async def test_what_is_spoilt_again_is_given_up(connector: str, end: str) -> None:
    rng = random.Random(0)
    async with faulty_pair(connector, (1, 2)) as made:
        full = made.source_node.fill_random()
        saboteur = Saboteur(made, rng, end, epochs=2)
        blocks = range(GEOMETRY.num_blocks)
        transfers = [Transfer(rng, 50, blocks[start : start + 50]) for start in (0, 50, 100)]
        for transfer in transfers:
            ticket = await transfer.reserve(made)
            with pytest.raises(TransferError, match="DIGEST_MISMATCH"):
                await transfer.hand_off(made, ticket)
            made.sink._live[ticket.transfer_id]._lapse()  # no other source takes over
            with pytest.raises(TransferError, match="DIGEST_MISMATCH"):
                await made.landed(ticket.transfer_id)
        assert sorted(made.freed) == ["sink"] * 3 + ["source"] * 3
        assert saboteur.faults > 100
        assert_nothing_is_held(made)
        assert torch.equal(made.source_node.caches[0], full)  # what was mended is right again
