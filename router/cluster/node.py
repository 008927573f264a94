"""One node as this router sees it, and the check whether two nodes pair."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from pdserve.common.core.errors import Blame, NodeError, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.failures import Effect, has
from pdserve.router.cluster.health import AwakeClock, CircuitBreaker
from pdserve.router.cluster.policy import NOT_MEASURED, Rates

ROLE_NAMES: dict[int, str] = {
    pb.ROLE_PREFILL: "prefill",
    pb.ROLE_DECODE: "decode",
    pb.ROLE_BOTH: "both",
}


MOST_SECONDS = 3600.0  # of a token or a step


@dataclass(slots=True, eq=False)
class Suspect:
    """A request on a node whose death would end it (`Retries.last_chance`)."""

    request_id: str
    alone: bool = True  # no other suspect may be what killed the node


@dataclass(slots=True, eq=False)
class Node:
    """One registered node and its state at this router."""

    info: pb.NodeInfo
    load: pb.NodeLoad
    last_seen: float
    breaker: CircuitBreaker
    # ---- this router's requests on it; `InFlightLoad` writes these
    in_flight: int = 0
    # Tokens that it still has to prefill for each request, in order of arrival.
    prefilling: dict[object, int] = field(default_factory=dict)
    prefill_tokens: int = 0  # their sum
    prompt_tokens: int = 0  # tokens of the prompts that it has prefilled
    cached_tokens: int = 0  # prompt tokens found in its prefix cache
    adapters: frozenset[str] = frozenset()  # digests of its LoRA adapters
    suspects: set[Suspect] = field(default_factory=set)
    # Called when the node is lost, because a stalled host breaks no connection.
    on_lost: set[Callable[[PdserveError], None]] = field(default_factory=set)
    clock: AwakeClock = field(default_factory=AwakeClock)  # the registry's
    # ---- liveness; `Registry` writes these
    lost: bool = False  # a call has failed since the last heartbeat
    silent: bool = False  # its heartbeats, or its answers, have stopped
    skew: float = 0.0  # seconds by which its clock is ahead of this host's, if too many
    unreachable: str = ""  # why it does not answer, though its heartbeats may come
    short: str = ""  # that it holds much less context than the router offers
    impossible: str = ""  # what is wrong with the numbers of its last report
    last_answer: float = 0.0  # the time of its last answer
    # ---- when and whether it is asked for its health; `probe_nodes` writes these
    look_at: float = 0.0
    probing: bool = False
    missed: int = 0  # consecutive missing answers
    # ---- the parsed rates of the last report; `rates` writes them
    told: tuple[pb.NodeLoad | None, Rates] = (None, NOT_MEASURED)
    id: str = field(init=False)  # it stays when the node describes itself anew
    # ---- `info` as JSON; `ClusterView` writes it
    described: tuple[pb.NodeInfo, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.id = self.info.node_id

    @property
    def role(self) -> str:
        return ROLE_NAMES[self.info.role]

    @property
    def num_requests(self) -> int:
        """The requests on it: this router's now, and others' sequences by its last report."""
        return self.in_flight + (0 if self.impossible else self.load.others)

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens that it still has to prefill, as `num_requests`."""
        return self.prefill_tokens + (0 if self.impossible else self.load.others_tokens)

    @property
    def prompts(self) -> Collection[int]:
        """The tokens of each prompt on it that is not computed yet, of this router."""
        return self.prefilling.values()

    @property
    def free_blocks(self) -> int:
        """The KV blocks that no sequence holds on the replica that has most, by its report."""
        return self.load.most_free_blocks

    @property
    def rates(self) -> Rates:
        """The rates of a replica, by its report; impossible values count as not measured."""
        if self.told[0] is not self.load:
            self.told = self.load, _credible(self.load.rates)
        return self.told[1]

    @property
    def replicas(self) -> int:
        """The replicas that share its load."""
        return self.info.data_parallel_size or 1

    @property
    def last_heard(self) -> float:
        """The time of its last answer. (Heartbeats may arrive although it does not answer.)"""
        return min(self.last_seen, self.last_answer) if self.unreachable else self.last_seen

    @property
    def is_up(self) -> bool:
        """Whether events allow it to get requests. `ClusterView.is_usable` also asks the
        clock and the breaker."""
        return not (self.lost or self.silent or self.unreachable) and self.load.healthy

    @property
    def clock_off(self) -> str:
        """The difference of its clock, and the fix; empty if the clock is right."""
        if not self.skew:
            return ""
        way = "ahead of" if self.skew > 0 else "behind"
        return f"its clock is {abs(self.skew):.0f} s {way} the router's: set the clocks (NTP)"

    def excused(self, error: PdserveError) -> PdserveError:
        """Returns the error of a call to it, or another one if a standstill of this router explains
        it."""
        between_nodes = isinstance(error, TransferError) and error.code != "LEASE_EXPIRED"
        explained = has(error.code, Effect.STANDSTILL) and not between_nodes
        if not explained or not self.clock.stood_still():
            return error
        return NodeError(
            f"this router stood still: {error.message}",
            code="ROUTER_STOOD_STILL",
            blame=Blame.NETWORK,
        )

    def prefilled(self, num_tokens: int, num_cached: int) -> None:
        """Notes a computed prompt: its tokens, and how many of them were cached (ignored if
        impossible)."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += min(num_tokens, num_cached)


def _credible(told: pb.Rates) -> Rates:
    found = Rates(told.prefill, told.step, told.sequence, told.transfer)
    return found if all(0 <= each < MOST_SECONDS for each in found) else NOT_MEASURED


def mismatch(prefill: Node, decode: Node) -> str:
    """Returns the differences between two nodes that do not pair."""
    ours, theirs = prefill.info.fingerprint_parts, decode.info.fingerprint_parts
    differences = [
        f"{part} {ours.get(part)} ≠ {theirs.get(part)}"
        for part in sorted({*ours, *theirs})
        if ours.get(part) != theirs.get(part)
    ]
    sends, takes = prefill.info.kv_connectors, decode.info.kv_connectors
    if set(sends).isdisjoint(takes):
        differences.append(f"no common KV connector ({', '.join(sends)} ≠ {', '.join(takes)})")
    return f"{prefill.id} and {decode.id}: {', '.join(differences)}"
