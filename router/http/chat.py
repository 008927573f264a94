"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.chat import ChatRequest, chat_from_body
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Event, Reasoning
from pdserve.router.http.logprobs import chat_logprobs, prompt_logprobs
from pdserve.router.http.request import STATE, client_of, preprocess
from pdserve.router.http.response import OpenAIWriter, respond
from pdserve.router.requests.generation import TextDelta


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    asked = await preprocess(request, "chat")
    chat = chat_from_body(state, asked, client_of(request), "chatcmpl")
    model, name = state.response_model(chat.body.model), chat.generation.request_id
    choices = ChatChoiceWriter(state.model.tokenizer, chat)
    writer = OpenAIWriter(name, model, chat.body, choices, [chat.generation])
    return await respond(request, await writer.resumable(request, asked), writer)


class ChatChoiceWriter:
    """A `ChoiceWriter`."""

    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, chat: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._body = chat.body
        self._choices = chat.choices
        self._begun: set[int] = set()
        self._prompt = chat.generation.prompt_token_ids
        self.scored: dict[int, PromptLogprobs] = {}
        self.beside: dict[str, Any] = {}
        if chat.body.return_token_ids:
            self.beside["prompt_token_ids"] = list(self._prompt)

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        scored = self.scored.pop(index, None)
        if scored is not None and "prompt_logprobs" not in self.beside:
            num_top = self._body.prompt_logprobs or 0
            self.beside["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, self._prompt, scored, num_top
            )
        events, finish_reason = self._parse(whole)
        return {
            "index": index,
            "message": {"role": "assistant", **self._form(_message(events))},
            "logprobs": self._logprobs(whole),
            "finish_reason": finish_reason,
            "stop_reason": whole.stop_reason,
            **self._token_ids(whole),
        }

    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": self._choices.reasoning_tokens}
        return {"completion_tokens_details": details}

    def chunks(self, index: int, delta: TextDelta) -> Sequence[dict[str, Any]]:
        """Returns the role first, once; then content, reasoning and calls; the finish reason in a
        chunk of its own. The first chunk of a text has the log-probabilities and ids of its
        tokens."""
        chunks: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        events, finish_reason = self._parse(delta)
        deltas = [self._form(_delta(event)) for event in events]
        logprobs = self._logprobs(delta)
        if not deltas and delta.tokens and (logprobs or self._body.return_token_ids):
            deltas = [{"content": ""}]
        of_tokens = {"logprobs": logprobs, **self._token_ids(delta)}
        for each in deltas:
            chunks.append(_chunk(index, each) | of_tokens)
            of_tokens = {}
        if finish_reason:
            ending = {"finish_reason": finish_reason, "stop_reason": delta.stop_reason}
            chunks.append(_chunk(index, {}) | ending)
        return chunks

    def _parse(self, delta: TextDelta) -> tuple[Sequence[Event], str | None]:
        events, reason = self._choices.parse(delta)
        if self._choices.legacy and reason == "tool_calls":
            reason = "function_call"
        return events, reason

    def _form(self, said: dict[str, Any]) -> dict[str, Any]:
        """Returns a message, or a delta of one, with its call in the form that the client reads."""
        if not self._choices.legacy or "tool_calls" not in said:
            return said
        (call,) = said.pop("tool_calls")
        return said | {"function_call": call["function"]}

    def _token_ids(self, delta: TextDelta) -> dict[str, list[int]]:
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [token.token_id for token in delta.tokens]}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._tokenizer, delta.tokens, self._body)


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
    """Returns the message of a whole answer; it has only the fields that the answer has, and
    `content`."""
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
    """Clients know it under either of two names."""
    return {"reasoning_content": text, "reasoning": text}


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
