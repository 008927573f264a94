"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import FinishReason, new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.foreign import ForeignBody
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Event, Reasoning
from pdserve.router.api.parsers.reasoning import AnswerParser
from pdserve.router.api.parsers.tool_parser import ToolParser
from pdserve.router.api.preprocess import as_chat
from pdserve.router.api.prompt_logprobs import prompt_logprobs
from pdserve.router.api.schema import ChatBody
from pdserve.router.api.tools import NAMED, AnswerPlan
from pdserve.router.http.request import SERVING, client_of, given_by, preprocess
from pdserve.router.http.response import MIN_LOGPROB, Response, logprob_of, token_name
from pdserve.router.requests.admission import Batch
from pdserve.router.requests.generation import GenerationRequest, TextDelta


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a body asks of the pipeline, and what makes its answer of that."""

    body: ChatBody
    generation: GenerationRequest
    choices: ChatChoices
    told_again: Sequence[str] = ()  # as `ForeignBody.told_again`


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    asked, body = await begin(request, "chat", "chatcmpl")
    response = Response(asked.generation.request_id, body, asked.choices, [asked.generation])
    return await response.respond(request)


async def begin(request: web.Request, kind: str, prefix: str) -> tuple[ChatRequest, Any]:
    """Reads a body of chat's or of what asks for the same in other words: the request and the
    body. `prefix` is that of the answer's id."""
    serving = request.app[SERVING]
    preprocessed = await preprocess(request, kind)
    asked, (token_ids,), plan = preprocessed.body, preprocessed.prompts, preprocessed.answer
    body = as_chat(asked, messages=False) if isinstance(asked, ForeignBody) else asked
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    given = given_by(body, grammar=preprocessed.grammar, logprobs=logprobs)
    if body.skip_special_tokens is None and plan.shows_special_tokens(serving.tool_parser):
        given["skip_special_tokens"] = False
    generation = serving.make_request(
        given,
        request_id=new_request_id(prefix),
        prompt_token_ids=token_ids,
        max_tokens=serving.model.fit_max_tokens(len(token_ids), limit, None, "messages"),
        batch=Batch(client_of(request), len(token_ids)),
        model=asked.model,
    )
    choices = ChatChoices(serving.model.tokenizer, body, token_ids, plan, serving.tool_parser)
    return ChatRequest(body, generation, choices, preprocessed.texts), asked


class ChatChoices:
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatBody,
        prompt_token_ids: Sequence[int],
        plan: AnswerPlan,
        tool_parser: type[ToolParser] | None,
    ) -> None:
        """`plan` says what choices have beside text; `tool_parser` reads calls that the model
        makes unasked."""
        self._tokenizer = tokenizer
        self._body = body
        self._plan = plan
        self._tool_parser = tool_parser
        self._parsers: dict[int, AnswerParser | None] = {}  # of the choices that have begun
        self._prompt = prompt_token_ids
        self.scored: dict[int, PromptLogprobs] = {}
        self.beside: dict[str, Any] = {}
        if body.return_token_ids:
            self.beside["prompt_token_ids"] = list(prompt_token_ids)

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        scored = self.scored.pop(index, None)
        if scored is not None and "prompt_logprobs" not in self.beside:
            num_top = self._body.prompt_logprobs or 0
            self.beside["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, self._prompt, scored, num_top
            )
        parser = self._plan.parser(self._tool_parser)
        message: dict[str, Any] = {"role": "assistant", "content": whole.text}
        if parser is not None:
            message |= _message(parser.push(whole.text, final=True))
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": self._finish_reason(whole, parser),
            "stop_reason": whole.stop_reason,
            **self._ids(whole),
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The role first, once; then content, reasoning and calls; the finish reason in an event of
        its own. What is told of tokens is in the first event of their text."""
        if index not in self._parsers:
            self._parsers[index] = self._plan.parser(self._tool_parser)
            yield _chunk(index, {"role": "assistant", "content": ""})
        parser = self._parsers[index]
        if parser is None:
            deltas = [{"content": delta.text}] if delta.text else []
        else:
            events = parser.push(delta.text, final=delta.finish_reason is not None)
            deltas = [_delta(event) for event in events]
        logprobs = self._logprobs(delta)
        if not deltas and delta.tokens and (logprobs or self._body.return_token_ids):
            deltas = [{"content": ""}]
        told = {"logprobs": logprobs, **self._ids(delta)}
        for each in deltas:
            yield _chunk(index, each) | told
            told = {}
        if delta.finish_reason:
            reason = self._finish_reason(delta, parser)
            ending = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            yield _chunk(index, {}) | ending

    def _finish_reason(self, delta: TextDelta, parser: AnswerParser | None) -> str | None:
        """`tool_calls` where the model called tools and then stopped. As OpenAI has it: not if a
        stop string or the limit cut a call short, nor if the client named the tool itself."""
        stopped = delta.finish_reason is FinishReason.STOP
        if parser is None or not (stopped and parser.called) or self._plan.tool_choice == NAMED:
            return delta.finish_reason
        cut = parser.in_call and isinstance(delta.stop_reason, str)
        return delta.finish_reason if cut else "tool_calls"

    def _ids(self, delta: TextDelta) -> dict[str, list[int]]:
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [token.token_id for token in delta.tokens]}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        """One entry per token."""
        if not self._body.logprobs:
            return None
        content = []
        for token in delta.tokens:
            top = token.logprobs.top if token.logprobs else ()
            entry = self._entry(token.token_id, logprob_of(token))
            entry["top_logprobs"] = [self._entry(i, max(p, MIN_LOGPROB)) for i, p in top]
            content.append(entry)
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(token_id, self._tokenizer.token_text(token_id), self._body),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
        case CallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def _message(events: Iterable[Event]) -> dict[str, Any]:
    """Of a whole answer; what it lacks is left out, but its content."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, call_id, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case CallArguments(_, text):
                calls[-1]["function"]["arguments"] += text
    message: dict[str, Any] = {"content": "".join(content)}
    if reasoning:
        message |= _reasoning("".join(reasoning))
    if calls:
        message["tool_calls"] = calls
    if (reasoning or calls) and not content:
        message["content"] = None
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Under both of the names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
