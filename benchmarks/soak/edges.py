"""Network faults: an edge is cut in one or both directions, or corrupts data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.site import Site
from benchmarks.soak.attack import Fault, NotNow
from benchmarks.soak.faults import Faults, Kind, ready

EDGES = ("router-prefill", "router-decode", "prefill-decode")
# A few cuts are longer than heartbeats, leases and retransmissions allow.
LONG_CUT = 15.0  # seconds


async def cut(faults: Faults, fault: Fault) -> None:
    """Drops packets silently, in one or both directions."""
    ways = fault.random.choice(((True, True), (True, False), (False, True)))

    def change(site: Site, source: str, target: str, spoilt: bool) -> None:
        for way, pair in zip(ways, ((source, target), (target, source)), strict=True):
            if way:
                site.drop(*pair, dropped=spoilt)

    await _on_an_edge(faults, fault, change)


def _spoil(mode: str) -> Kind:
    def change(site: Site, source: str, target: str, spoilt: bool) -> None:
        site.spoil(source, target, mode if spoilt else "pass")

    async def strike(faults: Faults, fault: Fault) -> None:
        await _on_an_edge(faults, fault, change)

    return Kind(strike, EDGES)


async def _on_an_edge(
    faults: Faults, fault: Fault, change: Callable[[Site, str, str, bool], None]
) -> None:
    """Makes an edge faulty for a while. A node that the router cannot reach becomes unhealthy; both
    ends of a KV transfer stay healthy, because the decode node computes prompts itself."""
    site, (source, role) = faults.fleet, fault.target.split("-")
    assert isinstance(site, Site)
    if source == "router":
        target = faults.take(role, fault.random)
        await _for_a_while(site, (source, target), fault.seconds, change)
        await ready(site, target)
        faults.well.add(target)
        return
    pairs = [(p, d) for p in site.names(source) for d in site.names(role)]
    if not (quiet := [pair for pair in pairs if pair not in faults.busy]):
        raise NotNow
    edge = fault.random.choice(quiet)
    faults.busy.add(edge)
    await _for_a_while(site, edge, fault.seconds, change)
    faults.busy.discard(edge)


async def _for_a_while(
    site: Site,
    edge: tuple[str, str],
    seconds: float,
    change: Callable[[Site, str, str, bool], None],
) -> None:
    await asyncio.to_thread(change, site, *edge, True)
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(change, site, *edge, False)


EDGE_KINDS = {
    "cut": Kind(cut, EDGES, LONG_CUT),
    "truncate": _spoil("truncate"),
    "flip": _spoil("flip"),
}
