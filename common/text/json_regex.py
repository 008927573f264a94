"""Regular expressions of schemas, which are ECMAScript's, in the syntax of llguidance: Rust's.

    [a&&b]  \\s  .  \\cJ  \\ud83d\\ude00   ──▶   the same characters, by their numbers

Rust reads some of them otherwise, and accepts more. What ECMAScript and Python, which many
validators use, read differently is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NoReturn

_SETS = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [
        (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ],
}  # fmt: skip
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_MEMBER = re.compile(
    r"""
    \\u(?P<high>[dD][89abAB]..)\\u(?P<low>[dD][c-fC-F]..)
    |\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|u\{(?P<braced>[0-9a-fA-F]{1,6})\})
    |(?P<property>\\[pP]\{[A-Za-z_=]+\})
    |\\(?P<set>[dDwWsS])
    |\\(?P<control>[tnvfr]|0(?![0-9])|c[a-zA-Z])
    |\\(?P<escaped>[^a-zA-Z0-9])
    |(?P<plain>[^\\])
    """,
    re.VERBOSE | re.DOTALL,
)
_MANY = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
_AS_IS = re.compile(r"[)|^$]|\\[bB]")  # the library refuses an anchor where it cannot match it
_PART = re.compile(r"\\.|(?P<begin>\[\^?\]?)(?P<members>(?:\\.|[^\]\\])*)(?P<end>\]?)", re.DOTALL)
_OPERATOR = re.compile(r"(?P<kept>\\.)|[\[&~]", re.DOTALL)
_TOKENS = re.compile(r"\[[^\]]*\]|\\?.", re.DOTALL)


def _character(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 0x7F else rf"\x{{{code:x}}}"


def _ranges(of: list[tuple[int, int]], inverted: bool = False) -> str:
    if inverted:
        starts = [0, *(last + 1 for _, last in of)]
        ends = [*(first - 1 for first, _ in of), 0x10FFFF]
        of = [each for each in zip(starts, ends, strict=True) if each[0] <= each[1]]
    shown = [(_character(first), _character(last)) for first, last in of]
    return "".join(first if first == last else f"{first}-{last}" for first, last in shown)


def _code(member: re.Match[str]) -> int | None:
    """Returns the single character that a member is; None: it is a set of them."""
    if (low := member["low"]) is not None:
        return 0x10000 + ((int(member["high"], 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF)
    if (digits := member["x"] or member["u"] or member["braced"]) is not None:
        return int(digits, 16)
    if (control := member["control"]) is not None:
        return ord(control[1]) % 32 if control[0] == "c" else _CONTROLS[control]
    one = member["escaped"] or member["plain"]
    return ord(one) if one else None


def _members(member: re.Match[str]) -> str:
    """Returns what stands for a member within brackets."""
    if (code := _code(member)) is not None:
        return _character(code)
    name = member["set"]
    return member["property"] or _ranges(_SETS[name.lower()], name.isupper())


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._place = pattern, 0

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"pattern {self._pattern[:100]} has {what}")

    def _took(self, expected: re.Pattern[str]) -> str:
        found = expected.match(self._pattern, self._place)
        self._place = found.end() if found else self._place
        return found[0] if found else ""

    def _member(self) -> re.Match[str]:
        member = _MEMBER.match(self._pattern, self._place)
        if member is None:
            self._refuse(f"an escape that is not supported: {self._pattern[self._place :][:8]}")
        self._place = member.end()
        return member

    def read(self) -> Iterator[str]:
        if self._pattern.startswith("(?i)"):
            self._place = 4
            yield "(?i)"
        may_repeat = False
        while rest := self._pattern[self._place : self._place + 3]:
            if many := self._took(_MANY):
                if not may_repeat:
                    self._refuse(f"nothing to repeat with {many}")
                yield many
                may_repeat = False
                continue
            may_repeat = rest[0] not in "(|^"
            if rest[0] == "[":
                yield self._brackets()
            elif rest[0] == "(":
                yield self._took(_GROUP) or self._refuse(f"a group that is not supported: {rest}")
            elif rest[0] == ".":
                self._place += 1
                yield f"[^{_ranges(_LINE_ENDS)}]"
            elif (anchor := self._took(_AS_IS)) or rest[0] in "{":
                yield anchor or self._refuse("a brace that repeats nothing")
            else:
                member = self._member()
                shown = _members(member)
                yield f"[{shown}]" if member["set"] else shown

    def _brackets(self) -> str:
        self._place += 1
        found = ["[^" if self._pattern.startswith("^", self._place) else "["]
        self._place += len(found[0]) - 1
        first = self._place
        while not self._pattern.startswith("]", self._place) or self._place == first:
            if self._place == first and self._pattern.startswith("]", first):
                self._refuse("brackets that begin with ]: escape it")
            if self._place >= len(self._pattern):
                self._refuse("brackets without an end")
            found.append(self._range())
        self._place += 1
        return "".join([*found, "]"])

    def _range(self) -> str:
        if self._pattern.startswith(r"\b", self._place):
            self._place += 2
            return _character(8)
        start = self._member()
        dash, place = self._pattern[self._place : self._place + 2], self._place
        if _code(start) is None or dash[:1] != "-" or dash[1:] in ("", "]"):
            return _members(start)
        self._place += 1
        end = self._member()
        if _code(end) is None:  # the dash is a member
            self._place = place
            return _members(start)
        return f"{_members(start)}-{_members(end)}"


@lru_cache(maxsize=4096)
def translated(pattern: str) -> str:
    r"""Returns the pattern for the library. In it, brackets have no `]`, and nothing is escaped but
    `\b`, `\B` and what stands for a character or a property.

    Raises:
        ValueError: it is not supported.
    """
    return "".join(_Reader(pattern).read())


def _escaped(member: re.Match[str]) -> str:
    return member["kept"] or rf"\{member[0]}"


def without_sets(regex: str) -> str:
    r"""Returns a regex of Python for the library: within brackets, Rust has others, and operators.

        [[a]b] [a&&b]   ──▶   [\[a]b] [a\&\&b]

    Raises:
        ValueError: it has a class of POSIX.
    """

    def plain(part: re.Match[str]) -> str:
        if part[0].startswith("\\"):
            return part[0]
        if "[:" in part["members"]:
            raise ValueError(f"brackets with [: are not supported: {part[0][:100]}")
        return part["begin"] + _OPERATOR.sub(_escaped, part["members"]) + part["end"]

    return _PART.sub(plain, regex)


def tokens(regex: str) -> list[str]:
    """Returns the characters of a translated pattern, with its brackets as one."""
    return _TOKENS.findall(regex)


def branches(regex: str) -> list[str]:
    """Splits a translated pattern at its outermost `|`."""
    depth, found = 0, [""]
    for token in tokens(regex):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found
