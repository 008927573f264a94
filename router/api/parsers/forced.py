"""Parsers of answers that a grammar holds to calls, whatever the model's own format."""

from __future__ import annotations

from pdserve.router.api.parsers.reader import Step
from pdserve.router.api.parsers.tool_parser import ToolParser


class BareCallParser(ToolParser):
    """Parses a text, or `{"name": …, "parameters": {…}}` of a tool and nothing else, as a schema
    that allows either makes a model write it. Only the last bracket may show which of them it is,
    so that a call comes as a whole; text that can be no call comes at once."""

    def parse(self) -> Step[None]:
        reader = self.reader
        reader.keep()
        yield from reader.space()
        arguments: list[str] = []
        name = yield from self._begun()
        if name in self.names and (yield from reader.peek()) == "{":
            whole = yield from reader.value(arguments.append)
            yield from reader.space()
            if whole and (yield from reader.literal("}")):
                self.begin(name)
                self.arguments("".join(arguments))
                self.in_call = False
                yield from reader.space()
                return
        self.content(reader.kept())

    def _begun(self) -> Step[str]:
        """Returns the name, if parameters follow; else empty."""
        reader, name = self.reader, ""
        for mark, key in (("{", "name"), (",", "parameters")):
            if not (yield from reader.literal(mark)):
                return ""
            yield from reader.space()
            if not (yield from reader.literal(f'"{key}"')):
                return ""
            yield from reader.space()
            if not (yield from reader.literal(":")):
                return ""
            yield from reader.space()
            if key == "name":
                name = (yield from reader.string()) or ""
                if name not in self.names:
                    return ""
                yield from reader.space()
        return name


class RequiredParser(ToolParser):
    """Parses a list of calls and nothing else, as `tool_choice: "required"` makes any model write
    it."""

    def parse(self) -> Step[None]:
        self.reader.keep()
        yield from self.reader.space()
        if (yield from self.reader.literal("[")):
            yield from self.list_of_calls()
        self.content(self.reader.kept())
        yield from self.reader.space()


class NamedParser(ToolParser):
    """Parses the arguments of one tool and nothing else, as a `tool_choice` that names it makes a
    model write them."""

    def parse(self) -> Step[None]:
        (name,) = self.names
        yield from self.reader.space()
        if (yield from self.reader.peek()):
            self.begin(name)
            self.in_call = not (yield from self.reader.value(self.arguments))
            yield from self.reader.space()
