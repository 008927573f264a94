"""Accounts for one request on one node: its load, and the consequences of its end for the node."""

from __future__ import annotations

from types import TracebackType

from pdserve.common.core.errors import PdserveError, TransferError
from pdserve.router.cluster.failures import Effect, has
from pdserve.router.cluster.node import Node, Suspect
from pdserve.router.cluster.registry import Registry


class InFlightLoad:
    """Use as a context manager: the request counts as the node's load inside, and how it ends is
    reported to the node's circuit breaker."""

    def __init__(
        self, registry: Registry, node: Node, prefill_tokens: int = 0, last_chance: str = ""
    ) -> None:
        """`prefill_tokens`: tokens to prefill. `last_chance`: the request's id, if one more death
        of a node would end it (`Retries.last_chance`)."""
        self._registry = registry
        self._node = node
        self._prefill_tokens = prefill_tokens
        self._suspect = Suspect(last_chance) if last_chance else None
        self._has_progressed = False
        self._trial = False  # of a node whose breaker is open
        self.first_in_line = False  # it was the next to be prefilled when it failed

    def __enter__(self) -> InFlightLoad:
        node = self._node
        if self._suspect is not None:
            node.suspects.add(self._suspect)
            for each in node.suspects if len(node.suspects) > 1 else ():
                each.alone = False
        node.in_flight += 1
        self._trial = node.breaker.begun()
        if self._prefill_tokens:
            node.prefilling[self] = self._prefill_tokens
            node.prefill_tokens += self._prefill_tokens
        self._registry.kinds.changed(node)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, PdserveError):
            self.failed(error)
        elif error is not None:
            self._node.breaker.undecided(self._trial)
        else:
            self._node.breaker.succeeded()
        self._prefilled()
        self._survived()
        self._node.in_flight -= 1
        self._registry.kinds.changed(self._node)

    @property
    def alone(self) -> bool:
        """Whether the node had no other request that one more death would end."""
        return self._suspect is None or self._suspect.alone

    def progressed(self) -> None:
        """Notes a token of the node: the prompt is prefilled, a breaker's trial has succeeded, and
        the request does not kill this node."""
        if not self._has_progressed:
            self._has_progressed = True
            self._prefilled()
            self._survived()
            if len(self._node.suspects) == 1:
                next(iter(self._node.suspects)).alone = True
        self._node.breaker.succeeded()

    def failed(self, error: PdserveError) -> None:
        """Notes the error of a call to the node. Only the node's own failures count against it: not
        those of the network between two nodes, of a sequence, or of another node. A node that did
        not answer is not used until its next heartbeat."""
        node = self._node
        self.first_in_line = next(iter(node.prefilling), None) is self
        on_link = isinstance(error, TransferError) and has(error.code, Effect.LINK)
        if error.blame.value != node.role or on_link or has(error.code, Effect.SOUND):
            node.breaker.undecided(self._trial)
            return
        node.breaker.failed()
        node.lost = node.lost or has(error.code, Effect.LOST)
        self._registry.kinds.changed(node)
        if error.code == "UNREACHABLE":
            self._registry.unanswered(node, error.message, refused=True)

    def _prefilled(self) -> None:
        if tokens := self._node.prefilling.pop(self, 0):
            self._node.prefill_tokens -= tokens
            self._registry.kinds.changed(self._node)

    def _survived(self) -> None:
        if self._suspect is not None and self._suspect in self._node.suspects:
            self._node.suspects.remove(self._suspect)
            self._registry.notify()
