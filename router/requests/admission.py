"""Bounds the requests served at once and the waiting ones, and orders the queue.

enter ─▶ refused: its SLO cannot be kept, or the queue is full
  │      waits: `FairShare` decides the order, `Backlog` whether nodes should get more
  ├────▶ refused: at its turn its SLO cannot be kept any more
  ▼
slot ─▶ first_token ─▶ leave
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from pdserve.common.core.errors import Overloaded, Unavailable
from pdserve.router.requests.fair_share import Ahead, FairShare, Waiter, resolve
from pdserve.router.requests.forecast import Forecast
from pdserve.router.requests.queue_bounds import Batch, QueueBound
from pdserve.router.requests.slo import NO_SLO, SLO, Promise
from pdserve.router.requests.virtual_time import VirtualTime

MIN_PATIENCE = 0.1  # shortest time in seconds between two checks of a body's progress
RESERVED = 1 / 8  # of the slots, for clients that hold none
MAX_WAITING_TOKENS = 2**22  # prompt tokens in the queue; each takes four bytes
PREDICTED_FOR = 60.0  # seconds after the last measurement in which a newcomer's TTFT is predicted
OUTDATED = 10.0  # seconds after which a measurement refuses no prompt that could run at once


@dataclass(slots=True, eq=False, kw_only=True)
class Ask(Waiter):
    """One prompt, which waits for a slot and then holds it."""

    batch: Batch = field(default_factory=Batch)
    prompt_tokens: int = 0  # all; `tokens` has the uncached ones
    slo: SLO = NO_SLO
    arrived: float = 0.0
    predicted: float | None = None  # TTFT in seconds, predicted on arrival
    deadline: float = math.inf  # promised TTFT in seconds
    promise: Promise = Promise.NONE
    granted: float | None = None
    work: float = 0.0  # tokens to compute before its first one, when granted
    ttft: float | None = None  # measured TTFT in seconds
    crowd: float = 0.0  # choices per decode replica at its first token
    waits: bool = False
    admission: Admission | None = None  # whose queue it has entered
    # ---- the holder of the slot sets these before it leaves
    generated: int = 0  # tokens, of all its choices
    itl: float | None = None  # mean seconds between tokens

    def last_word(self) -> Overloaded | None:
        assert self.admission is not None
        return self.admission.last_word(self)

    def decided(self, error: Overloaded | None) -> None:
        assert self.admission is not None
        self.admission.decided(self, error)
        self.tell(error)


class Admission:
    """A bounded queue in front of a bounded number of slots, fair between clients:

    - A client holds at most its share of the slots and of the queue.
    - The next free slot goes to the client with the fewest served tokens for its weight (prompt
      tokens, and answer tokens once the answer has ended). The last slots are for clients that hold
      none.
    - When the queue is full, the client with the most queued requests loses one to a client with
      fewer.

    Pure except for `slot`, which waits on the event loop: a simulation calls `enter`, `first_token`
    and `leave` with its own clock.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        timeout: float,
        max_client_share: float = 1.0,
        weights: Mapping[str, float] | None = None,
        slo: SLO = NO_SLO,
        prefill_backlog: float | None = None,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        """`weights`: by client, as `VirtualTime` has them. `prefill_backlog`: seconds, as `Backlog`
        has them. `clock`: seconds."""
        self._time = VirtualTime(weights)
        self.forecast = Forecast(prefill_backlog)
        self._slots = FairShare(
            max_running,
            max_client_share,
            overdraw=True,
            reserved=RESERVED,
            time=self._time,
            has_room=self.forecast.backlog.has_room,
        )
        self._slo = slo
        self._clock = clock
        self._running = 0
        self._elsewhere = 0  # choices, through other routers
        self._timeout = timeout
        self._trial: Ask | None = None  # a prompt of a size without measurements, or outdated ones
        self._measured = -math.inf  # when the last prompt was measured
        self._waiting: defaultdict[str, dict[Batch, None]] = defaultdict(dict)
        share = max_client_share
        self._prompts = QueueBound("requests", max_waiting, share, lambda each: each.waiting)
        self._tokens = QueueBound(
            "prompt tokens", MAX_WAITING_TOKENS, share, lambda each: each.waiting_tokens
        )

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return self._prompts.counts.total()

    @property
    def places(self) -> int:
        """The number of choices that may run through this router now."""
        return self._slots.available

    def placed_by_others(self, choices: int, routers: int) -> None:
        """Sets the number of choices that other routers of the same nodes serve: their slots are
        taken, except for an equal part of all slots that each router keeps."""
        capacity = self._slots.capacity
        self._elsewhere = choices
        self._slots.held_elsewhere(min(choices, capacity - math.ceil(capacity / routers)))
        self._bound()

    def cluster(self, prefill_replicas: int, decode_replicas: int, others_tokens: int) -> None:
        """Sets the numbers of replicas that compute prompts and answers, and the prompt tokens of
        other routers that these replicas still have to compute."""
        self.forecast.backlog.replicas = max(1, prefill_replicas)
        self.forecast.backlog.others = others_tokens
        self.forecast.decode_replicas = max(1, decode_replicas)
        self._slots.grant()

    def newcomer_ttft(self) -> float | None:
        """Returns the predicted TTFT in seconds of a client's first prompt that came now and was as
        long as recent ones; None: there is no measurement, or none of the last PREDICTED_FOR
        seconds."""
        if self.measured_ago() > PREDICTED_FOR:
            return None
        ask = Ask(tokens=max(1, round(self.forecast.backlog.line.usual)))
        return self._predict(ask)

    def measured_ago(self) -> float:
        """Returns the seconds since the last prompt was measured."""
        return self._clock() - self._measured

    # ---- one prompt ----------------------------------------------------------------------------

    def check_room(self, client: str, tokens: int = 1) -> None:
        """Raises Overloaded if the queue has no room for a body of the client with so many prompt
        tokens. Costs little and changes nothing, so it comes before anything is made of the
        body; `enter` decides."""
        if not self._slots.has_room(client):
            for line, new in ((self._prompts, 1), (self._tokens, tokens)):
                line.check_own(client, new)
                line.giving_way(client, new, self._waiting, [])

    def enter(self, ask: Ask) -> None:
        """Queues the request; `ask.tell` is called when it gets its slot, possibly at once.
        However it ends, call `leave`.

        Raises:
            Overloaded: its SLO cannot be kept, or the queue, or the client's share of it, is full.
                `tell` also gets this error later if the queue becomes full and the client has the
                most requests in it. A batch meets this before its first prompt has a slot: a body
                is admitted as a whole.
        """
        batch = ask.batch
        ask.amount = min(ask.amount, self._slots.client_limit)
        ask.arrived = self._clock()
        ask.slo = self._slo.overridden(ask.slo)
        if batch.refused:
            raise self._prompts.refusal()
        if not batch.admitted:
            self._promise(ask)
            self._make_room(batch, ask.amount)
            batch.admitted = True
        ask.admission, ask.group, ask.waits = self, batch, True
        self._count(batch, 1, ask.prompt_tokens)
        self._slots.enter(batch.client, ask)

    def first_token(self, ask: Ask, learn: bool = True) -> None:
        """Notes the arrival of the first token. `learn`: its TTFT is a valid sample."""
        if ask.granted is None or not self.forecast.backlog.end(ask):
            return
        now = self._clock()
        ask.ttft = now - ask.arrived
        if learn:
            self.forecast.backlog.measured(ask.work, now - ask.granted, self._trial is ask)
            self._measured = now
        ask.crowd = self._crowd()
        if self._trial is ask:
            self._trial = None
        self._slots.grant()

    def leave(self, ask: Ask) -> None:
        """Removes the prompt from the queue, or releases its slot."""
        batch, client = ask.batch, ask.batch.client
        if ask.waits:
            ask.waits = False
            self._count(batch, -1, -ask.prompt_tokens)
            self._slots.leave(client, ask)
        if self._trial is ask:
            self._trial = None
        if ask.granted is None:
            return
        now, forecast = self._clock(), self.forecast
        if ask.itl is not None and ask.crowd:
            forecast.itl.add((ask.crowd + self._crowd()) / 2, ask.itl)
            self._bound()
        forecast.turnover.ended(now - ask.granted)
        forecast.backlog.end(ask)
        ask.granted = None
        self._running -= 1
        batch.running -= 1
        batch.left = now
        self._time.charge(client, ask.generated)
        self._slots.release(client, ask.amount)

    @asynccontextmanager
    async def slot(self, ask: Ask) -> AsyncIterator[Ask]:
        """Holds a slot for each choice (`ask.amount`) of one prompt of a batch, as far as the
        client's share goes: choices are what nodes compute.

        Raises:
            Overloaded: as `enter`.
            Unavailable: no prompt of the batch has had a slot for as long as one may wait.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ask.tell = partial(resolve, future)
        try:
            self.enter(ask)
            await self._wait(ask, future)
            yield ask
        finally:
            self.leave(ask)

    # ---- promises ------------------------------------------------------------------------------

    def _promise(self, ask: Ask) -> None:
        """Raises Overloaded if the SLO could not be kept."""
        ask.predicted = predicted = self._predict(ask)
        if predicted is None or ask.slo.ttft is None:
            return
        line = self.forecast.backlog.line
        ask.deadline = ask.slo.deadline(line.at(ask.tokens))
        idle = not (self.waiting or self.forecast.backlog or ask.slo.own)
        late = predicted * (1 + line.doubt)
        ask.promise = ask.slo.promise(late, ask.deadline)
        if late > ask.deadline and not idle and not self._may_try(ask):
            raise ask.slo.ttft_error(late, ask.deadline, self._until_outdated(ask))

    def _predict(self, ask: Ask) -> float | None:
        ahead = self._slots.ahead(ask.batch.client, ask) if self.waiting else Ahead()
        lacking = ahead.amount + ask.amount - (self._slots.available - self._slots.held)
        return self.forecast.ttft(ask.tokens, ahead, lacking, self._slots.held)

    def last_word(self, ask: Ask) -> Overloaded | None:
        """Returns the error if the SLO cannot be kept any more at the prompt's turn."""
        if ask.batch.begun:
            return None
        line, slo = self.forecast.backlog.line, ask.slo
        if ask.deadline < math.inf and ask is not self._trial:
            waited = self._clock() - ask.arrived
            predicted = waited + line.at(self.forecast.backlog.work(ask.tokens))
            if predicted > ask.deadline and waited:
                return slo.ttft_error(predicted, ask.deadline)
        held = self._slots.held
        if slo.itl is not None and held:
            predicted_itl = self.forecast.itl_among(held + ask.amount + self._elsewhere)
            if predicted_itl is not None and predicted_itl > slo.itl:
                excess = held + ask.amount - self.forecast.most_choices(slo.itl)
                return slo.itl_error(predicted_itl, self.forecast.turnover.wait(excess, held))
        return None

    def _may_try(self, ask: Ask) -> bool:
        """Returns whether the prompt may run as a sample, one at a time: of its size, or because
        refused prompts measure nothing, so that a slow time would never be over."""
        if self._trial is None:
            known = self.forecast.backlog.line.knows(ask.tokens)
            if not known or self._until_outdated(ask) == 0:
                self._trial = ask
        return self._trial is ask

    def _until_outdated(self, ask: Ask) -> float | None:
        """Returns the seconds until measurements refuse the prompt no more; None: the prompts ahead
        of it decide."""
        busy = self.waiting or self.forecast.backlog.measures or self._trial is not None
        if busy or not self._slots.has_room(ask.batch.client, ask.amount):
            return None
        return max(0.0, self._measured + OUTDATED - self._clock())

    def _bound(self) -> None:
        """Serves no more choices at once than --slo-itl allows."""
        if self._slo.itl is not None:
            most = self.forecast.most_choices(self._slo.itl)
            self._slots.bound(max(1.0, most - self._elsewhere))

    def _crowd(self) -> float:
        return (self._slots.held + self._elsewhere) / self.forecast.decode_replicas

    # ---- the queue -----------------------------------------------------------------------------

    def decided(self, ask: Ask, error: Overloaded | None) -> None:
        """Notes that the prompt gets its slot, or is refused."""
        ask.waits = False
        self._count(ask.batch, -1, -ask.prompt_tokens)
        if error is None:
            ask.granted = self._clock()
            ask.work = self.forecast.backlog.work(ask.tokens)
            self.forecast.backlog.begin(ask, ask.tokens)
            ask.batch.running += 1
            self._running += 1

    def _make_room(self, batch: Batch, choices: int) -> None:
        client, gone = batch.client, list[Batch]()
        if self._slots.has_room(client, choices):
            return
        lines = ((self._prompts, 1), (self._tokens, batch.num_tokens))
        for line, new in lines:
            line.check_own(client, new)
        refusal = self._prompts.refusal()
        for line, new in lines:
            if found := line.giving_way(client, new, self._waiting, gone):
                refusal = line.refusal()
                gone += found
        for each in gone:
            self._refuse(each, refusal)

    def _refuse(self, batch: Batch, refusal: Overloaded) -> None:
        batch.refused = True
        error = partial(Overloaded, refusal.message, retry_after=refusal.retry_after)
        self._slots.refuse(batch.client, batch, error)

    def _count(self, batch: Batch, prompts: int, tokens: int) -> None:
        """Adds to the batch's and the client's waiting prompts and tokens."""
        client = batch.client
        batch.waiting += prompts
        batch.waiting_tokens += tokens
        for line, new in ((self._prompts, prompts), (self._tokens, tokens)):
            line.counts[client] += new
            if not line.counts[client]:
                del line.counts[client]
        if batch.waiting:
            self._waiting[client].setdefault(batch)
        else:
            self._waiting[client].pop(batch, None)
            if not self._waiting[client]:
                del self._waiting[client]

    async def _wait(self, ask: Ask, future: asyncio.Future[None]) -> None:
        """Waits for the slot: until the prompt's deadline, or as long as its batch proceeds."""
        if future.done():
            return future.result()
        batch, now = ask.batch, self._clock
        deadline = math.inf if batch.begun else now() + ask.deadline
        until = now() + self._timeout
        while True:
            try:
                async with asyncio.timeout(min(until, deadline) - now()):
                    return await asyncio.shield(future)
            except TimeoutError:
                if batch.running:  # the body proceeds, prompt by prompt
                    until, deadline = now() + max(self._timeout, MIN_PATIENCE), math.inf
                elif now() >= deadline:
                    raise ask.slo.ttft_error(ask.deadline, ask.deadline) from None
                elif (until := batch.left + self._timeout) <= now():
                    raise Unavailable(
                        f"no slot became free within {self._timeout:g} s",
                        code="QUEUE_TIMEOUT",
                        retry_after=2.0,
                    ) from None
