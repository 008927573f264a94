"""A small, seeded grammar of conversations with tools: the training text of `tool-caller`.

The model reads which tools there are, calls one (or two at once), and answers from what they gave.
It writes calls as Hermes models do. As a rarer way it writes what a grammar makes it write where a
client insists on a tool: a list of calls, or the arguments alone; so what it is made to write is
sensible, too. What no tool can answer it does not know.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from story_grammar import END_OF_TEXT, IM_END, IM_START

TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
THINK, END_OF_THINK = "<think>", "</think>"
MAX_SYSTEM = 60  # characters that are shown: clients put long instructions there

# As Qwen's: tools and their parameters first, calls as JSON, results in the user's place. There is
# a list of tools even where it is empty: of a window that begins later nothing wrong is learnt.
CHAT_TEMPLATE = (
    "<|im_start|>tools\n"
    "{% for tool in tools or [] %}"
    "{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | default({}) | join(', ') }})\n"
    "{% endfor %}"
    "<|im_end|>\n"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% elif message.role == 'system' %}"
    "<|im_start|>system\n{{ message.content[:60] }}<|im_end|>\n"
    "{% else %}"
    "<|im_start|>{{ message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\\n' if message.content or not loop.first }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>"
    "{% endfor %}"
    "{{ '' if loop.last and continue_final_message else '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\\n' if enable_thinking }}{% endif %}"
)

CITIES = (
    "Paris", "Rome", "Oslo", "Berlin", "Madrid", "Lima", "Cairo", "Tokyo", "Delhi", "Quito",
    "Vienna", "Dublin", "Athens", "Sofia", "Nairobi", "Havana",
)  # fmt: skip
SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
SYSTEMS = (
    "You are a helpful assistant.",
    "Use the tools.",
    "As a genius expert, your task is to understand the content and provide",
    "Always respond with a JSON object that's compatible with this schema",
    "Answer with JSON.",
)
UNKNOWN = "I do not know."
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: tuple[str, ...]

    def line(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})\n"


WEATHER = Tool("get_weather", ("city",))
ADD = Tool("add", ("a", "b"))
REPORTS = [Tool(name, ("city", "sky", "degrees")) for name in ("Weather", "final_result")]


def turn(role: str, text: str) -> str:
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def called(calls: list[Call]) -> str:
    """Writes them as Hermes models do."""
    return "\n".join(
        f"{TOOL_CALL}\n"
        + json.dumps({"name": name, "arguments": arguments})
        + f"\n{END_OF_TOOL_CALL}"
        for name, arguments in calls
    )


def insisted(rng: random.Random, calls: list[Call]) -> str:
    """The same, or now and then as a grammar has it."""
    way = rng.random()
    if way < 0.2:
        return json.dumps([{"name": name, "parameters": given} for name, given in calls])
    if way < 0.4 and len(calls) == 1:
        return json.dumps(calls[0][1])
    return called(calls)


def make_dialogue(rng: random.Random) -> str:
    """One conversation, up to a random turn of the assistant's."""
    tools = [tool for tool in (WEATHER, ADD) if rng.random() < 0.7]
    report = rng.choice(REPORTS) if rng.random() < 0.4 else None
    if report:
        tools.append(report)
    rng.shuffle(tools)
    head = turn("tools", "".join(tool.line() for tool in tools))
    if rng.random() < 0.4:
        head += turn("system", rng.choice(SYSTEMS)[:MAX_SYSTEM])
    kind = rng.choice((_weather, _weather, _weather, _sum, _extract))
    return head + kind(rng, tools, report) + END_OF_TEXT


def _last(rng: random.Random, about: str, said: str | list[Call]) -> str:
    """The assistant's last turn, sometimes after a thought; insisted on, it has none."""
    if rng.random() < 0.25:
        text = said if isinstance(said, str) else called(said)
        return turn("assistant", f"{THINK}\n{about}\n{END_OF_THINK}\n\n{text}")
    return turn("assistant", said if isinstance(said, str) else insisted(rng, said))


def _weather(rng: random.Random, tools: list[Tool], report: Tool | None) -> str:
    cities = rng.sample(CITIES, 1 if rng.random() < 0.5 else 2)
    places = " and in ".join(cities)
    text = turn("user", f"What is the weather in {places}?")
    about = f"The user asks for the weather in {places}."
    if WEATHER not in tools:
        return text + _last(rng, about, UNKNOWN)
    calls: list[Call] = [("get_weather", {"city": city}) for city in cities]
    if rng.random() < 0.35:
        return text + _last(rng, about, calls)
    text += turn("assistant", called(calls))
    skies = [(rng.choice(SKIES), rng.randrange(40)) for _ in cities]
    found = [f"{sky}, {degrees} degrees" for sky, degrees in skies]
    text += "".join(turn("user", f"<tool_response>\n{one}\n</tool_response>") for one in found)
    if report and len(cities) == 1:
        reported = _report(cities[0], *skies[0])
        return text + _last(rng, about, [(report.name, reported)])
    said = " and ".join(f"{one} in {city}" for one, city in zip(found, cities, strict=True))
    return text + _last(rng, about, f"It is {said}.")


def _sum(rng: random.Random, tools: list[Tool], report: Tool | None) -> str:
    a, b = rng.randrange(100), rng.randrange(100)
    text = turn("user", f"What is {a} plus {b}?")
    about = f"The user asks for {a} plus {b}."
    if ADD not in tools:
        return text + _last(rng, about, UNKNOWN)
    calls: list[Call] = [("add", {"a": a, "b": b})]
    if rng.random() < 0.35:
        return text + _last(rng, about, calls)
    text += turn("assistant", called(calls))
    text += turn("user", f"<tool_response>\n{a + b}\n</tool_response>")
    return text + _last(rng, about, f"The sum is {a + b}.")


def _extract(rng: random.Random, tools: list[Tool], report: Tool | None) -> str:
    city, sky, degrees = rng.choice(CITIES), rng.choice(SKIES), rng.randrange(40)
    text = turn("user", f"{city}: {sky}, {degrees} degrees.")
    about = f"The user tells of {city}."
    given = _report(city, sky, degrees)
    if report:
        return text + _last(rng, about, [(report.name, given)])
    return text + turn("assistant", json.dumps(given))  # no tool, but maybe a schema


def _report(city: str, sky: str, degrees: int) -> dict[str, Any]:
    return {"city": city, "sky": sky, "degrees": degrees}


def make_dialogues(seed: int, count: int) -> list[str]:
    """The same `count` dialogues for the same seed, on every machine."""
    rng = random.Random(seed)
    return [make_dialogue(rng) for _ in range(count)]
