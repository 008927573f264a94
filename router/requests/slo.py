"""Latencies that a request is promised, or else refused at once. Pure: plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from pdserve.common.core.errors import InvalidRequest, Overloaded

TTFT_HEADER, TPOT_HEADER = "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"  # llm-d's names
MOST_MS = 1e9
STRETCH = 2.0  # times that a prompt takes alone: the least that --slo-ttft promises


class Promise(StrEnum):
    """How far an admitted request was promised its TTFT limit."""

    LIMIT = "limit"
    EXTENDED = "extended"  # a longer time, as the prompt alone takes about as long as the limit
    NONE = "none"  # nothing was measured, the body's first prompt has the promise, or it is a trial


@dataclass(frozen=True, slots=True)
class SLO:
    """Holds what one request is promised, in seconds; None: nothing."""

    ttft: float | None = None
    itl: float | None = None
    own: bool = False  # the request itself says `ttft`: it is kept to the letter

    def overridden(self, other: SLO) -> SLO:
        """Returns these SLOs, replaced by those that the request sets."""
        if other.ttft is None and other.itl is None:
            return self
        ttft = self.ttft if other.ttft is None else other.ttft
        itl = self.itl if other.itl is None else other.itl
        return SLO(ttft, itl, other.ttft is not None)

    def deadline(self, alone: float) -> float:
        """Returns the seconds to the first token that are kept, for a prompt that takes `alone`
        seconds when nothing else is there. By --slo-ttft no prompt is too long to be served."""
        if self.ttft is None:
            return math.inf
        return self.ttft if self.own else max(self.ttft, STRETCH * alone)

    def promise(self, predicted: float, deadline: float) -> Promise:
        """Returns what a request has that is admitted with this prediction and deadline (s)."""
        if self.ttft is None or predicted > deadline:
            return Promise.NONE
        return Promise.LIMIT if deadline <= self.ttft else Promise.EXTENDED

    def outcomes(
        self, promise: Promise, first: float | None, waited: float, itl: float | None
    ) -> Iterator[tuple[str, str, Promise]]:
        """Yields (slo, outcome, promise) for each limit, whatever was promised instead. `first`:
        seconds to the first token; None: the request ended after `waited` seconds without one."""
        if self.ttft is not None:
            late = waited if waited > self.ttft else None
            yield "ttft", _outcome(late if first is None else first, self.ttft), promise
        if self.itl is not None:
            yield "itl", _outcome(itl, self.itl), Promise.LIMIT

    def ttft_error(
        self, predicted: float, deadline: float, retry_after: float | None = None
    ) -> Overloaded:
        """`retry_after`: seconds; by default the excess over the deadline."""
        after = predicted - deadline if retry_after is None else retry_after
        return Overloaded(
            f"the first token would come in {predicted:.3g} s, later than the {deadline:.3g} s of "
            "its SLO",
            code="SLO_TTFT",
            retry_after=max(1.0, after),
        )

    def itl_error(self, predicted: float, retry_after: float) -> Overloaded:
        return Overloaded(
            f"a token would come every {predicted:.3g} s, less often than every {self.itl:.3g} s, "
            "its SLO",
            code="SLO_ITL",
            retry_after=max(1.0, retry_after),
        )


NO_SLO = SLO()


def _outcome(seconds: float | None, limit: float) -> str:
    if seconds is None:
        return "unmeasured"
    return "met" if seconds <= limit else "missed"


def slo_of(header: Callable[[str], str | None]) -> SLO:
    """Returns the SLOs in a request's headers, or metadata.

    Raises:
        InvalidRequest: one is no number of milliseconds.
    """
    ttft, itl = _seconds(header, TTFT_HEADER), _seconds(header, TPOT_HEADER)
    return NO_SLO if ttft is None and itl is None else SLO(ttft, itl, ttft is not None)


def _seconds(header: Callable[[str], str | None], name: str) -> float | None:
    if (text := header(name)) is None:
        return None
    try:
        milliseconds = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= MOST_MS:
        raise InvalidRequest(
            f"{name} must be a number of milliseconds above 0 and up to {MOST_MS:.0e}", param=name
        )
    return milliseconds / 1000
