"""Placement by seconds: the time that a request on a node costs all requests, by the nodes'
rates."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.cluster.policy import (
    NOT_MEASURED,
    FadingSums,
    NodeSet,
    NodeState,
    Policy,
    PolicyRequest,
    Rates,
    requests_on,
    some,
)


class Cost(Policy):
    """Takes the node where the request adds the fewest seconds to all requests together:

        before + own + prompts × own + own × rate × (queued + own) / (1 - busy)  to compute it
      + transfer + ANSWER × (step + added × (2 × others + 1))                    to answer it

    - `own`: seconds for the tokens that the node has not cached.
    - `before`: seconds of the prompts queued on the node, each counted with at most `own`, because
      a node gives half of each step to shorter prompts.
    - `prompts × own`: each of these prompts shares steps with the new one, and waits for it.
    - `own × rate × (queued + own) / (1 - busy)`: the delay of prompts that arrive before the node
      is idle again (an M/G/1 queue). `rate` is arrivals per second, `busy` the share of time in
      use, `queued` the seconds of all queued prompts.
    - `added`: seconds that one more sequence adds to a step; `others`: requests on the node.

    The `rate` term makes recomputation more expensive the busier nodes are, spreads new prompts
    evenly where no node ever queues, and brings a hot prefix to a second node while the first one
    has room. There are no weights: nodes measure the seconds (`NodeRates`), and placements give
    `rate` and `busy`.

    A session's last prompt counts as cached on its node, even before the node has reported it.
    """

    uses_prefixes = True

    FADING = 60.0  # seconds in which given work fades to 1/e
    MOST_BUSY = 0.95
    ANSWER = 128  # tokens of an answer, where it has to be compared with a transfer

    def __init__(self) -> None:
        self._given = FadingSums(self.FADING)  # seconds of prefill
        self._sessions = Sessions()
        self._rates = NodeRates()
        self._last = ""
        self._seconds: list[float] = []  # the costs of the last choice

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        found = some(request, nodes, self._last)
        if not found:
            return None
        seconds = self._seconds = self._costs(request, found)
        least = min(seconds)
        equal = [node for node, each in zip(found, seconds, strict=True) if each == least]
        if len(equal) == 1:
            return equal[0]
        return min(equal, key=lambda node: (requests_on(node), -node.free_blocks, node.id))

    def why(self, request: PolicyRequest, node: NodeState) -> str:
        cached = request.cached.get(node, 0)
        least, *others = sorted(self._seconds)  # faster than a heap: they are few
        than = f"the next best node {others[0]:.3f} s" if others else "no other node fits"
        return (
            f"adds {least:.3f} s to all requests, {than}; {cached} of {request.num_tokens} tokens "
            "cached"
        )

    def _costs(self, request: PolicyRequest, found: Sequence[NodeState]) -> list[float]:
        """Returns the seconds that the request adds on each node."""
        missing, rates = self._sessions.missing(request, found), self._rates.of(found)
        where = list(zip(found, missing, rates, strict=True))
        if request.role == "decode":
            return [
                self._decode(node, each) + tokens * each.transfer for node, tokens, each in where
            ]
        now = request.now
        seconds = [self._prefill(now, node, tokens, each.prefill) for node, tokens, each in where]
        if request.role == "prefill":
            return seconds
        return [
            prefill + self._decode(node, each)
            for prefill, (node, _, each) in zip(seconds, where, strict=True)
        ]

    def _prefill(self, now: float, node: NodeState, missing: int, per_token: float) -> float:
        count, given = self._given.at(node, now)
        own, replicas, in_hand = missing * per_token, node.replicas, node.prompts
        queued, before, ours = node.num_prefill_tokens, 0.0, 0
        for each in in_hand:
            ours += each
            before += each if each < missing else missing
        prompts = float(len(in_hand))
        if (others := queued - ours) > 0:  # of other routers, about as long as ours
            usual = max(1.0, given / count / per_token) if count else missing
            before += min(others, missing * others / usual)
            prompts += others / usual
        waits = (before * per_token + prompts * own) / replicas
        busy = min(self.MOST_BUSY, given / self.FADING / replicas)
        rate = count / self.FADING / replicas
        later = own * rate * (queued * per_token / replicas + own) / (1 - busy)
        return waits + own + later

    def _decode(self, node: NodeState, rates: Rates) -> float:
        others = requests_on(node)
        added = max(rates.sequence, rates.step / 64)
        return self.ANSWER * (rates.step + added * (2 * others + 1))

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        if request.role != "decode":
            (missing,) = self._sessions.missing(request, (node,))
            self._given.add(node, missing * self._rates.one(node).prefill, request.now)
        self._sessions.placed(request, node)
        self._rates.placed(node)
        self._last = node.id


class NodeRates:
    """The nodes' rates, bounded by a plausible range. The median stands in for a node that has not
    measured, and for one without prompts for so long that its measurement may be outdated."""

    ALIKE = 1.5  # rates that differ by less than this factor are of equal nodes
    MOST = 16.0  # times as fast or slow as the usual node
    LONG = 1000  # prompts that went to others since a node had one
    UNKNOWN = Rates(1e-4, 0.02, 1e-4, 1e-6)  # until some node has measured
    MOST_NODES = 4096

    def __init__(self) -> None:
        self._reported: list[Rates] = []  # rates of the last `of`, as reported
        self._usual = self.UNKNOWN  # the (lower) median of each rate over those that measured it
        self._rates: list[Rates] = []  # the credible rates of `_reported`
        self._turn = 0
        self._turns: dict[str, int] = {}  # by node, of its last prompt

    def of(self, nodes: Sequence[NodeState]) -> list[Rates]:
        """Returns the credible rates of each node, compared with the median of these nodes."""
        reported = [node.rates for node in nodes]
        if reported != self._reported:  # else no node has reported since
            self._reported, self._usual = reported, self._usual_of(reported)
            self._rates = list(map(self._credible, reported))
        turn, turns, since = self._turn, self._turns, self._turn - self.LONG
        return [
            self._usual if turns.setdefault(node.id, turn) < since else rates
            for node, rates in zip(nodes, self._rates, strict=True)
        ]

    def one(self, node: NodeState) -> Rates:
        """Returns the credible rates of one node, compared with the median of the last `of`."""
        if self._turns.get(node.id, self._turn) < self._turn - self.LONG:
            return self._usual
        return self._credible(node.rates)

    def _usual_of(self, told: Sequence[Rates]) -> Rates:
        measured = [sorted(filter(None, column)) for column in zip(*told, strict=True)]
        medians = [each[(len(each) - 1) // 2] if each else 0.0 for each in measured]
        return Rates(*map(_measured_or, medians or NOT_MEASURED, self.UNKNOWN))

    def _credible(self, told: Rates) -> Rates:
        return Rates(*map(self._bounded, told, self._usual))

    def _bounded(self, own: float, usual: float) -> float:
        if not own or usual / self.ALIKE < own < usual * self.ALIKE:
            return usual
        return min(max(own, usual / self.MOST), usual * self.MOST)

    def placed(self, node: NodeState) -> None:
        self._turn += 1
        self._turns.pop(node.id, None)
        self._turns[node.id] = self._turn
        while len(self._turns) > self.MOST_NODES:
            del self._turns[next(iter(self._turns))]


def _measured_or(rate: float, other: float) -> float:
    return rate or other


class Sessions:
    """Remembers which node had a session's last prompt, and where that prompt ended. Prompts that
    do not go on from there are no conversation, whatever their client calls them: such a session
    would herd on one node."""

    MOST = 65_536  # sessions, the latest ones

    def __init__(self) -> None:
        # By session: node, tokens, full blocks, hash of the last one.
        self._last: dict[str, tuple[str, int, int, int]] = {}

    def missing(self, request: PolicyRequest, nodes: Sequence[NodeState]) -> list[int]:
        """Returns how many of its tokens each node does not have, or get from the session."""
        tokens, cached = request.num_tokens, request.cached
        missing = [max(1, tokens - cached.get(node, 0)) for node in nodes]
        where, known, count, end = self._last.get(request.session, ("", 0, 0, 0))
        if not where:
            return missing
        blocks = request.blocks()
        if count > len(blocks) or (count and blocks[count - 1] != end):
            return missing
        return [
            max(1, min(each, tokens - known)) if node.id == where else each
            for each, node in zip(missing, nodes, strict=True)
        ]

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        if not request.session:
            return
        blocks = request.blocks()
        end = blocks[len(blocks) - 1] if len(blocks) else 0
        self._last.pop(request.session, None)
        self._last[request.session] = node.id, request.num_tokens, len(blocks), end
        if len(self._last) > self.MOST:
            del self._last[next(iter(self._last))]
