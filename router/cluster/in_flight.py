"""One request on one node: the load it is, and what its end says of the node."""

from __future__ import annotations

from types import TracebackType

from pdserve.common.core.errors import PdserveError, TransferError
from pdserve.router.cluster.registry import Node, Registry

# A node that says so, or that did not answer, gets nothing until its next heartbeat.
LOST_CODES = frozenset(
    {
        "PEER_LOST",
        "PEER_SILENT",
        "UNREACHABLE",
        "DRAINING",
        "NODE_STOPPING",
        "RANK_DIED",
        "ENGINE_STALLED",
    }
)
# Of transfers: the link between two nodes, not either of them.
LINK_CODES = frozenset({"PEER_LOST", "CONNECT_FAILED", "LEASE_EXPIRED", "NO_COMMON_CONNECTOR"})
# Another request may do well there.
SOUND_CODES = frozenset({"SEQUENCE_FAILED", "ADAPTER_NOT_LOADED"})


class InFlightLoad:
    """Use as a context manager: the request counts as the node's load inside, and how it ends is
    reported to the node's circuit breaker."""

    def __init__(
        self, registry: Registry, node: Node, prefill_tokens: int = 0, last_chance: str = ""
    ) -> None:
        """`prefill_tokens`: so many are to be prefilled. `last_chance`: the request's id, when one
        more death of a node would be its end (`Retries.last_chance`)."""
        self._registry = registry
        self._node = node
        self._prefill_tokens = prefill_tokens
        self._last_chance = last_chance
        self.first_in_line = False  # when it failed, it was the next to be prefilled

    def __enter__(self) -> InFlightLoad:
        node = self._node
        node.last_chance = self._last_chance or node.last_chance
        node.in_flight += 1
        node.breaker.begun()
        if self._prefill_tokens:
            node.prefilling[self] = self._prefill_tokens
            node.prefill_tokens += self._prefill_tokens
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, PdserveError):
            self.failed(error)
        elif error is not None:
            self._node.breaker.undecided()
        else:
            self._node.breaker.succeeded()
        self._prefilled()
        self._survived()
        self._node.in_flight -= 1

    def progressed(self) -> None:
        """The node has made a token: nothing more is to prefill, a breaker's trial is over, and
        the request does not kill this node."""
        self._prefilled()
        self._survived()
        self._node.breaker.succeeded()

    def failed(self, error: PdserveError) -> None:
        """A call to the node ended so. Only a failure that is the node's own counts: not one of
        the network between two nodes, of a sequence, or of another node. A node that was not
        there is not used until its next heartbeat."""
        node = self._node
        self.first_in_line = next(iter(node.prefilling), None) is self
        on_link = isinstance(error, TransferError) and error.code in LINK_CODES
        if error.blame.value != node.role or on_link or error.code in SOUND_CODES:
            node.breaker.undecided()
            return
        node.breaker.failed()
        node.lost = node.lost or error.code in LOST_CODES
        if error.code == "UNREACHABLE":
            self._registry.unanswered(node, error.message, refused=True)

    def _prefilled(self) -> None:
        self._node.prefill_tokens -= self._node.prefilling.pop(self, 0)

    def _survived(self) -> None:
        if self._last_chance and self._node.last_chance == self._last_chance:
            self._node.last_chance = ""
            self._registry.notify()
        self._last_chance = ""
