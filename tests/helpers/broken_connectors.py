"""Connectors that break one promise each, and the check of the conformance kit that must notice.

They are the tcp connector, or the example, with a small mistake that plugin authors could make.
Everything else works, so each passes the checks that are about something else.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import xxhash
from pdserve_file_connector.connector import FileConnector

from pdserve.kv_transfer.blocks import gather
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    KVConnector,
    Landed,
    Progress,
    RankContext,
    RunDigest,
    Sent,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.tcp import TCPConnector
from pdserve.kv_transfer.layout import Rect
from segments import LEFT_ON_PURPOSE, SHM


class Tampered(KVConnector):
    """`caught_by`: the check that must fail, as file::test, and its parameter if it has some."""

    caught_by: ClassVar[str]

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        self.report = context.emit
        self.accepted: dict[bytes, SinkTransfer] = {}
        super().__init__(replace(context, emit=self.emit), config)

    def emit(self, event: Event) -> None:
        """Emits the event; subclasses tamper with it."""
        self.report(event)

    def accept(self, transfer: SinkTransfer) -> None:
        self.accepted[transfer.transfer_id] = transfer
        super().accept(transfer)  # type: ignore[safe-super]


class Broken(Tampered, TCPConnector):
    pass


class BrokenFile(Tampered, FileConnector):
    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, {"directory": "."})


# ---- blocks ----


class WritesOneBlockMore(Broken):
    caught_by = "test_delivery.py::test_only_the_named_blocks_are_written"

    def emit(self, event: Event) -> None:
        if isinstance(event, Landed) and len(ids := self.accepted[event.transfer_id].block_ids) > 1:
            self.context.view.cache[:, :, max(ids) + 1] = 0
        super().emit(event)


class TakesBlocksForAdjacent(Broken):
    caught_by = "test_delivery.py::test_any_block_ids[adjacent-scattered]"

    def accept(self, transfer: SinkTransfer) -> None:
        first, count = min(transfer.block_ids, default=0), len(transfer.block_ids)
        super().accept(replace(transfer, block_ids=tuple(range(first, first + count))))


class ReversesRuns(Broken):
    caught_by = "test_delivery.py::test_runs_arrive_in_their_places"

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        super().ready(transfer_id, run, block_ids[::-1], last)


class Truncates(Broken):
    caught_by = "test_delivery.py::test_blocks_arrive[200]"
    most = 100

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        cut = block_ids[: self.most]
        cut += block_ids[:1] * (len(block_ids) - len(cut))
        super().ready(transfer_id, run, cut, last)


class DropsTheLastRun(Broken):
    caught_by = "test_delivery.py::test_runs_arrive_in_their_places"

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        if last and run.first > 0:
            run, block_ids = BlockRun(run.first, 0), ()
        super().ready(transfer_id, run, block_ids, last)


class WaitsForTheLastRun(Broken):
    caught_by = "test_delivery.py::test_runs_go_out_as_they_become_ready"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self.held: list[tuple[bytes, BlockRun, tuple[int, ...], bool]] = []

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self.held.append((transfer_id, run, block_ids, last))
        while last and self.held:
            super().ready(*self.held.pop(0))


class MixesUpHeads(Broken):
    caught_by = "test_layouts.py::test_tensor_parallel[4-1-2]"

    def emit(self, event: Event) -> None:
        view = self.context.view
        if isinstance(event, Landed) and view.rect.head_start > 0:
            ids = list(self.accepted[event.transfer_id].block_ids)
            view.cache[:, :, ids] = view.cache[:, :, ids].flip(3)
        super().emit(event)


class MixesUpLayers(Broken):
    caught_by = "test_layouts.py::test_pipelines[cut]"

    def emit(self, event: Event) -> None:
        view = self.context.view
        if isinstance(event, Landed) and view.rect.layer_start > 0:
            ids = list(self.accepted[event.transfer_id].block_ids)
            view.cache[:, :, ids] = view.cache[:, :, ids].flip(0)
        super().emit(event)


# ---- events ----


class LandsEarly(Broken):
    caught_by = "test_delivery.py::test_landed_comes_after_the_data"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self.early: set[bytes] = set()

    def emit(self, event: Event) -> None:
        transfer_id = event.transfer_id
        if transfer_id in self.early:
            return
        if isinstance(event, Progress) and event.nbytes and transfer_id in self.accepted:
            self.early.add(transfer_id)
            event = Landed(transfer_id, event.epoch, event.nbytes)
        super().emit(event)


class LandsTwice(Broken):
    caught_by = "test_delivery.py::test_landed_and_sent_come_once"

    def emit(self, event: Event) -> None:
        for _ in range(2 if isinstance(event, Landed) else 1):
            super().emit(event)


class SaysSentTooSoon(Broken):
    caught_by = "test_peers.py::test_a_stalled_sink_does_not_block_the_source"

    def emit(self, event: Event) -> None:
        if not isinstance(event, Sent):
            super().emit(event)

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        super().ready(transfer_id, run, block_ids, last)
        if last:
            self.report(Sent(transfer_id, 1, 0, 0.0))


class CountsWrongBytes(Broken):
    caught_by = "test_delivery.py::test_events_name_the_transfer_and_its_bytes"

    def emit(self, event: Event) -> None:
        super().emit(replace(event, nbytes=1) if isinstance(event, Sent) else event)


class ForgetsTheEpoch(Broken):
    caught_by = "test_delivery.py::test_events_name_the_transfer_and_its_bytes"

    def emit(self, event: Event) -> None:
        super().emit(replace(event, epoch=1))


class MakesNoProgress(Broken):
    caught_by = "test_delivery.py::test_runs_go_out_as_they_become_ready"

    def emit(self, event: Event) -> None:
        if not isinstance(event, Progress):
            super().emit(event)


# ---- cancellation and epochs ----


class WritesAfterQuiesce(Broken):
    caught_by = "test_cancel.py::test_after_quiesce_the_sink_is_not_written"

    def quiesce(self, transfer_id: bytes) -> None:
        self.sender.forget(transfer_id)  # the source's half only


class ReadsAfterQuiesce(Broken):
    caught_by = "test_cancel.py::test_after_quiesce_the_source_is_not_read"

    def quiesce(self, transfer_id: bytes) -> None:
        self.receiver.forget(transfer_id)  # the sink's half only


class IgnoresTheEpoch(BrokenFile):
    caught_by = "test_cancel.py::test_a_zombie_of_an_older_epoch_never_writes"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        self.epochs: dict[bytes, int] = {}
        super().__init__(context, config)

    def accept(self, transfer: SinkTransfer) -> None:
        self.epochs[transfer.transfer_id] = transfer.epoch
        super().accept(replace(transfer, epoch=1))

    def submit(self, transfer: SourceTransfer) -> None:
        self.epochs[transfer.transfer_id] = transfer.epoch
        super().submit(replace(transfer, epoch=1))  # type: ignore[safe-super]

    def emit(self, event: Event) -> None:
        super().emit(replace(event, epoch=self.epochs[event.transfer_id]))


class AcceptsAnOlderEpoch(Broken):
    caught_by = "test_cancel.py::test_an_older_epoch_is_not_accepted_again"

    def accept(self, transfer: SinkTransfer) -> None:
        self.receiver.forget(transfer.transfer_id)
        super().accept(transfer)


class WaitsForTheEndInQuiesce(Broken):
    caught_by = "test_peers.py::test_quiesce_does_not_wait_for_a_stalled_source"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        self.over = threading.Event()
        super().__init__(context, config)

    def emit(self, event: Event) -> None:
        if isinstance(event, (Landed, Sent, Failed)):
            self.over.set()
        super().emit(event)

    def quiesce(self, transfer_id: bytes) -> None:
        self.over.wait(8.0)
        super().quiesce(transfer_id)


class EndsTheConnectionOfTheSource(Broken):
    """Closes the connection of an aborted transfer, so that other transfers on it fail."""

    caught_by = (
        "test_peers.py::"
        "test_cancelling_one_of_two_transfers_leaves_the_other_unharmed_at_the_source"
    )

    def quiesce(self, transfer_id: bytes) -> None:
        if transfer_id in self.sender._outbound:
            for worker in list(self.sender._workers.values()):
                if worker._channel is not None:
                    worker._channel.interrupt()
        super().quiesce(transfer_id)


class EndsTheConnectionOfTheSink(Broken):
    caught_by = (
        "test_peers.py::test_cancelling_one_of_two_transfers_leaves_the_other_unharmed_at_the_sink"
    )

    def quiesce(self, transfer_id: bytes) -> None:
        if transfer_id in self.receiver._inbound and self._server is not None:
            for pipe in list(self._server._pipes):
                pipe.interrupt()
        super().quiesce(transfer_id)


# ---- peers ----


class BlocksInReady(Broken):
    """Sends before `ready` returns."""

    caught_by = "test_peers.py::test_a_stalled_sink_does_not_block_the_source"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        self.moved = threading.Semaphore(0)
        super().__init__(context, config)

    def emit(self, event: Event) -> None:
        if isinstance(event, Progress) and event.nbytes:
            self.moved.release()
        super().emit(event)

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        super().ready(transfer_id, run, block_ids, last)
        self.moved.acquire(timeout=8.0)


class CopiesWhatIsReady(Broken):
    caught_by = "test_peers.py::test_a_stalled_sink_does_not_block_the_source"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self.copies: list[Any] = []

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self.copies.append(gather(self.context.view, self.context.view.rect, block_ids))
        super().ready(transfer_id, run, block_ids, last)


class SwallowsDeath(Broken):
    caught_by = "test_peers.py::test_a_killed_source_is_noticed"

    def emit(self, event: Event) -> None:
        if not isinstance(event, Failed):
            super().emit(event)


class BlamesItself(Broken):
    caught_by = "test_peers.py::test_a_killed_sink_is_noticed"

    def emit(self, event: Event) -> None:
        super().emit(replace(event, blame="prefill") if isinstance(event, Failed) else event)


class IgnoresTheFingerprint(Broken):
    caught_by = "test_calls.py::test_another_fingerprint_is_refused"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(replace(context, fingerprint=""), config)


# ---- calls ----


class RaisesOnUnknownTransfers(Broken):
    caught_by = "test_calls.py::test_unknown_transfers"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self.known: dict[bytes, SourceTransfer] = {}

    def submit(self, transfer: SourceTransfer) -> None:
        self.known[transfer.transfer_id] = transfer
        super().submit(transfer)

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        super().ready(self.known[transfer_id].transfer_id, run, block_ids, last)


class RaisesOnDuplicates(RaisesOnUnknownTransfers):
    caught_by = "test_calls.py::test_duplicate_calls"

    def submit(self, transfer: SourceTransfer) -> None:
        if transfer.transfer_id in self.known:
            raise ValueError("submitted twice")
        super().submit(transfer)


class ChokesOnGarbage(Broken):
    caught_by = "test_calls.py::test_garbage_endpoints[zero]"

    def submit(self, transfer: SourceTransfer) -> None:
        for _, endpoint in transfer.pieces:
            msgspec.msgpack.decode(endpoint, type=dict)
        super().submit(transfer)


class AcceptsAnyOption(Broken):
    caught_by = "test_calls.py::test_unknown_options_are_refused"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, {})


# ---- digests ----


class HashesOtherBytes(Broken):
    """Omits the prefix, so that a digest matches any transfer."""

    caught_by = "test_digests.py::test_a_sink_s_digests_are_of_its_blocks"

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        transfer = self.accepted[transfer_id]
        ids = transfer.block_ids[run.first : run.first + run.count]
        return xxhash.xxh3_128(gather(self.context.view, rect, ids).numpy().tobytes()).digest()


class HashesNothing(Broken):
    caught_by = "test_digests.py::test_a_sink_s_digests_are_of_its_blocks"

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        return None


class BelievesOldDigests(Broken):
    caught_by = "test_digests.py::test_a_sink_s_digest_is_of_one_epoch_and_one_run"

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        if (transfer := self.accepted.get(transfer_id)) is None:
            return None
        return super().landed_digest(transfer_id, transfer.epoch, rect, run)


class WritesLate(Broken):
    """Reports `Landed` before it copies the blocks."""

    caught_by = "test_digests.py::test_nothing_is_written_after_landed"

    def emit(self, event: Event) -> None:
        late = None
        if isinstance(event, Landed):
            ids = list(self.accepted[event.transfer_id].block_ids)
            late = self.context.view.cache[:, :, ids]
        super().emit(event)
        if late is not None:
            self.context.view.cache[:, :, ids] = late


class ForgetsTheLastDigest(Broken):
    caught_by = "test_digests.py::test_a_source_s_digests_are_of_its_blocks"

    def emit(self, event: Event) -> None:
        super().emit(
            replace(event, digests=event.digests[:-1]) if isinstance(event, Sent) else event
        )


class HashesEveryRun(Broken):
    caught_by = "test_digests.py::test_runs_of_ready_have_no_digest"

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self.ready_hashed(transfer_id, run, block_ids, last)


class CutsTheSinkOtherwise(Broken):
    caught_by = "test_digests.py::test_both_sides_cut_alike"

    def emit(self, event: Event) -> None:
        if isinstance(event, Sent):
            event = replace(event, digests=tuple(map(self.halved, event.digests)))
        super().emit(event)

    def halved(self, digest: RunDigest) -> RunDigest:
        return replace(digest, run=BlockRun(digest.run.first, max(1, digest.run.count // 2)))


# ---- resources and keys ----


class LeaksAThread(Broken):
    caught_by = "test_leaks.py::test_close_gives_everything_back"

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        threading.Thread(target=threading.Event().wait, args=(60.0,), daemon=True).start()


class LeaksDescriptors(Broken):
    caught_by = "test_leaks.py::test_transfers_give_everything_back"

    def submit(self, transfer: SourceTransfer) -> None:
        os.dup(0)
        super().submit(transfer)


class LeavesFiles(Broken):
    caught_by = "test_leaks.py::test_close_gives_everything_back"

    def close(self, deadline: float) -> None:
        super().close(deadline)
        os.close(tempfile.mkstemp()[0])


class LeavesSharedMemory(Broken):
    caught_by = "test_leaks.py::test_close_leaves_no_shared_memory"

    def close(self, deadline: float) -> None:
        super().close(deadline)
        os.close(tempfile.mkstemp(prefix=LEFT_ON_PURPOSE, dir=SHM)[0])


class GoesOnAfterClose(Broken):
    caught_by = "test_leaks.py::test_close_ends_all_writes"

    def close(self, deadline: float) -> None:
        pass


class TrustsEverybody(Broken):
    """Requires no key."""

    caught_by = "test_calls.py::test_another_key_is_refused[another]"

    @property
    def keys(self) -> tuple[bytes, ...]:
        return ()


class RefusesWithoutACode(Broken):
    """Rejects a peer with another key without the error's code."""

    caught_by = "test_calls.py::test_another_key_is_refused[none]"

    def emit(self, event: Event) -> None:
        if isinstance(event, Failed) and event.code == "CLUSTER_AUTH_FAILED":
            event = replace(event, code="PEER_LOST")
        super().emit(event)


MUTANTS = [kind for kind in list(globals().values()) if hasattr(kind, "caught_by")]
