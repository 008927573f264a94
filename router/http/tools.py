"""The tools of a request: whether they are right, and what to look for in the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.common.config.router import ChatConfig
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.router.http.conversation import text_of
from pdserve.router.http.schema import ChatBody, NamedTool, Tool
from pdserve.router.parsers import reasoning
from pdserve.router.parsers.formats import NamedParser, RequiredParser
from pdserve.router.parsers.reasoning import AnswerParser, ReasoningParser
from pdserve.router.parsers.tool_parser import ToolParser

MAX_TOOLS = 128
NONE, AUTO, REQUIRED, NAMED = "none", "auto", "required", "named"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What an answer has beside text."""

    tool_choice: str = NONE
    tool_names: tuple[str, ...] = ()  # that may be called
    parallel: bool = True
    thinking: bool | None = None  # whether it begins with a thought; None: it has none

    def shows_special_tokens(self, auto: type[ToolParser] | None) -> bool:
        return self.tool_choice == AUTO and auto is not None and auto.shows_special_tokens

    def parser(self, auto: type[ToolParser] | None) -> AnswerParser | None:
        """Of one choice; `auto` reads what the model writes unasked."""
        if self.tool_choice == NONE and self.thinking is None:
            return None
        kinds = {AUTO: auto, REQUIRED: RequiredParser, NAMED: NamedParser}
        tools = kinds.get(self.tool_choice)
        return AnswerParser(
            None if self.thinking is None else ReasoningParser(self.thinking),
            None if tools is None else tools(self.tool_names, self.parallel),
        )


def plan_tools(body: ChatBody, config: ChatConfig) -> AnswerPlan:
    """Raises InvalidRequest: a tool is wrong, or `tool_choice` is not one of them."""
    tools = check_tools(body.tools or [])
    choice, names = _choice(body, config, tools)
    return AnswerPlan(choice, names, body.parallel_tool_calls is not False)


def begins_thinking(body: ChatBody, config: ChatConfig, prompt: str) -> bool | None:
    """Whether the answer to `prompt` begins with a thought; None: nobody looks for one."""
    if config.reasoning_parser is None:
        return None
    continued = text_of(body.messages[-1]) if body.continue_final_message else None
    return reasoning.begins_thinking(config.reasoning_parser, prompt, continued)


def forced_calls(
    body: ChatBody, plan: AnswerPlan, structured: StructuredOutput | None
) -> StructuredOutput | None:
    """What the answer must be where a call is; None: it need not be one.

    Raises:
        InvalidRequest: it must be something else (`structured`) already, or tools are too large.
    """
    if plan.tool_choice == NONE:
        return None
    if structured is not None:
        raise InvalidRequest(
            f"{structured.param} leaves no room for a call: give tools without it, or tool_choice "
            "none",
            param=structured.param,
        )
    if plan.tool_choice == AUTO:
        return None
    schemas = {
        tool.function.name: {"type": "object", **(tool.function.parameters or {})}
        for tool in body.tools or ()
        if tool.function.name in plan.tool_names
    }
    if plan.tool_choice == NAMED:
        (schema,) = schemas.values()
    else:
        schema = _list_of_calls(schemas, plan.parallel)
    # Small models go on with white space for ever where they may.
    return StructuredOutput.of_json(ConstraintKind.JSON, schema, "tools", whitespace_pattern=" ?")


def _list_of_calls(schemas: dict[str, Any], parallel: bool) -> dict[str, Any]:
    """A JSON schema. Those of the tools are moved into it with all that they refer to."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    moved = {
        str(index): _moved(schema, f"#/$defs/{index}")
        for index, schema in enumerate(schemas.values())
    }
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": moved}


def _moved(part: Any, root: str) -> Any:
    """A schema whose own references begin at `root`."""
    if isinstance(part, list):
        return [_moved(each, root) for each in part]
    if not isinstance(part, dict):
        return part
    moved = {key: _moved(value, root) for key, value in part.items()}
    refers = moved.get("$ref")
    if isinstance(refers, str) and refers.startswith("#"):
        moved["$ref"] = root + refers[1:]
    return moved


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
    """What is to be done, and with which tools."""
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
            '"auto" tool choice needs a server with --enable-auto-tool-choice and '
            "--tool-call-parser; without them tool_choice may be required, a tool, or none",
            param="tool_choice",
        )
    return choice, names
