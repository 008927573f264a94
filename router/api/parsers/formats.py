"""The formats in which families of models write tool calls."""

from __future__ import annotations

import re
import secrets
import string

from pdserve.router.api.parsers.reader import Step
from pdserve.router.api.parsers.tool_parser import ToolParser

_MISTRAL_NAME = re.compile(r"[\w.-]+")
_ALPHANUMERIC = string.ascii_letters + string.digits


class HermesParser(ToolParser):
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>` within text, as Hermes, Qwen2.5
    and Qwen3 write it."""

    shows_special_tokens = True
    call_marker = "<tool_call>"

    def parse(self) -> Step[None]:
        reader = self.reader
        while (yield from reader.until(self.call_marker, self.content)):
            yield from reader.space()
            if not (yield from self.call()):
                self.content(reader.kept())
                continue
            yield from reader.space()
            yield from reader.literal("</tool_call>")
            yield from reader.space()


class Llama3JSONParser(ToolParser):
    """Parses `{"name": …, "parameters": {…}}` at the start, several with `;` between them, as Llama
    3.1 and later write it. No marker says that it is a call, so that it must name a tool."""

    shows_special_tokens = True
    bare_calls = True

    def parse(self) -> Step[None]:
        reader = self.reader
        reader.keep()
        yield from reader.space()
        yield from reader.literal("<|python_tag|>")
        yield from reader.space()
        while (yield from self.call(known=True)):
            reader.keep()
            yield from reader.space()
            yield from reader.literal(";")
            yield from reader.space()
        self.content(reader.kept())


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
        """The name, if parameters follow; else empty."""
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


class MistralParser(ToolParser):
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and from version 11 of Mistral's
    tokenizer on `[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    shows_special_tokens = True
    call_marker = "[TOOL_CALLS]"

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: Mistral's templates refuse other ids."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def parse(self) -> Step[None]:
        reader = self.reader
        while (yield from reader.until(self.call_marker, self.content)):
            yield from reader.space()
            if (yield from reader.literal("[")):
                yield from _calls(self)
            else:
                yield from self._named_call()
            self.content(reader.kept())
            yield from reader.space()

    def _named_call(self) -> Step[None]:
        reader = self.reader
        name: list[str] = []
        yield from reader.copy(_MISTRAL_NAME, name.append)
        if (yield from reader.literal("[CALL_ID]")):
            yield from reader.copy(_MISTRAL_NAME, lambda _: None)
        yield from reader.literal("[ARGS]")
        yield from reader.space()
        if name and (yield from reader.peek()) == "{":
            self.begin("".join(name))
            self.in_call = not (yield from reader.value(self.arguments))


class RequiredParser(ToolParser):
    """Parses a list of calls and nothing else, as `tool_choice: "required"` makes any model write
    it."""

    def parse(self) -> Step[None]:
        self.reader.keep()
        yield from self.reader.space()
        if (yield from self.reader.literal("[")):
            yield from _calls(self)
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


def _calls(parser: ToolParser) -> Step[None]:
    """Reads the rest of a list. Its end is kept if it is no call."""
    reader = parser.reader
    while True:
        yield from reader.space()
        if not (yield from parser.call()):
            return
        reader.keep()
        yield from reader.space()
        if not (yield from reader.literal(",")):
            if (yield from reader.literal("]")):
                reader.kept()
            return
