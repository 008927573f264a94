"""Converts chats over gRPC: their messages to chat's JSON body, their answer to typed responses."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict, SerializeToJsonError

from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.router.api.chat import ChatChoices
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Reasoning
from pdserve.router.api.preprocess import MAX_CONTAINERS, Structure
from pdserve.router.requests.generation import TextDelta

_MODES = {pb.TOOL_MODE_NONE: "none", pb.TOOL_MODE_AUTO: "auto", pb.TOOL_MODE_REQUIRED: "required"}
_SHARED = ("max_tokens", "truncate_prompt_tokens", "prompt_logprobs")


def chat_fields(chat: pb.Chat, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the JSON body for the same chat; `given` has the sampling parameters.

    Raises:
        InvalidRequest: the parameters of a tool or of the template are no JSON, or are too large;
            or there are too many messages and tools.
    """
    # First, because Python's objects are much larger than messages of two bytes.
    if len(chat.messages) + len(chat.tools) > MAX_CONTAINERS:
        raise InvalidRequest(f"a chat has at most {MAX_CONTAINERS} messages and tools")
    body: dict[str, Any] = {name: given[name] for name in _SHARED if name in given}
    body["messages"] = [_message(each) for each in chat.messages]
    if chat.tools:
        parameters = Structure("the text of tools' parameters", "tools")
        for each in chat.tools:
            parameters.check(each.parameters.encode())
        body["tools"] = [_tool(index, each) for index, each in enumerate(chat.tools)]
    match chat.WhichOneof("tool_choice"):
        case "tool":
            body["tool_choice"] = {"type": "function", "function": {"name": chat.tool}}
        case "mode" if chat.mode:
            if chat.mode not in _MODES:
                raise InvalidRequest("mode must be NONE, AUTO or REQUIRED", param="tool_choice")
            body["tool_choice"] = _MODES[chat.mode]
    for name in ("parallel_tool_calls", "add_generation_prompt"):
        if chat.HasField(name):
            body[name] = getattr(chat, name)
    body["continue_final_message"] = chat.continue_final_message
    try:
        body["chat_template_kwargs"] = MessageToDict(chat.chat_template_kwargs)
    except (SerializeToJsonError, ValueError) as error:  # JSON has no such number
        param = "chat_template_kwargs"
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    if "structured_outputs" in given:
        body["structured_outputs"] = structured_fields(given["structured_outputs"])
    return body


def answer(request_id: str, update: TextDelta, choices: ChatChoices | None) -> pb.GenerateResponse:
    """Returns the response for one delta; a chat's has text, reasoning and calls apart."""
    response = pb.GenerateResponse(
        request_id=request_id,
        index=update.choice,
        tokens=[convert.token_to_pb(token) for token in update.tokens],
        finish_reason=convert.finish_to_pb(update.finish_reason),
        stop_reason="" if update.stop_reason is None else str(update.stop_reason),
    )
    if choices is None:
        response.text = update.text
        return response
    events, finish_reason = choices.parse(update)
    for event in events:
        match event:
            case Content(text):
                response.text += text
            case Reasoning(text):
                response.reasoning += text
            case CallStart(index, call_id, name):
                response.tool_calls.add(index=index, id=call_id, name=name)
            case CallArguments(index, text):
                response.tool_calls.add(index=index, arguments=text)
    if finish_reason == "tool_calls":
        response.finish_reason = pb.FINISH_REASON_TOOL_CALLS
    return response


def structured_fields(message: pb.StructuredOutputs) -> dict[str, Any]:
    """Returns the message as `structured_outputs` of a JSON body."""
    fields: dict[str, Any] = {
        "disable_any_whitespace": message.disable_any_whitespace,
        "whitespace_pattern": message.whitespace_pattern or None,
    }
    if (kind := message.WhichOneof("constraint")) is not None:
        value = getattr(message, kind)
        fields[kind] = list(value.texts) if kind == "choice" else value
    return fields


def _message(message: pb.Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["content"] = message.content or None
        said["tool_calls"] = [
            {"id": each.id, "function": {"name": each.name, "arguments": each.arguments}}
            for each in message.tool_calls
        ]
    more = {"tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    return said | {name: value for name, value in more.items() if value}


def _tool(index: int, tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or None}
    if tool.parameters:
        try:
            function["parameters"] = exact_json.loads(tool.parameters)
        except (ValueError, RecursionError) as error:
            param = f"tools[{index}].parameters"
            raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from error
    return {"type": "function", "function": function}
