"""Timelines of running and finished requests: where is a request, where did its time go?"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from heapq import nsmallest
from itertools import count, islice
from time import monotonic, time
from typing import Any

from pdserve.common.core.errors import Cancelled, PdserveError, Unauthenticated
from pdserve.common.core.printable import printable
from pdserve.common.core.request import Timeline, new_request_id
from pdserve.common.obs.logging import request_id_var
from pdserve.common.obs.metrics import time_per_output_token
from pdserve.router.requests.generation import GenerationStats
from pdserve.router.requests.request_state import RequestState
from pdserve.router.requests.stages import ROUTER, Stages, arrival_var
from pdserve.router.requests.standing import Look, Standing, standing_of

MAX_FOUND = 100  # of the prompts of one request, or of those that share its id: the newest
MAX_MESSAGE = 500  # characters of a failure that are kept


@dataclass(frozen=True, slots=True)
class Ended:
    """The kept record of an ended request, or the record of a running one as of now. It has no
    tokens, and the error has no stack frames."""

    ids: tuple[str, ...]  # by which its client knows it
    client: str  # the client, from `APIKeys.client`
    stats: GenerationStats
    end: float  # monotonic
    error: dict[str, str] | None = None
    http_status: int | None = None  # of its error
    model: str = ""  # or its adapter; empty if it was refused before that was known
    standing: Standing | None = None  # None: it is over


class Timelines:
    """Keeps the timelines of the running requests, and of the last ended ones. Clients share the
    room: the client with the most timelines loses its oldest, so that one client with many
    requests, or many refused ones, does not drive out the others'."""

    def __init__(
        self, kept: int, look: Look = lambda node_id: {"node_id": node_id}, model: str = ""
    ) -> None:
        """`kept`: the number of ended ones to keep. `look`: returns the state of a node. `model`:
        the name of the served one."""
        self._kept = kept
        self._model = model
        self._look = look
        self._numbers = count()
        self._ended: dict[int, Ended] = {}  # the oldest first
        self._of: defaultdict[str, deque[int]] = defaultdict(deque)  # their numbers, by client
        self._served: dict[RequestState, tuple[str, ...]] = {}

    def begun(self, state: RequestState) -> None:
        header = request_id_var.get()
        self._served[state] = (state.request_id, *([header] if header else ()))

    def ended(self, state: RequestState, error: PdserveError | None = None) -> None:
        ids = self._served.pop(state)
        if self._kept:
            client, why = state.request.batch.client, _described(error)
            status = error.http_status if error is not None else None
            model = self._model_of(state)
            self._keep(Ended(ids, client, state.stats(), monotonic(), why, status, model))

    def _model_of(self, state: RequestState) -> str:
        adapter = state.request.adapter
        return self._model if adapter is None else adapter.name

    def refused(self, error: PdserveError, client: str, http_status: int | None = None) -> None:
        """Keeps a request that did not get as far as `begun`. Those without a valid key are left
        out: anyone can send them, each as another client."""
        if self._kept and not isinstance(error, Unauthenticated):
            own, header = new_request_id("refused"), request_id_var.get()
            ids = (own, header) if header else (own,)
            stats = GenerationStats(0, 0, 0, Timeline(), Stages(arrival_var.get()))
            status = http_status or error.http_status
            self._keep(Ended(ids, client, stats, monotonic(), _described(error), status))

    def find(self, name: str, client: str | None = None) -> list[dict[str, Any]]:
        """Finds the request with this id: JSON for each of its prompts; with `client` only that
        client's."""
        named = self._newest(client, lambda ids: _is_named(ids, name))
        found = islice(named, MAX_FOUND)
        return [
            _told(each) for each in sorted(found, key=lambda each: (len(each.ids[0]), each.ids))
        ]

    def recent(self, limit: int, client: str | None = None) -> list[dict[str, Any]]:
        """Returns the last `limit` requests, or a client's last, as JSON: running ones first, then
        the newest."""
        return [_summary(each) for each in islice(self._newest(client), limit)]

    def standing(self, limit: int, client: str | None = None) -> list[dict[str, Any]]:
        """Returns the running requests, as `recent` does, in the order of their last progress: a
        stalled request comes first."""
        of_client = (
            state for state in self._served if client in (None, state.request.batch.client)
        )
        oldest = nsmallest(limit, of_client, key=lambda state: state.deadline.moved)
        return [_summary(self._now(state)) for state in oldest]

    def longest_standing(self) -> float:
        """Returns the longest time, in seconds, that a running request has made no progress."""
        now = monotonic()
        return max((now - state.deadline.moved for state in self._served), default=0.0)

    def _keep(self, ended: Ended) -> None:
        number = next(self._numbers)
        self._ended[number] = ended
        self._of[ended.client].append(number)
        if len(self._ended) > self._kept:
            client = max(self._of, key=lambda name: len(self._of[name]))
            del self._ended[self._of[client].popleft()]
            if not self._of[client]:
                del self._of[client]

    def _now(self, state: RequestState) -> Ended:
        ids, client = self._served[state], state.request.batch.client
        standing = standing_of(state, self._look)
        model = self._model_of(state)
        return Ended(ids, client, state.stats(), monotonic(), model=model, standing=standing)

    def _newest(
        self, client: str | None, is_wanted: Callable[[tuple[str, ...]], bool] = lambda ids: True
    ) -> Iterator[Ended]:
        for state, ids in reversed(self._served.items()):
            if client in (None, state.request.batch.client) and is_wanted(ids):
                yield self._now(state)
        for each in reversed(self._ended.values()):
            if client in (None, each.client) and is_wanted(each.ids):
                yield each


def _is_named(ids: tuple[str, ...], name: str) -> bool:
    """Returns whether `name` is one of the ids, or the id of the whole request: its prompts have
    that id and a number."""
    return name in ids or ("-" in name and ids[0].startswith(f"{name}-"))


def _described(error: PdserveError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"code": error.code, "message": printable(error.message, MAX_MESSAGE)}


def _told(found: Ended) -> dict[str, Any]:
    return {**_state(found), "timeline": asdict(found.stats.receipt(found.end))}


def _summary(found: Ended) -> dict[str, Any]:
    stages, line = found.stats.stages, found.stats.timeline
    return {
        **_state(found),
        "created": round(time() - (monotonic() - stages.start), 3),  # seconds since 1970
        "first_token": line.first_token,
        "seconds": round(found.end - stages.start, 6),
        "nodes": sorted({span.node for span in stages.spans} - {ROUTER}),
        "path": line.path,
        "prefill_node": line.prefill_node,
        "decode_node": line.decode_node,
        "migrations": line.migrations,
    }


def _state(found: Ended) -> dict[str, Any]:
    stats = found.stats
    tpot = time_per_output_token(stats.timeline, stats.completion_tokens, stats.num_choices)
    return {
        "id": found.ids[0],
        "request_id": found.ids[-1],
        "model": found.model or None,
        "status": _status(found),
        "error": found.error,
        "http_status": found.http_status,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "tpot": tpot,  # seconds; None: no choice has a second token, or it has not finished
        "finish_reasons": stats.finish_reasons,
        "chosen": [each._asdict() for each in stats.chosen],
        "standing": None if found.standing is None else asdict(found.standing),
    }


def _status(found: Ended) -> str:
    """Returns "refused" for a request that was not placed on any node."""
    line, error = found.stats.timeline, found.error
    if error is None:
        return "running" if line.finished is None else "finished"
    placed = line.queued is not None or error["code"] == Cancelled.default_code
    return "failed" if placed else "refused"
