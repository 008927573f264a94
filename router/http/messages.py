"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.common.obs.logging import request_id_var
from pdserve.router.api.chat import ChatChoices, chat_from_body
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Event, Reasoning
from pdserve.router.http.encoding import error_body, json_response
from pdserve.router.http.events import ServerEvent, respond_as
from pdserve.router.http.request import STATE, client_of, preprocess
from pdserve.router.requests.generation import GenerationStats

REQUEST_ID = "Request-Id"  # has the id by which Anthropic's clients know their request
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


async def create_message(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    asked = await preprocess(request, "messages")
    chat = chat_from_body(state, asked, client_of(request), "msg")
    if asked.body.max_tokens is None:
        raise InvalidRequest("max_tokens must be given", param="max_tokens")
    model, generation = state.response_model(asked.body.model), chat.generation
    tokens = len(generation.prompt_token_ids)
    format = MessagesFormat(generation.request_id, model, tokens, chat.choices)
    return await respond_as(request, chat, format)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    (token_ids,) = (await preprocess(request, "messages")).prompts
    return json_response({"input_tokens": len(token_ids)})


def as_anthropic(refusal: web.Response) -> web.Response:
    """Returns the same error in Anthropic's format."""
    assert isinstance(refusal.body, bytes)
    refusal.body = msgspec.json.encode(_error(msgspec.json.decode(refusal.body), refusal.status))
    return refusal


def _error(body: dict[str, Any], status: int) -> dict[str, Any]:
    """Converts an error in OpenAI's format."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": body["error"] | {"type": kind},
        "request_id": request_id_var.get(),
    }


class MessagesFormat:
    """Content blocks in the order in which they come; the last one may be open."""

    def __init__(
        self, message_id: str, model: str, input_tokens: int, choices: ChatChoices
    ) -> None:
        """`input_tokens` are the prompt's; how many of them were cached is known at the end.
        `choices` count the tokens of thoughts."""
        self._choices = choices
        self._blocks: list[dict[str, Any]] = []
        self._arguments: list[str] = []  # JSON of the last tool call
        self._open: str | None = None  # type of the open block
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            **self._ending,
            "usage": _usage(input_tokens, 0, 0),
        }

    def whole(self, stats: GenerationStats) -> dict[str, Any]:
        usage = self._usage(stats)
        return {**self._message, "content": self._blocks, **self._ending, "usage": usage}

    def begin(self) -> Iterable[ServerEvent]:
        return [{"type": "message_start", "message": self._message}]

    def event(self, event: Event) -> Iterator[ServerEvent]:
        match event:
            case Content(text):
                yield from self._block("text", text="")
                self._blocks[-1]["text"] += text
                yield self._delta("text_delta", text=text)
            case Reasoning(text):
                yield from self._block("thinking", thinking="", signature="")
                self._blocks[-1]["thinking"] += text
                yield self._delta("thinking_delta", thinking=text)
            case CallStart(_, call_id, name):
                yield from self._close()
                yield from self._block("tool_use", id=call_id, name=name, input={})
            case CallArguments(_, text):
                self._arguments.append(text)
                yield self._delta("input_json_delta", partial_json=text)

    def finish(self, reason: str, stop_reason: str | int | None) -> Iterator[ServerEvent]:
        """Ends the choice. Chat reports no `tool_calls` if the client named the tool, so the blocks
        decide."""
        called = any(block["type"] == "tool_use" for block in self._blocks)
        if reason == "stop" and isinstance(stop_reason, str):
            self._ending = {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        else:
            reason = "tool_calls" if reason == "stop" and called else reason
            self._ending = {"stop_reason": STOPS.get(reason, reason), "stop_sequence": None}
        yield from self._close()

    def end(self, stats: GenerationStats) -> Iterable[ServerEvent]:
        yield {"type": "message_delta", "delta": self._ending, "usage": self._usage(stats)}
        yield {"type": "message_stop"}

    def error(self, error: PdserveError) -> Iterable[ServerEvent]:
        return [_error(error_body(error), error.http_status)]

    def _usage(self, stats: GenerationStats) -> dict[str, Any]:
        usage = _usage(stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens)
        details = {"thinking_tokens": self._choices.reasoning_tokens}
        return {**usage, "output_tokens_details": details}

    def _block(self, kind: str, **fields: Any) -> Iterator[ServerEvent]:
        """Opens a block, if none of this kind is open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._blocks.append({"type": kind, **fields})
            start = {"type": kind, **fields}
            yield {"type": "content_block_start", "index": self._index, "content_block": start}

    def _delta(self, kind: str, **fields: str) -> ServerEvent:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[ServerEvent]:
        if self._open is None:
            return
        if self._open == "tool_use":
            self._blocks[-1]["input"] = _object("".join(self._arguments))
            self._arguments.clear()
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1


def _object(arguments: str) -> Any:
    """Returns the arguments of a call; empty if it was cut short."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,  # clients mark nothing to be cached: all prompts are
        "output_tokens": output_tokens,
    }
