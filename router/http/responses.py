"""POST /v1/responses, OpenAI's successor of chat, without its storage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from secrets import token_hex
from typing import Any

import msgspec
from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.router.api.chat import ChatRequest, chat_from_body
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Event, Reasoning
from pdserve.router.api.responses_body import ResponsesBody, namespaces_of
from pdserve.router.http.encoding import error_body
from pdserve.router.http.events import ServerEvent, respond_as
from pdserve.router.http.request import STATE, client_of, preprocess
from pdserve.router.requests.generation import GenerationStats

Item = dict[str, Any]
_PLAIN = {"format": {"type": "text"}}


async def create_response(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    asked = await preprocess(request, "responses")
    chat = chat_from_body(state, asked, client_of(request), "resp")
    model = state.response_model(asked.body.model)
    return await respond_as(request, chat, ResponsesFormat(model, chat, asked.body))


class ResponsesFormat:
    """Output items in the order in which they come; the last one may be open."""

    def __init__(self, model: str, chat: ChatRequest, body: ResponsesBody) -> None:
        instructions, tools = map(msgspec.Raw, chat.echoed)
        self._choices = chat.choices
        has_some = '"namespace"' in chat.echoed[1]
        self._namespaces = namespaces_of(msgspec.json.decode(chat.echoed[1])) if has_some else {}
        self._items: list[Item] = []
        # The stem of the items' ids; ids sort in order of the items, because some clients sort
        # them.
        self._stem = token_hex(10)
        self._open = False
        self._reason: str | None = None
        self._number = 0  # the next event's
        self._response: dict[str, Any] = {
            "id": chat.generation.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": chat.body.reasoning_effort, "summary": None},
            "store": False,
            "temperature": chat.generation.sampling.temperature,
            "text": body.text.model_dump(exclude_none=True) if body.text else _PLAIN,
            "tool_choice": body.tool_choice or "auto",
            "tools": tools,
            "top_p": chat.generation.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def begin(self) -> Iterator[ServerEvent]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response)

    def event(self, event: Event) -> Iterator[ServerEvent]:
        match event:
            case Content(text):
                yield from self._text("message", text)
            case Reasoning(text):
                yield from self._text("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self._close()
                fields = {"call_id": call_id, "name": name, "arguments": ""}
                if space := self._namespaces.get(name):
                    fields |= {"name": name.removeprefix(f"{space}."), "namespace": space}
                yield from self._add("function_call", "fc", fields)
            case CallArguments(_, text):
                self._items[-1]["arguments"] += text
                yield self._item_event("response.function_call_arguments.delta", delta=text)

    def finish(self, reason: str, stop_reason: str | int | None) -> Iterator[ServerEvent]:
        self._reason = reason
        yield from self._close()

    def end(self, stats: GenerationStats) -> Iterable[ServerEvent]:
        response = self.whole(stats)
        return [self._event(f"response.{response['status']}", response=response)]

    def error(self, error: PdserveError) -> Iterator[ServerEvent]:
        body = error_body(error)["error"]
        reason = {name: body[name] for name in ("code", "message")}
        failed = {**self._response, "status": "failed", "error": reason, "output": self._items}
        yield self._event("error", **reason, param=body["param"])
        yield self._event("response.failed", response=failed)

    # ---- items -------------------------------------------------------------------------------

    def _text(self, kind: str, text: str) -> Iterator[ServerEvent]:
        """Yields the events for more text of a message, or of reasoning."""
        words = "output_text" if kind == "message" else "reasoning_text"
        if not (self._open and self._items[-1]["type"] == kind):
            yield from self._close()
            if kind == "message":
                item = {"role": "assistant", "content": []}
            else:
                item = {"summary": [], "content": []}
            yield from self._add(kind, "msg" if kind == "message" else "rs", item)
            part: dict[str, Any] = {"type": words, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            yield self._item_event("response.content_part.added", content_index=0, part=part.copy())
            self._items[-1]["content"].append(part)
        self._items[-1]["content"][0]["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._item_event(f"response.{words}.delta", content_index=0, delta=text, **extra)

    def _add(self, kind: str, prefix: str, fields: Item) -> Iterator[ServerEvent]:
        name = f"{prefix}-{self._stem}{len(self._items):04x}"
        item = {"id": name, "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open = True
        added = {**item, "content": []} if "content" in item else {**item}
        yield self._item_event("response.output_item.added", item=added, named=False)

    def _close(self) -> Iterator[ServerEvent]:
        if not self._open:
            return
        item, self._open = self._items[-1], False
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            (part,) = item["content"]
            extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{part['type']}.done"
            yield self._item_event(name, content_index=0, text=part["text"], **extra)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._item_event("response.output_item.done", item=item, named=False)

    def _item_event(self, kind: str, named: bool = True, **fields: Any) -> ServerEvent:
        name = {"item_id": self._items[-1]["id"]} if named else {}
        return self._event(kind, **name, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def whole(self, stats: GenerationStats) -> dict[str, Any]:
        cut = self._reason == "length"
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": stats.cached_tokens,
                    "cache_write_tokens": 0,  # clients ask for no write: all prompts are cached
                },
                "output_tokens": stats.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._choices.reasoning_tokens},
                "total_tokens": stats.prompt_tokens + stats.completion_tokens,
            },
        }
