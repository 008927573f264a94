"""What a failed node means for a request: go on elsewhere, compute it in one place, or give up."""

from __future__ import annotations

from common.core.errors import Blame, PdserveError, RequestError, TransferError
from router.registry import Node

TRANSFER_FAILURES = 2  # of one request, after which the decode node computes the prompt itself
WAITING = 0.125  # what a failure counts for of a node that had not begun with the request


class Recovery:
    """One request's failures so far.

    A request goes on as long as it gets anywhere: only `limit` failures in a row without a new
    token between them end it, so that a prompt that kills nodes does not kill them all. A node
    in whose queue it waited was hardly killed by it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0.0
        self._transfer_failures = 0
        self.failures = 0
        self.last: PdserveError | None = None  # the failure noted last
        self.avoid: set[str] = set()  # nodes (ids) that have failed it: only if there is no other

    @property
    def local_prefill(self) -> bool:
        """Whether the KV should not travel any more."""
        return self._transfer_failures >= TRANSFER_FAILURES

    def progress(self) -> None:
        """A token reached the client."""
        self._in_a_row = 0.0

    def failed(self, error: PdserveError, node: Node, begun: bool = True) -> None:
        """Notes a failure on a node, which may have `begun` with the request; raises `error`
        when another try would not help."""
        curable = error.blame in (Blame.PREFILL, Blame.DECODE, Blame.NETWORK)
        if not curable or isinstance(error, RequestError):
            raise error
        self.failures += 1
        self._in_a_row += 1 if begun else WAITING
        self._transfer_failures += isinstance(error, TransferError)
        self.avoid.add(node.info.node_id)
        if self._in_a_row > self._limit:
            raise error
        self.last = error
