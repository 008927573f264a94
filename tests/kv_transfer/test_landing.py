"""A source hashes what is more than a little as it sends it, and a sink that alone writes into its
blocks as it writes: nothing is read again, and faults on the way are found. Blocks that others may
write, or that were not hashed, are read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from compiled import use_compiled_code
from kv_fakes import BLOCK_SIZE, HEAD_DIM, HEADS, Geometry, Pair
from kv_faults import Place, spoil
from pdserve.kv_transfer.blocks import ByteRuns, RunsHash
from pdserve.kv_transfer.commands import Ready, Reply, decode_command
from pdserve.kv_transfer.connector import BlockRun, RunDigest
from pdserve.kv_transfer.connectors.base import sockets
from pdserve.kv_transfer.connectors.base.channel import FrameHash
from pdserve.kv_transfer.connectors.base.pull import PullMover
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.shm import MappedCache
from pdserve.kv_transfer.frame import Frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.rank import digester, group_connector
from pdserve.kv_transfer.rank.group_connector import GroupConnector
from transfers import pair
from waiting import wait_until

GEOMETRY = Geometry(layers=2, num_blocks=64)
RUNS = (BlockRun(0, 3), BlockRun(3, 1), BlockRun(4, 5))
SOURCE_IDS, SINK_IDS = (9, 3, 4, 5, 60, 1, 0, 2, 8), (4, 5, 6, 7, 1, 63, 40, 41, 9)
SMALLEST_RUN = BLOCK_NBYTES = 2 * 4 * GEOMETRY.layers * HEADS * BLOCK_SIZE * HEAD_DIM
REPEATED = 40  # transfers over a way with faults


async def hand_off(made: Pair) -> int:
    """Returns how many digests were compared."""
    ids = tuple(SINK_IDS)
    ticket = await made.reserve(len(ids) * GEOMETRY.block_size, 0, ids, made.note_sink_free)
    handoff = made.begin(ticket)
    for run in RUNS:
        blocks = SOURCE_IDS[run.first : run.first + run.count]
        handoff.ready(run, blocks, last=run is RUNS[-1])
    await handoff.commit("token")
    return (await made.landed(ticket.transfer_id)).num_digests


def check(made: Pair, full: torch.Tensor) -> None:
    node = made.sink_node
    for cache, rect in zip(node.caches, node.rects, strict=True):
        heads = full[:, :, :, rect.head_start : rect.head_end]
        assert torch.equal(cache[:, :, SINK_IDS], heads[:, :, SOURCE_IDS])


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the runs that digesters hash: of a source once; of a sink only if it reads again."""
    counts: Counter[str] = Counter()
    real = digester.hash_blocks

    def count(*arguments: Any) -> bytes:
        counts["runs"] += 1
        return real(*arguments)

    monkeypatch.setattr(digester, "hash_blocks", count)
    return counts


@pytest.fixture(params=[0, SMALLEST_RUN, 1 << 30], ids=["as sent", "mixed", "at once"])
def little(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a run up to which the core hashes it at once."""
    monkeypatch.setattr(group_connector, "SHORT_NBYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("connector", ["shm", "tcp", "shm,tcp"])
async def test_blocks_hashed_in_transit_are_not_read_again(
    connector: str,
    tp: tuple[int, int],
    compiled: bool,
    little: int,
    hashed: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_compiled_code(compiled, monkeypatch)
    monkeypatch.setattr(sockets, "HOT_NBYTES", 100)
    async with pair(connector, *tp, geometry=GEOMETRY) as made:
        full = made.source_node.fill_random()
        compared = await hand_off(made)
        assert compared == len(RUNS) * max(tp)
        at_once = [run for run in RUNS if run.count * BLOCK_NBYTES // tp[0] <= little]
        assert hashed["runs"] == len(at_once) * max(tp)
        check(made, full)


@pytest.mark.parametrize(
    ("connector", "readers"),
    [("reread:RereadTCP", 1), ("reread:RereadShm,tcp", 1), ("nccl", 2), ("shm,nccl", 2)],
)
async def test_blocks_that_others_may_write_are_read_again(
    connector: str, readers: int, hashed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sink; and by the source, if one of its connectors does not hash as it sends."""
    monkeypatch.setattr(group_connector, "SHORT_NBYTES", 0)
    async with pair(connector, geometry=GEOMETRY) as made:
        full = made.source_node.fill_random()
        compared = await hand_off(made)
        assert (compared, hashed["runs"]) == (len(RUNS), readers * len(RUNS))
        check(made, full)


async def test_layers_on_streams_of_their_own_are_read_again(
    hashed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's digests are of other parts than frames."""
    monkeypatch.setattr(group_connector, "SHORT_NBYTES", 0)
    options = {"tcp": {"streams": 2}}
    async with pair("tcp", geometry=GEOMETRY, options=options) as made:
        full = made.source_node.fill_random()
        compared = await hand_off(made)
        assert (compared, hashed["runs"]) == (len(RUNS), 2 * len(RUNS))
        check(made, full)


class Way:
    """Spoils a frame on the way to the sink: of each transfer at most one, in its first epoch."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.kinds: Counter[str] = Counter()
        self.due = False
        self.digested: set[int] = set()  # first blocks of the runs of which the source has digests

    def now(self) -> bool:
        """Returns whether it is time: for every third frame, until one is spoilt."""
        hit = self.due and self.rng.random() < 1 / 3
        self.due = self.due and not hit
        return hit

    def over_tcp(self, made: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel writes something else than was sent."""
        receive = SocketPipe.recv_blocks

        def spoilt(
            pipe: SocketPipe, memory: memoryview, runs: ByteRuns, gate: Gate, hashed: RunsHash
        ) -> bool:
            hit = self.now()
            moved = receive(pipe, memory, runs, gate, None if hit else hashed)
            if hit:
                at, nbytes = int(runs.offsets[-1]), int(runs.lengths[-1])
                data = bytearray(memory[at : at + nbytes])
                kind = self.rng.choice(("bit", "shifted", "zeroed"))
                if kind == "bit":
                    data[self.rng.randrange(nbytes)] ^= 1 << self.rng.randrange(8)
                elif kind == "shifted":
                    data = data[1:] + data[:1]
                else:
                    data[self.rng.randrange(nbytes) :] = b""
                memory[at : at + nbytes] = data.ljust(nbytes, b"\0")
                self.kinds[kind] += 1
                hashed.update(runs)
            return moved

        monkeypatch.setattr(SocketPipe, "recv_blocks", spoilt)

    def over_shm(self, made: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """The source's blocks are others when they are read than when their digest was made."""
        copy, call, make_hash = MappedCache.copy, made.source.ranks.call, PullMover.make_hash
        node = made.source_node

        async def noted(rank: int, message: bytes) -> bytes:
            reply = await call(rank, message)
            command = decode_command(message)[1]
            if isinstance(command, Ready) and msgspec.msgpack.decode(reply, type=Reply).digests:
                self.digested.add(command.run.first)
            return reply

        def note(mover: PullMover, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> None:
            make_hash(mover, frame, block_ids, gate)
            if mover.hash.made:
                self.digested.add(SOURCE_IDS.index(block_ids[0]))

        def spoilt(
            peer: MappedCache,
            rect: Rect,
            source_ids: Sequence[int],
            sink_ids: Sequence[int],
            hash_: FrameHash,
        ) -> None:
            if not self.now():
                return copy(peer, rect, source_ids, sink_ids, hash_)
            first = SOURCE_IDS.index(source_ids[0])
            wait_until(lambda: first in self.digested)
            place = Place(CacheView(node.caches[0], node.rects[0]), rect, source_ids)
            right = place.read()
            wrong = right.copy()
            self.kinds[spoil(self.rng, wrong, right[::-1]).__name__] += 1
            place.write(wrong)
            copy(peer, rect, source_ids, sink_ids, hash_)
            return place.write(right)

        monkeypatch.setattr(made.source.ranks, "call", noted)
        monkeypatch.setattr(PullMover, "make_hash", note)
        monkeypatch.setattr(MappedCache, "copy", spoilt)


@pytest.mark.parametrize(
    ("connector", "make"), [("tcp", Way.over_tcp), ("shm", Way.over_shm)], ids=["tcp", "shm"]
)
async def test_a_fault_on_the_way_is_found_and_the_data_sent_again(
    connector: str,
    make: Callable[[Way, Pair, pytest.MonkeyPatch], None],
    little: int,
    hashed: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = Way()
    async with pair(connector, geometry=GEOMETRY) as made:
        make(way, made, monkeypatch)
        for number in range(REPEATED):
            way.due, way.digested = True, set()
            made.sink_node.fill_random(seed=number)
            full = made.source_node.fill_random(seed=number + 1)
            await hand_off(made)
            check(made, full)
        faults = way.kinds.total()
        assert 0 < faults == made.source.counts["repulled"]
        assert made.sink.counts["stopped/DIGEST_MISMATCH"] == faults
        at_once = [run for run in RUNS if run.count * BLOCK_NBYTES <= little]
        assert hashed["runs"] == (REPEATED + faults) * len(at_once)  # no sink has read again
    assert len(way.kinds) > 2


async def test_digests_of_bands_of_layers_are_read_again(
    hashed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source of an earlier build cuts digests otherwise than frames. The sink has hashed none of
    these parts, and finds a fault as well."""

    def in_bands(source: GroupConnector, ready: Ready) -> tuple[RunDigest, ...]:
        transfer = source._sources[ready.transfer_id]
        ids, ((piece, _),) = (transfer.transfer_id, transfer.epoch), transfer.pieces
        return tuple(
            RunDigest(
                0, band, ready.run, source._digester.digest(*ids, band, ready.run, ready.block_ids)
            )
            for band in piece.rect.split_layers(2)
        )

    monkeypatch.setattr(GroupConnector, "_digest", in_bands)
    way = Way()
    async with pair("tcp", geometry=GEOMETRY) as made:
        way.over_tcp(made, monkeypatch)
        full = made.source_node.fill_random()
        assert await hand_off(made) == 2 * len(RUNS)
        assert hashed["runs"] == 2 * 2 * len(RUNS)  # on both sides
        while not way.kinds:
            way.due = True
            await hand_off(made)
        assert made.sink.counts["stopped/DIGEST_MISMATCH"] == 1
        check(made, full)
