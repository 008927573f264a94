"""A model checker for the hand-off: every order of events, breadth first, every state checked.

    python tests/helpers/explorer.py --depth 20 --budget bad=2,crash=1 --asks 2 --ranks 2

The parties are `handoff`'s. A state is a tuple of small integers: each party's
state by its number, and the messages under way as a bit set. What a party does next is worked
out once per state of that party. Four things are left out, none of which can hide a fault:

- messages that can change nothing any more (`Party.matters`) are taken off the network;
- loss and stalling are not steps: what is lost is what is never delivered;
- A goes first: the other order is the same with names exchanged;
- of several events that do the same to a party, one is taken.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import inf
from typing import Any, NamedTuple

from handoff.decode_node import DecodeNode
from handoff.party import (
    A_FAILS,
    B_FAILS,
    BAD,
    CRASH,
    D_ENDS,
    DUPLICATE,
    Invariant,
    Message,
    Move,
    Note,
    Party,
    Rules,
    Violation,
    broken,
    during,
)
from handoff.prefill_node import PrefillNode
from handoff.router import Router

PARTIES = "DABR"
COSTS = (BAD, CRASH, DUPLICATE, D_ENDS, A_FAILS, B_FAILS)
NONE = dict.fromkeys(COSTS, 0.0)  # nothing goes wrong
ALWAYS = NONE | dict.fromkeys((D_ENDS, A_FAILS, B_FAILS), inf)  # everybody may end at any time
REQUESTS = ("commit", "abort", "retarget", "write")  # what the network may deliver twice


def parties(rules: Rules) -> tuple[Party, ...]:
    return (DecodeNode(rules), PrefillNode(rules, "A"), PrefillNode(rules, "B"), Router(rules))


class World(NamedTuple):
    parts: tuple[int, ...]  # of PARTIES
    network: int  # messages under way, a bit each
    budget: tuple[float, ...]  # what is left of each of COSTS
    holders: tuple[str, ...]  # who held the ticket of epoch 0, 1, …
    activated: Note | None


class Step(NamedTuple):
    """A move, in numbers."""

    label: str
    part: int
    sends: int  # messages, as bits
    to: tuple[int, ...]  # their receivers
    notes: tuple[Note, ...]
    cost: int | None  # index in COSTS


@dataclass(frozen=True)
class Report:
    states: int
    transitions: int
    depth: int  # of the deepest state
    seconds: float  # of CPU
    complete: bool  # there is nothing beyond

    def __str__(self) -> str:
        end = "all" if self.complete else "cut"
        speed = self.transitions / max(self.seconds, 1e-9)
        return (
            f"{self.states:>10,} {self.transitions:>12,} {self.depth:>6} {self.seconds:>8.1f} "
            f"{speed:>9,.0f}  {end}"
        )

    HEAD = f"{'states':>10} {'transitions':>12} {'depth':>6} {'seconds':>8} {'per s':>9}  end"


class Mailbox:
    """Messages as bits of a number."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._bits: dict[Message, int] = {}

    def bit(self, message: Message) -> int:
        if message not in self._bits:
            self._bits[message] = 1 << len(self.messages)
            self.messages.append(message)
        return self._bits[message]

    def bits(self, messages: tuple[Message, ...]) -> int:
        return functools.reduce(int.__or__, map(self.bit, messages), 0)

    def under_way(self, network: int) -> Iterator[tuple[int, int]]:
        """(index, bit) of each message."""
        while network:
            bit = network & -network
            network ^= bit
            yield bit.bit_length() - 1, bit


class Actor:
    """A party with its states numbered, and what it does in each worked out once."""

    def __init__(self, party: Party, post: Mailbox) -> None:
        self.party = party
        self._post = post
        self._numbers: dict[Any, int] = {}
        self.parts: list[Any] = []
        self.moves = functools.cache(self._moves)
        self.receive = functools.cache(self._receive)
        self._matters = functools.cache(self._does_matter)
        self._masks: dict[int, tuple[int, int]] = {}  # messages known then, those to drop

    def number(self, part: Any) -> int:
        if part not in self._numbers:
            self._check_end(part)
            self._numbers[part] = len(self.parts)
            self.parts.append(part)
        return self._numbers[part]

    def _check_end(self, part: Any) -> None:
        """What time does to one party does not depend on the others."""
        path = ["time passes"]
        try:
            for move in itertools.islice(self._in_time(part), 100):
                part = move.part
                path.append(move.label)
        except Violation:
            return  # the search comes there, too, and can say how
        with during("; ".join(path)):
            self.party.check_end(part)

    def _in_time(self, part: Any) -> Iterator[Move]:
        """What happens if nothing but time passes."""
        while (move := self.party.timely(part)) is not None and move.part != part:
            yield move
            part = move.part

    def _step(self, move: Move) -> Step:
        with during(move.label):
            part = self.number(move.part)
        cost = COSTS.index(move.cost) if move.cost else None
        to = tuple({PARTIES.index(message.to) for message in move.sends})
        return Step(move.label, part, self._post.bits(move.sends), to, move.notes, cost)

    def _moves(self, number: int) -> tuple[Step, ...]:
        return tuple(self._step(move) for move in self.party.moves(self.parts[number]))

    def _receive(self, number: int, index: int) -> Step:
        message = self._post.messages[index]
        with during(f"{self.party.name}: gets {message}"):
            move = self.party.receive(self.parts[number], message)
        return self._step(move)

    def dead(self, number: int) -> int:
        """Messages to this party that will never matter to it, as bits."""
        known, mask = self._masks.get(number, (0, 0))
        messages = self._post.messages
        if known == len(messages):
            return mask
        for index in range(known, len(messages)):
            mask |= (not self._matters(number, index)) << index
        self._masks[number] = (len(messages), mask)
        return mask

    def _does_matter(self, number: int, index: int) -> bool:
        message = self._post.messages[index]
        return message.to != self.party.name or self.party.matters(self.parts[number], message)


class Explorer:
    """`budget` says how often what may go wrong, as a change to `ALWAYS`. With `succeeds`,
    whatever goes wrong within the budget, the sink's waiter must get the blocks in the end."""

    def __init__(self, rules: Rules, budget: dict[str, float], *, succeeds: bool = False) -> None:
        self._post = Mailbox()
        self._actors = [Actor(party, self._post) for party in parties(rules)]
        self._budget = tuple((ALWAYS | budget)[cost] for cost in COSTS)
        self._succeeds = succeeds
        self._parents: dict[World, World | None] = {}

    def run(self, depth: int | None = None, max_states: int | None = None) -> Report:
        """Explores to `depth` steps, or until there are `max_states`.

        Raises:
            Violation: with the shortest trace that leads to one.
        """
        began = time.process_time()
        transitions, level = 0, 0
        with self._traced(None):
            frontier = self._begin()
        while frontier and level != depth and len(self._parents) < (max_states or inf):
            level, reached = level + 1, []
            for world in frontier:
                with self._traced(world):
                    for successor in self._successors(world):
                        transitions += 1
                        if successor not in self._parents:
                            self._parents[successor] = world
                            reached.append(successor)
            frontier = reached
        seconds = time.process_time() - began
        return Report(len(self._parents), transitions, level, seconds, not frontier)

    def _begin(self) -> list[World]:
        parts = tuple(actor.number(actor.party.start()) for actor in self._actors)
        world = World(parts, 0, self._budget, (), None)
        self._parents = {world: None}
        return [world]

    # ---- steps ----

    def _successors(self, world: World) -> Iterator[World]:
        stuck = True
        for _, successor in self._steps(world):
            stuck = stuck and successor == world
            yield successor
        if stuck and self._succeeds and world.activated is None:
            broken(Invariant.SUCCESS, "; ".join(self._describe(world)))

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every possible next step: (label, world after it)."""
        parts, network, budget, _, _ = world
        for index, actor in enumerate(self._actors):
            for step in actor.moves(parts[index]):
                left = _spend(budget, step.cost)
                if left is not None:
                    yield step.label, self._after(world, index, step, network, left)
        messages = self._post.messages
        again = _spend(budget, COSTS.index(DUPLICATE))
        for number, bit in self._post.under_way(network):
            message = messages[number]
            index = PARTIES.index(message.to)
            step = self._actors[index].receive(parts[index], number)
            yield step.label, self._after(world, index, step, network ^ bit, budget)
            if again is not None and message.kind in REQUESTS:
                label = f"{step.label}, which will come again"
                yield label, self._after(world, index, step, network, again)

    def _after(
        self, world: World, index: int, step: Step, network: int, budget: tuple[float, ...]
    ) -> World:
        old, _, _, holders, activated = world
        parts = (*old[:index], step.part, *old[index + 1 :])
        for note in step.notes:
            with during(step.label):
                holders, activated = _noted(note, holders, activated)
        network &= ~self._actors[index].dead(step.part)
        sends = step.sends
        for receiver in step.to:
            sends &= ~self._actors[receiver].dead(parts[receiver])
        return World(parts, network | sends, budget, holders, activated)

    # ---- how one got there ----

    @contextmanager
    def _traced(self, world: World | None) -> Iterator[None]:
        try:
            yield
        except Violation as violation:
            violation.trace = (*self._trace(world), f"{violation.during}✗ {violation}")
            raise

    def _trace(self, world: World | None) -> list[str]:
        path: list[World] = []
        while world is not None:
            path.append(world)
            world = self._parents[world]
        path.reverse()
        return [self._label(*pair) for pair in itertools.pairwise(path)]

    def _describe(self, world: World) -> Iterator[str]:
        for actor, part in zip(self._actors, world.parts, strict=True):
            yield f"{actor.party.name}: {_describe(actor.parts[part])}"

    def _label(self, before: World, after: World) -> str:
        return next(label for label, world in self._steps(before) if world == after)


def _describe(part: Any) -> str:
    """The fields that are not their defaults."""
    shown = ((each.name, getattr(part, each.name), each.default) for each in fields(part))
    return ", ".join(f"{name}={value}" for name, value, default in shown if value != default)


def _spend(budget: tuple[float, ...], cost: int | None) -> tuple[float, ...] | None:
    """What is left of the budget; None: it does not suffice."""
    if cost is None or budget[cost] == inf:
        return budget
    return (*budget[:cost], budget[cost] - 1, *budget[cost + 1 :]) if budget[cost] else None


def _noted(
    note: Note, holders: tuple[str, ...], activated: Note | None
) -> tuple[tuple[str, ...], Note | None]:
    """What is known across parties, after the note."""
    fact, source, epoch = note
    held = (*holders, *("",) * (epoch + 1 - len(holders)))
    match fact:
        case "holds" if held[epoch] not in ("", source):
            broken(Invariant.ONE_HOLDER, f"{held[epoch]} and {source} have epoch {epoch}")
        case "holds":
            return (*held[:epoch], source, *held[epoch + 1 :]), activated
        case "activated" if held[epoch] != source:
            broken(Invariant.RIGHT_CONTENT, f"{source} committed epoch {epoch} of {held[epoch]}")
        case "activated":
            return holders, note
        case "succeeded" if activated != Note("activated", source, epoch):
            broken(Invariant.HONEST_SUCCESS, f"{source}, epoch {epoch}; {activated}")
    return holders, activated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--depth", type=int, help="steps to go; default: all there are")
    parser.add_argument("--max-states", type=int)
    parser.add_argument("--ranks", type=int, default=Rules.ranks)
    parser.add_argument("--asks", type=int, default=Rules.asks, help="epochs the router asks for")
    parser.add_argument("--budget", default="bad=1,crash=1,duplicate=1", help="what may go wrong")
    parser.add_argument("--empty", action="store_true", help="no blocks are wanted")
    args = parser.parse_args()
    limits = (each.split("=") for each in args.budget.split(",") if each)
    budget = {name: float(limit) for name, limit in limits}
    rules = Rules(ranks=args.ranks, asks=args.asks, empty=args.empty)
    print(Report.HEAD)
    print(Explorer(rules, budget).run(args.depth, args.max_states))


if __name__ == "__main__":
    main()
