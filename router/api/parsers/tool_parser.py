"""The base of parsers for tool calls. A new format is a subclass with `parse`.

    text ── push ──▶ parse, a generator ──▶ Content · CallStart · CallArguments ──▶ deltas

A call is streamed: it starts as soon as its name is known and its arguments begin. Text that looked
like a call and is none becomes content. Arguments are passed on as the model wrote them: if their
JSON breaks off, so do they.
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
    """Parses calls out of one answer."""

    # The format's markers are special tokens, so that the detokenizer must not drop these.
    shows_special_tokens: ClassVar[bool] = False
    # The single token that begins each call, or the first of several. By it a grammar distinguishes
    # calls from other text. None: the format has no such token.
    call_marker: ClassVar[str | None] = None
    # An answer that is `{"name": …, "parameters": {…}}` and nothing else is a call.
    bare_calls: ClassVar[bool] = False

    def __init__(self, names: Iterable[str] = (), parallel: bool = True) -> None:
        """`names` are the tools' names. If not `parallel`, calls after the first are dropped."""
        super().__init__()
        self.names = frozenset(names)
        self.num_calls = 0
        self.in_call = False  # the last call has no end yet
        self._parallel = parallel

    # ---- for formats -------------------------------------------------------------------------

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

        Returns false if there is no call, not even one that breaks off after its arguments have
        begun; `reader.kept()` has what was read then.

        Args:
            known: the call must have the name of one of the tools, and arguments.
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
    """Unpacks arguments that some models write as a string of JSON; no arguments are `{}`."""
    if given in ("", "null"):
        return "{}"
    value = decode(given)
    return value if isinstance(value, str) else given


@cache
def tool_parser(name: str) -> type[ToolParser]:
    """The class behind `--tool-call-parser`.

    Raises:
        ConfigError: there is no parser of that name.
    """
    parser = resolve(name, BUILTIN, GROUP)
    if not (isinstance(parser, type) and issubclass(parser, ToolParser)):
        raise ConfigError(f"--tool-call-parser {name} is no subclass of ToolParser")
    return parser
