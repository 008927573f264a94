"""The formats of tool calls by model family, each defined by its markers.

Names are vLLM's (`BUILTIN` in `tool_parser`). A format is the one in which the family's chat
template renders calls of earlier turns.
"""

from __future__ import annotations

import re
import secrets
import string
from typing import ClassVar

from pdserve.router.api.parsers.harmony import HarmonyParser
from pdserve.router.api.parsers.literals import Notation, quoted_by, value
from pdserve.router.api.parsers.pythonic import PythonicParser
from pdserve.router.api.parsers.reader import Step, nowhere
from pdserve.router.api.parsers.sections import (
    NAME,
    ListCallParser,
    NamedCallParser,
    ObjectCallParser,
    SectionParser,
    TaggedCallParser,
)
from pdserve.router.api.parsers.tool_parser import ArgumentKind, ToolParser

__all__ = ["HarmonyParser", "PythonicParser"]
_ALPHANUMERIC = string.ascii_letters + string.digits


# ---- calls as JSON objects -------------------------------------------------------------------


class HermesParser(ObjectCallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    shows_special_tokens = True
    call_marker = "<tool_call>"
    end_section = "</tool_call>"


class GraniteParser(ListCallParser):
    """`<|tool_call|>[{"name": …, "arguments": {…}}, …]`: Granite 3; some write `<tool_call>`."""

    shows_special_tokens = True
    call_marker = "<|tool_call|>"
    other_markers = ("<tool_call>",)


class Phi4MiniParser(ListCallParser):
    """`functools[{"name": …, "arguments": {…}}, …]`: Phi-4-mini."""

    call_marker = "functools"


class Llama3JSONParser(ToolParser):
    """`{"name": …, "parameters": {…}}` at the start, several with `;` between them: Llama 3.1 and
    later. No marker says that it is a call, so that it must name a tool."""

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


# ---- a name, then arguments as JSON ----------------------------------------------------------


class DeepSeekV3Parser(NamedCallParser):
    """`function<｜tool▁sep｜>name`, then arguments between fences: DeepSeek V3 and R1."""

    shows_special_tokens = True
    call_marker = "<｜tool▁calls▁begin｜>"
    begin_call = "<｜tool▁call▁begin｜>"
    before_name = "function<｜tool▁sep｜>"
    after_name = ("```json",)
    after_arguments = "```"
    end_call = "<｜tool▁call▁end｜>"
    end_section = "<｜tool▁calls▁end｜>"


class DeepSeekV31Parser(NamedCallParser):
    """`name<｜tool▁sep｜>{…}`: DeepSeek V3.1."""

    shows_special_tokens = True
    call_marker = "<｜tool▁calls▁begin｜>"
    begin_call = "<｜tool▁call▁begin｜>"
    after_name = ("<｜tool▁sep｜>",)
    end_call = "<｜tool▁call▁end｜>"
    end_section = "<｜tool▁calls▁end｜>"


class KimiParser(NamedCallParser):
    """`functions.name:0<|tool_call_argument_begin|>{…}`: Kimi K2. What stands before the arguments
    is the call's id; ids are counted over the conversation."""

    shows_special_tokens = True
    call_marker = "<|tool_calls_section_begin|>"
    other_markers = ("<|tool_call_begin|>",)
    begin_call = "<|tool_call_begin|>"
    name_pattern = re.compile(r"[\w.:-]+")
    after_name = ("<|tool_call_argument_begin|>",)
    end_call = "<|tool_call_end|>"
    end_section = "<|tool_calls_section_end|>"

    @staticmethod
    def new_id(name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def name_and_id(self, written: str) -> tuple[str, str | None]:
        name, _, index = written.removeprefix("functions.").rpartition(":")
        return (name, written) if name and index.isdecimal() else (written.replace(":", ""), None)


class MistralParser(NamedCallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and from version 11 of Mistral's tokenizer
    on `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    shows_special_tokens = True
    call_marker = "[TOOL_CALLS]"

    @staticmethod
    def new_id(name: str, index: int) -> str:
        """Returns nine letters and digits: Mistral's templates refuse other ids."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def one(self) -> Step[bool]:
        if (yield from self.reader.literal("[")):
            return (yield from self.list_of_calls())
        return (yield from super().one())

    def after(self) -> Step[None]:
        if (yield from self.reader.literal("[CALL_ID]")):
            yield from self.reader.copy(NAME, nowhere)
        yield from self.reader.literal("[ARGS]")


# ---- arguments one by one, in tags -----------------------------------------------------------


class QwenCoderParser(TaggedCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`:
    Qwen3-Coder, which sometimes omits the first tag, and Qwen3.5."""

    shows_special_tokens = True
    call_marker = "<tool_call>"
    other_markers = ("<function=",)
    begin_call = "<function="
    after_name = ">"
    key = ("<parameter=", ">")
    value = ("", "</parameter>")
    own_lines = True
    end_call = "</function>"
    end_section = "</tool_call>"


class SeedParser(QwenCoderParser):
    """The same within `<seed:tool_call>`: Seed-OSS."""

    call_marker = "<seed:tool_call>"
    end_section = "</seed:tool_call>"


class MiniMaxParser(TaggedCallParser):
    """`<invoke name="…"><parameter name="key">value</parameter></invoke>`: MiniMax M2."""

    shows_special_tokens = True
    call_marker = "<minimax:tool_call>"
    begin_call = "<invoke name="
    after_name = ">"
    key = ("<parameter name=", ">")
    value = ("", "</parameter>")
    own_lines = True
    end_call = "</invoke>"
    end_section = "</minimax:tool_call>"


class DeepSeekV32Parser(TaggedCallParser):
    """`<｜DSML｜invoke name="…">`, with parameters that say if they are text: DeepSeek V3.2."""

    call_marker = "<｜DSML｜function_calls>"
    begin_call = "<｜DSML｜invoke name="
    after_name = ">"
    key = ("<｜DSML｜parameter name=", ">")
    value = ("", "</｜DSML｜parameter>")
    kinds: ClassVar[dict[str, ArgumentKind]] = {
        ' string="true"': ArgumentKind.TEXT,
        ' string="false"': ArgumentKind.OTHER,
    }
    end_call = "</｜DSML｜invoke>"
    end_section = "</｜DSML｜function_calls>"


class GLMParser(TaggedCallParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and
    later."""

    shows_special_tokens = True
    call_marker = "<tool_call>"
    key = ("<arg_key>", "</arg_key>")
    value = ("<arg_value>", "</arg_value>")
    end_section = "</tool_call>"


# ---- notations of their own ------------------------------------------------------------------


class FunctionGemmaParser(SectionParser):
    """`call:name{key:<escape>text<escape>,other:1}`: FunctionGemma."""

    shows_special_tokens = True
    call_marker = "<start_function_call>"
    end_section = "<end_function_call>"
    notation: ClassVar[Notation] = quoted_by("<escape>")

    def one(self) -> Step[bool]:
        reader = self.reader
        if not (yield from reader.literal("call:")):
            return False
        name: list[str] = []
        yield from reader.copy(NAME, name.append)
        if not name or (yield from reader.peek()) != "{":
            return False
        self.begin("".join(name))
        self.in_call = not (yield from value(reader, self.notation, self.arguments))
        return True


class Gemma4Parser(FunctionGemmaParser):
    """The same with other markers: Gemma 4."""

    call_marker = "<|tool_call>"
    end_section = "<tool_call|>"
    notation = quoted_by('<|"|>')
