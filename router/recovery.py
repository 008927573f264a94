"""What a failed node means for a request: go on elsewhere, compute it in one place, or give up."""

from __future__ import annotations

import asyncio
import random
from time import monotonic

from pdserve.common.core.errors import Blame, NodeError, PdserveError, RequestError, TransferError
from pdserve.router.deadline import Deadline
from pdserve.router.registry import Node

TRANSFER_FAILURES = 2  # of one request, after which the decode node computes the prompt itself
WAITING = 0.125  # what a death counts for of a node that did not compute the request just then
DEATHS = frozenset({"PEER_LOST", "RANK_DIED", "ENGINE_STALLED", "NODE_FAILED"})
# A request that fails so twice, on another node where there is one, would on any.
POISONOUS = frozenset({"SEQUENCE_FAILED", "INTERNAL"})
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds; the first failure is followed by none


class Recovery:
    """One request's failures so far.

    A request goes on as long as its deadline allows, with longer and longer pauses while no token
    comes. It is *poison*, and ends, when it fails in the same way twice without getting further,
    or when more than `limit` nodes in a row have died while they computed it: it must not kill
    them all. One that gets further after it failed was not poison: the node was at fault.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tries = 0  # failures since the last token
        self._deaths: dict[str, float] = {}  # by role, since that role's last token
        # Where it failed poisonously, by code; until it gets further there, on whatever node.
        self._alike: dict[str, list[Node]] = {}
        self._transfer_failures = 0
        self.failures = 0
        self.last: PdserveError | None = None
        self.avoid: set[str] = set()  # nodes (ids) that have failed it: only if there is no other

    @property
    def local_prefill(self) -> bool:
        """Whether the KV should not travel any more."""
        return self._transfer_failures >= TRANSFER_FAILURES

    def suspect(self, role: str) -> Recovery | None:
        """Itself when one more death of a node of this role would be its end: whoever was there,
        too, until now, the next time it shall be the only such request on its node."""
        deaths = self._deaths.get(role, 0.0)
        return self if deaths and deaths + 1 > self._limit else None

    def progress(self, role: str) -> None:
        """A node of this role has made a token."""
        self._tries = 0
        self._deaths.pop(role, None)
        for code, nodes in self._alike.items():
            self._alike[code] = [node for node in nodes if node.role != role]
            if code == "SEQUENCE_FAILED":  # which counts as nobody's until then
                for node in nodes:
                    if node.role == role:
                        node.breaker.failed()

    def failed(self, error: PdserveError, node: Node, computing: bool = True) -> None:
        """Notes a node's own failure; `computing`: it was at work for this request.

        Raises:
            PdserveError: another try would not help.
        """
        self._note(error)
        self.avoid.add(node.info.node_id)
        if error.code in POISONOUS:
            alike = self._alike.setdefault(error.code, [])
            alike.append(node)
            if len(alike) > 1:
                raise _poison("it failed twice in the same way", error)
        if error.code in DEATHS:
            deaths = self._deaths.get(node.role, 0.0) + (1 if computing else WAITING)
            self._deaths[node.role] = deaths
            if deaths > self._limit:
                raise _poison(f"{node.role} nodes died in a row while they computed it", error)

    def parted(self, error: PdserveError, node: Node) -> None:
        """Notes that a hand-off failed as this node tells, which is nobody's own failure.

        Raises:
            PdserveError: another try would not help.
        """
        self._note(error)
        self.avoid.add(node.info.node_id)
        self._transfer_failures += isinstance(error, TransferError)

    def _note(self, error: PdserveError) -> None:
        # That the client left, only this router can know: a node's call was cut off.
        curable = error.blame in (Blame.PREFILL, Blame.DECODE, Blame.NETWORK)
        curable |= error.code == "CANCELLED"
        if not curable or isinstance(error, RequestError):
            raise error
        self.failures += 1
        self._tries += 1
        self.last = error

    async def pause(self, deadline: Deadline) -> None:
        """Before another try: longer after each failure, and never the same for all.

        Raises:
            PdserveError: the last failure, when there is no time left.
        """
        if self._tries < 2:
            return
        with deadline.waiting() as until:
            left = until - monotonic()
            if left <= 0 and self.last is not None:
                raise self.last
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._tries - 2, 10))
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))


def _poison(why: str, error: PdserveError) -> NodeError:
    return NodeError(
        f"{why}, so it is not tried again; the last error was {error}",
        code="POISON_REQUEST",
        blame=Blame.CLIENT,
        retryable=False,
    )
