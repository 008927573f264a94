"""The schemas of request bodies, with the fields of OpenAI's and vLLM's APIs.

A schema checks types only; `router/api/sampling.py` checks ranges, for gRPC, too. Every field may
be null, which means absent: clients send that.
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
    ValidationInfo,
    create_model,
)
from typing_extensions import TypeAliasType

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import PARAMETERS, Parameter, ParamType
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.parts import Part


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


# Clients send numbers as text, too, and whole numbers with a point.
Integer = Annotated[int, Strict(False), BeforeValidator(_no_boolean)]
Number = Annotated[float, Strict(False), BeforeValidator(_no_boolean)]
# Without FailFast a long list of the wrong type would give as long a list of errors.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])
Prompts = TypeAliasType("Prompts", Annotated[list[TokenIds], FailFast()])

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"

# The types that a field takes, where there are several, for the error message.
SHAPES = {
    "prompt": "a string, a list of strings, token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts",
    "guided_json": "an object or a string",
    "input": "a string or a list of items",
    "system": "a string or a list of blocks of text",
    "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    "arguments": "a string of JSON or an object",
    "function_call": '"none", "auto" or {"name": …}',
}


class Body(BaseModel):
    """Fields that the schema lacks are in `model_extra`; see `Ignored.fields`."""

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


def _json_schema(each: Parameter) -> dict[str, Any]:
    """Returns a parameter's bounds and meaning in JSON Schema."""
    numbers = {"minimum": each.low, "maximum": each.high} if each.kind in NUMBERS else {}
    lists = {"maxItems": each.most} if each.most and each.kind is not ParamType.BIASES else {}
    texts = {"maxLength": each.longest} if each.longest else {}
    found = {**numbers, **lists, **texts, "description": each.meaning}
    return {name: value for name, value in found.items() if value not in (None, "")}


NUMBERS = (ParamType.INTEGER, ParamType.NUMBER)
FIELDS: dict[str, Any] = {
    each.name: (TYPES[each.kind] | None, Field(None, json_schema_extra=_json_schema(each)))
    for each in PARAMETERS.values()
    if each.http
}
TableBody: Any = create_model("TableBody", __base__=Body, **FIELDS)


class GenerationBody(TableBody):
    """The parameters that completions and chat share: the table of `common/core/parameters.py`."""

    stream_options: StreamOptions | None = None
    resumable: bool | None = None  # the events of the stream have ids, for `resume`
    resume: Texts | None = None  # ids of the events that came, of a stream that broke off

    def given(self, **renamed: Any) -> dict[str, Any]:
        """Returns the parameters by name, as `AppState.make_request` takes them; `renamed` maps
        names that the endpoint spells differently."""
        return {name: getattr(self, name) for name in FIELDS} | renamed


class CompletionBody(GenerationBody):
    prompt: str | Texts | TokenIds | Prompts
    logprobs: Integer | None = None
    echo: bool | None = None
    best_of: Integer | None = None
    suffix: str | None = None

    @property
    def prompt_top(self) -> int | None:
        """The number of most likely tokens that the answer needs for each token of the prompt;
        None: the prompt's log-probabilities are not needed."""
        echoed = self.logprobs if self.echo else None
        asked = [each for each in (echoed, self.prompt_logprobs) if each is not None]
        return max(asked, default=None)


class _Open(BaseModel):
    """A message, a tool or a part of one. The chat template gets fields that it lacks, too."""

    model_config = ConfigDict(strict=True, extra="allow")


class Function(_Open):
    name: Annotated[str, StringConstraints(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Open):
    type: Literal["function"]
    function: Function


class NamedFunction(_Open):
    name: str


class NamedTool(_Open):
    type: Literal["function"]
    function: NamedFunction


class FunctionCall(_Open):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Open):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    refusal: str | None = None  # what the assistant said instead
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None


def _without_hosted(tools: Any, info: ValidationInfo) -> Any:
    """Leaves out tools that are not functions: those that a provider runs itself, and those whose
    input is no JSON. The names of such go to the validation's context."""
    if not isinstance(tools, list) or not isinstance(info.context, Ignored):
        return tools
    functions = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind == "function":
            functions.append(tool)
        else:
            info.context.add_tool(tool, index)
    return functions


def _of_function(choice: Any, info: ValidationInfo) -> Any:
    """Refuses a choice of a tool that was left out; where all were, there is none to choose."""
    left_out = info.context.tools if isinstance(info.context, Ignored) else ()
    if isinstance(choice, dict) and left_out:
        named = choice.get(str(choice.get("type")), choice)
        names = (named.get("name") if isinstance(named, dict) else None, choice.get("type"))
        if found := left_out.intersection(name for name in names if isinstance(name, str)):
            raise InvalidRequest(
                f"tool_choice names {found.pop()}, which this server leaves out: it is no function",
                param="tool_choice",
            )
    if choice == "auto" and left_out and not info.data.get("tools"):
        return None
    return choice


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast()])
Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast(), BeforeValidator(_without_hosted)])
Functions = TypeAliasType("Functions", Annotated[list[Function], FailFast()])
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_of_function)
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatTemplateBody(Body):
    """Fields that control how messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: Tools | None = None
    documents: list[dict[str, Any]] | None = None


class ChatBody(GenerationBody, ChatTemplateBody):
    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tool_choice: ToolChoice = None
    functions: Functions | None = None  # what there was before tools
    function_call: Literal["none", "auto"] | NamedFunction | None = None
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
