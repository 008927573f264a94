"""The workers of one router, seen from one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from pdserve.router.workers.link import TIMEOUT, Link

logger = logging.getLogger(__name__)

GATHER = "gather"  # a worker's call of the parent, which asks all other workers
METRICS = "metrics"  # what each exposes; the parent keeps the counters of those that have died
SERVING = "serving"  # a worker's call of the parent, once its ports are open
Ask = tuple[str, bytes]  # what, argument
_asks = msgspec.msgpack.Decoder(Ask)
_answers = msgspec.msgpack.Decoder(list[bytes])


class Siblings:
    """The other workers. A router that is one process has none."""

    def __init__(self, registry_ports: Sequence[int] = ()) -> None:
        """`registry_ports`: theirs, on this host."""
        self.registry_ports = registry_ports
        self.link = Link(self._answer)
        self._answers: dict[str, Callable[[bytes], bytes]] = {}

    def on(self, what: str, answer: Callable[[bytes], bytes]) -> None:
        """Sets this worker's answer to the others."""
        self._answers[what] = answer

    async def gather(self, what: str, argument: bytes = b"") -> list[bytes]:
        """Returns the answers of the other workers; dead or late ones are left out."""
        if not self.registry_ports:
            return []
        try:
            ask = msgspec.msgpack.encode((what, argument))
            return _answers.decode(await self.link.call(GATHER, ask, timeout=2 * TIMEOUT))
        except (OSError, TimeoutError) as error:
            logger.warning("the other workers cannot be asked for their %s: %s", what, error)
            return []

    async def _answer(self, what: str, argument: bytes) -> bytes:
        return self._answers[what](argument)


def read_ask(body: bytes) -> Ask:
    return _asks.decode(body)


def write_answers(answers: Sequence[bytes]) -> bytes:
    return msgspec.msgpack.encode(answers)
