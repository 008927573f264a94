"""Harmony, the format of gpt-oss: an answer is messages, each with a channel in its header.

    <|channel|>analysis<|message|>…<|end|>                              reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME
        <|constrain|>json<|message|>{…}<|call|>                         a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>            content

The prompt ends with the `<|start|>assistant` of the first one. Commentary without a recipient is
content, as it is meant for the user. Source: the guide to the format at
developers.openai.com/cookbook. The package openai-harmony isn't used: it downloads the vocabulary
when it starts, and the answer's text is here already, by the checkpoint's own tokenizer.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pdserve.router.api.parsers.parser import Reasoning
from pdserve.router.api.parsers.reader import Sink, Step
from pdserve.router.api.parsers.tool_parser import ToolParser

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
RETURN, CALL = "<|return|>", "<|call|>"
FINAL = f"{CHANNEL}final"  # then `<|message|>`, perhaps after a constraint
MARKERS = (CHANNEL, MESSAGE, START, END, RETURN, CALL)
_ENDS = (END, RETURN, CALL, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_HEADER = re.compile(r"[\w\s.:=/<|>-]*")
_LONGEST = 256  # characters of a header


class HarmonyParser(ToolParser):
    """Parses an answer's reasoning, content and calls."""

    shows_special_tokens = True
    stop_markers: ClassVar[tuple[str, ...]] = (RETURN, CALL)
    calls: ClassVar[bool] = True

    in_content = False  # the text begins within a message of the final channel
    _empty = False  # the call has no arguments yet

    def parse(self) -> Step[None]:
        reader = self.reader
        sink: Sink = self.content
        if not self.in_content:
            sink = yield from self._header("")
        while found := (yield from reader.until(_ENDS, sink)):
            sink(reader.kept().removesuffix(found))
            if self.in_call and self._empty:
                self.arguments("{}")
            self.in_call = False
            sink = yield from self._header(found)

    def _header(self, found: str) -> Step[Sink]:
        """Reads a header, which may have begun with the marker; returns the sink of its message.
        Text without a header is content."""
        reader = self.reader
        reader.keep(found)
        if found not in (START, CHANNEL):
            reader.keep()
            yield from reader.space()
            for begin in (MESSAGE, START, CHANNEL, "to="):
                if (yield from reader.literal(begin)):
                    found = begin
                    break
            else:
                self.content(reader.kept())
                return self.content
        parts = [found]
        if found != MESSAGE and not (yield from reader.until(MESSAGE, parts.append)):
            left = reader.kept()
            broken_off = found in (START, CHANNEL) and len(left) <= _LONGEST
            if not (broken_off and _HEADER.fullmatch(left)):
                self.content(left)
        reader.kept()
        return self._sink("".join(parts).rpartition(START)[2])

    def _sink(self, header: str) -> Sink:
        channels, function = _CHANNEL.findall(header), _FUNCTION.search(header)
        if function is not None and self.calls:
            self.begin(function[1])
            self._empty = True
            return self._arguments
        if function is None and ("to=" in header or channels[-1:] == ["analysis"]):
            return self._reasoning
        return self.content

    def _arguments(self, text: str) -> None:
        self._empty = self._empty and not text.strip()
        self.arguments(text)

    def _reasoning(self, text: str) -> None:
        self.events.append(Reasoning(text))


class HarmonyReasoning(HarmonyParser):
    """Parses reasoning and content alone, where no calls are wanted, or a grammar makes them."""

    calls = False
