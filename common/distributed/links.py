"""Measures at start the links between hosts that tensor-parallel ranks use for all-reduces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec
import torch

from pdserve.common.distributed.environment import DistributedEnvironment
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.parallel_state import ParallelState

_PINGS = 9
_BULK_BYTES, _BULKS = 1 << 20, 3


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between two hosts, one way."""

    hosts: tuple[str, str]  # addresses
    latency: float  # seconds for a few bytes
    bandwidth: float  # bytes/s of a large tensor

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class SpannedStage:
    """A pipeline stage whose tensor-parallel ranks are on several hosts."""

    hosts: int
    all_reduces: int  # per step
    slowest: HostLink

    def seconds(self, nbytes: int) -> float:
        """Predicts the seconds that all-reduces of `nbytes` each take per step. A host sends the
        other hosts' shares, and the sum of its own share to each of them."""
        traffic = nbytes * 2 * (self.hosts - 1) / self.hosts
        return self.all_reduces * self.slowest.seconds(traffic)


_links = msgspec.msgpack.Decoder(list[HostLink])
_stages = msgspec.msgpack.Decoder(list[SpannedStage])


def measure_stages(
    environment: DistributedEnvironment, state: ParallelState, all_reduces: int
) -> list[SpannedStage]:
    """Returns the stages that span hosts; this rank's does `all_reduces` a step. All ranks must
    call it. It does nothing in a node each of whose stages is on one host."""
    groups = state.layout["tp"]
    if not any(len({environment.hosts[rank] for rank in ranks}) > 1 for ranks in groups):
        return []
    links = _measure(environment, state.tp)
    own: list[SpannedStage] = []
    if state.tp.rank == 0 and links:
        hosts = len({environment.hosts[rank] for rank in state.tp.ranks})
        slowest = max(links, key=lambda link: link.seconds(_BULK_BYTES))
        own.append(SpannedStage(hosts, all_reduces, slowest))
    everyones = state.world.all_gather_bytes(msgspec.msgpack.encode(own))
    return [stage for body in everyones for stage in _stages.decode(body)]


def _measure(environment: DistributedEnvironment, group: GroupCoordinator) -> list[HostLink]:
    """Returns the links between all pairs of the group's hosts, on every rank. The first ranks of a
    pair of hosts measure it, pairs in the same order on all ranks, so that there is no deadlock."""
    first = {environment.hosts[rank]: i for i, rank in reversed(list(enumerate(group.ranks)))}
    own = []
    for one, other in combinations(sorted(first.values()), 2):
        if group.rank not in (one, other):
            continue
        peer = other if group.rank == one else one
        starts = group.rank == one
        pings = _round_trips(group, peer, starts, 4, _PINGS)
        bulk = min(_round_trips(group, peer, starts, _BULK_BYTES, _BULKS)) / 2
        if starts:
            ranks = group.ranks[one], group.ranks[other]
            hosts = environment.addresses[ranks[0]], environment.addresses[ranks[1]]
            own.append(_link(hosts, pings, bulk))
    bodies = group.all_gather_bytes(msgspec.msgpack.encode(own))
    return [link for body in bodies for link in _links.decode(body)]


def _link(hosts: tuple[str, str], pings: Sequence[float], bulk: float) -> HostLink:
    """Makes a link from the seconds of round trips of a few bytes (`pings`) and of the fastest
    one-way transfer of a large tensor (`bulk`). A busy host may delay all round trips: then the
    bandwidth is computed from `bulk` alone."""
    sending = bulk - min(pings) / 2
    seconds = sending if sending > 0 else bulk
    return HostLink(hosts, statistics.median(pings) / 2, _BULK_BYTES / seconds)


def _round_trips(
    group: GroupCoordinator, peer: int, starts: bool, nbytes: int, count: int
) -> list[float]:
    """Returns the seconds of each of `count` round trips; one before them opens connections."""
    tensor, times = torch.zeros(nbytes // 4, device=group.device), []
    for _ in range(count + 1):
        started = time.perf_counter()
        if starts:
            group.send(tensor, peer)
        group.recv(tensor.shape, tensor.dtype, peer)
        if not starts:
            group.send(tensor, peer)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        times.append(time.perf_counter() - started)
    return times[1:]


def describe_cost(stages: Sequence[SpannedStage], row_bytes: int, tokens: int) -> str:
    """Returns the log line at start. `row_bytes`: bytes per token in an all-reduce. `tokens`: those
    of a node's largest step."""
    slowest = max((stage.slowest for stage in stages), key=lambda link: link.seconds(_BULK_BYTES))
    one, many = (sum(stage.seconds(row_bytes * count) for stage in stages) for count in (1, tokens))
    all_reduces = sum(stage.all_reduces for stage in stages)
    return (
        f"tensor-parallel ranks are on {max(stage.hosts for stage in stages)} hosts: the slowest "
        f"link between them, {' – '.join(slowest.hosts)}, takes {1e3 * slowest.latency:.3g} ms and "
        f"carries {slowest.bandwidth / 1e6:.3g} MB/s, so {all_reduces} all-reduces add about "
        f"{1e3 * one:.3g} ms to a step of one token and {1e3 * many:.3g} ms to one of {tokens}"
    )
