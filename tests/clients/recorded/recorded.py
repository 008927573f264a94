"""Bodies as coding agents and chat programs send them, and how each goes on after a call.

A JSON file per program has its path, its headers and its body. Names of fields are the program's,
texts and `get_weather` are invented. `Conversation` sends it as the program does, streamed but
without chance, and again with what the tool gave. `make test` and `make test-clients` use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

HERE = Path(__file__).parent
PROGRAMS = tuple(sorted(each.stem for each in HERE.glob("*.json")))
WEATHER = {"Oslo": "snowy, 3 degrees", "Cairo": "sunny, 33 degrees"}
Fields = dict[str, Any]


@dataclass
class Answer:
    """The content of one stream."""

    text: str = ""
    calls: list[Fields] = field(default_factory=list)  # id, name and arguments, as JSON
    ended: str = ""  # why, in the API's words
    ignored: str = ""  # names in X-Ignored-Parameters
    items: list[Fields] = field(default_factory=list)  # of Responses, as they come


class Conversation:
    """One program's first turn, and the next one after a tool's result."""

    def __init__(self, program: str, url: str, model: str) -> None:
        recorded = json.loads((HERE / f"{program}.json").read_text())
        self.body: Fields = recorded["body"] | {"model": model, "temperature": 0}
        self._url = url + recorded["path"]
        self._headers = recorded["headers"]
        self._api = _APIS[recorded["path"].partition("?")[0]]

    @property
    def has_tools(self) -> bool:
        """Whether the program sends tools; others write calls, or edits, as text."""
        return "tools" in self.body

    def ask(self) -> Answer:
        """Sends the body. Raises AssertionError: another status than 200, or an error event."""
        with requests.post(
            self._url, json=self.body, headers=self._headers, stream=True, timeout=120
        ) as response:
            assert response.status_code == 200, response.text
            answer = Answer(ignored=response.headers.get("X-Ignored-Parameters", ""))
            for event in _events(response):
                assert "error" not in event, event
                self._api.read(event, answer)
        assert answer.ended, "the stream broke off"
        return answer

    def give_results(self, answer: Answer) -> None:
        """Adds the answer's calls and what their tool gives to the body."""
        results = [WEATHER[json.loads(each["arguments"])["city"]] for each in answer.calls]
        self._api.go_on(self.body, answer, results)


def _events(response: requests.Response) -> Iterator[Fields]:
    for line in response.iter_lines():
        data = line.removeprefix(b"data: ")
        if data != line and data != b"[DONE]":
            yield json.loads(data)


class _Chat:
    """POST /v1/chat/completions"""

    @staticmethod
    def read(event: Fields, answer: Answer) -> None:
        for choice in event["choices"]:
            delta = choice["delta"]
            answer.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    answer.calls.append({"id": call["id"], "name": "", "arguments": ""})
                for key, text in call["function"].items():
                    answer.calls[call["index"]][key] += text
            answer.ended = choice.get("finish_reason") or answer.ended

    @staticmethod
    def go_on(body: Fields, answer: Answer, results: list[str]) -> None:
        calls = [
            {"id": each["id"], "type": "function", "index": index,
             "function": {"name": each["name"], "arguments": each["arguments"]}}
            for index, each in enumerate(answer.calls)
        ]  # fmt: skip
        body["messages"] += [
            {"role": "assistant", "content": answer.text, "tool_calls": calls},
            *(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ),
        ]


class _Responses:
    """POST /v1/responses"""

    @staticmethod
    def read(event: Fields, answer: Answer) -> None:
        match event["type"]:
            case "response.output_text.delta":
                answer.text += event["delta"]
            case "response.output_item.done":
                item = event["item"]
                answer.items.append(item)
                if item["type"] == "function_call":
                    named = {name: item[name] for name in ("name", "arguments")}
                    answer.calls.append({"id": item["call_id"], **named})
            case "response.completed":
                answer.ended = event["response"]["status"]

    @staticmethod
    def go_on(body: Fields, answer: Answer, results: list[str]) -> None:
        body["input"] += answer.items + [
            {"type": "function_call_output", "call_id": call["id"], "output": result}
            for call, result in zip(answer.calls, results, strict=True)
        ]


class _Messages:
    """POST /v1/messages"""

    @staticmethod
    def read(event: Fields, answer: Answer) -> None:
        match event:
            case {"type": "content_block_start", "content_block": {"type": "tool_use"} as block}:
                call = {"id": block["id"], "name": block["name"], "arguments": ""}
                answer.calls.append(call)
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                answer.text += text
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                answer.calls[-1]["arguments"] += text
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                answer.ended = reason

    @staticmethod
    def go_on(body: Fields, answer: Answer, results: list[str]) -> None:
        said = [{"type": "text", "text": answer.text}] if answer.text else []
        calls = [
            {"type": "tool_use", "id": each["id"], "name": each["name"],
             "input": json.loads(each["arguments"])}
            for each in answer.calls
        ]  # fmt: skip
        given: list[Fields] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        given[-1]["cache_control"] = {"type": "ephemeral"}
        body["messages"] += [
            {"role": "assistant", "content": said + calls},
            {"role": "user", "content": given},
        ]


_APIS = {
    "/v1/chat/completions": _Chat,
    "/v1/responses": _Responses,
    "/v1/messages": _Messages,
}
