"""Timelines of requests, for who asks afterwards, or while one is served: where is it, where was
its time lost?"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from itertools import chain, islice
from time import monotonic
from typing import Any

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.printable import printable
from pdserve.common.obs.logging import request_id_var
from pdserve.router.generation import GenerationStats
from pdserve.router.request_state import RequestState

MAX_FOUND = 100  # of the prompts of one request, or of those that share its id: the newest
MAX_MESSAGE = 500  # characters of a failure that are kept


@dataclass(frozen=True, slots=True)
class Ended:
    """What is kept of a request that is over: no tokens, and of its error no frames."""

    ids: tuple[str, ...]  # by which its client knows it
    client: str  # whose it is, as `APIKeys.client` says
    stats: GenerationStats
    end: float  # monotonic
    error: dict[str, str] | None


class Timelines:
    """Those of the requests that are served, and of the last ones that ended."""

    def __init__(self, kept: int) -> None:
        """`kept`: how many of those that ended."""
        self._ended: deque[Ended] = deque(maxlen=kept)
        self._served: dict[RequestState, tuple[str, ...]] = {}

    def begun(self, state: RequestState) -> None:
        header = request_id_var.get()
        self._served[state] = (state.request_id, *([header] if header else ()))

    def ended(self, state: RequestState, error: PdserveError | None = None) -> None:
        ids = self._served.pop(state)
        if self._ended.maxlen:
            self._ended.append(_ended(state, ids, monotonic(), _described(error)))

    def find(self, name: str, client: str | None = None) -> list[dict[str, Any]]:
        """Of the request that has this id, as JSON, for each of its prompts; with `client` only
        of those that it has asked."""
        now = monotonic()

        def is_found(ids: tuple[str, ...], owner: str) -> bool:
            return client in (None, owner) and _is_named(ids, name)

        over = (each for each in reversed(self._ended) if is_found(each.ids, each.client))
        served = (
            _ended(state, ids, now, None)
            for state, ids in reversed(self._served.items())
            if is_found(ids, state.request.batch.client)
        )
        found = islice(chain(served, over), MAX_FOUND)
        return [
            _told(each) for each in sorted(found, key=lambda each: (len(each.ids[0]), each.ids))
        ]


def _ended(
    state: RequestState, ids: tuple[str, ...], end: float, error: dict[str, str] | None
) -> Ended:
    return Ended(ids, state.request.batch.client, state.stats(), end, error)


def _is_named(ids: tuple[str, ...], name: str) -> bool:
    """The prompts of a request of several have its id and a number."""
    return name in ids or ("-" in name and ids[0].startswith(f"{name}-"))


def _described(error: PdserveError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"code": error.code, "message": printable(error.message, MAX_MESSAGE)}


def _told(found: Ended) -> dict[str, Any]:
    running = found.stats.timeline.finished is None and found.error is None
    return {
        "id": found.ids[0],
        "request_id": found.ids[-1],
        "status": "failed" if found.error else "running" if running else "finished",
        "error": found.error,
        "prompt_tokens": found.stats.prompt_tokens,
        "completion_tokens": found.stats.completion_tokens,
        "timeline": asdict(found.stats.receipt(found.end)),
    }
