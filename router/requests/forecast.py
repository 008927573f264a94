"""Predictions of TTFT and ITL from recent measurements. Pure: plain numbers, no clock."""

from __future__ import annotations

from pdserve.router.requests.fair_share import Ahead

LEAST = 5  # samples before anything is predicted
FADING = 0.98  # weight of a sample after each later one
FORGETTING = 0.999  # weight of the largest x after each later sample
BEYOND = 2.0  # x up to this many times the largest recent one is predicted
MOST_DOUBT = 0.25  # more would refuse prompts needlessly in traces of very unequal prompts
IN_HAND = 2  # prompts per replica at least: one running, one queued


class Line:
    """The straight line `fixed + slope * x` through the latest samples, least squares; neither is
    ever less than 0."""

    def __init__(self) -> None:
        self.fixed = self.slope = 0.0
        self.doubt = 0.0  # mean relative error of the latest samples
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._count = 0
        self._largest = 0.0

    @property
    def usual(self) -> float:
        """The mean of the latest x."""
        return self._x / self._n if self._n else 0.0

    @property
    def known(self) -> bool:
        return self._count >= LEAST

    def knows(self, x: float) -> bool:
        """Returns whether there are recent samples of about this size."""
        return self.known and x <= BEYOND * self._largest

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x

    def add(self, x: float, y: float) -> None:
        if self.known and (predicted := self.at(x)):
            self.doubt += (min(MOST_DOUBT, abs(y - predicted) / predicted) - self.doubt) / 8
        self._count += 1
        self._largest = max(x, self._largest * FORGETTING)
        self._n = self._n * FADING + 1
        self._x = self._x * FADING + x
        self._y = self._y * FADING + y
        self._xx = self._xx * FADING + x * x
        self._xy = self._xy * FADING + x * y
        self._fit()

    def _fit(self) -> None:
        x, y = self.usual, self._y / self._n
        variance = self._xx / self._n - x * x
        if variance > 0.01 * x * x:  # else all x are alike and determine no slope
            self.slope = max(0.0, (self._xy / self._n - x * y) / variance)
            self.fixed = y - self.slope * x
        if variance <= 0.01 * x * x or self.fixed < 0:
            self.slope = self._xy / self._xx if self._xx else 0.0
            self.fixed = 0.0 if self._xx else y


class Backlog:
    """The prompts queued on nodes, and the time for one more.

    Nodes give half of a step to shorter prompts (`common/engine/fair_queue.share_budget`), so a
    queued prompt delays another one by at most that one's tokens.
    """

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds`: limit of the work queued on nodes; None: no limit."""
        self.line = Line()  # tokens → seconds
        self.replicas = 1  # replicas that compute prompts
        self.others = 0  # queued tokens of other routers
        self._seconds = seconds
        self._in_hand: dict[object, int] = {}
        self._tokens = 0

    def __bool__(self) -> bool:
        return bool(self._in_hand or self.others)

    def begin(self, key: object, tokens: int) -> None:
        self._in_hand[key] = tokens
        self._tokens += tokens

    def end(self, key: object) -> bool:
        """Returns whether the prompt was queued on a node."""
        tokens = self._in_hand.pop(key, None)
        self._tokens -= tokens or 0
        return tokens is not None

    @property
    def measures(self) -> bool:
        """Whether a prompt of this router is on a node, and will be measured."""
        return bool(self._in_hand)

    def measured(self, work: float, seconds: float, trial: bool) -> None:
        """Adds a prompt's measurement. A trial that took less than half of what was predicted shows
        that all earlier ones are outdated."""
        if trial and self.line.knows(work) and seconds < self.line.at(work) / 2:
            self.line = Line()
        self.line.add(work, seconds)

    def has_room(self) -> bool:
        """Returns whether the nodes should get another prompt now."""
        if self._seconds is None or len(self._in_hand) < IN_HAND * self.replicas:
            return True
        work = (self._tokens + self.others) / self.replicas
        return self.line.known and self.line.slope * work < self._seconds

    def work(self, tokens: int, ahead: int = 0) -> float:
        """Returns the tokens computed until a prompt's first token; `ahead` of them belong to
        prompts in the router's queue."""
        before = sum(min(each, tokens) for each in self._in_hand.values())
        return tokens + (before + self.others + ahead) / self.replicas


class Turnover:
    """Predicts when places come free."""

    def __init__(self) -> None:
        self._seconds = 0.0  # mean time that recent requests held a slot

    def ended(self, seconds: float) -> None:
        self._seconds += (seconds - self._seconds) / 16 if self._seconds else seconds

    def wait(self, places: float, held: int) -> float:
        """Returns the seconds until `places` of the `held` ones are free."""
        return places * self._seconds / held if places > 0 and held else 0.0


class Forecast:
    """All predictions for one router's requests."""

    def __init__(self, prefill_backlog: float | None = None) -> None:
        """`prefill_backlog`: the `seconds` of `Backlog`."""
        self.backlog = Backlog(prefill_backlog)
        self.turnover = Turnover()
        self.itl = Line()  # choices of a decode replica → seconds between tokens
        self.decode_replicas = 1

    def ttft(self, tokens: int, ahead: Ahead, lacking: int, held: int) -> float | None:
        """Returns the predicted TTFT in seconds of a prompt behind the `ahead` ones in the queue,
        when together they lack `places` places. None: there is no measurement of such prompts."""
        line = self.backlog.line
        work = self.backlog.work(tokens, ahead.tokens)
        if not line.known:
            return None
        queued = self.turnover.wait(lacking, held) + line.at(tokens)
        return max(line.at(work), queued)

    def most_choices(self, itl: float) -> float:
        """Returns how many choices the decode nodes may serve within the ITL limit; without a
        measurement against more, no limit applies."""
        if not self.itl.known or not self.itl.slope:
            return float("inf")
        most = (itl - self.itl.fixed) / self.itl.slope
        return max(1.0, most) * self.decode_replicas

    def itl_among(self, choices: int) -> float | None:
        """Returns the predicted ITL in seconds when the nodes serve `choices` choices."""
        crowd = choices / self.decode_replicas
        return self.itl.at(crowd) if self.itl.knows(crowd) else None
