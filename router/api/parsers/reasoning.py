"""Parses reasoning, then the answer: each family's marks for it, and one parser for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.config.router import HARMONY
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.parsers.harmony import CHANNEL, FINAL, MESSAGE, HarmonyReasoning
from pdserve.router.api.parsers.parser import Content, Event, Parser, Reasoning
from pdserve.router.api.parsers.reader import Step
from pdserve.router.api.parsers.tool_parser import ToolParser


@dataclass(frozen=True, slots=True)
class Thought:
    """How a family marks a thought; marks of one kind are alternatives."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    # It reasons where neither the prompt's end nor the answer has a mark.
    unasked: bool = False
    ended_by: tuple[str, ...] = ()  # what also ends a thought, and is part of the answer


_TAGS = Thought()
_FROM_THE_START = Thought(unasked=True)
FAMILIES = {
    "deepseek_r1": _FROM_THE_START,
    "deepseek_v3": _TAGS,
    "gemma4": Thought(("<|channel>thought\n", "<|channel>"), ("<channel|>",)),
    "glm45": _TAGS,
    "glm47": _TAGS,
    "granite": Thought(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "holo2": _TAGS,
    "kimi_k2": Thought(unasked=True, ended_by=("<|tool_calls_section_begin|>",)),
    "minimax_m2": _FROM_THE_START,
    "mistral": Thought(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": _TAGS,
    "olmo3": _FROM_THE_START,
    HARMONY: Thought((), (), unasked=True),
    "qwen3": _TAGS,
    "seed_oss": Thought(("<seed:think>",), ("</seed:think>",)),
    "step3": _FROM_THE_START,
}
"""By vLLM's names for `--reasoning-parser`. Harmony has messages, not marks: `HarmonyParser`."""


def begins_thinking(family: str, prompt: str, continued: str | None = None) -> bool:
    """Returns whether the answer begins inside a thought. Templates that switch thinking on or off
    end the prompt with an open or a closed thought. `continued` is the message that the answer
    continues, if there is one."""
    thought = FAMILIES[family]
    if continued is not None:
        return _last(continued, thought.begins) > _last(continued, thought.ends)
    end = prompt.rstrip()
    marks = [each.rstrip() for each in thought.begins]
    if end.endswith((*marks, *thought.ends)):
        return end.endswith(tuple(marks))
    return thought.unasked


def _last(text: str, marks: tuple[str, ...]) -> int:
    return max((text.rfind(mark) for mark in marks), default=-1)


def may_think(family: str, prompt: str, continued: str | None = None) -> bool:
    """Returns whether a thought may still come: the template has not closed one, and the answer
    does not continue a text."""
    if continued is not None:
        return begins_thinking(family, prompt, continued)
    thought = FAMILIES[family]
    return not thought.ends or not prompt.rstrip().endswith(thought.ends)


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """The tokens by which a grammar knows where a thought is."""

    begin: int
    end: int
    heading: tuple[int, ...] = ()  # tokens that must have come before `end`


def thought_tokens(family: str, tokenizer: Tokenizer) -> ThoughtTokens | None:
    """Returns the tokens that begin and end a thought; None: the model writes them as text."""
    if family == HARMONY:
        begin, end = tokenizer.marker(CHANNEL), tokenizer.marker(MESSAGE)
        heading = tokenizer.encode(FINAL, add_special_tokens=False)
    else:
        thought, heading = FAMILIES[family], ()
        begin, end = (_token(tokenizer, marks) for marks in (thought.begins, thought.ends))
    return None if begin is None or end is None else ThoughtTokens(begin, end, heading)


def _token(tokenizer: Tokenizer, marks: tuple[str, ...]) -> int | None:
    found = (tokenizer.marker(mark) for mark in marks)
    return next((token for token in found if token is not None), None)


def has_special_marks(family: str, tokenizer: Tokenizer) -> bool:
    """Returns whether the marks are special tokens, which the detokenizer must not drop then."""
    thought = FAMILIES[family]
    marks = (CHANNEL,) if family == HARMONY else (*thought.begins, *thought.ends)
    tokens = [token for mark in marks if (token := tokenizer.marker(mark)) is not None]
    return any(map(tokenizer.special.__contains__, tokens))


class ReasoningParser(Parser):
    """Splits off the thought; space around it belongs to neither thought nor answer."""

    def __init__(self, thinking: bool, thought: Thought = _TAGS) -> None:
        """`thinking`: the text begins inside a thought; else only if it begins with a mark."""
        super().__init__()
        self._thinking = thinking
        self._thought = thought

    def parse(self) -> Step[None]:
        reader, thought = self.reader, self._thought
        reader.keep()
        yield from reader.space()
        begun = False
        for mark in thought.begins:
            begun = begun or (yield from reader.literal(mark))
        if begun or self._thinking:
            yield from reader.space()
            ends = (*thought.ends, *thought.ended_by)
            found = yield from reader.until(ends, self._reasoning)
            yield from reader.space()
            reader.kept()
            if found in thought.ended_by:
                self.content(found)
        self.content(reader.kept())

    def _reasoning(self, text: str) -> None:
        self.events.append(Reasoning(text))


def reasoning_parser(family: str, thinking: bool) -> Parser:
    """Returns a parser for one answer."""
    if family != HARMONY:
        return ReasoningParser(thinking, FAMILIES[family])
    harmony = HarmonyReasoning()
    harmony.in_content = not thinking
    return harmony


class AnswerParser:
    """Parses one choice's text: first its reasoning, then calls in the rest."""

    def __init__(self, reasoning: Parser | None, tools: ToolParser | None) -> None:
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
