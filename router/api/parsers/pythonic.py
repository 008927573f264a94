"""Calls as Python writes them: `[f(a=1), g(b='x')]`."""

from __future__ import annotations

import re
from typing import ClassVar

from pdserve.router.api.parsers.literals import PYTHON, value
from pdserve.router.api.parsers.reader import Step, encode
from pdserve.router.api.parsers.sections import NAME
from pdserve.router.api.parsers.tool_parser import ToolParser

_KEY = re.compile(r"\w+")


class PythonicParser(ToolParser):
    """Parses a list of calls at the start of the text. A list is no call by itself, so that each
    must name a tool."""

    around: ClassVar[tuple[str, str]] = ("<|python_start|>", "<|python_end|>")  # either may lack

    def parse(self) -> Step[None]:
        reader = self.reader
        reader.keep()
        yield from reader.space()
        yield from reader.literal(self.around[0])
        yield from reader.space()
        more = yield from reader.literal("[")
        while more and (yield from self._call()):
            reader.keep()
            yield from reader.space()
            more = yield from reader.literal(",")
            if not more and (yield from reader.literal("]")):
                yield from reader.space()
                yield from reader.literal(self.around[1])
                reader.kept()
                yield from reader.space()
        self.content(reader.kept())

    def _call(self) -> Step[bool]:
        """Reads `name(key=value, …)`; returns false if no call begins."""
        reader = self.reader
        yield from reader.space()
        name = yield from self._word(NAME)
        if name not in self.names:
            return False
        yield from reader.space()
        if not (yield from reader.literal("(")):
            return False
        separator = "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal(")")):
                self._begin(name, separator)
                self.arguments("{}" if separator == "{" else "}")
                self.in_call = False
                return True
            key = yield from self._word(_KEY)
            yield from reader.space()
            if not key or not (yield from reader.literal("=")):
                return separator != "{"
            self._begin(name, separator)
            self.arguments(f"{separator}{encode(key)}: ")
            separator = ", "
            if not (yield from value(reader, PYTHON, self.arguments)):
                return True
            yield from reader.space()
            if not (yield from reader.literal(",")) and (yield from reader.peek()) != ")":
                return True

    def _begin(self, name: str, separator: str) -> None:
        if separator == "{":
            self.begin(name)

    def _word(self, pattern: re.Pattern[str]) -> Step[str]:
        parts: list[str] = []
        yield from self.reader.copy(pattern, parts.append)
        return "".join(parts)
