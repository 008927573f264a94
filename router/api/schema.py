"""Request bodies, as OpenAI and vLLM word them.

Only types are checked here; ranges are checked where gRPC's are (`router/api/sampling.py`). Every
field may be null, which means absent: clients send that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    StringConstraints,
    create_model,
)
from typing_extensions import TypeAliasType

from pdserve.common.core.parameters import PARAMETERS, Parameter, ParamType


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


# Also as text, and whole numbers with a point: clients send that.
Integer = Annotated[int, Strict(False), BeforeValidator(_no_boolean)]
Number = Annotated[float, Strict(False), BeforeValidator(_no_boolean)]
# A long list of the wrong type would otherwise give as long a list of errors.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])
Prompts = TypeAliasType("Prompts", Annotated[list[TokenIds], FailFast()])

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"

# What to say of a field that takes several shapes, when it has none of them.
SHAPES = {
    "prompt": "a string, a list of strings, token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts of type text",
    "guided_json": "an object or a string",
    "input": "a string or a list of items",
    "system": "a string or a list of blocks of text",
    "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    "arguments": "a string of JSON or an object",
}


class Body(BaseModel):
    """Fields we do not know are kept in `model_extra`, to be logged, and otherwise ignored."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=(), frozen=True
    )

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


TYPES: dict[ParamType, Any] = {
    ParamType.INTEGER: Integer,
    ParamType.NUMBER: Number,
    ParamType.BOOLEAN: bool,
    ParamType.TEXT: str,
    ParamType.TEXT_OR_TEXTS: str | Texts,
    ParamType.TEXTS: Texts,
    ParamType.TOKEN_IDS: TokenIds,
    ParamType.TOKEN_ID_LISTS: Prompts,
    ParamType.BIASES: dict[str, Number],
    ParamType.OBJECT: dict[str, Any],
    ParamType.OBJECT_OR_TEXT: dict[str, Any] | str,
}


def _said(each: Parameter) -> dict[str, Any]:
    """A row's bounds and meaning in words of JSON Schema."""
    numbers = {"minimum": each.low, "maximum": each.high} if each.kind in NUMBERS else {}
    lists = {"maxItems": each.most} if each.most and each.kind is not ParamType.BIASES else {}
    texts = {"maxLength": each.longest} if each.longest else {}
    said = {**numbers, **lists, **texts, "description": each.meaning}
    return {name: value for name, value in said.items() if value not in (None, "")}


NUMBERS = (ParamType.INTEGER, ParamType.NUMBER)
FIELDS: dict[str, Any] = {
    each.name: (TYPES[each.kind] | None, Field(None, json_schema_extra=_said(each)))
    for each in PARAMETERS.values()
    if each.http
}
TableBody: Any = create_model("TableBody", __base__=Body, **FIELDS)


class GenerationBody(TableBody):
    """What completions and chat have in common: the table of `common/core/parameters.py`."""

    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    prompt: str | Texts | TokenIds | Prompts
    logprobs: Integer | None = None
    echo: bool | None = None
    best_of: Integer | None = None
    suffix: str | None = None

    @property
    def prompt_top(self) -> int | None:
        """Of the most likely tokens in the place of each of the prompt's so many are needed; None:
        nothing of the prompt."""
        echoed = self.logprobs if self.echo else None
        asked = [each for each in (echoed, self.prompt_logprobs) if each is not None]
        return max(asked, default=None)


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class _Part(BaseModel):
    """Of tools and calls. Other fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


class Function(_Part):
    name: Annotated[str, StringConstraints(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    name: str


class NamedTool(_Part):
    type: Literal["function"]
    function: NamedFunction


class FunctionCall(_Part):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Part):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast()])
Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast()])


class ChatTemplateBody(Body):
    """What says how messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    documents: list[dict[str, Any]] | None = None


class ChatBody(GenerationBody, ChatTemplateBody):
    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(ChatTemplateBody):
    prompt: str | None = None
    messages: Messages | None = None


class LoadLoRABody(Body):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadLoRABody(Body):
    lora_name: str


class DetokenizeBody(Body):
    tokens: TokenIds
