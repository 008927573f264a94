"""OpenAI's functions, from before there were tools: each request becomes one with tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.schema import (
    ChatBody,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)


def with_tools(body: ChatBody) -> ChatBody:
    """Returns the body with its functions as tools; an answer calls one of them at most.

    Raises:
        InvalidRequest: it has tools, too, or a `function_call` without functions.
    """
    if not body.functions:
        if body.function_call not in (None, "none"):
            raise InvalidRequest("function_call needs functions", param="function_call")
        return body
    if body.tools:
        raise InvalidRequest("functions and tools exclude each other", param="functions")
    choice = body.function_call
    if isinstance(choice, NamedFunction) and choice.name not in {f.name for f in body.functions}:
        raise InvalidRequest(
            f"function_call: there is no function {choice.name[:128]}", param="function_call"
        )
    tools = [Tool(type="function", function=each) for each in body.functions]
    if isinstance(choice, NamedFunction):
        more: dict[str, Any] = {"tool_choice": NamedTool(type="function", function=choice)}
    else:
        more = {"tool_choice": choice}
    more |= {"tools": tools, "parallel_tool_calls": False}
    return body.model_copy(update=more)


def with_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """Yields the messages with each `function_call` as a tool's call, and each message of the role
    function as its result."""
    number = 0
    for message in messages:
        if (call := message.function_call) is not None and not message.tool_calls:
            number += 1
            called = ToolCall(id=f"call_{number}", function=call)
            message = message.model_copy(update={"tool_calls": [called], "function_call": None})
        elif message.role == "function":
            message = message.model_copy(update={"role": "tool", "tool_call_id": f"call_{number}"})
        yield message
