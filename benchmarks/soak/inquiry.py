"""Asks the routers about a request without an answer: whether it makes progress, and what it waits
for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError

from benchmarks.access import Access

STANDS = 60.0  # seconds without progress after which a request without a time limit counts as hung
LATE = 30.0  # most seconds by which a router may miss a request's time limit


@dataclass(frozen=True, slots=True)
class Found:
    moves: bool  # whether a router serves it, and will end it in time if it makes no progress
    answered: bool  # whether a server answered at all
    words: str
    ended: bool = False  # its port refuses: the server has ended, and its requests with it


def inquire(fleet: Access, request_id: str, routers: Iterable[str] | None = None) -> Found:
    """Asks these routers, or all that should run."""
    words, moves, answered = [], False, False
    for router in sorted(fleet.routers.keys() & fleet.pids.keys()) if routers is None else routers:
        try:
            found = fleet.shown(f"/v1/timelines/{request_id}", router)["data"]
        except HTTPError as error:
            words.append(f"{router}: {'unknown' if error.code == 404 else error}")
            answered = True
            continue
        except OSError as error:
            words.append(f"{router}: {error}")
            continue
        answered = True
        standing = [each["standing"] for each in found if each["standing"] is not None]
        moves |= any(map(_moves, standing))
        words.append(f"{router}: {', '.join(map(_said, found))}")
    return Found(moves, answered, "; ".join(words))


def _moves(standing: dict[str, Any]) -> bool:
    """Returns whether the router keeps its promise: to end a request that makes no progress."""
    if (left := standing["gives_up_in"]) is not None:
        return bool(left > -LATE)
    return bool(standing["seconds"] < STANDS)


def _said(prompt: dict[str, Any]) -> str:
    if (standing := prompt["standing"]) is None:
        return f"{prompt['status']} ({prompt['error']})" if prompt["error"] else prompt["status"]
    return (
        f"{prompt['completion_tokens']} tokens, for {standing['seconds']:.0f} s waiting for "
        f"{standing['waits_for']}, {standing['failures']} failures ({standing['last_error']}), "
        f"node: {standing['node']}"
    )
