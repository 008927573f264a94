"""Parses reasoning: `<think>…</think>`, then the answer."""

from __future__ import annotations

from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.parsers.parser import Content, Event, Parser, Reasoning
from pdserve.router.api.parsers.reader import Step
from pdserve.router.api.parsers.tool_parser import ToolParser

THINK, END_OF_THINK = "<think>", "</think>"
# Whether a family reasons where neither prompt nor answer has a marker.
THINKS_UNASKED = {"deepseek_r1": True, "qwen3": False}


def begins_thinking(family: str, prompt: str, continued: str | None = None) -> bool:
    """Whether the answer begins inside a thought. Templates that switch thinking on or off end the
    prompt with an open or a closed thought. `continued` is the message that the answer continues,
    if there is one."""
    if continued is not None:
        return continued.rfind(THINK) > continued.rfind(END_OF_THINK)
    end = prompt.rstrip()
    if end.endswith((THINK, END_OF_THINK)):
        return end.endswith(THINK)
    return THINKS_UNASKED[family]


def thought_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens that begin and end a thought; None: the model writes the markers as text."""
    begin, end = tokenizer.marker(THINK), tokenizer.marker(END_OF_THINK)
    if begin is None or end is None or tokenizer.is_special(begin) or tokenizer.is_special(end):
        return None
    return begin, end


def may_think(prompt: str, continued: str | None = None) -> bool:
    """Whether a thought may still come: the template has not closed one, and the answer does not
    continue a text."""
    if continued is not None:
        return continued.rfind(THINK) > continued.rfind(END_OF_THINK)
    return not prompt.rstrip().endswith(END_OF_THINK)


class ReasoningParser(Parser):
    """Splits off the thought; space around it belongs to neither thought nor answer."""

    def __init__(self, thinking: bool) -> None:
        """`thinking`: the text begins inside a thought; else only if it begins with `<think>`."""
        super().__init__()
        self._thinking = thinking

    def parse(self) -> Step[None]:
        reader = self.reader
        reader.keep()
        yield from reader.space()
        if (yield from reader.literal(THINK)) or self._thinking:
            yield from reader.space()
            yield from reader.until(END_OF_THINK, self._reasoning)
            yield from reader.space()
            reader.kept()
        self.content(reader.kept())

    def _reasoning(self, text: str) -> None:
        self.events.append(Reasoning(text))


class AnswerParser:
    """Parses one choice's text: first its reasoning, then calls in the rest."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def called(self) -> bool:
        """Whether the text has called a tool."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def in_call(self) -> bool:
        """Whether the last call has no end yet."""
        return self._tools is not None and self._tools.in_call

    def push(self, text: str, final: bool = False) -> list[Event]:
        """Takes the next text; `final`: it is the last."""
        events: list[Event] = [Content(text)]
        if self._reasoning is not None:
            events = self._reasoning.push(text)
            if final:
                events += self._reasoning.finish()
        if self._tools is None:
            return [event for event in events if not isinstance(event, Content) or event.text]
        parsed: list[Event] = []
        for event in events:
            parsed += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return parsed + (self._tools.finish() if final else [])
