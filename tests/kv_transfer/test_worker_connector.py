"""A rank's extension answers some calls on the node's event loop, and leaves others to a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from kv_fakes import FINGERPRINT, Geometry, shared_cache
from pdserve.common.worker.kv_cache import GroupCache
from pdserve.kv_transfer.commands import (
    Accept,
    Command,
    Quiesce,
    Ready,
    Release,
    Reply,
    Submit,
    Verify,
    encode_command,
)
from pdserve.kv_transfer.connector import BlockRun, RunDigest, SinkTransfer, SourceTransfer
from pdserve.kv_transfer.connectors.multi.connector import MultiConnector
from pdserve.kv_transfer.layout import Piece, Rect
from pdserve.kv_transfer.rank import group_connector
from pdserve.kv_transfer.rank.group_connector import SHORT_NBYTES, SHORT_RUNS
from pdserve.kv_transfer.rank.worker_connector import WorkerConnector, build_worker_connector
from pdserve.kv_transfer.selection import RankConfig

ID = bytes(16)
BLOCKS = 64
GEOMETRY = Geometry(num_blocks=BLOCKS, head_dim=512)
WHOLE = Rect(0, GEOMETRY.layers, 0, GEOMETRY.heads)
encode = partial(encode_command, 0)


@contextmanager
def rank(source: bool) -> Iterator[WorkerConnector]:
    cache, _ = shared_cache(GEOMETRY.shape(WHOLE), torch.float32)
    config = msgspec.msgpack.encode(RankConfig({"tcp": {}}, FINGERPRINT, source=source))
    shape = GEOMETRY.cache_shape(WHOLE)
    made = build_worker_connector(
        [GroupCache(cache, shape)], None, 0, "127.0.0.1", config, lambda _: None
    )
    try:
        yield made
    finally:
        made.close(5.0)


def block_nbytes() -> int:
    return GEOMETRY.layers * 2 * GEOMETRY.heads * GEOMETRY.block_size * GEOMETRY.head_dim * 4


def ready(count: int, digest: bool = True) -> Ready:
    return Ready(ID, BlockRun(0, count), tuple(range(count)), True, digest)


def answer(made: WorkerConnector, command: Command) -> Any:
    reply = made.handle_at_once(encode(command))
    return None if reply is None else msgspec.msgpack.decode(reply, type=Reply)


def test_a_sink_accepts_and_checks_little_at_once() -> None:
    few, many = SHORT_NBYTES // block_nbytes(), SHORT_NBYTES // block_nbytes() + 1
    assert 0 < few < many <= BLOCKS
    with rank(source=False) as made:
        for epoch, count in ((1, few), (2, many)):
            accept = Accept(SinkTransfer(ID, epoch, 0, tuple(range(count))))
            assert answer(made, accept).error is None
            wrong = RunDigest(0, WHOLE, BlockRun(0, count), b"wrong")
            reply = answer(made, Verify(ID, epoch, (wrong,)))
            assert reply is None if count == many else reply.digests == (wrong,)
            assert answer(made, Verify(ID, epoch, (wrong,) * (SHORT_RUNS + 1))) is None
        assert answer(made, Quiesce(ID)) is None
        assert answer(made, Release(ID)) is None
        made.handle(encode(Release(ID)))
        assert answer(made, Verify(ID, 2, ())).error.code == "UNKNOWN_TRANSFER"


def test_digests_of_an_epoch_that_is_over_are_not_compared() -> None:
    """A call that is late asks for them; the present epoch's have a call of their own."""
    with rank(source=False) as made:
        for epoch in (1, 2):
            answer(made, Accept(SinkTransfer(ID, epoch, 0, (0, 1))))
        late = answer(made, Verify(ID, 1, (RunDigest(0, WHOLE, BlockRun(0, 2), b"right"),)))
        assert late.error.code == "UNKNOWN_TRANSFER"


@pytest.mark.parametrize("as_sent", [True, False])
def test_a_source_announces_and_hashes_little_at_once(
    as_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Much is hashed by the connector, if it can, or on another thread."""
    monkeypatch.setattr(MultiConnector, "hashes_as_it_sends", as_sent)
    many = SHORT_NBYTES // block_nbytes() + 1
    with rank(source=False) as sink, rank(source=True) as made:
        piece = Piece(0, 0, WHOLE)
        submit = Submit(SourceTransfer(ID, 1, ((piece, sink.groups[0].endpoint),)))
        assert answer(made, submit).error is None
        at_once = answer(made, ready(many))
        assert at_once == (Reply(hashed_as_sent=True) if as_sent else None)
        assert len(answer(made, ready(many - 1)).digests) == 1
        assert answer(made, ready(many, digest=False)).digests == ()
        made.handle(encode(Quiesce(ID)))


def test_a_rank_ends_whose_connector_does_not_quiesce(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(transfer_id: bytes) -> None:
        raise KeyError(transfer_id)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(group_connector, "leave", leave)
    with rank(source=True) as made:
        monkeypatch.setattr(made.groups[0]._connector, "quiesce", defect)
        with pytest.raises(SystemExit):
            made.handle(encode(Quiesce(ID)))


def test_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank(source=False) as made:
        inside, leave = threading.Event(), threading.Event()

        def quiesce(transfer_id: bytes) -> None:
            inside.set()
            leave.wait(30.0)

        monkeypatch.setattr(made.groups[0]._connector, "quiesce", quiesce)
        thread = threading.Thread(target=made.handle, args=(encode(Quiesce(ID)),))
        thread.start()
        assert inside.wait(30.0)
        accept = Accept(SinkTransfer(ID, 1, 0, (0,)))
        assert answer(made, accept) is None
        leave.set()
        thread.join()
        assert answer(made, accept).error is None


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80", encode(("Accept", 1))])
def test_an_invalid_command_gets_an_error_reply(garbage: bytes) -> None:
    with rank(source=False) as made:
        assert made.handle_at_once(garbage) is None
        reply = msgspec.msgpack.decode(made.handle(garbage), type=Reply)
        assert reply.error is not None and reply.error.code == "BAD_FRAME"
        assert answer(made, Verify(ID, 1, ())).error.code == "UNKNOWN_TRANSFER"
