"""Bodies of the Responses and Messages APIs, and their conversion to chat's body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, create_model
from typing_extensions import TypeAliasType

from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.schema import (
    FIELDS,
    Body,
    ChatBody,
    CompletionBody,
    Integer,
    Number,
    StreamOptions,
    Texts,
)

Objects = TypeAliasType("Objects", Annotated[list[dict[str, Any]], FailFast()])
Fields = dict[str, Any]


# Chat's parameters that these bodies take, too, as vLLM's do. None of them adds a field to an
# answer.
SAME = (
    "min_tokens", "top_k", "min_p", "seed", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "skip_special_tokens",
    "structured_outputs", "cache_salt", "priority", "timeline",
)  # fmt: skip
_SameBody: Any = create_model("_SameBody", __base__=Body, **{name: FIELDS[name] for name in SAME})


class CompatBody(_SameBody):
    """A body of another API that is translated to a chat."""

    sent_as: ClassVar[Mapping[str, str]] = {}  # the path of a field in this body, by chat's name
    chat_template_kwargs: Fields | None = None

    @classmethod
    @cache
    def elsewhere(cls) -> frozenset[str]:
        """Fields that only completions or chat have."""
        return (
            frozenset(ChatBody.model_fields | CompletionBody.model_fields) - cls.model_fields.keys()
        )

    def same(self) -> Fields:
        """Returns the fields that chat has under the same name."""
        names = (*SAME, "model", "temperature", "top_p", "stream", "chat_template_kwargs")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def parameters(self) -> Fields:
        """Chat's other fields, without the messages. Their types have not been checked."""
        raise NotImplementedError

    def echoed(self) -> tuple[str, ...]:
        """Returns JSON of the fields that an answer repeats, however long they are."""
        return ()

    def conversation(self) -> list[Fields]:
        """Chat's messages. Their types have not been checked.

        Raises:
            InvalidRequest: a part has no equivalent in chat.
        """
        raise NotImplementedError


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


# ---- OpenAI's Responses ----------------------------------------------------------------------


class TextFormat(_Options):
    type: str


class TextOptions(_Options):
    format: TextFormat | None = None
    verbosity: str | None = None


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
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None

    def parameters(self) -> Fields:
        fields: Fields = {"parallel_tool_calls": self.parallel_tool_calls, "stop": self.stop}
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["tools"] = [_tool_of(tool) for tool in self.tools] if self.tools else None
        fields["tool_choice"] = _named(self.tool_choice)
        fields["reasoning_effort"] = (self.reasoning or {}).get("effort")
        text = self.text or TextOptions()
        fields["verbosity"] = text.verbosity
        if text.format is not None:
            kind, rest = text.format.type, text.format.model_extra
            fields["response_format"] = {"type": kind, **({kind: rest} if rest else {})}
        return {name: value for name, value in fields.items() if value is not None}

    def echoed(self) -> tuple[str, ...]:
        return exact_json.dumps(self.instructions), exact_json.dumps(self.tools or [])

    def conversation(self) -> list[Fields]:
        given = self.input
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return first + list(_merged(_item(i, item) for i, item in enumerate(items)))


def _tool_of(tool: Fields) -> Fields:
    if tool.get("type") != "function":
        raise InvalidRequest("only tools of type function can be called", param="tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _named(choice: Any) -> Any:
    if isinstance(choice, dict) and "function" not in choice:
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return choice


def _item(index: int, item: Fields) -> Fields:
    match item.get("type", "message"):
        case "message":
            param = f"input[{index}].content"
            return {"role": item.get("role"), "content": _texts(item.get("content"), param)}
        case "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            called = {"id": item.get("call_id"), "type": "function", "function": call}
            return {"role": "assistant", "tool_calls": [called]}
        case "function_call_output":
            output = _texts(item.get("output"), f"input[{index}].output")
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        case "reasoning":
            return {}
    raise InvalidRequest(
        f"input[{index}] must be a message, a function_call or its output", param="input"
    )


def _merged(messages: Iterator[Fields]) -> Iterator[Fields]:
    """Joins calls to the assistant's message before them."""
    last: Fields = {}
    for message in filter(None, messages):
        if last.get("role") == message.get("role") == "assistant" and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if last:
            yield last
        last = message
    if last:
        yield last


def _texts(content: Any, param: str) -> Any:
    """Joins the texts of a list of parts; any other value stays as it is."""
    if not isinstance(content, list):
        return content
    kinds = ("text", "input_text", "output_text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise InvalidRequest(f"{param} may only have parts of text", param=param)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{param} has a part without text", param=param)
    return "".join(part["text"] for part in content)


# ---- Anthropic's Messages --------------------------------------------------------------------


class AnthropicChoice(_Options):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(CompatBody):
    """POST /v1/messages, and its count_tokens."""

    messages: Objects
    max_tokens: Integer | None = None
    system: str | Objects | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None
    tools: Objects | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    def parameters(self) -> Fields:
        if (self.thinking or {}).get("type", "disabled") != "disabled":
            raise InvalidRequest("thinking cannot be asked for", param="thinking")
        fields: Fields = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        fields["tools"] = [_anthropic_tool(tool) for tool in self.tools] if self.tools else None
        if choice := self.tool_choice:
            kinds = {"auto": "auto", "any": "required", "none": "none"}
            tool = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = kinds.get(choice.type, tool)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return {name: value for name, value in fields.items() if value is not None}

    def conversation(self) -> list[Fields]:
        system = _texts(self.system, "system")
        messages = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(self.messages):
            messages += _turn(message, f"messages[{index}]")
        return messages


def _anthropic_tool(tool: Fields) -> Fields:
    if tool.get("type", "custom") != "custom":
        raise InvalidRequest("only the client's own tools can be called", param="tools")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _turn(message: Fields, where: str) -> Iterator[Fields]:
    """Yields one message for each tool result, then one for the turn's own text and calls."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    texts, calls = [], []
    for block in content:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(block)
            case "thinking" | "redacted_thinking":
                pass
            case "tool_use":
                call = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": call})
            case "tool_result":
                given = _texts(block.get("content"), f"{where}.content") or ""
                name = block.get("tool_use_id")
                yield {"role": "tool", "tool_call_id": name, "content": given}
            case _:
                raise InvalidRequest(
                    f"{where}.content may have text, tool_use and tool_result",
                    param=f"{where}.content",
                )
    if texts or calls:
        said = {"role": role, "content": _texts(texts, f"{where}.content")}
        yield said | ({"tool_calls": calls} if calls else {})
