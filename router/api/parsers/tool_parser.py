"""The base of parsers for tool calls. A new format is a subclass with `parse`.

    text ── push ──▶ parse, a generator ──▶ Content · CallStart · CallArguments ──▶ deltas

A call is streamed: it starts as soon as its name is known and its arguments begin. Text that only
looked like a call becomes content. Arguments are passed on as the model wrote them, even if their
JSON breaks off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import ClassVar

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import resolve
from pdserve.common.core.request import new_call_id
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Parser
from pdserve.router.api.parsers.reader import Step, decode, nowhere

GROUP = "pdserve.tool_parsers"
_FORMATS = {
    "deepseek_v3": "DeepSeekV3Parser",
    "deepseek_v31": "DeepSeekV31Parser",
    "deepseek_v32": "DeepSeekV32Parser",
    "functiongemma": "FunctionGemmaParser",
    "gemma4": "Gemma4Parser",
    "glm45": "GLMParser",
    "glm47": "GLMParser",
    "granite": "GraniteParser",
    "hermes": "HermesParser",
    "kimi_k2": "KimiParser",
    "llama3_json": "Llama3JSONParser",
    "llama4_json": "Llama3JSONParser",
    "llama4_pythonic": "PythonicParser",
    "minimax_m2": "MiniMaxParser",
    "mistral": "MistralParser",
    "openai": "HarmonyParser",
    "phi4_mini_json": "Phi4MiniParser",
    "pythonic": "PythonicParser",
    "qwen3_coder": "QwenCoderParser",
    "qwen3_xml": "QwenCoderParser",
    "seed_oss": "SeedParser",
}
BUILTIN = {
    name: f"pdserve.router.api.parsers.formats:{parser}" for name, parser in _FORMATS.items()
}


class ArgumentKind(StrEnum):
    """The part of a tool's schema that says something of an argument, for formats that write all of
    them as text."""

    TEXT = "text"
    TEXT_OR_NULL = "text_or_null"
    OTHER = "other"  # JSON if it is valid, else a text


Kinds = Mapping[str, Mapping[str, ArgumentKind]]
"""The arguments of each tool whose kind is not OTHER, by name."""


class ToolParser(Parser):
    """Parses calls out of one answer."""

    # The format's markers are special tokens, so that the detokenizer must not drop these.
    shows_special_tokens: ClassVar[bool] = False
    # The single token that begins each call, or the first of several. By it a grammar distinguishes
    # calls from other text. None: the format has no such token.
    call_marker: ClassVar[str | None] = None
    # An answer that is `{"name": …, "parameters": {…}}` and nothing else is a call.
    bare_calls: ClassVar[bool] = False
    # Tokens that end an answer in this format, whether or not the checkpoint says so.
    stop_markers: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        names: Iterable[str] = (),
        parallel: bool = True,
        kinds: Kinds | None = None,
        first: int = 0,
    ) -> None:
        """`names` are the tools' names. If not `parallel`, calls after the first are dropped.
        `first`: the number of calls in the conversation so far; formats with numbered ids continue
        from there."""
        super().__init__()
        self.names = frozenset(names)
        self.make_id = type(self).new_id
        self._kinds = kinds or {}
        self._first = first
        self.num_calls = 0
        self.in_call = False  # the last call has no end yet
        self._parallel = parallel

    # ---- for formats -------------------------------------------------------------------------

    @staticmethod
    def new_id(name: str, index: int) -> str:
        """Returns an id for the call of that tool, the conversation's `index`-th."""
        return new_call_id()

    def kind_of(self, name: str, argument: str) -> ArgumentKind:
        return self._kinds.get(name, {}).get(argument, ArgumentKind.OTHER)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begins a call; `call_id` is the model's own, if it wrote one."""
        self.reader.kept()
        self.num_calls += 1
        self.in_call = True
        if self._handed_out:
            index = self.num_calls - 1
            call_id = call_id or self.make_id(name, self._first + index)
            self.events.append(CallStart(index, call_id, name))

    def arguments(self, text: str) -> None:
        if self._handed_out:
            self.events.append(CallArguments(self.num_calls - 1, text))

    @property
    def _handed_out(self) -> bool:
        return self._parallel or self.num_calls == 1

    def list_of_calls(self) -> Step[bool]:
        """Reads a list of calls after its bracket; returns false if there is none. `reader.kept()`
        then has the text."""
        reader, first = self.reader, self.num_calls
        while True:
            yield from reader.space()
            if not (yield from self.call()):
                break
            reader.keep()
            yield from reader.space()
            if not (yield from reader.literal(",")):
                if (yield from reader.literal("]")):
                    reader.kept()
                break
        return self.num_calls > first

    def call(self, *, known: bool = False) -> Step[bool]:
        """Reads `{"name": …, "arguments": {…}}` (or `parameters`), keys in any order.

        Returns false if there is no call, not even one that breaks off inside its arguments;
        `reader.kept()` then has the text.

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
    """Returns the class behind `--tool-call-parser`.

    Raises:
        ConfigError: there is no parser of that name.
    """
    parser = resolve(name, BUILTIN, GROUP, "--tool-call-parser")
    if not (isinstance(parser, type) and issubclass(parser, ToolParser)):
        raise ConfigError(f"--tool-call-parser {name} is no subclass of ToolParser")
    return parser
