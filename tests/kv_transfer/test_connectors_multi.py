"""Several connectors in one rank: which one carries a transfer, and what happens when it fails."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

import transfers
from kv_fakes import Geometry, Pair, shared_cache
from paths import ROOT
from pdserve.common.config.node import TransferConfig
from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.kv_transfer.connector import (
    BlockRun,
    Capabilities,
    Event,
    Failed,
    KVConnector,
    Landed,
    Progress,
    RankContext,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.pull import PullMover
from pdserve.kv_transfer.connectors.multi.connector import MultiConnector
from pdserve.kv_transfer.connectors.multi.routes import AVOID_S, RecentFailures, host_identity
from pdserve.kv_transfer.layout import CacheView, Piece, Rect
from pdserve.kv_transfer.selection import AUTO, auto_connectors, choose_connectors


@asynccontextmanager
async def pair(*args: Any, **options: Any) -> AsyncIterator[Pair]:
    before = threading.active_count()
    async with transfers.pair(*args, **options) as made:
        yield made
    async with asyncio.timeout(60):  # a timer that was cancelled may be late
        while threading.active_count() > before + 1:  # the loop's own executor
            await asyncio.sleep(0.01)


async def hand_off(made: Pair) -> None:
    """One transfer, to the last byte."""
    full = made.source_node.fill_random(seed=made.sink.counts["landed"])
    ticket, handoff = await transfers.start(made)
    transfers.announce(handoff)
    await asyncio.gather(handoff.commit(0), made.landed(ticket.transfer_id))
    transfers.assert_landed(made, full)


def carried(made: Pair) -> dict[str, int]:
    """Bytes that came through each of the sinks' connectors so far."""
    ranks = range(len(made.sink_node.ranks))
    children = [made.sink_node.children(rank) for rank in ranks]
    return {name: sum(each[name].counts["bytes"] for each in children) for name in children[0]}


def carriers(made: Pair) -> set[str]:
    return {name for name, nbytes in carried(made).items() if nbytes}


def elsewhere(made: Pair) -> None:
    """The sources are on another host from now on."""
    for rank in range(len(made.source_node.ranks)):
        made.source_node.multi(rank).host = "elsewhere"


# ---- which one ----


@pytest.mark.parametrize(
    ("ours", "theirs", "used"),
    [
        ("shm", "shm", "shm"),
        ("shm,tcp", "shm,tcp", "shm"),
        ("tcp,shm", "shm,tcp", "tcp"),  # the source's order counts
        ("shm,tcp", "tcp", "tcp"),
        ("tcp", "shm,tcp", "tcp"),
    ],
)
async def test_the_source_takes_the_first_that_both_speak(
    ours: str, theirs: str, used: str
) -> None:
    async with pair(ours, 2, 1, sink_connector=theirs) as made:
        await hand_off(made)
        assert carriers(made) == {used}
        assert made.sink.counts["late_event"] == 0


async def test_same_host_connectors_are_for_one_host() -> None:
    async with pair("shm,tcp") as made:
        elsewhere(made)
        await hand_off(made)
        assert carriers(made) == {"tcp"}


def test_a_host_is_a_kernel_a_network_and_a_user() -> None:
    boot, network, user = host_identity().split("/")
    assert len(boot) == 36
    assert int(network) == os.stat("/proc/self/ns/net").st_ino
    assert int(user) == os.geteuid()


@pytest.mark.parametrize("reason", ["names", "hosts"])
async def test_nothing_in_common_is_a_typed_error(reason: str) -> None:
    async with pair("shm", sink_connector="tcp" if reason == "names" else "shm") as made:
        if reason == "hosts":
            elsewhere(made)
        with pytest.raises(TransferError, match="such as --kv-connector tcp") as error:
            await hand_off(made)
        assert error.value.code == "NO_COMMON_CONNECTOR"
        assert "another host" in str(error.value) or reason == "names"


async def test_an_endpoint_that_makes_no_sense_is_refused() -> None:
    async with pair("shm,tcp") as made:
        piece = Piece(0, 0, made.sink_node.rects[0])
        transfer = SourceTransfer(b"t" * 16, 1, ((piece, b"no msgpack"),))
        with pytest.raises(TransferError, match="BAD_FRAME"):
            made.source_node.multi().submit(transfer)


# ---- when it fails ----


async def test_one_that_cannot_connect_is_replaced_within_the_transfer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair("shm,tcp", 2, 1) as made:
        made.sink_node.children()["shm"].close(1.0)  # it no longer listens
        with caplog.at_level(logging.WARNING, "pdserve.kv_transfer.connectors.multi.connector"):
            for _ in range(3):
                await hand_off(made)
        assert carriers(made) == {"tcp"}
        assert made.source.counts["sent"] == 3
        said = [each.getMessage() for each in caplog.records if "goes first" in each.getMessage()]
        assert len(said) == 2  # each source rank found out once, and remembered
        assert "cannot connect" in said[0] and "tcp goes first" in said[0]


async def test_ranks_of_one_node_may_differ() -> None:
    """A sink rank gets one piece through each connector."""
    async with pair("shm,tcp", 2, 1) as made:
        shm: Any = made.source_node.children(1)["shm"]
        shm.sender._dial = refuse
        await hand_off(made)
        await hand_off(made)
        shares = carried(made)
        assert shares["shm"] == shares["tcp"] > 0


def refuse(endpoint: bytes) -> Any:
    raise ConnectionRefusedError("not today")


async def test_a_failure_in_mid_transfer_is_final_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deliver = PullMover.send

    def break_at_the_second_run(self: PullMover, frame: Any, *args: Any) -> int:
        if frame.first:
            raise ConnectionError("the host is on fire")
        return deliver(self, frame, *args)

    monkeypatch.setattr(PullMover, "send", break_at_the_second_run)
    async with pair("shm,tcp", lease_s=1.0) as made:
        with pytest.raises(TransferError) as error:
            await hand_off(made)
        assert error.value.code in ("PEER_LOST", "ABORTED")
        assert "tcp" not in carriers(made)  # what has moved is not sent again elsewhere
        await hand_off(made)
        assert "tcp" in carriers(made)


async def test_all_fail() -> None:
    async with pair("shm,tcp", lease_s=1.0) as made:
        for child in made.sink_node.children().values():
            child.close(1.0)
        for _ in range(2):  # the second time all are in their cool-down
            with pytest.raises(TransferError) as error:
                await hand_off(made)
            assert error.value.code in ("CONNECT_FAILED", "ABORTED")
        assert made.freed == ["source"] * 2
    assert made.freed == ["sink"] * 2 + ["source"] * 2


def test_the_cool_down_ends() -> None:
    now = 100.0
    failing = RecentFailures(lambda: now)
    assert failing.add({"a", "b"}) and "a" in failing and "c" not in failing
    now += AVOID_S / 2
    assert not failing.add({"b"})
    now += AVOID_S / 2
    assert "a" not in failing and "b" in failing
    assert failing.add({"a", "b"})  # a is new again


# ---- two children on strings ----


class Puppet(KVConnector):
    """Does nothing by itself; remembers what it is told."""

    capabilities = Capabilities(push=True)

    def __init__(self, context: RankContext, config: Mapping[str, Any], name: str) -> None:
        super().__init__(context, config)
        self.name = name
        self.told: list[Any] = []

    def endpoint(self) -> bytes:
        return self.name.encode()

    def accept(self, transfer: SinkTransfer) -> None:
        self.told.append("accept")

    def submit(self, transfer: SourceTransfer) -> None:
        self.told.append(("submit", *(endpoint for _, endpoint in transfer.pieces)))

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self.told.append(run.first)

    def quiesce(self, transfer_id: bytes) -> None:
        self.told.append("quiesce")

    def close(self, deadline: float) -> None:
        self.told.append("close")


ID = b"transfer-id-0001"
RECT = Rect(0, 3, 0, 2)


class Stage:
    """A multi-connector of puppets `a` and `b`, and what it reported."""

    def __init__(self) -> None:
        cache, fd = shared_cache(Geometry().shape(RECT), torch.float32)
        os.close(fd)
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda event: None
        context = RankContext(CacheView(cache, RECT), "127.0.0.1", "same", self._emit)
        makers: dict[str, Callable[[RankContext], KVConnector]] = {
            name: partial(Puppet, config={}, name=name) for name in "ab"
        }
        self.multi = MultiConnector(context, makers)
        self.a: Any = self.multi.children["a"]
        self.b: Any = self.multi.children["b"]
        self.block_nbytes = cache[:, :, 0].nbytes

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def submit(self, epoch: int = 1) -> None:
        piece = (Piece(0, 0, RECT), self.multi.endpoint())
        self.multi.submit(SourceTransfer(ID, epoch, (piece,)))

    def settle(self) -> None:
        """Waits for a change of children that is under way."""
        route = self.multi._outbound[ID]
        if route.failover is not None:
            route.failover.result(5.0)


@pytest.fixture
def stage() -> Any:
    made = Stage()
    yield made
    made.multi.close(1.0)
    assert made.a.told[-1] == made.b.told[-1] == "close"


def fail(code: str = "CONNECT_FAILED", retryable: bool = True, epoch: int = 1) -> Failed:
    return Failed(ID, epoch, code, "decode", retryable, "gone")


def test_the_next_one_hears_all_that_was_announced(stage: Stage) -> None:
    stage.submit()
    stage.multi.ready(ID, BlockRun(0, 2), (5, 6), False)
    stage.a.context.emit(fail())
    stage.settle()
    stage.multi.ready(ID, BlockRun(2, 1), (7,), True)
    assert stage.a.told == [("submit", b"a"), 0, "quiesce"]
    assert stage.b.told == [("submit", b"b"), 0, 2]
    stage.a.context.emit(Sent(ID, 1, 1, 0.0))  # it has no say any more
    stage.a.context.emit(fail())
    assert stage.events == []
    stage.b.context.emit(Sent(ID, 1, 1, 0.0))
    assert stage.events == [Sent(ID, 1, 1, 0.0)]
    stage.multi.quiesce(ID)
    assert stage.a.told[-1] == stage.b.told[-1] == "quiesce"


@pytest.mark.parametrize(
    "failed", [fail("FINGERPRINT_MISMATCH", retryable=False), fail("PEER_LOST")]
)
def test_a_failure_that_another_connector_cannot_avoid_is_reported(
    stage: Stage, failed: Failed
) -> None:
    stage.submit()
    if failed.retryable:
        stage.a.context.emit(Progress(ID, 1, 8))  # something has moved
    stage.a.context.emit(failed)
    assert stage.events[-1] == failed
    assert stage.b.told == []


def test_one_that_moves_data_after_it_failed_ends_the_transfer(stage: Stage) -> None:
    stage.submit()
    stage.a.context.emit(fail())
    stage.settle()
    stage.a.context.emit(Progress(ID, 1, 8))
    (event,) = stage.events
    assert isinstance(event, Failed) and event.code == "CONNECTOR_FAILED"


def test_a_transfer_that_is_over_is_not_begun_again(stage: Stage) -> None:
    stage.submit()
    stage.a.context.emit(fail())
    stage.multi.quiesce(ID)
    stage.submit(epoch=2)
    assert stage.a.told[-1] == "quiesce"  # a is avoided now
    assert stage.b.told[-1] == ("submit", b"b")
    stage.b.context.emit(fail(epoch=1))
    assert stage.multi.counts["late_event"] == 1


def test_the_others_are_quiet_before_the_core_hears_that_all_landed(stage: Stage) -> None:
    stage.multi.accept(SinkTransfer(ID, 1, 0, (4, 5)))
    assert stage.a.told == stage.b.told == ["accept"]
    stage.on_event = lambda event: stage.b.told.append(event)
    landed = Landed(ID, 1, 2 * stage.block_nbytes)
    stage.a.context.emit(landed)
    named = replace(landed, connectors=("a",))
    assert stage.b.told == ["accept", "quiesce", named]
    assert "quiesce" not in stage.a.told
    stage.b.context.emit(landed)
    stage.b.context.emit(fail())
    assert stage.events == [named]


def test_pieces_through_several_land_when_no_byte_is_missing(stage: Stage) -> None:
    total = 2 * stage.block_nbytes
    stage.multi.accept(SinkTransfer(ID, 1, 0, (4, 5)))
    stage.a.context.emit(Progress(ID, 1, total // 2))
    stage.b.context.emit(Progress(ID, 1, total // 2 - 8))
    assert not any(isinstance(event, Landed) for event in stage.events)
    stage.b.context.emit(Progress(ID, 1, 8))
    assert stage.events[-1] == Landed(ID, 1, total, ("a", "b"))


def test_a_sink_gives_up_when_no_child_is_left(stage: Stage) -> None:
    stage.multi.accept(SinkTransfer(ID, 1, 0, (4, 5)))
    stage.a.context.emit(fail())
    stage.a.context.emit(fail())
    assert stage.events == []  # the source may come through b
    stage.b.context.emit(fail("PEER_LOST"))
    assert stage.events == [fail("PEER_LOST")]


def test_a_sink_gives_up_when_some_of_it_is_lost(stage: Stage) -> None:
    stage.multi.accept(SinkTransfer(ID, 1, 0, (4, 5)))
    stage.a.context.emit(Progress(ID, 1, 8))
    stage.a.context.emit(fail())
    assert stage.events == [Progress(ID, 1, 8), fail()]


def test_one_alone_says_itself_when_it_is_done(stage: Stage) -> None:
    total = 2 * stage.block_nbytes
    stage.multi.accept(SinkTransfer(ID, 1, 0, (4, 5)))
    stage.a.context.emit(Progress(ID, 1, total))  # twice reported, say
    assert stage.events == [Progress(ID, 1, total)]


def test_older_epochs_and_strangers_are_counted(stage: Stage) -> None:
    stage.multi.accept(SinkTransfer(ID, 2, 0, (4, 5)))
    stage.multi.accept(SinkTransfer(ID, 1, 0, (4, 5)))
    stage.a.context.emit(Landed(ID, 1, 1))
    stage.multi.release(ID)
    stage.a.context.emit(Landed(ID, 2, 1))
    assert stage.events == []
    assert stage.multi.counts["late_event"] == 2


# ---- the options ----


def choose(names: str, options: dict[str, Any] | None = None, device: str = "cpu") -> Any:
    config = TransferConfig(kv_connector=names, kv_connector_config=options or {})
    return choose_connectors(config, device)


def test_options_go_to_the_connector_they_name() -> None:
    assert choose("tcp", {"congestion_control": ""}) == {"tcp": {"congestion_control": ""}}
    both = choose("shm, tcp", {"tcp": {"congestion_control": ""}})
    assert list(both.items()) == [("shm", {}), ("tcp", {"congestion_control": ""})]
    assert choose("auto", {"tcp": {"tls": True}}) == {"shm": {}, "tcp": {"tls": True}}


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        ("shm,pigeon", {}, "--kv-connector: unknown name 'pigeon'; choose one of"),
        ("tpc", {}, "unknown name 'tpc'; did you mean tcp?"),
        ("shm,", {}, "unknown name ''"),
        ("shm,auto", {}, "unknown name 'auto'"),
        ("tcp,shm,tcp", {}, "comes twice"),
        ("shm,tcp", {"congestion_control": ""}, "options for congestion_control"),
        ("auto", {"pigeon": {}}, "options for pigeon, but the connectors are shm, tcp"),
        ("shm,tcp", {"tcp": "reno"}, "no JSON object"),
        ("tcp,test_connectors:FutureConnector", {}, "API version 99"),
    ],
)
def test_options_that_make_no_sense(names: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(names, options)


def test_auto_takes_what_the_cache_allows() -> None:
    anywhere = Capabilities(devices=frozenset({"cpu", "cuda"}))
    on_cpus = Capabilities(same_host=True)
    known = {"tcp": anywhere, "shm": on_cpus}
    assert auto_connectors("cpu", known) == ("shm", "tcp")
    assert auto_connectors("cpu", {**known, "shm": Capabilities(devices=frozenset())}) == ("tcp",)
    assert auto_connectors("cuda", known) == ("tcp",)
    assert {name for names in AUTO.values() for name in names} == set(known)


def test_help_and_pages_say_what_auto_takes() -> None:
    cpu, cuda = ",".join(AUTO["cpu"]), ",".join(AUTO["cuda"])
    (option,) = (each for each in fields(TransferConfig) if each.name == "kv_connector")
    assert f"auto: {cpu} for CPU caches, {cuda} for CUDA" in option.metadata["help"]
    for page in ("operate.md", "write-a-connector.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert re.search(rf"`{cpu}` for (a CPU cache|CPU caches) and `{cuda}` for CUDA", text), page


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choose("auto")
        choose("tcp,shm")
    assert [record.getMessage() for record in caplog.records] == [
        "KV connectors: shm, tcp (auto: CPU cache)",
        "KV connectors: tcp, shm",
    ]
