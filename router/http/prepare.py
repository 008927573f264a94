"""A request's body to what is asked: parsed, checked, as token ids. The costly part of a request,
so it runs wherever its size says: on the event loop, on a thread or in a process of its own.
Nothing here does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.sampling import check_range
from pdserve.router.http.errors import from_validation
from pdserve.router.http.schema import (
    Body,
    ChatBody,
    ChatTemplateBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
)
from pdserve.router.sampling import make_choices
from pdserve.router.served_model import ServedModel

MAX_PROMPTS = 1024  # of one body; each waits for a place of its own
MAX_BODY_CHOICES = 4096  # prompts × n
# A few bytes of JSON become objects of a hundred times their size: bounds before it is parsed.
MAX_CONTAINERS = 2**16  # lists and objects
MAX_VALUES = 2**21
_SMALL = 64 * 1024  # bytes that cannot exceed either by much
# One that is never closed ends with the body: every escaped quote in it would be tried else.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[BodyT]):
    """What a body asks. `body` may lack what became of it: prompts, messages, a template."""

    body: BodyT
    prompts: Sequence[Sequence[int]]  # token ids
    texts: Sequence[str] = ()  # of the prompts where they are echoed, or of the tokens
    unknown: frozenset[str] = field(default_factory=frozenset)  # fields no schema has


@dataclass(frozen=True, slots=True)
class TextModel:
    """What turns text into tokens, and whose templates it runs."""

    model: ServedModel
    trust_request_chat_template: bool = False

    def prepare(self, kind: str, raw: bytes | bytearray) -> Prepared[Any]:
        """`kind` is one of `KINDS`.

        Raises:
            InvalidRequest: no JSON, a field of the wrong type or out of range, or too long a
                prompt.
            ModelNotFound: it names another model.
        """
        schema, work = KINDS[kind]
        if len(raw) > _SMALL:
            _check_structure(raw)
        body = parse(schema, raw)
        self.model.check_name(body.model)
        prompts, texts = work(self, body)
        return Prepared(body, prompts, texts, frozenset(body.model_extra or ()))


def parse(schema: type[BodyT], raw: bytes | bytearray) -> BodyT:
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error


def _check_structure(raw: bytes | bytearray) -> None:
    """Counts outside strings, and no further than it must."""
    containers = values = end = 0
    for string in _STRING.finditer(raw):
        containers, values = _count(raw, end, string.start(), containers, values)
        end = string.end()
    _count(raw, end, len(raw), containers, values)


def _count(
    raw: bytes | bytearray, start: int, end: int, containers: int, values: int
) -> tuple[int, int]:
    containers += raw.count(b"[", start, end) + raw.count(b"{", start, end)
    values += raw.count(b",", start, end)
    if containers > MAX_CONTAINERS:
        raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} lists and objects")
    if values > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES} values")
    return containers, values


# ---- completions ----------------------------------------------------------------------------

Work = Callable[[TextModel, Any], tuple[Sequence[Sequence[int]], Sequence[str]]]


def _completion(text: TextModel, body: CompletionBody) -> tuple[Any, Any]:
    check_response_format(body)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != make_choices(body.n):
        raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, 5)
        if body.echo:
            raise InvalidRequest("logprobs of an echoed prompt are not supported", param="echo")
    prompts = [_ids(text.model, one) for one in _prompts(body)]
    if not body.echo:
        return prompts, ()
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(given[0], str):  # the client's own
        return prompts, given
    decode = text.model.tokenizer.decode
    return prompts, [decode(ids, skip_special_tokens=False) for ids in prompts]


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """Counted before anything is made of them."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    if len(prompt) * make_choices(body.n) > MAX_BODY_CHOICES:
        raise InvalidRequest(f"prompts × n may be at most {MAX_BODY_CHOICES}", param="n")
    return cast(Sequence[str | list[int]], prompt)


def _ids(model: ServedModel, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return model.encode(prompt, "prompt")
    return model.check_prompt(prompt, "prompt")


def check_response_format(body: GenerationBody) -> None:
    """Only plain text is generated."""
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise InvalidRequest(
            "response_format must be {'type': 'text'}: structured output is not supported yet",
            param="response_format",
        )


# ---- chat -----------------------------------------------------------------------------------


def _chat(text: TextModel, body: ChatBody) -> tuple[Any, Any]:
    check_response_format(body)
    if body.tools:
        raise InvalidRequest("tools are not supported yet", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is not supported yet", param="tool_choice")
    if body.max_completion_tokens is not None:
        check_range("max_completion_tokens", body.max_completion_tokens, 1, None)
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, 20)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return [_conversation(text, body, body.messages)], ()


def _conversation(
    text: TextModel, body: ChatTemplateBody, messages: list[Message]
) -> tuple[int, ...]:
    """The conversation as token ids, through the chat template.

    Raises:
        InvalidRequest: no messages, or the template refuses them.
    """
    if not messages:
        raise InvalidRequest("messages is an empty list", param="messages")
    if body.chat_template is not None and not text.trust_request_chat_template:
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
    rendered = text.model.tokenizer.render_chat_template(
        [_as_template_message(message) for message in messages],
        add_generation_prompt=not body.continue_final_message
        and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
    )
    return text.model.encode(rendered, "messages", bool(body.add_special_tokens))


def _as_template_message(message: Message) -> dict[str, Any]:
    """OpenAI's newer name for `system` is in no open model's template."""
    role = "system" if message.role == "developer" else message.role
    return {"content": "", **message.model_dump(exclude_none=True), "role": role}


# ---- tokens alone ---------------------------------------------------------------------------


def _tokenize(text: TextModel, body: TokenizeBody) -> tuple[Any, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return [_conversation(text, body, body.messages)], ()
    special = body.add_special_tokens is not False
    return [text.model.encode(body.prompt or "", "prompt", special)], ()


def _detokenize(text: TextModel, body: DetokenizeBody) -> tuple[Any, Any]:
    token_ids = text.model.check_ids(body.tokens, "tokens")
    return (), [text.model.tokenizer.decode(token_ids, False)]


KINDS: dict[str, tuple[type[Body], Work]] = {
    "completion": (CompletionBody, _completion),
    "chat": (ChatBody, _chat),
    "tokenize": (TokenizeBody, _tokenize),
    "detokenize": (DetokenizeBody, _detokenize),
}
