"""The decode node's half: its machine, what `RecvTransfer` does for each action, its ranks."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass

from handoff.party import Invariant, Message, Move, Note, Rules, broken, during
from pdserve.kv_transfer.control.protocol import Action, Machine, SinkEvent, SinkState

_S = SinkState
# There is no cause to refuse a renewal.
_STANDS = (_S.OPENING, _S.RESERVED, _S.COMMITTED, _S.LANDED, _S.VERIFYING, _S.READY)


@dataclass(unsafe_hash=True, slots=True)
class Rank:
    """One rank of the decode node: its connector and its share of the blocks."""

    accepted: int = 0  # the epoch whose data it takes; 0: none
    content: Message | None = None  # the last write into the blocks
    landed: int = 0  # 1: all its data is in; 2: and the sink has heard of it


@dataclass(unsafe_hash=True, slots=True)
class Sink:
    state: SinkState = SinkState.OPENING
    epoch: int = 1
    ranks: tuple[Rank, ...] = ()
    opening: tuple[int, ...] | None = None  # ranks that have yet to accept; (): all have
    quiescing: tuple[int, ...] = ()  # ranks that have yet to be quiet
    verifying: tuple[tuple[int, str, bool | None], ...] = ()  # epoch, source, result
    payload: Message | None = None  # the commit
    waiting: tuple[str, ...] = ()  # sources whose commit is to be answered
    answer: str = ""  # this epoch's commits get
    asker: tuple[str, int] | None = ("R", 0)  # whoever is to get the next ticket
    also: tuple[str, int] | None = None  # a mutant's earlier asker
    given: str = ""  # freed, activated
    crashed: bool = False


class SinkStep:
    """One step of D, from `part` on."""

    def __init__(self, rules: Rules, part: Sink) -> None:
        self.rules = rules
        self.part = copy(part)
        self.sends: list[Message] = []
        self.notes: list[Note] = []
        self._cause = ""

    def move(self, label: str, cost: str = "") -> Move:
        return Move(f"D: {label}", self.part, tuple(self.sends), tuple(self.notes), cost)

    def on(self, event: SinkEvent, epoch: int | None = None) -> SinkStep:
        part, before = self.part, self.part.epoch
        stale = epoch not in (None, before)
        named = None if event in self.rules.unchecked else epoch
        machine = Machine(self.rules.sink, part.state, before, Counter())
        actions = machine.on(event, named)
        if stale and (actions or machine.state != part.state):
            broken(Invariant.STALE_IS_INERT, f"{event} of epoch {epoch} in epoch {before}")
        if event in self.rules.sink[part.state] and not stale:
            self.rules.taken.add((part.state, event))
        part.state = machine.state
        part.epoch = machine.epoch if self.rules.epoch_grows else before
        self._cause = "mismatch" if event is SinkEvent.MISMATCH else "refused"
        with during(f"D: {event}"):
            for action in actions:
                self._do(action)
        return self

    def _do(self, action: Action) -> None:
        part = self.part
        match action:
            case Action.OPEN:
                self._open()
            case Action.ISSUE_TICKET:
                self._issue()
            case Action.VERIFY:
                sender = part.payload.sender if part.payload else ""
                part.verifying += ((part.epoch, sender, None),)
            case Action.ACTIVATE:
                self._activate()
            case Action.REPLY_COMMIT:
                self._answer("acked")
            case Action.REJECT_COMMIT:
                self._answer(self._cause)
            case Action.QUIESCE:
                part.quiescing = tuple(range(self.rules.ranks))
            case Action.FREE:
                self._free()

    def _open(self) -> None:
        part = self.part
        if part.waiting:
            broken(Invariant.ONE_ANSWER, f"no answer to the commit of {part.waiting}")
        part.opening = tuple(range(self.rules.ranks))
        part.payload, part.answer = None, ""
        # What ranks still report is of the old epoch.
        part.ranks = tuple(
            Rank(each.accepted, each.content, 2 * bool(each.landed)) for each in part.ranks
        )

    def _issue(self) -> None:
        part = self.part
        if part.asker is None:
            broken(Invariant.ONE_ANSWER, "a ticket that nobody waits for")
        for who, number in filter(None, (part.asker, part.also)):
            self.sends.append(Message(who, "ticket", "D", part.epoch, number))
        part.asker = part.also = None

    def _answer(self, answer: str) -> None:
        part = self.part
        if part.answer:
            broken(Invariant.ONE_ANSWER, f"a commit, {part.answer} before, is {answer} now")
        part.answer = answer
        self.sends += (Message(source, answer, "D", part.epoch) for source in part.waiting)
        part.waiting = ()

    def _give(self, how: str) -> None:
        if self.part.given:
            broken(Invariant.ONE_OUTCOME, f"{self.part.given}, and now {how}")
        self.part.given = how

    def _free(self) -> None:
        self._give("freed")
        if any(rank.accepted for rank in self.part.ranks):
            broken(Invariant.GIVEN_WHILE_WRITTEN, "freed")
        if self.part.asker is not None:
            self.refuse(self.part.asker)
            self.part.asker = None

    def _activate(self) -> None:
        part, commit = self.part, self.part.payload
        self._give("activated")
        if any(rank.accepted and not rank.landed for rank in part.ranks):
            broken(Invariant.GIVEN_WHILE_WRITTEN, "activated")
        if commit is None or commit.epoch != part.epoch:
            broken(Invariant.RIGHT_CONTENT, f"epoch {part.epoch} ends with {commit}")
        self.notes.append(Note("activated", commit.sender, part.epoch))
        if not self._holds(commit.sender, commit.epoch):
            held = ", ".join(str(rank.content) for rank in part.ranks)
            broken(Invariant.RIGHT_CONTENT, f"{commit}, but the blocks hold {held}")

    def refuse(self, asker: tuple[str, int]) -> None:
        who, number = asker
        self.sends.append(Message(who, "refused", "D", 0, number))

    # ---- messages ----

    def commit(self, message: Message) -> None:
        part = self.part
        if self._is_stale(message, SinkEvent.COMMIT):
            return self.sends.append(Message(message.sender, "refused", "D", message.epoch))
        if part.state in (SinkState.RESERVED, SinkState.LANDED):
            part.payload = message
        if part.answer:
            self.sends.append(Message(message.sender, part.answer, "D", message.epoch))
        else:
            part.waiting = tuple(sorted({*part.waiting, message.sender}))
        self.on(SinkEvent.COMMIT, message.epoch)
        return None

    def abort(self, message: Message) -> None:
        if not self._is_stale(message, SinkEvent.ABORT):
            self.on(SinkEvent.ABORT, message.epoch)

    def renew(self, message: Message) -> None:
        stands = self.part.epoch == message.epoch and self.part.state in _STANDS
        if self.part.crashed or not stands:
            self.sends.append(Message(message.sender, "ended", "D", message.epoch))

    def retarget(self, message: Message) -> None:
        part, asker = self.part, (message.sender, message.number)
        over = part.state in (SinkState.READY, SinkState.DRAINING, SinkState.FREED)
        if over or self._is_stale(message, SinkEvent.RETARGET):
            return self.refuse(asker)
        if part.asker is not None and message.epoch and self.rules.router_outbids:
            return self.refuse(asker)
        if part.asker is not None and self.rules.last_asker_alone:
            self.refuse(part.asker)
        elif part.asker is not None:
            part.also = part.asker
        part.asker = asker
        self.on(SinkEvent.RETARGET)
        return None

    def _is_stale(self, message: Message, event: SinkEvent) -> bool:
        checked = event not in self.rules.unchecked
        return self.part.crashed or (checked and message.epoch not in (0, self.part.epoch))

    def write(self, message: Message) -> None:
        part, rank = self.part, copy(self.part.ranks[message.number])
        epochs = (rank.accepted, message.epoch)
        wanted = epochs[0] == epochs[1] or (not self.rules.rank_checks_epoch and rank.accepted)
        if not wanted or (rank.landed and self.rules.landed_is_final):
            return
        if message.epoch != part.epoch:
            broken(Invariant.NO_STALE_WRITE, f"{message} in epoch {part.epoch}")
        if part.given:
            broken(Invariant.NO_LATE_WRITE, f"{message}, blocks {part.given}")
        rank.content, rank.landed = message, rank.landed or 1
        self.put(message.number, rank)

    # ---- what ranks do and report ----

    def put(self, number: int, rank: Rank) -> None:
        ranks = self.part.ranks
        self.part.ranks = (*ranks[:number], rank, *ranks[number + 1 :])

    def accept(self, number: int) -> SinkStep:
        part, rank = self.part, copy(self.part.ranks[number])
        if part.given:
            broken(Invariant.GIVEN_WHILE_WRITTEN, f"rank {number} accepts, blocks {part.given}")
        if rank.accepted < part.epoch:
            rank.accepted, rank.landed = part.epoch, int(self.rules.empty)
            self.put(number, rank)
        assert part.opening is not None
        part.opening = tuple(each for each in part.opening if each != number)
        return self

    def opened(self, event: SinkEvent) -> SinkStep:
        self.part.opening = None
        self.on(event, self.part.epoch)
        if event is SinkEvent.OPENED and self.rules.recalls_landing:
            self._count_landed()
        return self

    def quiet(self, number: int) -> SinkStep:
        part, rank = self.part, copy(self.part.ranks[number])
        rank.accepted = 0
        self.put(number, rank)
        part.quiescing = tuple(each for each in part.quiescing if each != number)
        return self if part.quiescing else self.on(SinkEvent.QUIESCED)

    def landed(self, number: int) -> SinkStep:
        rank = copy(self.part.ranks[number])
        rank.landed = 2
        self.put(number, rank)
        self._count_landed()
        return self

    def _count_landed(self) -> None:
        part = self.part
        if all(rank.landed == 2 and rank.accepted == part.epoch for rank in part.ranks):
            self.on(SinkEvent.RANKS_LANDED)

    def verified(self, check: tuple[int, str, bool | None]) -> SinkStep:
        """The ranks compare; later, the node hears the result."""
        epoch, source, result = check
        left = tuple(each for each in self.part.verifying if each != check)
        if result is not None:
            self.part.verifying = left
            return self.on(SinkEvent.VERIFIED if result else SinkEvent.MISMATCH, epoch)
        right = not self.rules.digests_compared or self._holds(source, epoch)
        self.part.verifying = (*left, (epoch, source, right))
        return self

    def _holds(self, source: str, epoch: int) -> bool:
        """Whether the blocks hold what the source sent in the epoch."""
        right = [Message("D", "write", source, epoch, rank) for rank in range(self.rules.ranks)]
        return self.rules.empty or [rank.content for rank in self.part.ranks] == right
