"""The body of OpenAI's Responses, and its items as messages of a chat.

Agents send the whole conversation with each request, as items: those that this server wrote, and
those of other servers and of tools that only others run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.compat import CompatBody, Fields, Objects, Options
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.parts import as_parts
from pdserve.router.api.schema import Integer, Number, StreamOptions, Texts

# Calls of tools that are no functions: the name that they have in a chat, and the key of their
# arguments.
_CALLS = {
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "custom_tool_call": ("", "input"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
}
_OUTPUTS = {f"{kind}_output" for kind in ("function_call", *_CALLS)}
_DOT = "."  # between a namespace and a function
# Items that tell of a provider's own tools, and of a client's own state.
_LEFT_OUT = frozenset({
    "code_interpreter_call", "file_search_call", "ghost_snapshot", "image_generation_call",
    "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
    "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip
_STORED = frozenset({"compaction", "compaction_summary", "context_compaction", "item_reference"})


class TextFormat(Options):
    type: str


class TextOptions(Options):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Options):
    effort: str | None = None


class ResponsesBody(CompatBody):
    """POST /v1/responses. Nothing is stored."""

    sent_as: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # each answer says false
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None

    def parameters(self, ignored: Ignored) -> Fields:
        fields: Fields = {"parallel_tool_calls": self.parallel_tool_calls, "stop": self.stop}
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["tools"] = list(_tools_of(self.tools)) if self.tools else None
        fields["tool_choice"] = _named(self.tool_choice)
        fields["store"] = self.store
        reasoning, text = self.reasoning or ReasoningOptions(), self.text or TextOptions()
        fields["reasoning_effort"] = reasoning.effort
        for name, value in (reasoning.model_extra or {}).items():
            if value is not None:
                ignored.add(f"reasoning.{name}")
        fields["verbosity"] = text.verbosity
        if text.format is not None:
            kind, rest = text.format.type, text.format.model_extra
            fields["response_format"] = {"type": kind, **({kind: rest} if rest else {})}
        return {name: value for name, value in fields.items() if value is not None}

    def echoed(self) -> tuple[str, ...]:
        return exact_json.dumps(self.instructions), exact_json.dumps(self.tools or [])

    def conversation(self, ignored: Ignored) -> list[Fields]:
        given = self.input
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return first + list(_merged(_item(i, item, ignored) for i, item in enumerate(items)))


def _tools_of(tools: Iterable[Any], namespace: str = "") -> Iterator[Any]:
    """Yields chat's tools. A namespace's functions have its name before theirs; so do calls of
    these, as long as they are in a chat."""
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        inner = tool.get("tools") if kind == "namespace" else None
        if isinstance(inner, list) and isinstance(name := tool.get("name"), str):
            yield from _tools_of(inner, namespace + name + _DOT)
        elif kind == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            if namespace:
                function["name"] = f"{namespace}{function.get('name')}"
            yield {"type": "function", "function": function}
        else:
            yield tool


def namespaces_of(tools: Iterable[Any]) -> dict[str, str]:
    """Returns the namespaces of functions that have one, by their names in a chat."""
    found = (tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "namespace")
    names = (each["function"]["name"] for each in _tools_of(found) if "function" in each)
    return {name: name.rpartition(_DOT)[0] for name in names}


def _named(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _item(index: int, item: Fields, ignored: Ignored) -> Fields:
    """Returns the message for one item, which may be a part of the assistant's; empty if there is
    none."""
    kind, where = item.get("type", "message"), f"input[{index}]"
    kind = kind if isinstance(kind, str) else ""
    if kind == "message":
        content = as_parts(item.get("content"), f"{where}.content")
        return {"role": item.get("role"), "content": content}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning": _thought(item)}
    if kind == "function_call":
        name, namespace = item.get("name"), item.get("namespace")
        name = f"{namespace}{_DOT}{name}" if namespace else name
        return _call(item, name, item.get("arguments"))
    if kind in _CALLS:
        name, key = _CALLS[kind]
        given = item.get(key)
        arguments = given if isinstance(given, dict) else {key: given}
        return _call(item, name or item.get("name"), arguments)
    if kind in _OUTPUTS:
        output = _output(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": _call_id(item), "content": output}
    if kind in _LEFT_OUT:
        ignored.add(f"input.{kind}", where)
        return {}
    if kind in _STORED:
        raise InvalidRequest(
            f"{where} is a {kind}, which only the server that stored it can read: send the "
            "messages themselves",
            param="input",
        )
    raise InvalidRequest(f"{where} must be a message, a call or its output", param="input")


def _call(item: Fields, name: Any, arguments: Any) -> Fields:
    call = {"name": name, "arguments": arguments}
    called = {"id": _call_id(item), "type": "function", "function": call}
    return {"role": "assistant", "tool_calls": [called]}


def _call_id(item: Fields) -> Any:
    return item.get("call_id") or item.get("id")


def _thought(item: Fields) -> str:
    """Returns the text of a thought; empty if it is encrypted."""
    parts = item.get("content")
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = (part.get("text") for part in found)
    return "".join(text for text in texts if isinstance(text, str))


def _output(output: Any, param: str) -> Any:
    """Returns a tool's output as content: text and parts as they are, other values as JSON."""
    if isinstance(output, dict) and "type" in output:
        output = [output]
    parts = output if isinstance(output, list) else [None]
    if all(isinstance(each, dict) and "type" in each for each in parts):
        return as_parts(output, param)
    if isinstance(output, str | None):
        return output or ""
    return exact_json.dumps(output)


def _merged(messages: Iterator[Fields]) -> Iterator[Fields]:
    """Joins the assistant's parts: a thought and what follows it, and calls with what is before
    them. A thought alone is dropped."""
    last: Fields = {}
    for message in filter(None, messages):
        if last.get("role") == message.get("role") == "assistant":
            if "tool_calls" in message:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
            if last.keys() <= {"role", "reasoning"}:
                thoughts = last["reasoning"] + message.get("reasoning", "")
                last = last | message | {"reasoning": thoughts}
                continue
        if _says(last):
            yield last
        last = message
    if _says(last):
        yield last


def _says(message: Fields) -> bool:
    return bool(message.keys() - {"role", "reasoning"})
