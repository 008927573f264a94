"""What every rank hosts: one connector or several, its children. Each transfer takes the best
child that both sides speak.

    sink     accept ──▶ all children; complete when no byte is missing, whoever brought it
    source   submit ──▶ the first child both sides speak ──failed, nothing moved──▶ the next one
                                                         ──failed later──▶ Failed

A child that failed is the last choice for the same sink ranks during a cool-down. The ranks of a
node choose one by one, so a sink rank may get pieces of one transfer through several children. One
that fails there before anything came through it is no loss: the source turns to another, or says
in its abort that it cannot.

Two locks: `_lock` guards the books, and is never held while a child or the core is called;
`_order` puts what a source tells its children into one order, and is not taken by their events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import ClassVar

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import (
    BlockRun,
    Capabilities,
    Event,
    Failed,
    KVConnector,
    Landed,
    Progress,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.intake import as_transfer_error
from pdserve.kv_transfer.connectors.multi.books import (
    COOL_DOWN_S,
    CoolDown,
    Endpoints,
    Incoming,
    Outgoing,
    host_identity,
)

logger = logging.getLogger(__name__)


class MultiConnector(KVConnector):
    """`config` has what makes each child, by name, in order of preference."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, pull=True, devices=frozenset({"cpu", "cuda"})
    )

    def __init__(
        self, context: RankContext, config: Mapping[str, Callable[[RankContext], KVConnector]]
    ) -> None:
        super().__init__(context, config)
        self.host = host_identity()
        self._lock = threading.Lock()
        self._order = threading.Lock()
        self._incoming: dict[bytes, Incoming] = {}
        self._outgoing: dict[bytes, Outgoing] = {}
        self._failing = CoolDown()  # of (child, endpoint it was to reach)
        self._late: Counter[str] = Counter()
        self._switcher = ThreadPoolExecutor(1, "kv-switch")
        self._closing = False
        self.children = {
            name: make(replace(context, emit=partial(self._on_event, name)))
            for name, make in config.items()
        }

    @property
    def counts(self) -> Counter[str]:
        """Those of all children, and `late_event`: what children said too late."""
        total = Counter(self._late)
        for child in self.children.values():
            total.update(child.counts)
        return total

    # ---- sink -------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        ends = {name: child.endpoint() for name, child in self.children.items()}
        return Endpoints(self.host, ends).encode()

    def accept(self, transfer: SinkTransfer) -> None:
        view = self.context.view
        nbytes = piece_nbytes(view.cache, view.rect, len(transfer.block_ids))
        with self._lock:
            known = self._incoming.get(transfer.transfer_id)
            if known is None or known.transfer.epoch < transfer.epoch:
                hopes = set(self.children)
                self._incoming[transfer.transfer_id] = Incoming(transfer, nbytes, hopes)
        for child in self.children.values():
            child.accept(transfer)

    def _judge_incoming(self, name: str, incoming: Incoming, event: Event) -> Event | None:
        if incoming.speaker is not None:
            return event if name == incoming.speaker else None
        if incoming.ends(name, event):
            incoming.speaker = name
            if isinstance(event, Progress):
                return Landed(event.transfer_id, event.epoch, incoming.nbytes)
        elif isinstance(event, Failed):
            return None
        return event

    # ---- source -----------------------------------------------------------------------------

    def submit(self, transfer: SourceTransfer) -> None:
        """Raises TransferError: NO_COMMON_CONNECTOR, or BAD_FRAME for a nonsensical endpoint."""
        peers = {endpoint: Endpoints.decode(endpoint) for _, endpoint in transfer.pieces}
        common = self._common(peers.values())
        if not common:
            raise self._nothing_common(peers.values())
        with self._order:
            with self._lock:
                if transfer.transfer_id in self._outgoing:
                    return
                choices = sorted(common, key=lambda name: self._avoids(name, peers.values()))
                outgoing = Outgoing(transfer, peers, choices)
                self._outgoing[transfer.transfer_id] = outgoing
            self._start(outgoing)

    def _common(self, peers: Collection[Endpoints]) -> list[str]:
        """The children that reach all peers, the best first."""
        return [
            name
            for name, child in self.children.items()
            if all(
                name in peer.connectors
                and (peer.host == self.host or not child.capabilities.same_host)
                for peer in peers
            )
        ]

    def _nothing_common(self, peers: Collection[Endpoints]) -> TransferError:
        theirs = sorted({name for peer in peers for name in peer.connectors})
        where = "this" if all(peer.host == self.host for peer in peers) else "another"
        return TransferError(
            f"no KV connector can be used: the prefill rank speaks {', '.join(self.children)}, the "
            f"decode rank, on {where} host, {', '.join(theirs)}; give both nodes one that fits, "
            "such as --kv-connector tcp",
            code="NO_COMMON_CONNECTOR",
        )

    def _start(self, outgoing: Outgoing) -> None:
        """Has the best choice left deliver what was announced so far. Called in `_order`."""
        with self._lock:
            name = outgoing.serving = outgoing.choices.pop(0)
        child = self.children[name]
        child.submit(outgoing.through(name))
        for run in outgoing.runs:
            child.ready(outgoing.transfer.transfer_id, *run)

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        with self._order:
            outgoing = self._outgoing.get(transfer_id)
            if outgoing is None:
                return
            outgoing.runs.append((run, block_ids, last))
            if (name := outgoing.serving) is not None:
                self.children[name].ready(transfer_id, run, block_ids, last)

    def _judge_outgoing(self, name: str, outgoing: Outgoing, event: Event) -> Event | None:
        moved = isinstance(event, Progress) and event.nbytes > 0
        outgoing.moved = outgoing.moved or moved
        if name == outgoing.serving:
            return self._failed(name, outgoing, event) if isinstance(event, Failed) else event
        if moved and outgoing.serving is not None:  # its last words come after its successor's
            outgoing.serving = None
            message = f"connector {name} had failed and moved KV all the same"
            return as_event(event, TransferError(message, code="CONNECTOR_FAILED"))
        return None

    def _failed(self, name: str, outgoing: Outgoing, event: Failed) -> Failed | None:
        """None: the next child will do."""
        outgoing.serving = None
        self._avoid(name, outgoing, event.message)
        final = outgoing.moved or not event.retryable or not outgoing.choices
        if final or self._closing:
            return event
        outgoing.switch = self._switcher.submit(self._switch, name, outgoing, event)
        return None

    def _switch(self, name: str, outgoing: Outgoing, event: Failed) -> None:
        """Goes on with the next child, on a thread that belongs to none."""
        transfer_id = outgoing.transfer.transfer_id
        try:
            self.children[name].quiesce(transfer_id)  # what it moves, it has moved by then
            with self._order:
                if self._outgoing.get(transfer_id) is outgoing and not outgoing.moved:
                    self._start(outgoing)
                    return
        except Exception as error:
            event = as_event(event, as_transfer_error(error, Blame.DECODE))
        self.context.emit(event)

    def _avoid(self, name: str, outgoing: Outgoing, reason: str) -> None:
        peers = outgoing.peers.values()
        news = self._failing.add({(name, peer.connectors[name]) for peer in peers})
        others = [each for each in self._common(peers) if not self._avoids(each, peers)]
        if news and others:
            logger.warning(
                "KV connector %s: %s; for %.0f s %s goes first to this decode rank",
                name, reason, COOL_DOWN_S, others[0],
            )  # fmt: skip

    def _avoids(self, name: str, peers: Collection[Endpoints]) -> bool:
        return any((name, peer.connectors[name]) in self._failing for peer in peers)

    # ---- both -------------------------------------------------------------------------------

    def _on_event(self, name: str, event: Event) -> None:
        """A child reports, on a thread of its own."""
        with self._lock:
            incoming = self._incoming.get(event.transfer_id)
            verdict = self._judge(name, event)
        if isinstance(verdict, Landed) and incoming is not None:
            with incoming.gate.passage() as admitted:
                if admitted:
                    self._land(name, verdict)
        elif verdict is not None:
            self.context.emit(verdict)

    def _land(self, name: str, landed: Landed) -> None:
        """Once the core knows, the blocks may be written by others: no child may any more."""
        for other, child in self.children.items():
            if other != name:
                child.quiesce(landed.transfer_id)
        self.context.emit(landed)

    def _judge(self, name: str, event: Event) -> Event | None:
        """What the core hears of it."""
        outgoing = self._outgoing.get(event.transfer_id)
        incoming = self._incoming.get(event.transfer_id)
        if outgoing is not None and outgoing.transfer.epoch == event.epoch:
            return self._judge_outgoing(name, outgoing, event)
        if incoming is not None and incoming.transfer.epoch == event.epoch:
            return self._judge_incoming(name, incoming, event)
        self._late["late_event"] += 1
        return None

    def quiesce(self, transfer_id: bytes) -> None:
        self._forget(transfer_id)
        for child in self.children.values():
            child.quiesce(transfer_id)

    def release(self, transfer_id: bytes) -> None:
        self._forget(transfer_id)
        for child in self.children.values():
            child.release(transfer_id)

    def _forget(self, transfer_id: bytes) -> None:
        """No child is told of the transfer from now on."""
        with self._order, self._lock:
            incoming = self._incoming.pop(transfer_id, None)
            outgoing = self._outgoing.pop(transfer_id, None)
        if incoming is not None:
            incoming.gate.close()
        if outgoing is not None and outgoing.switch is not None:
            wait([outgoing.switch])

    def close(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        with self._lock:
            self._closing = True
        for child in self.children.values():
            child.close(max(0.0, end - time.monotonic()))
        self._switcher.shutdown()


def as_event(event: Event, error: TransferError) -> Failed:
    """The failure of the transfer that `event` is about."""
    fault = (error.code, error.blame.value, error.retryable, error.message)
    return Failed(event.transfer_id, event.epoch, *fault)
