"""Values that models write as Python or in a notation of their own, read and written as JSON.

The text is written on as it comes. Brackets are counted on a list, so that depth takes no
recursion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from pdserve.router.api.parsers.reader import Reader, Sink, Step, encode

_BRACKETS = {"[": ("]", "[", "]"), "(": (")", "[", "]"), "{": ("}", "{", "}")}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_LONGEST = 64  # characters of a number that is not JSON
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_SAME = {"\\", "'", '"'}
_HEX = {"x": 2, "u": 4, "U": 8}  # digits of a character's number


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written: text in quotes, the rest bare."""

    quotes: tuple[str, ...]  # around a text, the same at both ends; the longest first
    escapes: bool  # a backslash in a text is Python's
    bare: re.Pattern[str]  # characters of numbers and words
    key: re.Pattern[str]  # characters of a key without quotes


PYTHON = Notation(('"""', "'''", '"', "'"), True, re.compile(r"[\w.+-]+"), re.compile(r"[\w.+-]+"))


def quoted_by(quote: str) -> Notation:
    """Keys are bare, and texts stand between two marks that they cannot have."""
    return Notation((quote,), False, re.compile(r"[^,{}\[\]<]+"), re.compile(r"[^,:{}\[\]<\s]+"))


def from_python(text: str) -> str | None:
    """Returns a Python value as JSON; None if the text is none."""
    reader, parts = Reader(), list[str]()
    reader.feed(text)
    reader.close()
    whole = _run(value(reader, PYTHON, parts.append))
    return "".join(parts) if whole and not len(reader) else None


def _run(step: Step[bool]) -> bool:
    """Returns the result of a step that waits for nothing."""
    try:
        next(step)
    except StopIteration as stop:
        return bool(stop.value)
    raise AssertionError("the reader is closed")


def value(reader: Reader, notation: Notation, sink: Sink) -> Step[bool]:
    """Reads one value; returns false if it has no end, or is none."""
    open_brackets: list[str] = []  # as they close in the text
    while True:
        yield from reader.space()
        opened = (yield from reader.peek()) in _BRACKETS and len(reader) > 0
        if opened:
            closing, written, _ = _BRACKETS[reader.take(1)]
            open_brackets.append(closing)
            sink(written)
        elif not (yield from _atom(reader, notation, sink)):
            return False
        more = yield from _next(reader, open_brackets, sink, first=opened)
        if not more or not open_brackets:
            return more
        if open_brackets[-1] == "}" and not (yield from _key(reader, notation, sink)):
            return False


def _next(reader: Reader, open_brackets: list[str], sink: Sink, first: bool) -> Step[bool]:
    """Closes brackets and reads a comma; returns false if neither comes. `first`: a bracket has
    just been opened, so that a value may follow without a comma."""
    while open_brackets:
        yield from reader.space()
        char = yield from reader.peek()
        comma = not first and char == ","
        if comma:
            reader.take(1)
            yield from reader.space()
            char = yield from reader.peek()
        if char == open_brackets[-1]:
            reader.take(1)
            sink("}" if open_brackets.pop() == "}" else "]")
            first = False
            continue
        if comma:
            sink(", ")
        return comma or first
    return True


def _key(reader: Reader, notation: Notation, sink: Sink) -> Step[bool]:
    """Reads a key and its colon."""
    yield from reader.space()
    if not (yield from _text(reader, notation, sink)):
        parts: list[str] = []
        if not (yield from reader.copy(notation.key, parts.append)):
            return False
        sink(encode("".join(parts)))
    yield from reader.space()
    if not (yield from reader.literal(":")):
        return False
    sink(": ")
    return True


def _atom(reader: Reader, notation: Notation, sink: Sink) -> Step[bool]:
    """Reads a value without brackets."""
    if (yield from _text(reader, notation, sink)):
        return True
    parts: list[str] = []
    yield from reader.copy(notation.bare, parts.append)
    text = "".join(parts).strip()
    if not text:
        return False
    sink(_bare(text))
    return True


def _bare(text: str) -> str:
    if text in _WORDS:
        return _WORDS[text]
    if _JSON.fullmatch(text):
        return text
    kinds: tuple[Callable[[str], float], ...] = (lambda text: int(text, 0), float)
    for number in kinds if len(text) <= _LONGEST else ():
        try:
            found = number(text)
            return encode(text) if math.isinf(found) or math.isnan(found) else str(found)
        except (ValueError, OverflowError):
            continue
    return encode(text)


def _text(reader: Reader, notation: Notation, sink: Sink) -> Step[bool]:
    """Reads a text in quotes; returns false if there is none, or it has no end."""
    for quote in notation.quotes:
        if (yield from reader.literal(quote)):
            break
    else:
        return False
    sink('"')

    def write(text: str) -> None:
        sink(encode(text)[1:-1])

    whole = yield from (_escaped if notation.escapes else _plain)(reader, quote, write, sink)
    if whole:
        sink('"')
    return whole


def _plain(reader: Reader, quote: str, write: Sink, sink: Sink) -> Step[bool]:
    if not (yield from reader.until(quote, write)):
        return False
    write(reader.kept().removesuffix(quote))
    return True


def _escaped(reader: Reader, quote: str, write: Sink, sink: Sink) -> Step[bool]:
    unescaped = _unescaped(quote[0])
    while True:
        yield from reader.copy(unescaped, write)
        if (yield from reader.literal("\\")):
            yield from _escape(reader, write, sink)
        elif (yield from reader.literal(quote)):
            return True
        elif not (yield from reader.peek()):
            return False
        else:
            write(reader.take(1))


def _escape(reader: Reader, write: Sink, sink: Sink) -> Step[None]:
    char = yield from reader.peek()
    reader.take(1)
    if char in _HEX:
        yield from _numbered(reader, char, write, sink)
    elif char in _SAME or char == "":
        write(char or "\\")
    elif char != "\n":  # which continues the line
        write(_ESCAPES.get(char, "\\" + char))


def _numbered(reader: Reader, char: str, write: Sink, sink: Sink) -> Step[None]:
    """Reads a character by its number. Half a character stays an escape, as its other half may
    follow."""
    digits: list[str] = []
    while len(digits) < _HEX[char] and (yield from reader.peek()) in _DIGITS and len(reader):
        digits.append(reader.take(1))
    written = "".join(digits)
    number = int(written, 16) if len(digits) == _HEX[char] else None
    if number is None or number > 0x10FFFF:
        write(f"\\{char}{written}")
    elif 0xD800 <= number < 0xE000:
        sink(f"\\u{number:04x}")
    else:
        write(chr(number))


_DIGITS = frozenset("0123456789abcdefABCDEF")


@cache
def _unescaped(quote: str) -> re.Pattern[str]:
    return re.compile(rf"[^\\{quote}]+")
