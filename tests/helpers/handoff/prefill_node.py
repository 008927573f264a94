"""A and B: a prefill node's machine, what `SendTransfer` does for each action, what may happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

from handoff.party import BAD, CRASH, Invariant, Message, Move, Note, Party, Rules, broken, during
from pdserve.kv_transfer.control.protocol import Action, Machine, SourceEvent, SourceState


@dataclass(unsafe_hash=True, slots=True)
class Source:
    state: SourceState | None = None  # None: no session
    epoch: int = 0  # its ticket's
    reading: bool = False  # ranks may read the blocks
    unsent: tuple[int, ...] = ()  # sink ranks whose data is yet to go out
    asking: str = ""  # commit, retarget; repull: before that, ranks are quiesced
    quiescing: bool = False
    again: bool = False  # it has been asked to send again
    renewing: bool = False  # a renewal is not answered yet
    freed: bool = False


class SourceStep:
    """One step of a prefill node, from `part` on."""

    def __init__(self, rules: Rules, name: str, part: Source) -> None:
        self.rules = rules
        self.name = name
        self.part = copy(part)
        self.sends: list[Message] = []
        self.notes: list[Note] = []

    def move(self, label: str, cost: str = "") -> Move:
        sends, notes = tuple(self.sends), tuple(self.notes)
        return Move(f"{self.name}: {label}", self.part, sends, notes, cost)

    def on(self, event: SourceEvent) -> SourceStep:
        part = self.part
        assert part.state is not None
        machine = Machine(self.rules.source, part.state, 0, Counter())
        actions = machine.on(event)
        if event in self.rules.source[part.state]:
            self.rules.taken.add((part.state, event))
        part.state = machine.state
        with during(f"{self.name}: {event}"):
            for action in actions:
                self._do(action)
        return self

    def _do(self, action: Action) -> None:
        part = self.part
        match action:
            case Action.SEND_COMMIT:
                part.asking = "commit"
                self._send("commit")
            case Action.SEND_ABORT:
                self._send("abort")
            case Action.REPULL:
                if part.again:
                    broken(Invariant.ONE_REPULL, self.name)
                part.asking, part.again = "repull", True
            case Action.RESEND:
                self._submit()
            case Action.REPORT_SUCCESS:
                self.notes.append(Note("succeeded", self.name, part.epoch))
            case Action.QUIESCE:
                part.quiescing, part.asking, part.again = True, "", False
                part.renewing = False
            case Action.FREE:
                self._free()

    def _send(self, kind: str) -> None:
        self.sends.append(Message("D", kind, self.name, self.part.epoch))

    def _submit(self) -> None:
        self.part.reading = True
        self.part.unsent = () if self.rules.empty else tuple(range(self.rules.ranks))

    def _free(self) -> None:
        if self.part.freed:
            broken(Invariant.ONE_FREE, self.name)
        if self.part.reading:
            broken(Invariant.FREED_WHILE_READ, self.name)
        self.part.freed = True
        self.part.unsent = ()

    def _quiet(self) -> None:
        self.part.reading, self.part.unsent = False, ()

    def begin(self, epoch: int) -> SourceStep:
        self.part = Source(SourceState.SENDING)
        self._take_ticket(epoch)
        self._submit()
        return self

    def _take_ticket(self, epoch: int) -> None:
        self.part.epoch = epoch
        self.notes.append(Note("holds", self.name, epoch))

    def retargeted(self, epoch: int) -> SourceStep:
        self._take_ticket(epoch)
        return self.on(SourceEvent.RETARGETED)

    def write(self, number: int, good: bool) -> SourceStep:
        part = self.part
        part.unsent = tuple(each for each in part.unsent if each != number)
        self.sends.append(Message("D", "write", self.name, part.epoch, number, good))
        return self

    def ask_again(self) -> SourceStep:
        self._quiet()
        self.part.asking = "retarget"
        epoch = self.part.epoch
        self.sends.append(Message("D", "retarget", self.name, epoch, epoch))
        return self

    def renew(self) -> SourceStep:
        self.part.renewing = True
        self._send("renew")
        return self

    def quiesced(self) -> SourceStep:
        self._quiet()
        self.part.quiescing = False
        return self.on(SourceEvent.QUIESCED)


_GIVES_UP = (SourceEvent.LEASE_LAPSED, SourceEvent.FAILED, SourceEvent.ABORT)
_OVER = (SourceState.DRAINING, SourceState.FREED)
_ANSWERS = {
    "acked": SourceEvent.COMMIT_ACKED,
    "mismatch": SourceEvent.MISMATCH,
    "refused": SourceEvent.COMMIT_REFUSED,
}


class PrefillNode(Party):
    def __init__(self, rules: Rules, name: str) -> None:
        self._rules = rules
        self.name = name

    def start(self) -> Source:
        return Source()

    def moves(self, part: Source) -> Iterator[Move]:
        if part.state is None or part.freed:
            return
        yield Move(f"{self.name}: crashes", Source(), cost=CRASH)
        yield from self._writes(part)
        if part.state is SourceState.SENDING:
            yield self._step(part).on(SourceEvent.COMMIT).move("commits")
            if self._rules.renewals and not part.renewing:
                yield self._step(part).renew().move("renews")
        yield from self._answers(part)
        if part.state not in _OVER:
            yield from self._ends(part)

    def _step(self, part: Source) -> SourceStep:
        return SourceStep(self._rules, self.name, part)

    def _writes(self, part: Source) -> Iterator[Move]:
        for number in part.unsent if part.reading else ():
            yield self._step(part).write(number, True).move(f"sends to rank {number}")
            damaged = self._step(part).write(number, False)
            yield damaged.move(f"sends to rank {number}, damaged on the way", BAD)

    def _answers(self, part: Source) -> Iterator[Move]:
        if part.asking == "repull":
            yield self._step(part).ask_again().move("is quiet and asks for a new epoch")
        if part.quiescing:
            yield self._step(part).quiesced().move("its ranks are quiet")

    def _ends(self, part: Source) -> Iterator[Move]:
        """Of events that do the same, one is enough."""
        ends: dict[Any, Move] = {}
        for event in _GIVES_UP[not self._rules.source_lease :]:
            move = self._step(part).on(event).move(event, f"{self.name} fails")
            ends.setdefault((move.part, move.sends), move)
        yield from ends.values()

    def timely(self, part: Source) -> Move | None:
        if (answer := next(self._answers(part), None)) is not None:
            return answer
        if part.state in (None, *_OVER) or not self._rules.source_lease:
            return None
        return self._step(part).on(SourceEvent.LEASE_LAPSED).move("lease lapses")

    def check_end(self, part: Source) -> None:
        if part.state is not None and not part.freed:
            broken(Invariant.TERMINATION, f"{self.name} stays {part.state}")

    def receive(self, part: Source, message: Message) -> Move:
        step, label = self._step(part), f"gets {message}"
        if message.kind == "run":
            live = part.state is not None and not part.freed
            return (step if live else step.begin(message.epoch)).move(label)
        if message.kind == "ticket":
            return step.retargeted(message.epoch).move(label)
        if message.kind == "ended":
            step.part.renewing = False
            return step.on(SourceEvent.RENEW_REFUSED).move(label)
        return step.on(_ANSWERS[message.kind]).move(label)

    def matters(self, part: Source, message: Message) -> bool:
        if message.kind == "run":
            return True
        if message.kind == "ended":
            return part.renewing and self._minds(part)
        if message.kind == "ticket" or (message.kind == "refused" and not message.epoch):
            return part.asking == "retarget" and message.number == part.epoch
        return part.asking == "commit" and message.epoch == part.epoch

    def _minds(self, part: Source) -> bool:
        """Whether a refused renewal can change anything, now or later."""
        assert part.state is not None
        order = list(SourceState)
        later = order[order.index(part.state) :]
        return any(SourceEvent.RENEW_REFUSED in self._rules.source[state] for state in later)
