"""Finds rules of a client's Lark grammar that have no finite text: an answer that enters one never
ends, or dies.

    a: "x" a | b      ──▶ `a` has none, unless `b` has one

Groups become rules of their own, so that nothing here recurses. Conditions of parametric rules
(`%if`) count as true; the library checks the syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pdserve.common.text.json_shapes import least_fixpoint
from pdserve.common.text.json_strings import terminal_fits

MAX_TERMINALS = 500
_TOKEN = re.compile(
    r"""
    (?P<skip>(?://|\#)[^\n]*|[ \t\r]+|->[ ]*\w+|::[^\s:|]+|\.\.)
    |(?P<line>\n\s*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[imslux]*|<[^<>\s]+>|@[\w-]+)
    |(?P<many>[?*+]|\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+)
    |(?P<statement>%(?!if\b)\w+)
    |(?P<condition>%if\b[^\n|]*)
    |(?P<name>[?!]?[A-Za-z_][\w-]*)
    |(?P<other>.)
    """,
    re.VERBOSE,
)
_OPTIONAL = re.compile(r"[?*]|[{~]\s*0|\{\s*,")
_HEAD = re.compile(r"(?:\.-?\d+)?\s*(?:\[[^\]\n]*\]|\{[^}\n]*\})?(?:::_)?\s*:(?!:)")

Rules = Mapping[str, list[list[str]]]  # alternatives: names of what they need


class _Reader:
    """Reads the rules and terminals of a grammar."""

    def __init__(self, lark: str) -> None:
        self.rules: dict[str, list[list[str]]] = {}
        self.terminals: dict[str, str] = {}  # definitions
        self._lark = lark
        self._open: list[str] = []  # the rule, and its groups that are open
        place, starts = 0, True
        while token := _TOKEN.match(lark, place):
            place = token.end()
            if token.lastgroup == "line":
                starts = True
            elif token.lastgroup != "skip":
                place = self._read(token, place, starts)
                starts = False

    def _read(self, token: re.Match[str], place: int, starts: bool) -> int:
        text, kind = token[0], token.lastgroup
        if kind == "statement":
            return self._statement(place, starts)
        if kind == "name" and starts and (head := _HEAD.match(self._lark, place)):
            return self._begin(text.lstrip("?!"), head.end())
        if not self._open or kind == "condition":
            return place
        if kind == "many":
            self._repeat(text)
        elif kind in ("name", "text"):
            self._needs(text)
        elif text in "([":
            group = f"({len(self.rules)}"
            self.rules[group] = [[]]
            self._needs(group)
            self._open.append(group)
        elif text in ")]" and len(self._open) > 1:
            self._open.pop()
            if text == "]":
                self._repeat("?")
        elif text == "|":
            self.rules[self._open[-1]].append([])
        return place

    def _begin(self, name: str, place: int) -> int:
        """Begins a rule; a terminal is taken as a whole."""
        self._open = [name]
        if not name.strip("_")[:1].isupper():
            self.rules[name] = [[]]
            return place
        self._open = []
        following = re.compile(r"\n(?=\s*(?:[?!]?[A-Za-z_][\w-]*[^\S\n]*(?:[.\[{][^\n:]*)?:|%))")
        end = following.search(self._lark, place)
        last = len(self._lark) if end is None else end.start()
        self.terminals[name] = self._lark[place:last]
        return last

    def _statement(self, place: int, starts: bool) -> int:
        """Skips what follows a `%`: braces, or the line."""
        if starts:
            self._open = []
        brace = re.compile(r"\s*\{").match(self._lark, place)
        if brace is None:
            end = self._lark.find("\n", place)
            return len(self._lark) if end < 0 else end
        depth, place = 1, brace.end()
        strings = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]')
        while depth and (token := strings.search(self._lark, place)):
            depth += (token[0] == "{") - (token[0] == "}")
            place = token.end()
        return place

    def _needs(self, what: str) -> None:
        self.rules[self._open[-1]][-1].append(what)

    def _repeat(self, times: str) -> None:
        alternative = self.rules[self._open[-1]][-1]
        if _OPTIONAL.match(times) and alternative:
            alternative[-1] = f"?{alternative[-1]}"


def check_rules(lark: str) -> None:
    """Raises ValueError: a rule that the start rule reaches has no finite text."""
    reader = _Reader(lark)
    rules = reader.rules
    reached = {name: list(chain.from_iterable(rules[name])) for name in _reached(rules)}
    empty = set(_empty_terminals(reader, chain.from_iterable(reached.values())))
    may_lack = rules.keys() | empty

    def fits(name: str, found: set[str]) -> bool:
        return any(
            all(each in found or each not in may_lack for each in needed) for needed in rules[name]
        )

    found = least_fixpoint(reached, fits)
    lacking = [each for each in [*reached, *empty] if each not in found and each[0] != "("]
    if lacking:
        raise ValueError(f"no finite text matches {lacking[0][:100]}")


def _reached(rules: Rules) -> Iterator[str]:
    pending, seen = ["start"], {"start"}
    while pending:
        name = pending.pop()
        if name not in rules:
            continue
        yield name
        for each in (each.lstrip("?") for each in chain.from_iterable(rules[name])):
            if each not in seen:
                seen.add(each)
                pending.append(each)


def _empty_terminals(reader: _Reader, needed: Iterable[str]) -> Iterator[str]:
    """Yields the terminals and regexes in use that no text matches. What the library does not
    compile alone is left to it."""
    used = dict.fromkeys(each.lstrip("?") for each in needed)
    definitions = "".join(f"\n{name}: {text}" for name, text in reader.terminals.items())
    asked = [each for each in used if each in reader.terminals or each.startswith("/")]
    for each in asked[:MAX_TERMINALS]:
        try:
            fits = terminal_fits(f"{each}{definitions}")
        except ValueError:
            continue
        if not fits:
            yield each
