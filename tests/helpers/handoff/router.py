"""R: the router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from handoff.party import CRASH, Message, Move, Party, Rules


@dataclass(unsafe_hash=True, slots=True)
class Routing:
    asked: int = 0  # calls for a ticket so far, the reservation not counted
    waits: bool = True  # for the last one's answer
    turn: int = 0  # tickets handed out
    crashed: bool = False


class Router(Party):
    """Believes what it likes: at any time it may give a source up and ask for another epoch.
    (What cancels a request is a move of D.)"""

    name = "R"

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def start(self) -> Routing:
        return Routing()

    def moves(self, part: Routing) -> Iterator[Move]:
        if part.crashed:
            return
        yield Move("R: crashes", Routing(waits=False, crashed=True), cost=CRASH)
        if part.turn and part.asked < self._rules.asks:
            number = part.asked + 1
            ask = Message("D", "retarget", "R", 0, number)
            yield Move("R: gives the source up", Routing(number, True, part.turn), (ask,))

    def receive(self, part: Routing, message: Message) -> Move:
        if message.kind == "refused":
            return Move(f"R: gets {message}", Routing(part.asked, False, part.turn))
        source = "AB"[part.turn % 2]
        run = Message(source, "run", "R", message.epoch)
        label = f"R: gets {message}, for {source}"
        return Move(label, Routing(part.asked, False, part.turn + 1), (run,))

    def check_end(self, part: Routing) -> None:
        """A router may wait for ever: nobody hangs on it."""

    def matters(self, part: Routing, message: Message) -> bool:
        return part.waits and message.number == part.asked
