"""The connector that every rank hosts, over one connector or several, its children. Each transfer
takes the best child that both sides have.

    sink     accept ──▶ all children; complete when no byte is missing
    source   submit ──▶ the first child both sides have ──failed, nothing moved──▶ the next one
                                                        ──failed later──▶ Failed

A child that failed is the last choice for the same sink ranks for a while. The ranks of a node
choose one by one, so a sink rank may get pieces of one transfer through several children. A child
that fails at the sink before any byte came through it does not fail the transfer: the source takes
another, or aborts.

Two locks: `_lock` guards the routes, and is never held while a child or the core is called;
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
from pdserve.kv_transfer.connectors.base.channel import as_transfer_error
from pdserve.kv_transfer.connectors.multi.routes import (
    AVOID_S,
    AnnouncedRun,
    Endpoints,
    RecentFailures,
    SinkRoute,
    SourceRoute,
    host_identity,
)
from pdserve.kv_transfer.layout import Rect

logger = logging.getLogger(__name__)


class MultiConnector(KVConnector):
    """Gets as `config` the makers of its children by name, in order of preference."""

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
        self._inbound: dict[bytes, SinkRoute] = {}
        self._outbound: dict[bytes, SourceRoute] = {}
        self._failing = RecentFailures()  # of (child, endpoint) pairs
        self._late: Counter[str] = Counter()
        self._failovers = ThreadPoolExecutor(1, "kv-failover")
        self._closing = False
        self.children = {
            name: make(replace(context, emit=partial(self._on_event, name)))
            for name, make in config.items()
        }

    @property
    def counts(self) -> Counter[str]:
        """Sums the counts of all children, and adds `late_event`: late events of children."""
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
            known = self._inbound.get(transfer.transfer_id)
            if known is None or known.transfer.epoch < transfer.epoch:
                route = SinkRoute(transfer, nbytes, set(self.children))
                self._inbound[transfer.transfer_id] = route
        for child in self.children.values():
            child.accept(transfer)

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        """Returns the hash of one child, if no other child can write into the blocks afterwards."""
        children = self.children.values()
        if not all(child.capabilities.sink_writes for child in children):
            return None
        made = (child.landed_digest(transfer_id, epoch, rect, run) for child in children)
        known = [each for each in made if each is not None]
        return known[0] if len(known) == 1 else None

    # ---- source -----------------------------------------------------------------------------

    def submit(self, transfer: SourceTransfer) -> None:
        """Raises TransferError: NO_COMMON_CONNECTOR, or BAD_FRAME for an invalid endpoint."""
        peers = {endpoint: Endpoints.decode(endpoint) for _, endpoint in transfer.pieces}
        common = self._common(peers.values())
        if not common:
            raise self._nothing_common(peers.values())
        with self._order:
            with self._lock:
                if transfer.transfer_id in self._outbound:
                    return
                untried = sorted(common, key=lambda name: self._avoids(name, peers.values()))
                route = SourceRoute(transfer, peers, untried)
                self._outbound[transfer.transfer_id] = route
            self._start(route)

    def _common(self, peers: Collection[Endpoints]) -> list[str]:
        """Returns the children that reach all peers, the best first."""
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
            f"no KV connector can be used: the prefill rank has {', '.join(self.children)}, the "
            f"decode rank, on {where} host, {', '.join(theirs)}; give both nodes one that fits, "
            "such as --kv-connector tcp",
            code="NO_COMMON_CONNECTOR",
        )

    def _start(self, route: SourceRoute) -> None:
        """Gives the runs so far to the best untried child. The caller holds `_order`."""
        with self._lock:
            name = route.active = route.untried.pop(0)
        child = self.children[name]
        child.submit(route.as_seen_by(name))
        for run in route.runs:
            run.announce(child, route.transfer.transfer_id)

    @property
    def hashes_as_it_sends(self) -> bool:
        """Returns whether every child does: any may take over."""
        return all(child.hashes_as_it_sends for child in self.children.values())

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self._announce(transfer_id, AnnouncedRun(run, block_ids, last, hashed=False))

    def ready_hashed(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self._announce(transfer_id, AnnouncedRun(run, block_ids, last, hashed=True))

    def _announce(self, transfer_id: bytes, run: AnnouncedRun) -> None:
        with self._order:
            route = self._outbound.get(transfer_id)
            if route is None:
                return
            route.runs.append(run)
            if (name := route.active) is not None:
                run.announce(self.children[name], transfer_id)

    def _filter_outbound(self, name: str, route: SourceRoute, event: Event) -> Event | None:
        moved = isinstance(event, Progress) and event.nbytes > 0
        route.moved = route.moved or moved
        if name == route.active:
            return self._failed(name, route, event) if isinstance(event, Failed) else event
        if moved and route.active is not None:  # its last event comes after its successor began
            route.active = None
            message = f"connector {name} had failed and still moved KV"
            error = TransferError(message, code="CONNECTOR_FAILED")
            return Failed.of(event.transfer_id, event.epoch, error)
        return None

    def _failed(self, name: str, route: SourceRoute, event: Failed) -> Failed | None:
        """Returns None if the next child takes over."""
        route.active = None
        self._avoid(name, route, event.message)
        final = route.moved or not event.retryable or not route.untried
        if final or self._closing:
            return event
        route.failover = self._failovers.submit(self._fail_over, name, route, event)
        return None

    def _fail_over(self, name: str, route: SourceRoute, event: Failed) -> None:
        """Continues with the next child; runs on a thread that belongs to no child."""
        transfer_id = route.transfer.transfer_id
        try:
            self.children[name].quiesce(transfer_id)  # afterwards it moves nothing more
            with self._order:
                if self._outbound.get(transfer_id) is route and not route.moved:
                    self._start(route)
                    return
        except Exception as error:
            typed = as_transfer_error(error, Blame.DECODE)
            event = Failed.of(transfer_id, event.epoch, typed)
        self.context.emit(event)

    def _avoid(self, name: str, route: SourceRoute, reason: str) -> None:
        peers = route.peers.values()
        news = self._failing.add({(name, peer.connectors[name]) for peer in peers})
        others = [each for each in self._common(peers) if not self._avoids(each, peers)]
        if news and others:
            logger.warning(
                "KV connector %s: %s; for %.0f s %s goes first to this decode rank",
                name, reason, AVOID_S, others[0],
            )  # fmt: skip

    def _avoids(self, name: str, peers: Collection[Endpoints]) -> bool:
        return any((name, peer.connectors[name]) in self._failing for peer in peers)

    # ---- both -------------------------------------------------------------------------------

    def _on_event(self, name: str, event: Event) -> None:
        """Handles an event of a child, on the child's thread."""
        with self._lock:
            inbound = self._inbound.get(event.transfer_id)
            passed = self._filter(name, event)
        if isinstance(passed, Landed) and inbound is not None:
            with inbound.gate.passage() as admitted:
                if admitted:
                    self._land(name, passed)
        elif passed is not None:
            self.context.emit(passed)

    def _land(self, name: str, landed: Landed) -> None:
        """Reports Landed once all other children are quiesced: then the core may give the blocks to
        a sequence, which writes to them."""
        for other, child in self.children.items():
            if other != name:
                child.quiesce(landed.transfer_id)
        self.context.emit(landed)

    def _filter(self, name: str, event: Event) -> Event | None:
        """Returns the event for the core; None if there is none."""
        outbound = self._outbound.get(event.transfer_id)
        inbound = self._inbound.get(event.transfer_id)
        if outbound is not None and outbound.transfer.epoch == event.epoch:
            return self._filter_outbound(name, outbound, event)
        if inbound is not None and inbound.transfer.epoch == event.epoch:
            return inbound.filter(name, event)
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
        """Forgets a transfer, so that no call reaches a child any more."""
        with self._order, self._lock:
            inbound = self._inbound.pop(transfer_id, None)
            outbound = self._outbound.pop(transfer_id, None)
        if inbound is not None:
            inbound.gate.close()
        if outbound is not None and outbound.failover is not None:
            wait([outbound.failover])

    def close(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        with self._lock:
            self._closing = True
        for child in self.children.values():
            child.close(max(0.0, end - time.monotonic()))
        self._failovers.shutdown()
