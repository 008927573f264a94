"""Calls between markers, within text. A family of models is a subclass that names its markers:

    text  CALL_MARKER  BEGIN call END  BEGIN call END  SECTION_END  text

Markers that a family lacks are empty. `one` reads a call; the classes here are its usual shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from pdserve.router.api.parsers.literals import from_python
from pdserve.router.api.parsers.reader import Sink, Step, encode
from pdserve.router.api.parsers.tool_parser import ArgumentKind, ToolParser

NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"[^<>\n\"']+")
_QUOTES = ('"', "'")
_PYTHON = ("[", "{", "(", "T", "F", "N")  # begins of values that Python writes otherwise


class SectionParser(ToolParser):
    """Parses sections of calls. A section without a call is content."""

    call_marker: ClassVar[str]
    other_markers: ClassVar[tuple[str, ...]] = ()  # that begin a section as well
    begin_call: ClassVar[str] = ""
    end_call: ClassVar[str] = ""
    end_section: ClassVar[str] = ""

    def one(self) -> Step[bool]:
        """Reads a call after `begin_call`. Returns false if there is none."""
        raise NotImplementedError

    def parse(self) -> Step[None]:
        reader, markers = self.reader, (self.call_marker, *self.other_markers)
        while found := (yield from reader.until(markers, self.content)):
            yield from reader.space()
            called = False
            begun = found == self.begin_call or (yield from reader.literal(self.begin_call))
            while begun and (yield from self.one()):
                called = True
                yield from self._end_call()
                begun = self.begin_call != "" and (yield from reader.literal(self.begin_call))
            yield from self._end_section(called)

    def _end_call(self) -> Step[None]:
        yield from self.reader.space()
        yield from self.reader.literal(self.end_call)
        self.reader.keep()
        yield from self.reader.space()

    def _end_section(self, called: bool) -> Step[None]:
        """Drops the marker and the space after a section of calls; text that is no call is
        content."""
        left = self.reader.kept()
        if not called or left.strip():
            self.content(left)
            return
        yield from self.reader.literal(self.end_section)
        yield from self.reader.space()


class ObjectCallParser(SectionParser):
    """A call is `{"name": …, "arguments": {…}}`."""

    def one(self) -> Step[bool]:
        return (yield from self.call())


class ListCallParser(SectionParser):
    """Calls are a list of such objects."""

    def one(self) -> Step[bool]:
        if not (yield from self.reader.literal("[")):
            return False
        return (yield from self.list_of_calls())


class NamedCallParser(SectionParser):
    """A call is BEFORE_NAME name AFTER_NAME {…}; each marker of AFTER_NAME may be missing."""

    before_name: ClassVar[str] = ""
    name_pattern: ClassVar[re.Pattern[str]] = NAME
    after_name: ClassVar[tuple[str, ...]] = ()
    after_arguments: ClassVar[str] = ""

    def one(self) -> Step[bool]:
        reader = self.reader
        yield from reader.literal(self.before_name)
        yield from reader.space()
        parts: list[str] = []
        yield from reader.copy(self.name_pattern, parts.append)
        yield from self.after()
        yield from reader.space()
        name, call_id = self.name_and_id("".join(parts))
        if not name:
            return False
        if (yield from reader.peek()) == "{":
            self.begin(name, call_id)
            self.in_call = not (yield from reader.value(self.arguments))
            yield from reader.space()
            yield from reader.literal(self.after_arguments)
            return True
        if not (self.end_call and (yield from reader.literal(self.end_call))):
            return False
        self.begin(name, call_id)
        self.arguments("{}")
        self.in_call = False
        return True

    def after(self) -> Step[None]:
        """Reads what stands between the name and its arguments."""
        for marker in self.after_name:
            yield from self.reader.space()
            yield from self.reader.literal(marker)

    def name_and_id(self, written: str) -> tuple[str, str | None]:
        """Splits the text in the name's place into a name and, if there is one, the call's id."""
        return written, None


class TaggedCallParser(SectionParser):
    """A call is name AFTER_NAME, then KEY[0] key KEY[1] VALUE[0] value VALUE[1] for each argument.

    Arguments are text; the tools' schemas say which are JSON. Text arguments are streamed.
    """

    after_name: ClassVar[str] = ""
    key: ClassVar[tuple[str, str]]
    value: ClassVar[tuple[str, str]]
    own_lines: ClassVar[bool] = False  # the newlines around a value are not part of it
    kinds: ClassVar[Mapping[str, ArgumentKind]] = {}  # marks after a key that say what it is

    def one(self) -> Step[bool]:
        name = yield from self._word(NAME)
        if not name or not (yield from self.reader.literal(self.after_name)):
            return False
        yield from self.reader.space()
        found = yield from self._next()
        if not found:
            return False
        self.begin(name)
        first = True
        while found == self.key[0]:
            if not (yield from self._argument(name, first)):
                return True
            first = False
            yield from self.reader.space()
            found = yield from self._next()
        if found or (yield from self.reader.peek()):
            self.arguments("{}" if first else "}")
            self.in_call = False
        return True

    def _next(self) -> Step[str]:
        """Reads a key's marker or that of the call's end; empty: neither comes."""
        for marker in (self.key[0], self.end_call or self.end_section):
            if (yield from self.reader.literal(marker)):
                return marker
        return ""

    def _argument(self, name: str, first: bool) -> Step[bool]:
        """Returns false if it breaks off."""
        reader = self.reader
        key = yield from self._word(_KEY)
        kind = self.kind_of(name, key)
        for mark, said in self.kinds.items():
            if (yield from reader.literal(mark)):
                kind = said
        if not key or not (yield from reader.literal(self.key[1])):
            return False
        if self.value[0]:
            yield from reader.space()
            if not (yield from reader.literal(self.value[0])):
                return False
        self.arguments(f"{'{' if first else ', '}{encode(key)}: ")
        if self.own_lines:
            yield from reader.literal("\n")
        if kind is ArgumentKind.TEXT:
            return (yield from self._text())
        parts: list[str] = []
        whole = yield from self._until_end(parts.append)
        if whole:
            self.arguments(as_json("".join(parts), kind))
        return whole

    def _text(self) -> Step[bool]:
        self.arguments('"')
        whole = yield from self._until_end(lambda text: self.arguments(encode(text)[1:-1]))
        if whole:
            self.arguments('"')
        return whole

    def _until_end(self, sink: Sink) -> Step[bool]:
        if not (yield from self.reader.until(self.value[1], sink)):
            return False
        space = self.reader.kept().removesuffix(self.value[1])
        sink(space.removesuffix("\n") if self.own_lines else space)
        return True

    def _word(self, pattern: re.Pattern[str]) -> Step[str]:
        """Reads a word, which may be in quotes."""
        parts: list[str] = []
        quote = yield from self.reader.peek()
        if quote in _QUOTES:
            yield from self.reader.literal(quote)
        yield from self.reader.copy(pattern, parts.append)
        if quote in _QUOTES:
            yield from self.reader.literal(quote)
        return "".join(parts).strip()


def as_json(text: str, kind: ArgumentKind | None) -> str:
    """Returns an argument's value as JSON. It may be JSON, or Python as in `['a', True]`; else it
    is a text."""
    stripped = text.strip()
    if kind is ArgumentKind.TEXT_OR_NULL:
        return "null" if stripped == "null" else encode(text)
    try:
        msgspec.json.decode(stripped)
        return stripped
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return (from_python(stripped) if stripped[:1] in _PYTHON else None) or encode(text)
