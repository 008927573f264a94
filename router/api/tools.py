"""The tools of a request: checks them, and plans how to parse the answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pdserve.common.config.router import ChatConfig
from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import (
    NO_SCHEMAS,
    SCHEMAS_BY_NAME,
    ConstraintKind,
    Opening,
    StructuredOutput,
)
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.conversation import joined
from pdserve.router.api.parsers import reasoning
from pdserve.router.api.parsers.forced import BareCallParser, NamedParser, RequiredParser
from pdserve.router.api.parsers.harmony import HarmonyParser
from pdserve.router.api.parsers.reasoning import AnswerParser, reasoning_parser
from pdserve.router.api.parsers.tool_parser import ArgumentKind, ToolParser, tool_parser
from pdserve.router.api.schema import ChatBody, NamedTool, Tool

MAX_TOOLS = 128
# Keywords of JSON Schema whose value has schemas by the client's names; keywords without schemas.
_NAMES = {"$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"}
_TYPES = ("string", "null", "number", "integer", "boolean", "object", "array")
NONE, AUTO, REQUIRED, NAMED = "none", "auto", "required", "named"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How to parse an answer: its tool calls and its reasoning."""

    tool_choice: str = NONE
    tool_names: tuple[str, ...] = ()  # tools that may be called
    parallel: bool = True
    legacy: bool = False  # the client sent functions, and reads calls of these
    unread: bool = False  # `auto` is `none`: there is no parser for the model's calls
    bare: bool = False  # under `auto`: one schema makes the answer a call or a text
    # Under `auto`: what the schemas say of arguments, by tool, then by name.
    kinds: dict[str, dict[str, ArgumentKind]] = field(default_factory=dict)
    earlier: int = 0  # calls in the conversation so far
    reasoning: str | None = None  # the family whose reasoning it may have
    thinking: bool = False  # whether it begins with reasoning
    special_marks: bool = False  # the reasoning's marks are special tokens
    opening: Opening = field(default_factory=Opening)  # where its text follows a grammar

    def shows_special_tokens(self, auto: type[ToolParser] | None) -> bool:
        calls = self.tool_choice == AUTO and auto is not None and auto.shows_special_tokens
        return calls or self.special_marks

    def parser(self, auto: type[ToolParser] | None) -> AnswerParser:
        """Returns a parser for one choice; `auto` also reads calls that no grammar enforces."""
        tools = self._tools(auto)
        if isinstance(tools, HarmonyParser):  # which reads reasoning as well
            tools.in_content = not self.thinking
            return AnswerParser(None, tools)
        family = self.reasoning
        return AnswerParser(reasoning_parser(family, self.thinking) if family else None, tools)

    def _tools(self, auto: type[ToolParser] | None) -> ToolParser | None:
        kinds = {
            AUTO: BareCallParser if self.bare else auto,
            REQUIRED: RequiredParser,
            NAMED: NamedParser,
        }
        kind = kinds.get(self.tool_choice)
        if kind is None:
            return None
        tools = kind(self.tool_names, self.parallel, self.kinds, self.earlier)
        if auto is not None:  # its template may want ids of one form
            tools.make_id = auto.new_id
        return tools


def plan_tools(body: ChatBody, config: ChatConfig) -> AnswerPlan:
    """Raises InvalidRequest: a tool is wrong, or `tool_choice` names an unknown tool."""
    tools = check_tools(body.tools or [])
    choice, names = _choice(body, config, tools)
    if choice == AUTO and config.calls is None:
        return AnswerPlan(unread=True)
    plan = AnswerPlan(choice, names, body.parallel_tool_calls is not False)
    earlier = sum(len(message.tool_calls or ()) for message in body.messages)
    if choice != AUTO:
        return replace(plan, earlier=earlier)
    kinds = {tool.function.name: argument_kinds(tool.function.parameters or {}) for tool in tools}
    return replace(plan, earlier=earlier, kinds=kinds)


def with_thought(
    plan: AnswerPlan, body: ChatBody, config: ChatConfig, prompt: str, tokens: Tokenizer, held: bool
) -> AnswerPlan:
    """Adds whether the answer to `prompt` begins with reasoning. `held`: the text after it follows
    a grammar, which must know where the text begins."""
    family = config.reasoning
    if family is None:
        return plan
    continued = joined(body.messages[-1]) if body.continue_final_message else None
    thinking = reasoning.begins_thinking(family, prompt, continued)
    special = reasoning.has_special_marks(family, tokens)
    if held:
        thought = reasoning.thought_tokens(family, tokens)
        if thought is None or not reasoning.may_think(family, prompt, continued):
            return plan
        opening = replace(
            plan.opening,
            thought=(thought.begin, thought.end),
            heading=thought.heading,
            thinking=thinking,
        )
        plan = replace(plan, opening=opening)
    return replace(plan, reasoning=family, thinking=thinking, special_marks=special)


def with_unforced_calls(
    plan: AnswerPlan,
    structured: StructuredOutput,
    body: ChatBody,
    config: ChatConfig,
    tokens: Tokenizer,
) -> tuple[AnswerPlan, StructuredOutput]:
    """Allows calls beside a constraint: as in OpenAI's API an answer under `auto` is either calls
    or a text that `structured` allows. A token distinguishes them, or else the schema allows
    either.

    Raises:
        InvalidRequest: the model's calls cannot be distinguished from such a text.
    """
    if plan.tool_choice != AUTO:
        return plan, structured
    assert config.calls is not None, "auto needs one"
    parser = tool_parser(config.calls)
    if parser.bare_calls and structured.kind == ConstraintKind.JSON:
        return replace(plan, bare=True), _call_or(structured, _schemas(body, plan))
    call = None if parser.call_marker is None else tokens.marker(parser.call_marker)
    if call is None:
        raise InvalidRequest(
            f"{structured.param} beside tools needs calls that begin with a token of their own; "
            f"there is none for {config.calls} here: give tools without it, or a "
            "tool_choice other than auto",
            param=structured.param,
        )
    return replace(plan, opening=replace(plan.opening, call=call)), structured


def forced_calls(body: ChatBody, plan: AnswerPlan) -> StructuredOutput | None:
    """Returns the constraint that makes the answer a call; it replaces that on a text. None: the
    answer need not be a call.

    Raises:
        InvalidRequest: tools are too large, or cannot be put side by side.
    """
    if plan.tool_choice not in (REQUIRED, NAMED):
        return None
    schemas = _schemas(body, plan)
    if plan.tool_choice == NAMED:
        (schema,) = schemas.values()
    else:
        schema = _list_of_calls(schemas, plan.parallel)
    return StructuredOutput.of_json(ConstraintKind.JSON, schema, "tools")


def _schemas(body: ChatBody, plan: AnswerPlan) -> dict[str, Any]:
    """Returns the schemas of the arguments, by the names of tools that may be called."""
    return {
        tool.function.name: {"type": "object", **(tool.function.parameters or {})}
        for tool in body.tools or ()
        if tool.function.name in plan.tool_names
    }


def _call_or(structured: StructuredOutput, schemas: dict[str, Any]) -> StructuredOutput:
    """Returns the constraint that allows a text as in `structured`, or one call instead."""
    calls, moved = _calls(schemas)
    try:
        given = exact_json.loads(structured.text)
        text = {key: value for key, value in given.items() if key != "$id"}
        moved["text"] = _moved(text, "#/$defs/text")
    except RecursionError as error:
        raise InvalidRequest(
            f"{structured.param} is nested too deeply", param=structured.param
        ) from error
    except ValueError as error:
        raise InvalidRequest(
            f"{structured.param} has {error}, which cannot be kept in one schema with tools: refer "
            'to "#/$defs/…" instead',
            param=structured.param,
        ) from error
    either = {"anyOf": [*calls, {"$ref": "#/$defs/text"}], "$defs": moved}
    return replace(structured, text=exact_json.dumps(either))


def _list_of_calls(schemas: dict[str, Any], parallel: bool) -> dict[str, Any]:
    """Returns the JSON schema of a list of calls."""
    calls, moved = _calls(schemas)
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": moved}


def _calls(schemas: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns a schema for each call, and the `$defs` that they refer to: the tools' own schemas,
    each moved with everything in it."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    moved: dict[str, Any] = {}
    for index, (name, schema) in enumerate(schemas.items()):
        alone = {key: value for key, value in schema.items() if key != "$id"}
        try:
            moved[str(index)] = _moved(alone, f"#/$defs/{index}")
        except ValueError as error:
            raise InvalidRequest(
                f"tools: the parameters of {name} have {error}, which cannot be kept in one schema "
                'with other tools: refer to "#/$defs/…" instead, or name the tool in tool_choice',
                param="tools",
            ) from error
    return calls, moved


def _moved(part: Any, root: str) -> Any:
    """Returns a schema, or a list of them, with its references rewritten to begin at `root`.

    Raises:
        ValueError: it names a part of itself by a keyword, not by its place.
    """
    if isinstance(part, list):
        return [_moved(each, root) for each in part]
    if not isinstance(part, dict):
        return part
    moved = {}
    for key, value in part.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            value = {name: _moved(each, root) for name, each in value.items()}
        elif key in _NAMES and isinstance(value, str):
            raise ValueError(key)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            value = root + value[1:]
        elif key not in NO_SCHEMAS:
            value = _moved(value, root)
        moved[key] = value
    return moved


def argument_kinds(schema: dict[str, Any]) -> dict[str, ArgumentKind]:
    """Returns the kinds of a tool's arguments by name, without those of `ArgumentKind.OTHER`."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    kinds = {name: _kind(each, schema) for name, each in properties.items()}
    return {name: kind for name, kind in kinds.items() if kind is not ArgumentKind.OTHER}


def _kind(part: Any, root: dict[str, Any]) -> ArgumentKind:
    """Returns the values that a schema allows. References are followed once: to a part of
    `root`."""
    if isinstance(part, dict) and isinstance(name := part.get("$ref"), str):
        place, _, last = name.rpartition("/")
        definitions = root.get(place.removeprefix("#/"))
        part = definitions.get(last) if isinstance(definitions, dict) else None
    types = _types(part)
    if "string" not in types or types - {"string", "null"}:
        return ArgumentKind.OTHER
    return ArgumentKind.TEXT_OR_NULL if "null" in types else ArgumentKind.TEXT


def _types(part: Any) -> set[str]:
    """Returns the types of the values that a schema allows; `any` where it does not say."""
    if not isinstance(part, dict):
        return {"any"}
    if (given := part.get("type")) is not None:
        return {each for each in (given if isinstance(given, list) else [given]) if each in _TYPES}
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(values, list):
        return {"string" if isinstance(each, str) else "any" for each in values}
    options = part.get("anyOf", part.get("oneOf"))
    if isinstance(options, list):
        return {each for option in options if isinstance(option, dict) for each in _plain(option)}
    return {"any"}


def _plain(option: dict[str, Any]) -> set[str]:
    """`_types` of one option, without options of its own."""
    return _types({key: value for key, value in option.items() if key not in ("anyOf", "oneOf")})


def check_tools(tools: list[Tool]) -> list[Tool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS}", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function, param = tool.function, f"tools[{index}].function"
        if function.name in seen:
            raise InvalidRequest(
                f"{param}.name: there is a tool {function.name} already", param=f"{param}.name"
            )
        seen.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequest(
                f"{param}.parameters: must be a JSON schema of an object",
                param=f"{param}.parameters",
            )
    return tools


def _choice(body: ChatBody, config: ChatConfig, tools: list[Tool]) -> tuple[str, tuple[str, ...]]:
    """Returns the tool choice, and the names of the tools that may be called."""
    names = tuple(tool.function.name for tool in tools)
    choice = body.tool_choice or (AUTO if names else NONE)
    if choice == NONE:
        return NONE, ()
    if not names:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice: there is no tool {name[:128]}", param="tool_choice")
        return NAMED, (name,)
    if choice == AUTO and not config.enable_auto_tool_choice:
        raise InvalidRequest(
            '"auto" tool choice is off here (--no-enable-auto-tool-choice): tool_choice may be '
            "required, a tool, or none",
            param="tool_choice",
        )
    return choice, names
