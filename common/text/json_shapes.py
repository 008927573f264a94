"""The texts of JSON that a schema allows, as alternatives of a rule: terminals, other rules, lists
and objects. An object's declared properties come in the schema's order, then its free keys.

A shape knows which of its parts it needs. So what has no finite text is found before anything is
generated: a rule fits if one of its shapes fits, and a shape if the rules do that it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.common.text.json_strings import quoted

_MAX_STATES = 20_000  # properties × the number of them to count

# Terminals, with the white space around them.
# Names are short, for a grammar's size is bounded, and unlike clients' own.
COMMA, COLON = "J_C", "J_N"
ARRAY, END_ARRAY, NO_ITEMS = "J_A", "J_AE", "J_A0"
OBJECT, END_OBJECT, NOTHING = "J_O", "J_OE", "J_O0"

Fits = Callable[[str], bool]  # whether a rule has a finite text
Rule = tuple[str, list[str]]  # a name and its alternatives


def least_fixpoint(
    needs: Mapping[str, Iterable[str]], holds: Callable[[str, set[str]], bool]
) -> set[str]:
    """Returns the names that hold because of others that do. `needs`: those that a name may hold
    because of."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name, needed in needs.items():
        for each in needed:
            users[each].append(name)
    found, pending = set[str](), list(needs)
    while pending:
        name = pending.pop()
        if name not in found and holds(name, found):
            found.add(name)
            pending += users[name]
    return found


@dataclass(frozen=True, slots=True)
class Text:
    """A terminal, or a rule of the library that begins with `%json`."""

    text: str
    type: str
    values: frozenset[Any] | None = None  # those that it has, if they are listed

    def needs(self) -> tuple[str, ...]:
        return ()

    def fits(self, fits: Fits) -> bool:
        return True

    def width(self, fits: Fits) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Other:
    """Another rule."""

    name: str

    def needs(self) -> tuple[str, ...]:
        return (self.name,)

    def fits(self, fits: Fits) -> bool:
        return fits(self.name)


def _times(item: str, least: int, most: int | None) -> str:
    """Returns the alternative of an item so often."""
    if most == 0:
        return ""
    if (least, most) == (1, 1):
        return item
    if (least, most) == (0, None):
        return f"({item})*"
    return f"({item}){{{least},{'' if most is None else most}}}"


@dataclass(frozen=True, slots=True)
class Array:
    """`first` are the rules of the first items, `rest` that of all others."""

    first: tuple[str, ...]
    rest: str | None
    least: int
    most: int | None

    def needs(self) -> tuple[str, ...]:
        return (*self.first, *([] if self.rest is None else [self.rest]))

    def _most(self, fits: Fits) -> int | None:
        """Returns how many items are possible at most."""
        most = next((i for i, each in enumerate(self.first) if not fits(each)), None)
        if most is None and (self.rest is None or not fits(self.rest)):
            most = len(self.first)
        return min((each for each in (most, self.most) if each is not None), default=None)

    def fits(self, fits: Fits) -> bool:
        most = self._most(fits)
        return most is None or self.least <= most

    def width(self, fits: Fits) -> int:
        return 1

    def rules(self, name: str, fits: Fits) -> Iterator[Rule]:
        """Yields the rules of this list, the last of which is called `name`."""
        most = self._most(fits)
        shown = [] if self.least else [NO_ITEMS]
        if most != 0:
            shown.append(f"{ARRAY} {self._items(most)} {END_ARRAY}")
        yield name, shown

    def _items(self, most: int | None) -> str:
        first = self.first if most is None else self.first[:most]
        more = None if most is None else most - len(first)
        tail = ""
        if self.rest is not None and more != 0:
            if not first:
                least = max(self.least - 1, 0)
                more = None if more is None else more - 1
                return f"{self.rest} {_times(f'{COMMA} {self.rest}', least, more)}"
            tail = _times(f"{COMMA} {self.rest}", max(self.least - len(first), 0), more)
        for place in range(len(first) - 1, 0, -1):
            tail = f"{COMMA} {first[place]} {tail}"
            if place >= self.least:
                tail = f"({tail})?"
        return f"{first[0]} {tail}"


@dataclass(frozen=True, slots=True)
class Object:
    """`declared` are names, rules and whether they are required; `free` are pairs of a key's
    terminal and a rule."""

    declared: tuple[tuple[str, str, bool], ...]
    free: tuple[tuple[str, str], ...]
    least: int
    most: int | None

    def needs(self) -> tuple[str, ...]:
        return (*(rule for _, rule, _ in self.declared), *(rule for _, rule in self.free))

    def fits(self, fits: Fits) -> bool:
        required = all(fits(rule) for _, rule, required in self.declared if required)
        return required and _States(self, fits).any()

    def width(self, fits: Fits) -> int:
        """Returns the items that llguidance follows at once within this object, at most: three for
        each property that may be the next one, one for each that an end would end."""
        widest, run = 0, 0
        shown = [required for _, rule, required in self.declared if fits(rule)]
        for place, required in enumerate(shown):
            run = 0 if required else run + 1
            widest = max(widest, 3 * run, place + 1)
        return max(widest, len(shown) - run + 3 * run if run else 0) + 10

    def rules(self, name: str, fits: Fits) -> Iterator[Rule]:
        """Yields the rules of this object, the last of which is called `name`."""
        return _States(self, fits).rules(name)


State = tuple[int, int]  # index of the next declared property, number of properties so far


class _States:
    """An object, property by property. They are counted as far as it matters: where there is one,
    a comma follows."""

    def __init__(self, of: Object, fits: Fits) -> None:
        """Raises ValueError: there are too many states."""
        self._of = of
        self._declared = [each for each in of.declared if fits(each[1])]
        self._free = [each for each in of.free if fits(each[1])]
        count = len(self._declared)
        self._cap = max(1, min(count, max(of.least, of.most or 0)))
        if count * self._cap > _MAX_STATES:
            raise ValueError("minProperties or maxProperties is too large beside properties")
        self._ends = self._compute()

    def _compute(self) -> dict[State, bool]:
        """Returns whether the object can end from each state, with one property at least."""
        last = len(self._declared)
        ends = {(last, count): self._tail(count) is not None for count in range(self._cap + 1)}
        for place in range(last - 1, -1, -1):
            for count in range(self._cap + 1):
                next_ = (ends[state] for _, state in self._next((place, count)))
                ends[place, count] = any(next_)
        return ends

    def _next(self, state: State) -> list[tuple[bool, State]]:
        """Returns whether the next property is taken, and the state after it."""
        place, count = state
        most, required = self._of.most, self._declared[place][2]
        taken = [(True, (place + 1, min(count + 1, self._cap)))]
        return (taken if most is None or count < most else []) + (
            [] if required else [(False, (place + 1, count))]
        )

    def _tail(self, count: int) -> str | None:
        """Returns the free properties after the declared ones; None: the object cannot end."""
        least, most = self._of.least - count, self._of.most
        room = None if most is None else most - count
        # Free keys may be equal to each other, so that they count as one.
        if least > 1 or (room is not None and room < 0):
            return None
        if not self._free or room == 0:
            return None if least > 0 or count == 0 else ""
        pair = " | ".join(f"{key} {COLON} {rule}" for key, rule in self._free)
        pair = f"({pair})"
        if count == 0:
            return f"{pair} {_times(f'{COMMA} {pair}', 0, None if room is None else room - 1)}"
        return _times(f"{COMMA} {pair}", max(least, 0), room)

    @property
    def _may_be_empty(self) -> bool:
        return self._of.least == 0 and not any(required for _, _, required in self._declared)

    def any(self) -> bool:
        return self._may_be_empty or self._ends[0, 0]

    def rules(self, name: str) -> Iterator[Rule]:
        shown = [NOTHING] if self._may_be_empty else []
        if self._ends[0, 0]:
            shown.append(f"{OBJECT} {_named(name, (0, 0))} {END_OBJECT}")
            yield from self._reachable(name)
        yield name, shown

    def _reachable(self, name: str) -> Iterator[Rule]:
        pending, seen = [(0, 0)], {(0, 0)}
        while pending:
            state = pending.pop()
            if state[0] == len(self._declared):
                yield _named(name, state), [self._tail(state[1]) or ""]
                continue
            key, rule, _ = self._declared[state[0]]
            shown = []
            for taken, after in self._next(state):
                if self._ends[after]:
                    comma = f"{COMMA} " if state[1] else ""
                    item = f"{comma}{quoted(key)} {COLON} {rule} " if taken else ""
                    shown.append(item + _named(name, after))
                    pending += [] if after in seen else [after]
                    seen.add(after)
            yield _named(name, state), shown


def _named(name: str, state: State) -> str:
    return f"{name}p{state[0]}c{state[1]}"
