"""Preprocesses a request's body: parses, checks and tokenizes it. This is the costly part of a
request, so that its size decides where it runs: on the event loop, on a thread or in a process of
its own. Nothing here does I/O.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from pdserve.common.config.router import ChatConfig
from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest, PdserveError, RequestTooLarge, is_defect
from pdserve.common.core.parameters import MAX_CHOICES, check_range
from pdserve.common.core.prompt_logprobs import check_size
from pdserve.common.core.structured import StructuredOutput
from pdserve.common.obs.logging import request_id_var
from pdserve.common.text.detokenizer import whole_characters
from pdserve.router.api.compat import CompatBody
from pdserve.router.api.conversation import CostlyTemplate, Templates, render_bounded
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.legacy import with_calls, with_tools
from pdserve.router.api.messages_body import MessagesBody
from pdserve.router.api.responses_body import ResponsesBody
from pdserve.router.api.sampling import make_choices
from pdserve.router.api.schema import (
    SHAPES,
    Body,
    ChatBody,
    ChatTemplateBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    LoadLoRABody,
    Message,
    TokenizeBody,
    UnloadLoRABody,
)
from pdserve.router.api.structured import structured_of
from pdserve.router.api.tools import (
    AnswerPlan,
    check_tools,
    forced_calls,
    plan_tools,
    with_thought,
    with_unforced_calls,
)
from pdserve.router.cluster.served_model import ServedModel

logger = logging.getLogger(__name__)

MAX_PROMPTS = 1024  # in one body; each waits for a slot of its own
MAX_BODY_CHOICES = 4096  # prompts × n
# A few bytes of JSON become objects of a hundred times their size: bounds before it is parsed.
MAX_CONTAINERS = 2**16  # lists and objects
MAX_VALUES = 2**21
MAX_KEYS = 2**18  # each is kept as text, whether or not a schema has it
_SMALL = 64 * 1024  # bytes that cannot exceed either by much
PIECE = 64 * 1024  # bytes that a piece of a body has at least, but for the last
# A string without an end takes the rest of the body; else each of its escaped quotes is tried.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

BodyT = TypeVar("BodyT", bound=Body)


class BodyBuffer:
    """A body as it arrives, in pieces. One block would be moved as a whole when it grows, and would
    leave a hole of its size in memory."""

    def __init__(self, whole: bytes = b"") -> None:
        self._pieces: list[bytearray] = []
        self._size = 0
        self.add(whole)

    def __len__(self) -> int:
        """Bytes."""
        return self._size

    def __iter__(self) -> Iterator[bytearray]:
        return iter(self._pieces)

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._pieces and len(self._pieces[-1]) < PIECE:
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def whole(self) -> bytes:
        return b"".join(self._pieces)

    def clear(self) -> None:
        """Frees the pieces, even while a refusal's traceback holds this object."""
        self._pieces.clear()
        self._size = 0


@dataclass(frozen=True, slots=True)
class Preprocessed(Generic[BodyT]):
    """A body and the result of preprocessing it. From another process `body` comes without its
    prompts, messages and template."""

    body: BodyT
    prompts: Sequence[Sequence[int]]  # token ids
    # The prompts' texts if they are echoed; a text of `detokenize`; or `CompatBody.echoed`.
    texts: Sequence[str] = ()
    structured: StructuredOutput | None = None  # the constraint on the answer
    answer: AnswerPlan = field(default_factory=AnswerPlan)
    ignored: Sequence[str] = ()  # as `Ignored.names`
    grammar: str = ""  # the compiled constraint
    resume: str = ""  # the ids of `GenerationBody.resume`, joined by spaces


# Fields of bodies that become token ids, text, a constraint, or are sent beside the body.
CONSUMED_FIELDS = frozenset({
    "prompt", "messages", "input", "instructions", "system", "tokens",
    "chat_template", "chat_template_kwargs", "documents", "functions", "tools", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "resume",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """Preprocesses bodies for one model, with the server's settings for chats."""

    model: ServedModel
    chat: ChatConfig = field(default_factory=ChatConfig)
    adapters: frozenset[str] = frozenset()  # names of adapters, which are models, too
    templates: Templates = "here"  # where costly ones are rendered

    def preprocess(self, kind: str, raw: bytes | bytearray) -> Preprocessed[Any]:
        """`kind` is one of `KINDS`; `raw` may be any bytes.

        Raises:
            InvalidRequest: it is no JSON, a field has the wrong type or is out of range, or a
                prompt is too long.
            ModelNotFound: it names another model; then nothing has been tokenized.
            RequestTooLarge: it takes too much memory.
            PdserveError: a defect, which is logged.
            CostlyTemplate: another process must do it.
        """
        try:
            return self._preprocess(kind, raw)
        except (PdserveError, CostlyTemplate):
            raise
        except BaseException as error:
            if not is_defect(error):
                raise
            raise failed(error) from error

    def _preprocess(self, kind: str, raw: bytes | bytearray) -> Preprocessed[Any]:
        schema, preprocess = KINDS[kind]
        if len(raw) > _SMALL:
            Structure("the body").check(raw)
        ignored = Ignored(self.chat.strict_parameters)
        body = parse(schema, raw, ignored)
        if body.model not in self.adapters:
            self.model.check_name(body.model)
        if not isinstance(body, CompatBody):
            ignored.fields(body.model_extra)
            given = body.resume if isinstance(body, GenerationBody) else None
            resume = " ".join(given or ())
            return replace(preprocess(self, body), ignored=ignored.names, resume=resume)
        ignored.fields(body.model_extra, body.elsewhere())
        made = preprocess(self, as_chat(body, ignored))
        return replace(made, body=body, texts=body.echoed(), ignored=ignored.names)


def parse(schema: type[BodyT], raw: bytes | bytearray, ignored: Ignored | None = None) -> BodyT:
    """`ignored` gets the tools that are left out.

    Raises:
        InvalidRequest: the body does not fit the schema.
    """
    try:
        body = schema.model_validate_json(raw, context=ignored or Ignored())
        # pydantic's parser rounds numbers, of schemas too.
        if exact_json.may_round(raw) and exact_json.has_exact(exact := exact_json.loads(raw)):
            return schema.model_validate(exact, context=Ignored())
        return body
    except ValidationError as error:
        raise _invalid(error) from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="INVALID_JSON") from error


def as_chat(body: CompatBody, ignored: Ignored, messages: bool = True) -> ChatBody:
    """Chat's body for the same request; without its messages if `messages` is false. `ignored` gets
    what chat has no equivalent of.

    Raises:
        InvalidRequest: such a part cannot be left out.
    """
    said = body.conversation(ignored) if messages else []
    fields = body.same() | body.parameters(ignored) | {"messages": said}
    try:
        chat = ChatBody.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise _invalid(error, body.sent_as) from error
    ignored.fields(chat.model_extra, sent_as=body.sent_as)
    return chat


def _invalid(error: ValidationError, sent_as: Mapping[str, str] | None = None) -> InvalidRequest:
    """Returns the first of pydantic's errors; `param` is a path such as `messages[0].role`.
    `sent_as`: as `CompatBody.sent_as`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}", code="INVALID_JSON")
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object", code="INVALID_JSON")
    # Inside a field of several types pydantic's path goes on with its own name of the type.
    steps = list(takewhile(lambda step: not _is_shape(step), first["loc"]))
    steps[0] = (sent_as or {}).get(str(steps[0]), steps[0])
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
    if len(steps) < len(first["loc"]) and steps[-1] in SHAPES:
        return InvalidRequest(f"{param}: must be {SHAPES[str(steps[-1])]}", param=param)
    return InvalidRequest(f"{param}: {first['msg']}", param=param)


def _is_shape(step: int | str) -> bool:
    return isinstance(step, str) and (step == "str" or "[" in step)


class Structure:
    """Counts the containers, values and keys of JSON texts before they are parsed, and stops at
    the bounds."""

    def __init__(self, name: str, param: str | None = None) -> None:
        """Counts one text, or several together; `name` and `param` are for the error."""
        self._name = name
        self._param = param
        self._containers = self._values = self._keys = 0

    def check(self, raw: bytes | bytearray) -> None:
        """Raises InvalidRequest: there are too many values."""
        end = 0
        for string in _STRING.finditer(raw):
            self._count(raw, end, string.start())
            end = string.end()
        self._count(raw, end, len(raw))

    def _count(self, raw: bytes | bytearray, start: int, end: int) -> None:
        self._containers += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        self._values += raw.count(b",", start, end)
        self._keys += raw.count(b":", start, end)
        if self._containers > MAX_CONTAINERS:
            self._refuse(MAX_CONTAINERS, "lists and objects")
        if self._values > MAX_VALUES:
            self._refuse(MAX_VALUES, "values")
        if self._keys > MAX_KEYS:
            self._refuse(MAX_KEYS, "keys")

    def _refuse(self, most: int, what: str) -> None:
        raise InvalidRequest(f"{self._name} has more than {most} {what}", param=self._param)


def failed(error: BaseException) -> PdserveError:
    """Returns the typed error for an exception in preprocessing."""
    if isinstance(error, MemoryError):
        return RequestTooLarge("preparing the body takes too much memory")
    if isinstance(error, (RecursionError, UnicodeError, OverflowError)):  # the values cause them
        return InvalidRequest(f"the body cannot be prepared: {error}")
    logger.error("preparing a body failed", exc_info=error)
    log = f"its log entry is under request id {request_id_var.get()}"
    return PdserveError(f"preparing the body failed; {log}", code="PREPARATION_FAILED")


# ---- completions -----------------------------------------------------------------------------

Preprocess = Callable[[Preprocessor, Any], Preprocessed[Any]]


def _completion(preprocessor: Preprocessor, body: CompletionBody) -> Preprocessed[Any]:
    structured = check_generation(body)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None:
        check_range("best_of", body.best_of, make_choices(body.n), MAX_CHOICES)
        if body.stream and body.best_of > make_choices(body.n):
            raise InvalidRequest("best_of cannot be streamed", param="best_of")
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, preprocessor.model.max_logprobs)
    prompts = [_ids(preprocessor.model, body, one) for one in _prompts(body)]
    if (num_top := body.prompt_top) is not None:
        check_range("prompt_logprobs", num_top, 0, preprocessor.model.max_logprobs)
        check_size(sum(map(len, prompts)) * make_choices(body.n), num_top)
    if not body.echo:
        return Preprocessed(body, prompts, structured=structured)
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(given[0], str) and body.truncate_prompt_tokens is None:  # as they were sent
        return Preprocessed(body, prompts, given, structured)
    tokenizer = preprocessor.model.tokenizer
    # The answer, if there is one, begins with the rest of the last character.
    shown = [whole_characters(tokenizer, ids) if body.max_tokens != 0 else ids for ids in prompts]
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in shown]
    return Preprocessed(body, prompts, texts, structured)


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """Returns the prompts, counted before anything is made of them."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    if len(prompt) * (body.best_of or make_choices(body.n)) > MAX_BODY_CHOICES:
        param = "best_of" if body.best_of else "n"
        raise InvalidRequest(f"prompts × {param} may be at most {MAX_BODY_CHOICES}", param=param)
    return cast(Sequence[str | list[int]], prompt)


def _ids(model: ServedModel, body: CompletionBody, prompt: str | list[int]) -> Sequence[int]:
    if isinstance(prompt, str):
        return _truncated(model, body, model.encode(prompt, "prompt"))
    return model.check_prompt(_truncated(model, body, prompt), "prompt")


def _truncated(model: ServedModel, body: GenerationBody, token_ids: Sequence[int]) -> Sequence[int]:
    limit = getattr(body, "max_completion_tokens", None) or body.max_tokens
    return model.truncate(token_ids, body.truncate_prompt_tokens, limit)


def check_generation(body: GenerationBody) -> StructuredOutput | None:
    """Checks the fields that completions and chat share; returns the constraint on the answer."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return structured_of(body)


# ---- chat ------------------------------------------------------------------------------------


def _chat(preprocessor: Preprocessor, body: ChatBody) -> Preprocessed[Any]:
    structured = check_generation(body)
    if body.max_completion_tokens is not None:
        check_range("max_completion_tokens", body.max_completion_tokens, 1, None)
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, preprocessor.model.max_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    body, model = with_tools(body), preprocessor.model
    chat, tokenizer = preprocessor.chat, model.tokenizer
    plan = replace(plan_tools(body, chat), legacy=bool(body.functions))
    structured = forced_calls(body, plan) or structured
    if structured is not None:
        plan, structured = with_unforced_calls(plan, structured, body, chat, tokenizer)
    text = _render(preprocessor, body, body.messages)
    plan = with_thought(plan, body, chat, text, tokenizer, held=structured is not None)
    token_ids = model.encode(text, "messages", bool(body.add_special_tokens))
    prompt = _truncated(model, body, token_ids)
    if body.prompt_logprobs is not None:
        check_range("prompt_logprobs", body.prompt_logprobs, 0, model.max_logprobs)
        check_size(len(prompt), body.prompt_logprobs)
    return Preprocessed(body, [prompt], structured=structured, answer=plan)


def _render(preprocessor: Preprocessor, body: ChatTemplateBody, messages: list[Message]) -> str:
    arguments = Structure("the text of tool calls' arguments", "messages")
    messages = list(with_calls(messages))
    for call in (call for message in messages for call in message.tool_calls or ()):
        if isinstance(text := call.function.arguments, str):  # JSON that is parsed
            arguments.check(text.encode())
    tokenizer, templates = preprocessor.model.tokenizer, preprocessor.templates
    return render_bounded(tokenizer, preprocessor.chat, body, messages, templates)


# ---- tokens alone ----------------------------------------------------------------------------


def _tokenize(preprocessor: Preprocessor, body: TokenizeBody) -> Preprocessed[Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        check_tools(body.tools or [])
        text = _render(preprocessor, body, body.messages)
        special = bool(body.add_special_tokens)
        return Preprocessed(body, [preprocessor.model.encode(text, "messages", special)])
    special = body.add_special_tokens is not False
    return Preprocessed(body, [preprocessor.model.encode(body.prompt or "", "prompt", special)])


def _detokenize(preprocessor: Preprocessor, body: DetokenizeBody) -> Preprocessed[Any]:
    token_ids = preprocessor.model.check_ids(body.tokens, "tokens")
    return Preprocessed(body, (), [preprocessor.model.tokenizer.decode(token_ids, False)])


def _no_prompt(preprocessor: Preprocessor, body: Body) -> Preprocessed[Any]:
    return Preprocessed(body, ())


KINDS: dict[str, tuple[type[Body], Preprocess]] = {
    "completion": (CompletionBody, _completion),
    "chat": (ChatBody, _chat),
    "responses": (ResponsesBody, _chat),
    "messages": (MessagesBody, _chat),
    "tokenize": (TokenizeBody, _tokenize),
    "detokenize": (DetokenizeBody, _detokenize),
    "load_lora": (LoadLoRABody, _no_prompt),
    "unload_lora": (UnloadLoRABody, _no_prompt),
}
