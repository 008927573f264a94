"""The schemas of request bodies, with the fields of OpenAI's and vLLM's APIs.

A schema checks types only; `router/api/sampling.py` checks ranges, for gRPC, too. Every field may
be null, which means absent: clients send that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
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

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import PARAMETERS, Parameter, ParamType


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
    "content": "a string or a list of parts of type text",
    "guided_json": "an object or a string",
    "input": "a string or a list of items",
    "system": "a string or a list of blocks of text",
    "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    "arguments": "a string of JSON or an object",
}


class Body(BaseModel):
    """Fields that the schema lacks are in `model_extra`; see `unknown_fields`."""

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


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class _Part(BaseModel):
    """A part of a message or tool. Fields that it lacks go to the chat template as they are."""

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
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast()])
Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast()])


class ChatTemplateBody(Body):
    """Fields that control how messages become a prompt."""

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


# ---- fields that no schema has ---------------------------------------------------------------
#
# OpenAI, Anthropic or vLLM define these fields, and no schema has them. To ignore one would answer
# another question than the client asked, so it is refused. A field that no API defines is ignored,
# and logged.

# By name, the values that ask for nothing, as null does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "background": (False,),
    "conversation": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Anthropic
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    # vLLM
    "early_stopping": (False,),
    "echo": (False,),
    "enable_response_messages": (False,),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "previous_input_messages": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_token_strs": (False,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
# Fields that change no answer.
WITHOUT_EFFECT = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "spaces_between_special_tokens",
})  # fmt: skip
ONE_CHOICE = (("n", 1), ("best_of", 1))


def unknown_fields(
    extra: Mapping[str, Any],
    elsewhere: Collection[str] = frozenset(),
    sent_as: Mapping[str, str] = MappingProxyType({}),
) -> frozenset[str]:
    """Returns a body's fields that no API defines. `elsewhere` are fields of other endpoints;
    `sent_as` maps a field's name here to its path in the client's body.

    Raises:
        InvalidRequest: a field requests something that this server does not do.
    """
    for name, value in extra.items():
        if value is None:
            continue
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            sent = sent_as.get(name, name)
            raise InvalidRequest(f"{sent} is not supported", param=sent)
        if name in elsewhere and value is not False and (name, value) not in ONE_CHOICE:
            raise InvalidRequest(f"{name} is not supported by this endpoint", param=name)
    return frozenset(extra) - UNSUPPORTED.keys() - WITHOUT_EFFECT
