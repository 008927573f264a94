"""Request bodies, as OpenAI and vLLM word them.

Only types are checked here; ranges are checked where gRPC's are (`router/sampling.py`). Every
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
    create_model,
    field_validator,
)
from typing_extensions import TypeAliasType

from pdserve.common.core.sampling import PARAMETERS, Kind, Parameter


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

# What to say of a field that takes several shapes, when it has none of them.
SHAPES = {
    "prompt": "a string, a list of strings, token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts of type text",
    "tool_choice": "a string or an object",
    "guided_json": "an object or a string",
    "input": "a string or a list of items",
    "system": "a string or a list of blocks of text",
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


TYPES: dict[Kind, Any] = {
    Kind.INTEGER: Integer,
    Kind.NUMBER: Number,
    Kind.BOOLEAN: bool,
    Kind.TEXT: str,
    Kind.TEXT_OR_TEXTS: str | Texts,
    Kind.TEXTS: Texts,
    Kind.TOKEN_IDS: TokenIds,
    Kind.TOKEN_ID_LISTS: Prompts,
    Kind.BIASES: dict[str, Number],
    Kind.OBJECT: dict[str, Any],
    Kind.OBJECT_OR_TEXT: dict[str, Any] | str,
}


def _said(each: Parameter) -> dict[str, Any]:
    """A row's bounds and meaning in words of JSON Schema."""
    numbers = {"minimum": each.low, "maximum": each.high} if each.kind in NUMBERS else {}
    lists = {"maxItems": each.most} if each.most and each.kind is not Kind.BIASES else {}
    texts = {"maxLength": each.longest} if each.longest else {}
    said = {**numbers, **lists, **texts, "description": each.meaning}
    return {name: value for name, value in said.items() if value not in (None, "")}


NUMBERS = (Kind.INTEGER, Kind.NUMBER)
_FIELDS: dict[str, Any] = {
    each.name: (TYPES[each.kind] | None, Field(None, json_schema_extra=_said(each)))
    for each in PARAMETERS.values()
    if each.http
}
TableBody: Any = create_model("TableBody", __base__=Body, **_FIELDS)


class GenerationBody(TableBody):
    """What completions and chat have in common: the table of `common/core/sampling.py`."""

    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    prompt: str | Texts | TokenIds | Prompts
    logprobs: Integer | None = None
    echo: bool | None = None
    best_of: Integer | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Fields beside these go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None

    @field_validator("content")
    @classmethod
    def _join_parts(cls, content: str | list[TextPart] | None) -> str | None:
        return "".join(p.text for p in content) if isinstance(content, list) else content


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast()])


class ChatTemplateBody(Body):
    """What says how messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, ChatTemplateBody):
    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(ChatTemplateBody):
    prompt: str | None = None
    messages: Messages | None = None


class DetokenizeBody(Body):
    tokens: TokenIds
