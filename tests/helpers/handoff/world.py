"""All parties of one transfer: the possible next events, and checks of every promise."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from handoff.loop import StepLoop, party_var
from handoff.promises import Promise, Violation
from handoff.ranks import NUM_BLOCKS, Place, SinkRank, SourceRank, Write
from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.kv_transfer.commands import (
    Accept,
    Quiesce,
    RankError,
    Ready,
    Release,
    Reply,
    Submit,
    Verify,
    decode_command,
    encode_event,
)
from pdserve.kv_transfer.connector import BlockRun, Failed, Landed, Sent
from pdserve.kv_transfer.control.protocol import SinkState
from pdserve.kv_transfer.control.recv_transfer import GroupBlocks
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.source import KVSource
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket
from pdserve.kv_transfer.layout import Rect, Share

# The kinds of faults that a budget limits: damaged data; dying parties; messages that are repeated,
# lost, or all lost from some point on; renewals; and ends that a party chooses or that come early.
BAD, CRASH, DUPLICATE, LOST, CUT, RENEW = "bad", "crash", "duplicate", "lost", "cut", "renew"
STRAY = "stray"  # writes into landed blocks
D_ENDS, A_ENDS, B_ENDS = "D ends", "A ends", "B ends"
ANYBODY_ENDS = {D_ENDS: 1, A_ENDS: 1, B_ENDS: 1}

LEASE_S, BLOCK_SIZE = 1e6, 4
REFUSED = Reply(error=RankError("no", "CONNECTOR_FAILED", "decode", True))
OVER = (SinkState.READY, SinkState.DRAINING, SinkState.FREED)


@dataclass(frozen=True)
class Setting:
    ranks: int = 1  # of the decode node
    firsts: tuple[int, ...] = (0,)  # first block per KV group; a window starts later
    empty: bool = False  # the decode node has every block cached: ranks land when they accept
    damaged: bool = False  # whether the first epoch sends damaged data
    slow: str = ""  # labels with this text wait until nothing else is left
    asks: int = 1  # how often the router asks for another epoch
    budget: dict[str, int] = field(default_factory=lambda: ANYBODY_ENDS)
    succeeds: bool = False  # whether the waiter must get the blocks within the budget
    as_sent: bool = False  # whether source ranks hash while they send
    reads_again: bool = True  # whether sink ranks read again for digests, or hash while landing


@dataclass(eq=False)
class Option:
    """A possible next event."""

    label: str
    do: Callable[[], object]
    party: str  # the party that acts, unless it is dead
    cost: str = ""
    variants: tuple[Option, ...] = ()  # events that may happen instead
    epoch: int = 0  # the epoch of a call to the sink
    late: int = 0  # how often other options overtook it


class SourceClient:
    """A source's `SinkClient`."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def connect(self, ticket: Ticket) -> None: ...

    async def commit(self, ticket: Ticket, token: Any, digests: Any) -> Any:
        return await self._call(
            "commit", ticket, lambda sink, *call: sink.commit(*call, token, digests)
        )

    async def renew(self, ticket: Ticket, committed: bool = False) -> Any:
        kind = "progress" if committed else "renew"
        return await self._call(
            kind, ticket, at_once(lambda sink, *call: sink.renew(*call, committed))
        )

    async def abort(self, ticket: Ticket, reason: str) -> Any:
        return await self._call("abort", ticket, at_once(lambda sink, *call: sink.abort(*call, "")))

    async def retarget(self, ticket: Ticket) -> Any:
        self._world.repulls(self._name)
        new = await self._call("retarget", ticket, lambda sink, *call: sink.retarget(*call))
        self._world.holds(self._name, new.epoch)
        return new

    async def _call(self, kind: str, ticket: Ticket, work: Callable[..., Awaitable[Any]]) -> Any:
        sink, call = self._world.sink, (ticket.transfer_id, ticket.epoch)
        return await self._world.call(kind, self._name, ticket.epoch, lambda: work(sink, *call))


def at_once(work: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any) -> Any:
        return work(*arguments)

    return call


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.loop = StepLoop()
        self.found: list[Violation] = []
        self.pending: list[Option] = []  # events in flight
        self.budget = Counter(setting.budget)
        self.crashed: set[str] = set()
        self.given = ""  # "activated" or "freed"
        self.activated: tuple[str, int] | None = None
        self.turn = self.asked = 0  # router: tickets given, requests for another one
        self.left = self.cut = False
        self.opened = 0  # the latest epoch that a rank accepted
        self.holders: dict[int, str] = {}
        self.outcomes: dict[str, asyncio.Future[Any]] = {}  # source → outcome of its last transfer
        self.again: Counter[str] = Counter()
        self._in_call: dict[asyncio.Task[Any], str] = {}  # unanswered calls to the sink
        self._unanswered: dict[
            asyncio.Task[Any], Callable[[], None]
        ] = {}  # what to do if the sink dies
        self.firsts = [NUM_BLOCKS] * len(setting.firsts) if setting.empty else setting.firsts
        places = [(rank, *each) for rank in range(setting.ranks) for each in enumerate(self.firsts)]
        self.ranks = [
            SinkRank(Place(number, *each), NUM_BLOCKS - each[-1], setting.reads_again)
            for number, each in enumerate(places)
        ]
        self.source_ranks = {
            (name, group): SourceRank(name, () if setting.empty else self._sinks(group))
            for name in "AB"
            for group in range(len(self.firsts))
        }
        self.step(Option("", self._begin, "D"))

    def _sinks(self, group: int) -> tuple[Place, ...]:
        return tuple(each.place for each in self.ranks if each.place.group == group)

    def _begin(self) -> None:
        common: dict[str, Any] = {"fingerprint": "", "block_size": BLOCK_SIZE, "lease_s": LEASE_S}
        places = [each.place for each in self.ranks]
        endpoints = [RankEndpoint(each.rank, each.rect, b"", each.group) for each in places]
        self.sink = KVSink(endpoints, address="", call=self._sink_rank, **common)
        whole = Rect(0, self.setting.ranks, 0, 1)
        self.sources = {
            name: KVSource(
                [Share(0, whole, group) for group in range(len(self.firsts))],
                call=lambda _, message, name=name: self._source_rank(name, message),  # type: ignore[misc]
                sink=SourceClient(self, name),  # type: ignore[arg-type]
                **common,
            )
            for name in "AB"
        }
        for name, source in self.sources.items():
            source.forget = self._sees_free(name, source.forget)  # type: ignore[method-assign]
        self._reserving = self.loop.create_task(self._decode())
        self.ticket: Ticket | None = None

    # ---- options ------------------------------------------------------------------------------

    def options(self) -> list[Option]:
        """Returns the options; the first is the default, and never one with a cost."""
        begun = sorted((o for o in self.pending if o.party not in self.crashed), key=self._late)
        variants = [variant for option in begun for variant in option.variants]
        possible = itertools.chain(variants, self._troubles())
        return [*begun, *self._in_the_end(bool(begun)), *filter(self._affords, possible)]

    def _late(self, option: Option) -> int:
        slow = self.setting.slow
        return option.late + (slow != "" and slow in option.label)

    def _affords(self, option: Option) -> bool:
        return self.budget[option.cost] > 0

    def _in_the_end(self, busy: bool) -> Iterator[Option]:
        if self._router_asks():
            yield Option("R gives the source up", self._ask, "R")
        elif not busy:
            yield from (self._lapse(party, timer) for party, timer in self._leases())

    def _router_asks(self) -> bool:
        asks = self.turn and self.asked < self.setting.asks and not self.given
        return bool(asks) and "R" not in self.crashed and not self.cut

    def _troubles(self) -> Iterator[Option]:
        if not self.given and "D" not in self.crashed:
            if not self.left:
                yield Option("D: the client leaves", self._leave, "D", D_ENDS)
            if self.ticket and self.ranks[0].accepted:
                yield Option("D: rank 0 fails", self._sink_fails, "D", D_ENDS)
        for name, done in self.outcomes.items():
            if not done.done() and name not in self.crashed:
                yield Option(
                    f"{name}: its rank fails", self._source_fails(name), name, f"{name} ends"
                )
                yield Option(f"{name}: gives up", self._aborts(name), name, f"{name} ends")
        for party, timer in self._leases():
            yield self._lapse(party, timer, f"{party} ends")
        for party, timer in self._timers():
            if not _is_lease(timer):
                label = f"{party}: it is time to renew"
                yield Option(label, lambda timer=timer: self.loop.fire(timer), party, RENEW)  # type: ignore[misc]
        for party in "DABR":
            if party not in self.crashed and (party in "DR" or party in self.outcomes):
                yield Option(f"{party} dies", lambda party=party: self._crash(party), party, CRASH)  # type: ignore[misc]
        if not self.cut:
            yield Option("no message arrives any more", self._cut, "", CUT)

    def _timers(self) -> Iterator[tuple[str, asyncio.TimerHandle]]:
        return (each for each in self.loop.timers if each[0] not in self.crashed)

    def _leases(self) -> Iterator[tuple[str, asyncio.TimerHandle]]:
        return (each for each in self._timers() if _is_lease(each[1]))

    def _lapse(self, party: str, timer: asyncio.TimerHandle, cost: str = "") -> Option:
        return Option(f"{party}: the lease lapses", lambda: self.loop.fire(timer), party, cost)

    def step(self, option: Option) -> None:
        """Executes an option and checks all promises; raises Violation."""
        before = self._sink_state()
        if option.cost:
            self.budget[option.cost] -= 1
        self.pending = [
            each for each in self.pending if each is not option and option not in each.variants
        ]
        token = party_var.set(option.party)
        self.loop.do(option.do)
        party_var.reset(token)
        self.found += (error for error in self.loop.errors if isinstance(error, Violation))
        if option.epoch and before and option.epoch != before[1] and before != self._sink_state():
            self._broken(Promise.STALE_IS_INERT, f"{option.label} in epoch {before[1]}")
        if self.found:
            raise self.found[0]
        for error in self.loop.errors:
            if not isinstance(error, PdserveError):
                raise Violation(Promise.NO_DEFECT, repr(error))

    def _broken(self, promise: Promise, detail: object) -> None:
        """Records a violation, since a driver would catch an exception."""
        self.found.append(Violation(promise, detail))

    def check_end(self) -> None:
        """Checks the promises about the end, when no event is left."""
        if not self.given and "D" not in self.crashed:
            raise Violation(Promise.TERMINATION, f"the sink stays {self._sink_state()}")
        for name, outcome in self.outcomes.items():
            if name not in self.crashed and not outcome.done():
                raise Violation(Promise.TERMINATION, f"{name} does not end")
        if self._in_call and "D" not in self.crashed:
            raise Violation(Promise.ONE_ANSWER, f"none: {list(self._in_call.values())}")
        if self.setting.succeeds and self.activated is None:
            raise Violation(Promise.SUCCESS, f"blocks {self.given}")

    def fingerprint(self, options: list[Option]) -> tuple[Any, ...]:
        """Returns everything that later events depend on; `options`: the current ones."""
        return (
            *((option.label, option.late) for option in options),
            *(tuple(vars(rank).values()) for rank in (*self.ranks, *self.source_ranks.values())),
            *((each.done(), name) for name, each in self.outcomes.items()),
            *(self._source_state(name) for name in "AB"),
            (
                self._sink_state(),
                self.given,
                self.turn,
                self.asked,
                self.opened,
                self.left,
                self.cut,
            ),
            tuple(self.budget.items()),
            tuple(sorted(self._in_call.values())),
        )

    def _sink_state(self) -> tuple[Any, ...] | None:
        live = next(iter(self.sink._live.values()), None) if hasattr(self, "sink") else None
        if live is None:
            return None
        cause = live.cause and live.cause.code
        waits = live.epoch.ticket.done(), live.epoch.committed.done()
        return (live.machine.state, live.machine.epoch, *live.epoch.landed, *waits, cause)

    def _source_state(self, name: str) -> tuple[Any, ...]:
        return tuple(
            (live._machine.state, live.ticket.epoch, live._keeper.committed)
            for live in self.sources[name]._live.values()
        )

    # ---- the network --------------------------------------------------------------------------

    async def call(
        self, kind: str, who: str, epoch: int, work: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Sends a call to the sink; returns its answer or raises its error."""
        answer: asyncio.Future[Any] = self.loop.create_future()

        def reply(what: str, result: Any = None, error: Exception | None = None) -> None:
            def resolve() -> None:
                if answer.done():  # the caller has left
                    return
                answer.set_exception(error) if error else answer.set_result(result)

            heard = Option(f"{who} gets {what} from D", resolve, who)
            heard.variants = () if kind == "commit" else (self._lost(heard, answer),)
            if not (self.cut and what != "nothing"):
                self.pending.append(heard)

        def nothing() -> None:
            """Loses the message: a commit waits, other calls time out."""
            if kind != "commit":
                reply("nothing", error=NodeError("no answer", code="PEER_LOST"))

        def deliver() -> None:
            if "D" in self.crashed:
                return nothing()
            task = self.loop.create_task(_as_coroutine(work()))
            self._in_call[task], self._unanswered[task] = label, nothing
            task.add_done_callback(ended)
            return None

        def ended(task: asyncio.Task[Any]) -> None:
            del self._in_call[task], self._unanswered[task]
            error = task.exception()
            if isinstance(error, PdserveError):
                reply(f"{error.code} for its {kind}", error=error)
            elif error is None:
                reply(f"the answer to its {kind}", task.result())
            else:
                self._broken(Promise.NO_DEFECT, repr(error))

        label = f"D gets {kind}{f' of epoch {epoch}' if epoch else ''} from {who}"
        request = Option(label, deliver, "", epoch=epoch)
        again = Option(f"{label}, which will come again", self._twice(deliver, label, epoch), "")
        again.cost = DUPLICATE
        request.variants = (again, Option(f"{label}: no, it is lost", nothing, "", LOST))
        nothing() if self.cut else self.pending.append(request)
        return await answer

    def _twice(self, deliver: Callable[[], None], label: str, epoch: int) -> Callable[[], None]:
        def both() -> None:
            deliver()
            self.pending.append(Option(f"{label}, again", deliver, "", epoch=epoch))

        return both

    def _lost(self, heard: Option, answer: asyncio.Future[Any]) -> Option:
        error = NodeError("no answer", code="PEER_LOST")
        label = f"{heard.label}: no, it is lost"
        return Option(
            label, lambda: answer.done() or answer.set_exception(error), heard.party, LOST
        )

    def _cut(self) -> None:
        self.cut = True
        for option in [each for each in self.pending if " gets " in each.label]:
            self.pending.remove(option)
            if lost := [each for each in option.variants if each.cost == LOST]:
                lost[0].do()

    def _crash(self, party: str) -> None:
        self.crashed.add(party)
        if party == "D":
            self.given = self.given or "lost"
            for nothing in self._unanswered.values():
                nothing()

    # ---- the decode node ----------------------------------------------------------------------

    async def _decode(self) -> None:
        blocks = [GroupBlocks(first, tuple(range(NUM_BLOCKS - first))) for first in self.firsts]
        try:
            ticket, landing = await self.sink.reserve(NUM_BLOCKS * BLOCK_SIZE, blocks, self._freed)
            self.ticket = ticket
            self._tell_router(ticket, self.asked)
            arrival = await asyncio.shield(landing)
        except (PdserveError, asyncio.CancelledError):
            return
        self._activate(str(arrival.first_token))

    def _give(self, how: str) -> None:
        if self.given:
            self._broken(Promise.ONE_OUTCOME, f"{self.given}, and now {how}")
        self.given = how

    def _freed(self) -> None:
        self._give("freed")
        if writing := [str(rank.place) for rank in self.ranks if rank.accepted]:
            self._broken(Promise.GIVEN_WHILE_WRITTEN, f"freed, ranks {writing}")

    def _activate(self, source: str) -> None:
        self._give("activated")
        if any(rank.accepted and not rank.landed for rank in self.ranks):
            self._broken(Promise.GIVEN_WHILE_WRITTEN, "activated")
        epoch = self.opened
        right = Write(source, epoch)
        held = [rank.content for rank in self.ranks]
        if self.holders.get(epoch) != source or (
            self.ranks[0].wanted and held != [right] * len(held)
        ):
            self._broken(Promise.RIGHT_CONTENT, f"{source} in epoch {epoch}; {held}")
        self.activated = source, epoch

    def _leave(self) -> None:
        self.left = True
        if self.ticket is None:
            self._reserving.cancel()
        else:
            self.loop.create_task(self.sink.cancel(self.ticket.transfer_id))
        self.loop.call_soon(self._check_left)

    def _check_left(self) -> None:
        if self.ticket is not None and (state := self._sink_state()) and state[0] not in OVER:
            self._broken(Promise.CANCEL_ENDS_IT, state[0])

    async def _sink_rank(self, number: int, message: bytes) -> bytes:
        group, command = decode_command(message)
        rank = self.ranks[number * len(self.firsts) + group]
        answer: asyncio.Future[Reply] = self.loop.create_future()
        if isinstance(command, Accept):
            self.opened = max(self.opened, command.transfer.epoch)

        def do() -> None:
            reply = Reply()
            match command:
                case Accept(transfer):
                    if self.given:
                        self._broken(Promise.GIVEN_WHILE_WRITTEN, f"{rank.place} accepts")
                    rank.accept(transfer.epoch)
                    if rank.landed:
                        self._landed(rank)
                case Verify(digests=digests):
                    reply = Reply(digests=rank.wrong(digests))
                case Quiesce() | Release():
                    rank.accepted = 0
            if isinstance(command, Quiesce | Release):
                return _answer(answer, reply)
            label = f"D: {rank.place} has done {_name(command)}"
            return self.pending.append(Option(label, lambda: _answer(answer, reply), "D"))

        option = Option(f"D: {rank.place} does {_name(command)}", do, "D")
        if isinstance(command, Accept):
            refuse = Option(f"D: {rank.place} refuses", lambda: _answer(answer, REFUSED), "D")
            refuse.cost = D_ENDS
            option.variants = (refuse,)
        self.pending.append(option)
        return msgspec.msgpack.encode(await answer)

    def _landed(self, rank: SinkRank) -> None:
        assert self.sink._live
        (transfer_id,) = self.sink._live
        place = rank.place
        event = encode_event(place.group, Landed(transfer_id, rank.accepted, 8))
        label = f"D hears that {place} has all of epoch {rank.accepted}"

        def hear() -> None:
            self.sink.on_event(place.rank, event)

        def stray() -> None:
            rank.content = rank.content and rank.content._replace(good=False)
            hear()

        heard = Option(label, hear, "D")
        heard.variants = (Option(f"{label}, which a stray write spoils", stray, "D", STRAY),)
        self.pending.append(heard)

    def _sink_fails(self) -> None:
        assert self.ticket
        lost = Failed(
            self.ticket.transfer_id, self.ranks[0].accepted, "PEER_LOST", "prefill", True, ""
        )
        self.sink.on_event(0, encode_event(0, lost))

    # ---- the router ---------------------------------------------------------------------------

    def _ask(self) -> None:
        self.asked += 1
        self.loop.create_task(self._retarget(self.asked))

    async def _retarget(self, number: int) -> None:
        assert self.ticket
        transfer_id = self.ticket.transfer_id
        try:
            ticket = await self.call("retarget", "R", 0, lambda: self.sink.retarget(transfer_id, 0))
        except PdserveError:
            return
        self._has_ticket(ticket, number)

    def _tell_router(self, ticket: Ticket, number: int) -> None:
        has = Option("R gets the first ticket", lambda: self._has_ticket(ticket, number), "R")
        if not self.cut:
            self.pending.append(has)

    def _has_ticket(self, ticket: Ticket, number: int) -> None:
        if number == self.asked and "R" not in self.crashed:
            source, self.turn = "AB"[self.turn % 2], self.turn + 1
            label = f"{source} gets run of epoch {ticket.epoch} from R"
            self.pending.append(Option(label, lambda: self._run(source, ticket), source))

    # ---- the prefill nodes --------------------------------------------------------------------

    def _run(self, name: str, ticket: Ticket) -> None:
        source = self.sources[name]
        if source._live:
            return  # one is under way
        self.holds(name, ticket.epoch)
        self.again[name] = 0
        transfer = source.begin(ticket)
        self.outcomes[name] = transfer.outcome
        transfer.outcome.add_done_callback(lambda done: self._ended(name, transfer, done))
        for group in range(len(self.firsts)):
            ids = tuple(range(NUM_BLOCKS))
            transfer.ready(BlockRun(0, NUM_BLOCKS), ids, last=True, group=group)
        commits = Option(f"{name}: commits", lambda: transfer.commit(name), name)  # type: ignore[arg-type]
        self.pending.append(commits)

    def _sees_free(self, name: str, forget: Callable[[Any], None]) -> Callable[[Any], None]:
        freed: list[Any] = []

        def free(transfer: Any) -> None:
            if transfer in freed:
                self._broken(Promise.ONE_FREE, name)
            if any(self.source_ranks[name, group].reading for group in range(len(self.firsts))):
                self._broken(Promise.FREED_WHILE_READ, name)
            freed.append(transfer)
            forget(transfer)

        return free

    def _ended(self, name: str, transfer: Any, outcome: asyncio.Future[Any]) -> None:
        epoch = transfer.ticket.epoch
        if outcome.exception() is None and self.activated != (name, epoch):
            self._broken(Promise.HONEST_SUCCESS, f"{name}, epoch {epoch}; {self.activated}")

    def holds(self, name: str, epoch: int) -> None:
        """Records that a source holds the ticket of an epoch."""
        if self.holders.setdefault(epoch, name) != name:
            self._broken(Promise.ONE_HOLDER, f"{self.holders[epoch]} and {name} have epoch {epoch}")

    def repulls(self, name: str) -> None:
        self.again[name] += 1
        if self.again[name] > 1:
            self._broken(Promise.ONE_REPULL, name)

    async def _source_rank(self, name: str, message: bytes) -> bytes:
        group, command = decode_command(message)
        rank = self.source_ranks[name, group]
        answer: asyncio.Future[Reply] = self.loop.create_future()

        def do() -> None:
            reply = Reply()
            match command:
                case Submit(transfer):
                    rank.epoch, rank.reading = transfer.epoch, True
                    if self.outcomes[name].done():
                        self._broken(Promise.FREED_WHILE_READ, f"{name} submits")
                case Ready(transfer_id):
                    as_sent = self.setting.as_sent
                    reply = Reply(hashed_as_sent=as_sent, digests=() if as_sent else rank.hashes())
                    if rank.reading:
                        self._send(rank)
                        self._sent(rank, group, transfer_id)
                case Quiesce():
                    rank.reading = False
            _answer(answer, reply)

        self.pending.append(
            Option(
                f"{name}: its rank does {_name(command)}{f' of group {group}' if group else ''}",
                do,
                name,
            )
        )
        return msgspec.msgpack.encode(await answer)

    def _send(self, rank: SourceRank) -> None:
        for place in rank.sinks:
            good, bad = (Write(rank.name, rank.epoch, good) for good in (True, False))
            options = [
                Option(f"{place} of D gets {write}", self._arrives(place.number, write), "D", cost)
                for write, cost in ((good, ""), (bad, BAD))
            ]
            spoilt = self.setting.damaged and rank.epoch == 1
            options[0].variants = (options[1],)
            self.pending.append(replace(options[1], cost="") if spoilt else options[0])

    def _sent(self, rank: SourceRank, group: int, transfer_id: bytes) -> None:
        made = rank.hashes() if self.setting.as_sent else ()
        event = encode_event(group, Sent(transfer_id, rank.epoch, 8, 0.0, made))
        source, what = self.sources[rank.name], f" of group {group}" if group else ""
        label = f"{rank.name} hears that its rank has sent all{what} of epoch {rank.epoch}"
        self.pending.append(Option(label, lambda: source.on_event(0, event), rank.name))

    def _arrives(self, number: int, write: Write) -> Callable[[], None]:
        def arrive() -> None:
            rank = self.ranks[number]
            if rank.takes(write):
                rank.take(write, self.opened, self.given)
                self._landed(rank)

        return arrive

    def _source_fails(self, name: str) -> Callable[[], None]:
        def fail() -> None:
            source = self.sources[name]
            ((transfer_id, live),) = source._live.items()
            lost = Failed(transfer_id, live.ticket.epoch, "PEER_LOST", "decode", True, "")
            source.on_event(0, encode_event(0, lost))

        return fail

    def _aborts(self, name: str) -> Callable[[], object]:
        (live,) = self.sources[name]._live.values()
        return lambda: self.loop.create_task(live.abort("its caller left"))


def _answer(answer: asyncio.Future[Reply], reply: Reply) -> None:
    if not answer.done():  # the caller has left
        answer.set_result(reply)


def _is_lease(timer: asyncio.TimerHandle) -> bool:
    return timer._callback.__name__ == "_check"  # type: ignore[attr-defined]


def _name(command: object) -> str:
    return type(command).__name__.lower()


async def _as_coroutine(work: Awaitable[Any]) -> Any:
    return await work
