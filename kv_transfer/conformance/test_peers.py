"""The rank on the other side stops, or dies, in a process of its own."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.commands import Ready
from pdserve.kv_transfer.conformance.caches import FREE, Geometry
from pdserve.kv_transfer.conformance.ends import CLOSE_S, DEATH_S, End, LocalEnd
from pdserve.kv_transfer.conformance.kit import Kit
from pdserve.kv_transfer.conformance.nodes import Pair, eventually, scattered, settle
from pdserve.kv_transfer.conformance.remote import RemoteEnd
from pdserve.kv_transfer.conformance.test_calls import check_typed
from pdserve.kv_transfer.connector import BlockRun, Failed, Landed, Sent

pytestmark = pytest.mark.usefixtures("processes")

ID, OTHER = b"transfer-id-0001", b"transfer-id-0002"
BIG = Geometry(block_size=16, head_dim=128, num_blocks=128)  # 32 MiB: more than any buffer
COUNT = BIG.num_blocks
IDS = scattered(COUNT, COUNT)
RUNS = (2, *(9,) * 14)
MINE, THEIRS = IDS[: COUNT // 2], IDS[COUNT // 2 :]  # of two transfers
NBYTES = 256 << 10  # of a block


def begin(pair: Pair[LocalEnd, RemoteEnd] | Pair[RemoteEnd, LocalEnd]) -> None:
    """The first two blocks have arrived."""
    ids = IDS[: pair.source.geometry.num_blocks]
    pair.accept(ID, ids)
    pair.submit(ID)
    pair.announce(ID, ids[:2], last=False)
    assert eventually(lambda: pair.arrived(ids[:2], ids[:2])), "the first run did not arrive"


def go_on(pair: Pair[LocalEnd, RemoteEnd] | Pair[RemoteEnd, LocalEnd]) -> None:
    """Announces all other blocks."""
    pair.announce(ID, IDS[2:], RUNS[1:], first=2)


def anonymous_memory() -> int:
    """Bytes this process has allocated; not its maps of files."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s*(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def wait_failed(end: End, blame: Blame) -> None:
    started = time.monotonic()
    while not (failed := end.events.of(Failed, ID)):
        assert time.monotonic() - started < DEATH_S, (
            f"{DEATH_S:g} s after its peer's death the connector has not emitted Failed"
        )
        time.sleep(0.02)
    check_typed(failed[0], blame)
    assert failed[0].retryable, "a peer that died is worth another try elsewhere: retryable"


def test_a_stalled_sink_does_not_block_the_source(kit: Kit) -> None:
    """While the sink hangs `ready` returns at once, and the source keeps no copies: the blocks stay
    untouched until `release`. When the sink resumes, so does the transfer."""
    pair = Pair(kit.node(geometry=BIG), kit.remote(BIG))
    begin(pair)
    pair.sink.end.stop()
    before = anonymous_memory()
    go_on(pair)
    settle()
    grown = anonymous_memory() - before
    assert grown < COUNT * NBYTES // 2, f"the source copied {grown >> 20} MiB while it waited"
    assert not pair.source.end.events.of(Sent, ID), "Sent, but the sink has stood still"
    pair.sink.end.resume()
    pair.wait_landed(ID)
    pair.wait_sent(ID)
    assert pair.arrived(IDS, IDS), "the blocks are not what the source's were"


def test_quiesce_does_not_wait_for_a_stalled_sink(kit: Kit) -> None:
    """The source gives up while the sink hangs: it frees its blocks without the sink's help, and
    the sink does not take their later contents."""
    pair = Pair(kit.node(geometry=BIG), kit.remote(BIG))
    begin(pair)
    pair.sink.end.stop()
    go_on(pair)
    settle()
    pair.source.end.quiesce(ID)
    pair.source.end.cache.tensor.fill_(FREE)
    pair.sink.end.resume()
    settle()
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but the source gave it up half way"


def test_quiesce_does_not_wait_for_a_stalled_source(kit: Kit) -> None:
    """The sink gives up while the source hangs, likely inside a run: it frees its blocks without
    the source's help, and they stay untouched when the source resumes."""
    pair = Pair(kit.remote(BIG), kit.node(geometry=BIG))
    begin(pair)
    pair.announce(ID, IDS[2:-9], RUNS[1:-1], first=2, last=False)
    pair.source.end.stop()
    pair.sink.end.quiesce(ID)
    pair.sink.end.cache.tensor.fill_(FREE)
    pair.source.end.resume()
    pair.announce(ID, IDS[-9:], first=COUNT - 9)
    settle()
    assert pair.others_untouched(()), "a block was written after `quiesce` had returned"


def begin_two(pair: Pair[LocalEnd, RemoteEnd] | Pair[RemoteEnd, LocalEnd]) -> None:
    """Two transfers share the way; the first two blocks of each have arrived."""
    for transfer_id, ids in ((ID, MINE), (OTHER, THEIRS)):
        pair.accept(transfer_id, ids)
        pair.submit(transfer_id)
        pair.announce(transfer_id, ids[:2], last=False)
    started = (*MINE[:2], *THEIRS[:2])
    assert eventually(lambda: pair.arrived(started, started)), "the first runs did not arrive"


def check_unharmed(pair: Pair[LocalEnd, RemoteEnd] | Pair[RemoteEnd, LocalEnd]) -> None:
    pair.wait_landed(OTHER)
    pair.wait_sent(OTHER)
    assert pair.arrived(THEIRS, THEIRS), "the other transfer's blocks are not what was sent"
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but it was cancelled half way"


def test_cancelling_one_of_two_transfers_leaves_the_other_unharmed_at_the_source(kit: Kit) -> None:
    """Two transfers between the same ranks; the source gives one up, likely inside a run. It frees
    its blocks, and the other transfer continues: their shared connection must not end."""
    pair = Pair(kit.node(geometry=BIG), kit.remote(BIG))
    begin_two(pair)
    pair.sink.end.stop()
    pair.announce(ID, MINE[2:-9], first=2, last=False)
    pair.announce(OTHER, THEIRS[2:], first=2)
    settle()
    pair.source.end.quiesce(ID)
    pair.source.end.cache.tensor[:, :, list(MINE)] = FREE
    pair.sink.end.resume()
    check_unharmed(pair)


def test_cancelling_one_of_two_transfers_leaves_the_other_unharmed_at_the_sink(kit: Kit) -> None:
    """The same, but the sink cancels one transfer and the source, which does not know,
    continues."""
    pair = Pair(kit.remote(BIG), kit.node(geometry=BIG))
    begin_two(pair)
    for transfer_id, ids in ((ID, MINE), (OTHER, THEIRS)):
        pair.announce(transfer_id, ids[2:-9], first=2, last=False)
    pair.source.end.stop()
    pair.sink.end.quiesce(ID)
    pair.sink.end.cache.tensor[:, :, list(MINE)] = FREE
    pair.source.end.resume()
    for transfer_id, ids in ((ID, MINE), (OTHER, THEIRS)):
        pair.announce(transfer_id, ids[-9:], first=len(ids) - 9)
    check_unharmed(pair)
    assert pair.others_untouched(THEIRS), "a block was written after `quiesce` had returned"


def test_close_does_not_wait_for_a_stalled_sink(kit: Kit) -> None:
    """`close` with runs under way to a sink that stands still keeps its deadline."""
    pair = Pair(kit.node(geometry=BIG), kit.remote(BIG))
    begin(pair)
    pair.sink.end.stop()
    go_on(pair)
    settle()
    started = time.monotonic()
    pair.source.end.close(CLOSE_S)
    assert time.monotonic() - started < CLOSE_S, f"`close({CLOSE_S:g})` took longer"


def test_a_killed_source_is_noticed(kit: Kit) -> None:
    """The source's process is killed half way: the sink emits Failed and blames the prefill side.
    The sink's other transfers continue."""
    pair = Pair(kit.remote(), kit.node())
    other = Pair(kit.node(), pair.sink)
    begin(pair)
    pair.source.end.kill()
    wait_failed(pair.sink.end, Blame.PREFILL)
    pair.sink.end.quiesce(ID)
    settle()
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but the source died half way"
    other.send(OTHER, (1, 2), (3, 4))
    assert other.arrived((1, 2), (3, 4)), "the sink is of no use after a source died"


def test_a_killed_sink_is_noticed(kit: Kit) -> None:
    """The sink's process is killed half way: the source emits Failed and blames the decode side, at
    the latest when it has more to deliver. The source's other transfers continue."""
    pair = Pair(kit.node(), kit.remote())
    begin(pair)
    pair.sink.end.kill()
    for first in range(2, 20):
        pair.source.end.ready(Ready(ID, BlockRun(first, 1), (IDS[first],), False))
        time.sleep(0.01)
    wait_failed(pair.source.end, Blame.DECODE)
    assert not pair.source.end.events.of(Sent, ID), "Sent, but the sink died half way"
    pair.source.end.quiesce(ID)
    other = Pair(pair.source, kit.node())
    other.send(OTHER, (1, 2), (3, 4))
    assert other.arrived((1, 2), (3, 4)), "the source is of no use after a sink died"
