"""The last events of the cluster, as this router saw them: nodes that come, change their state or
leave, refused nodes, broken links. For people who look a little later."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from heapq import merge
from typing import Any

from pdserve.common.core.printable import printable
from pdserve.router.cluster.cluster_view import ClusterView

MAX_EVENTS = 100  # the last ones
MAX_FAULTS = 20  # refusals and broken links, which strangers and nodes can make up
MAX_TEXT = 300  # characters of one, so all together have about 100 kB
RECENT = 120.0  # seconds without a refusal after which the next one is news

_TONES = {"ready": "good", "broken": "warn", "unpaired": "warn"}


@dataclass(frozen=True, slots=True)
class Event:
    at: float  # seconds since 1970
    tone: str  # good, warn, bad or quiet
    text: str
    own: bool = False  # of this router process alone: the others note different ones


class NodeEvents:
    """Compares the nodes with those of its last look."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._states: dict[str, str] = {}  # by node id
        self._faults: set[tuple[str, ...]] = set()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._fault_events: deque[Event] = deque(maxlen=MAX_FAULTS)

    def look(self, now: float) -> None:
        """Notes the differences since the last call. `now`: seconds since 1970."""
        states = self._view.states()
        for node_id, state in states.items():
            if self._states.get(node_id) != state:
                self._changed(now, node_id, state)
        for node_id in self._states.keys() - states.keys():
            self.note(now, "quiet", f"{node_id} has left")
        self._states = states
        faults = self._found_faults()
        for key, text in faults.items():
            if key not in self._faults:
                self._fault_events.append(Event(now, "bad", _short(text)))
        self._faults = set(faults)

    def note(self, now: float, tone: str, text: str, own: bool = False) -> None:
        self._events.append(Event(now, tone, _short(text), own))

    def since(self, at: float) -> list[dict[str, Any]]:
        """Returns the events after this time as JSON, the oldest first."""
        events = merge(self._fault_events, self._events, key=lambda each: each.at)
        return [asdict(each) for each in events if each.at > at]

    def _changed(self, now: float, node_id: str, state: str) -> None:
        what = state
        if state not in ("ready", "lost"):
            what = f"{state}: {self._view.reason(node_id)}"
        verb = "is" if node_id in self._states else "registered:"
        self.note(now, _TONES.get(state, "bad"), f"{node_id} {verb} {what}")

    def _found_faults(self) -> Mapping[tuple[str, ...], str]:
        registry = self._view.registry
        refused: dict[tuple[str, ...], str] = {
            (reason, port): f"a node was refused: {reason}"
            for reason, port, _, ago in registry.refusals.items()
            if ago < RECENT
        }
        broken: dict[tuple[str, ...], str] = {
            (each["prefill"], each["decode"], "link"): (
                f"{each['prefill']} hands no KV over to {each['decode']}: {each['reason']}"
            )
            for each in self._view.broken_links()
        }
        return {**refused, **broken}


def _short(text: str) -> str:
    return printable(text, MAX_TEXT)[:MAX_TEXT]  # escapes are longer than what they stand for
