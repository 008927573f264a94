"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients ask."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.common.obs.logging import request_id_var
from pdserve.router.http.chat import begin
from pdserve.router.http.encoding import error_body, json_response
from pdserve.router.http.events import Event, respond
from pdserve.router.http.request import SERVING, preprocess
from pdserve.router.requests.generation import GenerationStats

REQUEST_ID = "Request-Id"  # the name under which Anthropic's clients know their request
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
    asked, body = await begin(request, "messages", "msg")
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens must be given", param="max_tokens")
    model = request.app[SERVING].answering(body.model)
    generation = asked.generation
    shape = MessageShape(generation.request_id, model, len(generation.prompt_token_ids))
    return await respond(request, asked, shape)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    (token_ids,) = (await preprocess(request, "messages")).prompts
    return json_response({"input_tokens": len(token_ids)})


def as_anthropic(refusal: web.Response) -> web.Response:
    """The same refusal as Anthropic words it."""
    assert isinstance(refusal.body, bytes)
    refusal.body = msgspec.json.encode(_error(msgspec.json.decode(refusal.body), refusal.status))
    return refusal


def _error(body: dict[str, Any], status: int) -> dict[str, Any]:
    """`body` is the error's as OpenAI words it."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": body["error"] | {"type": kind},
        "request_id": request_id_var.get(),
    }


class MessageShape:
    """Content blocks in the order in which they come; one is open at a time."""

    def __init__(self, message_id: str, model: str, input_tokens: int) -> None:
        """`input_tokens` are the prompt's; how many of them were cached is known at the end."""
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(input_tokens, 0, 0),
        }
        self._open: str | None = None  # the type of the open block
        self._index = -1

    def whole(self, choice: dict[str, Any], stats: GenerationStats) -> dict[str, Any]:
        said, content = choice["message"], []
        if thought := said.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if said.get("content"):
            content.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls") or ():
            function = call["function"]
            content.append(_tool_use(call["id"], function["name"], _object(function["arguments"])))
        return {
            **self._message,
            "content": content,
            **_ending(choice, bool(said.get("tool_calls"))),
            "usage": _usage_of(stats),
        }

    def begin(self) -> Iterable[Event]:
        return [{"type": "message_start", "message": {**self._message}}]

    def chunk(self, choice: dict[str, Any]) -> Iterator[Event]:
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            start = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._block("thinking", start)
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                yield from self._close()
                yield from self._block("tool_use", _tool_use(call["id"], function["name"], {}))
            if more := function.get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": more})
        if choice["finish_reason"]:
            self._message |= _ending(choice, self._open == "tool_use")
            yield from self._close()

    def end(self, stats: GenerationStats) -> Iterable[Event]:
        ending = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": _usage_of(stats)}
        yield {"type": "message_stop"}

    def failed(self, error: PdserveError) -> Iterable[Event]:
        return [_error(error_body(error), error.http_status)]

    def _block(self, kind: str, start: dict[str, Any]) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close()
            self._open, self._index = kind, self._index + 1
            yield {"type": "content_block_start", "index": self._index, "content_block": start}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}


def _tool_use(call_id: str, name: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _object(arguments: str) -> Any:
    """A call that was cut short has no whole object."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _ending(choice: dict[str, Any], used: bool) -> dict[str, Any]:
    """Of chat's `finish_reason` and `stop_reason`; `used`: it ends with a call, which for chat is
    no reason where the client named the tool."""
    reason, stop = choice["finish_reason"], choice.get("stop_reason")
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if reason == "stop" and used:
        reason = "tool_calls"
    return {"stop_reason": STOPS.get(reason, reason), "stop_sequence": None}


def _usage_of(stats: GenerationStats) -> dict[str, int]:
    return _usage(stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,  # clients mark nothing to be cached: all prompts are
        "output_tokens": output_tokens,
    }
