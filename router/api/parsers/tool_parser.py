"""What reads tool calls out of a model's text, and how a new format is added.

    text ── push ──▶ parse, a generator ──▶ Content · CallStart · CallArguments ──▶ deltas

A call is handed out as it comes: its start as soon as its name is known and its arguments begin.
Text that looked like a call and has none is content. From its start on, a call is as the model
wrote it: if its JSON breaks off, or its end is missing, so do its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import ClassVar

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import resolve
from pdserve.common.core.request import new_call_id
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Parser
from pdserve.router.api.parsers.reader import Step, decode, nowhere

GROUP = "pdserve.tool_parsers"
BUILTIN = {
    "hermes": "pdserve.router.api.parsers.formats:HermesParser",
    "llama3_json": "pdserve.router.api.parsers.formats:Llama3JSONParser",
    "mistral": "pdserve.router.api.parsers.formats:MistralParser",
}


class ToolParser(Parser):
    """What reads calls out of one answer. A format is a subclass with `parse`."""

    # Markers of the format are special tokens, of which answers otherwise show nothing.
    shows_special_tokens: ClassVar[bool] = False
    # What each call begins with, or the first of several, where that is a single token: by it calls
    # are told from an answer that is held to a grammar. None: there is no such thing.
    call_marker: ClassVar[str | None] = None
    # An answer that is `{"name": …, "parameters": {…}}` and nothing else is a call.
    bare_calls: ClassVar[bool] = False

    def __init__(self, names: Iterable[str] = (), parallel: bool = True) -> None:
        """`names` are the tools'. Not `parallel`: calls after the first are not handed out."""
        super().__init__()
        self.names = frozenset(names)
        self.num_calls = 0
        self.in_call = False  # its end has not come
        self._parallel = parallel

    # ---- for formats ----

    @staticmethod
    def new_id() -> str:
        return new_call_id()

    def begin(self, name: str) -> None:
        self.reader.kept()
        self.num_calls += 1
        self.in_call = True
        if self._handed_out:
            self.events.append(CallStart(self.num_calls - 1, self.new_id(), name))

    def arguments(self, text: str) -> None:
        if self._handed_out:
            self.events.append(CallArguments(self.num_calls - 1, text))

    @property
    def _handed_out(self) -> bool:
        return self._parallel or self.num_calls == 1

    def call(self, *, known: bool = False) -> Step[bool]:
        """Reads `{"name": …, "arguments": {…}}` (or `parameters`), keys in any order.

        False: there is none, not even one that breaks off after its arguments have begun. What
        was read is then in `reader.kept()`.

        Args:
            known: only with the name of one of the tools, and with arguments.
        """
        reader, name, given = self.reader, "", ""
        begun = False
        separator = "{"
        while (yield from reader.literal(separator)):
            separator = ","
            yield from reader.space()
            key = yield from reader.string()
            yield from reader.space()
            if key is None or not (yield from reader.literal(":")):
                break
            yield from reader.space()
            if key == "name":
                name = (yield from reader.string()) or ""
                if not name or (known and name not in self.names):
                    break
            elif key in ("arguments", "parameters") and not (begun or given):
                if name and (yield from reader.peek()) in ("{", "["):
                    begun = True
                    self.begin(name)
                    whole = yield from reader.value(self.arguments)
                    self.in_call = not whole
                else:
                    parts: list[str] = []
                    whole = yield from reader.value(parts.append)
                    given = "".join(parts)
                if not whole:
                    break
            elif not (yield from reader.value(nowhere)):
                break
            yield from reader.space()
        else:
            closed = yield from reader.literal("}")
            if not begun and closed and name and (given or not known):
                begun = True
                self.begin(name)
                self.arguments(_unquoted(given))
                self.in_call = False
        return begun


def _unquoted(given: str) -> str:
    """Arguments that are a string of JSON, as some models write them; none as an empty object."""
    if given in ("", "null"):
        return "{}"
    value = decode(given)
    return value if isinstance(value, str) else given


@cache
def tool_parser(name: str) -> type[ToolParser]:
    """The class behind `--tool-call-parser`.

    Raises:
        ConfigError: there is none of that name.
    """
    parser = resolve(name, BUILTIN, GROUP)
    if not (isinstance(parser, type) and issubclass(parser, ToolParser)):
        raise ConfigError(f"--tool-call-parser {name} is no subclass of ToolParser")
    return parser
