"""What has gone from which prefill node to which decode node, since this router knows both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

MAX_FLOWS = 1024  # pairs; those that were used last


@dataclass(slots=True)
class Flow:
    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0  # that sending took; transfers at the same time count each


class Flows:
    """By the ids of the two nodes."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str], Flow] = {}  # the one used last is the last

    def landed(self, prefill: str, decode: str, num_bytes: int) -> None:
        """The decode node has it all."""
        flow = self._of(prefill, decode)
        flow.transfers += 1
        flow.bytes += num_bytes

    def sent(self, prefill: str, decode: str, seconds: float) -> None:
        """The prefill node says how long it took, whatever that may be."""
        if isfinite(seconds) and seconds > 0:
            self._of(prefill, decode).seconds += seconds

    def items(self) -> Iterator[tuple[tuple[str, str], Flow]]:
        yield from self._flows.items()

    def _of(self, prefill: str, decode: str) -> Flow:
        pair = prefill, decode
        flow = self._flows.pop(pair, None) or Flow()
        self._flows[pair] = flow
        if len(self._flows) > MAX_FLOWS:
            del self._flows[next(iter(self._flows))]
        return flow
