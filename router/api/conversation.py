"""Renders messages into the prompt's text, with the model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pdserve.common.config.router import ChatConfig
from pdserve.common.core.apart import Bounds, run_apart
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.parsers.harmony import MESSAGE
from pdserve.router.api.parsers.reader import decode
from pdserve.router.api.parts import text_of
from pdserve.router.api.schema import ChatTemplateBody, Message, Tool
from pdserve.router.api.template_probes import takes_late_systems, takes_parts, takes_texts

# An honest conversation of 30 MB takes a fraction of these.
BOUNDS = Bounds(cpu_seconds=2.0, memory=512 * 2**20)
# A template cannot make much of values within these bounds: the size of a number, the characters of
# a text, the values of a list or an object.
_NUMBER, _LONG, _MANY = 2**16, 1024, 64

# The variables by which families switch thinking off; a template reads its own.
NO_THINKING = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

Templates = Literal["here", "elsewhere", "apart"]
"""Where to render a template that may take any time: here without bounds, in another process, or in
a child of this one."""


class CostlyTemplate(Exception):
    """Another process must render the template."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The result in a child process."""

    text: str = ""
    error: tuple[str, str, str | None] | None = None  # message, code, param of an InvalidRequest


_rendered = msgspec.msgpack.Decoder(_Rendered)


def render_bounded(
    tokenizer: Tokenizer,
    config: ChatConfig,
    body: ChatTemplateBody,
    messages: list[Message],
    templates: Templates,
) -> str:
    """Calls `render`, within bounds if the template may take any time.

    Raises:
        CostlyTemplate: another process must do it.
        InvalidRequest: as `render`, or it took more than BOUNDS.
    """
    if templates == "here" or not _may_be_costly(config, body):
        return render(tokenizer, config, body, messages)
    if templates == "elsewhere":
        raise CostlyTemplate
    done = run_apart(lambda: _try(tokenizer, config, body, messages), BOUNDS).result
    if done is None:
        param = "chat_template_kwargs" if body.chat_template is None else "chat_template"
        raise InvalidRequest(f"the chat template takes more than {BOUNDS}", param=param)
    rendered = _rendered.decode(done)
    if rendered.error is not None:
        message, code, param_ = rendered.error
        raise InvalidRequest(message, code=code, param=param_)
    return rendered.text


def _try(
    tokenizer: Tokenizer, config: ChatConfig, body: ChatTemplateBody, messages: list[Message]
) -> bytes:
    try:
        rendered = _Rendered(render(tokenizer, config, body, messages))
    except InvalidRequest as error:
        rendered = _Rendered(error=(error.message, error.code, error.param))
    return msgspec.msgpack.encode(rendered)


def _may_be_costly(config: ChatConfig, body: ChatTemplateBody) -> bool:
    """Returns True for a client's own template, and for the server's with large values."""
    if body.chat_template is not None:
        return config.trust_request_chat_template  # otherwise `render` refuses it
    return not _is_slight(body.chat_template_kwargs)


def _is_slight(value: Any) -> bool:
    match value:
        case bool() | float() | None:
            return True
        case int():
            return abs(value) <= _NUMBER
        case str():
            return len(value) <= _LONG
        case dict():
            return len(value) <= _MANY and all(map(_is_slight, value.values()))
        case _:
            return len(value) <= _MANY and all(map(_is_slight, value))


def render(
    tokenizer: Tokenizer, config: ChatConfig, body: ChatTemplateBody, messages: list[Message]
) -> str:
    """Returns the conversation as text.

    Raises:
        InvalidRequest: there are no messages, or the template refuses them.
    """
    if not messages:
        raise InvalidRequest("messages is an empty list", param="messages")
    if body.chat_template is not None and not config.trust_request_chat_template:
        raise InvalidRequest(
            "this server does not run clients' chat templates "
            "(--trust-request-chat-template allows them)",
            param="chat_template",
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    # Harmony's template refuses a message that has content, reasoning and calls: there the model is
    # shown what the user has seen.
    harmony = MESSAGE in (body.chat_template or tokenizer.chat_template)
    contents = _Contents(tokenizer, body.chat_template, config.chat_template_content_format)
    given = [
        _as_template_message(message, contents.of(message, f"messages[{index}].content"), harmony)
        for index, message in enumerate(messages)
    ]
    return tokenizer.render_chat_template(
        _systems_first(tokenizer, body.chat_template, given),
        add_generation_prompt=not body.continue_final_message
        and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        tools=[_as_template_tool(tool) for tool in body.tools or ()] or None,
        documents=body.documents or None,
        template_kwargs=_effort(body, harmony) | (body.chat_template_kwargs or {}),
    )


def _effort(body: ChatTemplateBody, harmony: bool) -> dict[str, Any]:
    """Returns the template's variables for the effort. Harmony has three levels and always
    reasons."""
    if body.reasoning_effort is None:
        return {}
    effort: str = body.reasoning_effort
    if harmony:
        effort = _HARMONY_EFFORTS.get(effort, effort)
    off = NO_THINKING if effort == "none" else {}
    return {"reasoning_effort": effort, **off}


def joined(message: Message) -> str:
    """Returns a message's text; there is a line break between its parts, as in vLLM.

    Raises:
        InvalidRequest: a part has no text.
    """
    return "\n".join(_texts(message, "messages"))


def _texts(message: Message, param: str) -> list[str]:
    content = message.refusal or "" if message.content is None else message.content
    return [content] if isinstance(content, str) else [text_of(part, param) for part in content]


@dataclass(frozen=True, slots=True)
class _Contents:
    """Decides how the template gets contents: as strings or as parts."""

    tokenizer: Tokenizer
    template: str | None
    format: str  # as --chat-template-content-format

    def of(self, message: Message, param: str) -> Any:
        """Raises InvalidRequest: a part has no text."""
        texts = _texts(message, param)
        if self._in_parts(message):
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _in_parts(self, message: Message) -> bool:
        if message.content is None or self.format != "auto":
            return message.content is not None and self.format == "openai"
        if not takes_texts(self.tokenizer, self.template):
            return True
        role = "system" if message.role == "developer" else message.role
        is_list = isinstance(message.content, list)
        return is_list and takes_parts(self.tokenizer, self.template, role)


def _systems_first(
    tokenizer: Tokenizer, template: str | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the messages, with those of the system joined into the first one if the template does
    not take them elsewhere."""
    systems = [each for each in messages if each["role"] == "system"]
    if all(each is messages[0] for each in systems) or takes_late_systems(tokenizer, template):
        return messages
    contents = [each["content"] for each in systems]
    if all(isinstance(content, str) for content in contents):
        whole: Any = "\n".join(contents)
    else:
        whole = [part for content in contents for part in _parts(content)]
    rest = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": whole}, *rest]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_template_message(message: Message, content: Any, harmony: bool) -> dict[str, Any]:
    """Returns the message as templates take it: `developer` becomes `system`, the arguments of
    calls are objects, and reasoning has one of its two names."""
    given = message.model_dump(exclude_none=True)
    if reasoning := given.pop("reasoning", None):
        given.setdefault("reasoning_content", reasoning)
    if harmony and message.content and message.tool_calls:
        given.pop("reasoning_content", None)
    given["content"] = content
    if not given.get("tool_calls"):
        given.pop("tool_calls", None)
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = _as_object(call["function"].get("arguments"))
    return given | {"role": "system" if message.role == "developer" else message.role}


def _as_object(arguments: str | dict[str, Any] | None) -> Any:
    """Parses the arguments of a call. A model may have written no JSON: then they stay text."""
    if not arguments:
        return {}
    if isinstance(arguments, str):
        value = decode(arguments)
        return value if isinstance(value, dict) else arguments
    return arguments


def _as_template_tool(tool: Tool) -> dict[str, Any]:
    """Returns the tool without `strict`, which is for the server. Templates read `parameters`, so
    that a tool without any gets an empty object."""
    given = tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}})
    function = {name: value for name, value in given["function"].items() if value is not None}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return given | {"function": function}
