"""The body of Anthropic's Messages, and its turns as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.compat import CompatBody, Fields, Objects, Options
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.parts import as_parts
from pdserve.router.api.schema import Integer, Number, Texts

THINKING = {"enable_thinking": True, "thinking": True}  # the template's variables
# Claude Code sends two names of its own for the user.
_ROLES = {"ctx": "user", "msg": "user"} | {each: each for each in ("assistant", "system", "user")}
# Blocks that tell of tools that only Anthropic runs.
_LEFT_OUT = frozenset({
    "bash_code_execution_tool_result", "code_execution_tool_result", "mcp_tool_result",
    "mcp_tool_use", "server_tool_use", "text_editor_code_execution_tool_result",
    "tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result",
})  # fmt: skip
# Claude Code begins its system prompt with it. It differs in each request, so that no prefix would
# be found in a cache.
_BILLING = "x-anthropic-billing-header:"


class AnthropicChoice(Options):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Options):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"] | None = None


class OutputConfig(Options):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(CompatBody):
    """POST /v1/messages, and its count_tokens."""

    sent_as: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    }

    messages: Objects
    max_tokens: Integer | None = None
    system: str | Objects | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None
    tools: Objects | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of `output_config.format`
    metadata: dict[str, Any] | None = None

    def parameters(self, ignored: Ignored) -> Fields:
        fields: Fields = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        fields["tools"] = [_tool_of(tool) for tool in self.tools] if self.tools else None
        if choice := self.tool_choice:
            kinds = {"auto": "auto", "any": "required", "none": "none"}
            tool = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = kinds.get(choice.type, tool)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        fields |= self._effort()
        output = self.output_config or OutputConfig()
        if (format := output.format or self.output_format) is not None:
            fields["response_format"] = _format(format)
        for name, options in (("thinking", self.thinking), ("output_config", output)):
            for key, value in ((options and options.model_extra) or {}).items():
                if value:
                    ignored.add(f"{name}.{key}")
        return {name: value for name, value in fields.items() if value is not None}

    def _effort(self) -> Fields:
        """Returns the fields for thinking and its effort. Types other than enabled and disabled
        leave it to the template."""
        thinking = self.thinking.type if self.thinking else None
        if thinking == "disabled":
            return {"reasoning_effort": "none"}
        asked = {"chat_template_kwargs": THINKING | (self.chat_template_kwargs or {})}
        effort = self.output_config.effort if self.output_config else None
        return {"reasoning_effort": effort, **(asked if thinking == "enabled" else {})}

    def conversation(self, ignored: Ignored) -> list[Fields]:
        messages = list(_system(self.system, "system"))
        for index, message in enumerate(self.messages):
            messages += _turn(message, f"messages[{index}]", ignored)
        return messages


def _tool_of(tool: Fields) -> Fields:
    if tool.get("type") not in ("custom", None):
        return tool
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    return {"type": "function", "function": function}


def _format(format: Fields) -> Fields:
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}


def _system(content: Any, param: str) -> Iterator[Fields]:
    given = as_parts(content, param, drop_empty=True)
    if isinstance(given, list):
        given = [part for part in given if not part["text"].startswith(_BILLING)]
    if given:
        yield {"role": "system", "content": given}


def _turn(message: Fields, where: str, ignored: Ignored) -> Iterator[Fields]:
    """Yields one message for each tool result, then one for the turn's own text and calls."""
    given, content, param = message.get("role"), message.get("content"), f"{where}.content"
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    if role == "system":
        yield from _system(content, param)
        return
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    texts: list[Any] = []
    said: Fields = {}
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            call = {"name": block.get("name"), "arguments": block.get("input")}
            called = {"id": block.get("id"), "type": "function", "function": call}
            said.setdefault("tool_calls", []).append(called)
        elif kind == "tool_result":
            yield _result(block, param)
        elif kind == "thinking" and isinstance(thought := block.get("thinking"), str):
            said["reasoning"] = said.get("reasoning", "") + thought
        elif isinstance(kind, str) and kind in _LEFT_OUT:
            ignored.add(f"messages.{kind}", param)
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(_as_text(block))
    parts = as_parts(texts, param, drop_empty=True)
    if parts or "tool_calls" in said:
        yield {"role": role, "content": parts or None, **said}


def _result(block: Fields, param: str) -> Fields:
    """Returns a tool's result; that it failed is in its text."""
    content = block.get("content")
    if isinstance(content, list):
        content = as_parts([_as_text(each) for each in content], param)
    content = content or ("error" if block.get("is_error") else "")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _as_text(block: Any) -> Any:
    """Returns blocks that hold text in other words as blocks of text; others stay as they are."""
    if not isinstance(block, dict):
        return block
    source, text = block.get("source"), None
    match block.get("type"):
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            text = source.get("data")
        case "tool_reference":
            text = block.get("tool_name")
        case "compaction":
            text = block.get("content")
        case "search_result" if isinstance(found := block.get("content"), list):
            texts = (each.get("text") for each in found if isinstance(each, dict))
            parts = (block.get("title"), source, *texts)
            text = "\n".join(part for part in parts if isinstance(part, str))
    return {"type": "text", "text": text} if isinstance(text, str) else block
