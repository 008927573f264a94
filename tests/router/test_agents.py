"""Bodies of coding agents and chat programs: what a model server has no part in is left out and
named, or refused with --strict-parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, check_error, serve
from pdserve.common.config.router import ChatConfig
from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.messages_body import MessagesBody
from pdserve.router.api.parsers.formats import HermesParser
from pdserve.router.api.responses_body import ResponsesBody

COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HEADER = "X-Ignored-Parameters"
ASKS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"messages": CHAT, "max_tokens": 20},
    RESPONSES: {"input": "hello", "max_output_tokens": 20},
    MESSAGES: {"messages": CHAT, "max_tokens": 20},
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
PARAMETERS = {"type": "object", "properties": {}}
OWN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    RESPONSES: {"type": "function", "name": "f", "parameters": PARAMETERS},
    MESSAGES: {"name": "f", "input_schema": PARAMETERS},
}
# By path: a field, and its name in the header; none: it changes no answer.
LEFT_OUT: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    COMPLETIONS: [
        ({"verbosity": "low"}, "verbosity"),
        ({"store": True}, "store"),
        ({"store": False}, None),
        ({"metadata": {"a": "b"}}, None),
        ({"service_tier": "priority"}, "service_tier"),
        ({"service_tier": "auto"}, None),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"safety_identifier": "me"}, None),
        ({"web_search_options": {}}, "web_search_options"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"bad\nname": 1}, "bad?name"),
    ],
    RESPONSES: [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, None),
        ({"service_tier": "flex"}, "service_tier"),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"include": ["web_search_call.action.sources"]}, "include"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.summary"),
        ({"prompt_cache_key": "k", "client_metadata": {"a": "b"}}, None),
        ({"max_tool_calls": 3}, "max_tool_calls"),
    ],
    MESSAGES: [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
        ({"output_config": {"effort": "max"}}, None),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
        ({"context_management": {"edits": []}}, None),
        ({"metadata": {"user_id": "me"}, "betas": ["x"], "service_tier": "auto"}, None),
        ({"mcp_servers": []}, None),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
}
TYPES = {
    COMPLETIONS: [{"type": "web_search"}, {"type": "custom", "custom": {"name": "patch"}}],
    RESPONSES: [
        {"type": kind}
        for kind in (
            *("web_search", "web_search_preview", "local_shell", "file_search", "shell"),
            *("code_interpreter", "image_generation", "computer_use_preview", "apply_patch"),
        )
    ]
    + [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "mcp", "server_label": "deepwiki", "server_url": "https://x"},
    ],
    MESSAGES: [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
    ],
}


@pytest.fixture
async def agent_site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 2000, chat=chat, tool_parser=HermesParser) as site:
        yield site


@pytest.fixture
async def strict_site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(
        enable_auto_tool_choice=True, tool_call_parser="hermes", strict_parameters=True
    )
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 2000, chat=chat, tool_parser=HermesParser) as site:
        yield site


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(path, each) for path, found in table.items() for each in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "case"), cases(LEFT_OUT))
async def test_fields_are_left_out_and_named(
    agent_site: Site, path: str, case: tuple[dict[str, Any], str | None], stream: bool
) -> None:
    fields, name = case
    response = await agent_site.post(path, ASKS[path] | fields | {"stream": stream})
    assert response.status == 200, await response.text()
    assert response.headers.get(HEADER) == name


@pytest.mark.parametrize(("path", "case"), cases(LEFT_OUT))
async def test_strict_parameters_refuse_them(
    strict_site: Site, path: str, case: tuple[dict[str, Any], str | None]
) -> None:
    fields, name = case
    response = await strict_site.post(path, ASKS[path] | fields)
    if name is None:
        assert response.status == 200, await response.text()
    else:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, name.replace("?", "\n"))
        assert "--strict-parameters" in error["message"]


@pytest.mark.parametrize(("path", "tool"), cases(TYPES))
async def test_hosted_and_custom_tools_are_left_out(
    agent_site: Site, strict_site: Site, path: str, tool: dict[str, Any]
) -> None:
    """Beside a function, and alone, whatever the choice is left to."""
    own = tool.get("custom", tool)
    name = own.get("name") or own.get("server_label") or tool["type"]
    auto = {"type": "auto"} if path == MESSAGES else "auto"
    for tools in ([OWN[path], tool], [tool]):
        body = ASKS[path] | {"tools": tools, "tool_choice": auto}
        response = await agent_site.post(path, body)
        assert response.status == 200, await response.text()
        assert response.headers[HEADER] == f"tools.{name}"
        refused = await strict_site.post(path, body)
        assert (await refused.json())["error"]["param"] == f"tools[{len(tools) - 1}]"


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (COMPLETIONS, {"type": "custom", "custom": {"name": "patch"}}),
        (COMPLETIONS, {"type": "function", "function": {"name": "patch"}}),
        (RESPONSES, {"type": "web_search"}),
        (RESPONSES, {"type": "custom", "name": "patch"}),
        (RESPONSES, {"type": "mcp", "server_label": "deepwiki", "name": "ask"}),
        (MESSAGES, {"type": "tool", "name": "web_search"}),
    ],
)
async def test_a_choice_of_a_tool_that_is_left_out_is_refused(
    agent_site: Site, path: str, choice: dict[str, Any]
) -> None:
    body = ASKS[path] | {"tools": [OWN[path], *TYPES[path]], "tool_choice": choice}
    response = await agent_site.post(path, body)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "tool_choice")
    assert "leaves out" in error["message"]


async def test_the_log_names_each_field_once(
    agent_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.router.api.app_state")
    for _ in range(3):
        await agent_site.post(RESPONSES, ASKS[RESPONSES] | {"tools": [{"type": "web_search"}]})
    assert caplog.text.count("tools.web_search") == 1


async def test_pages_of_other_origins_see_the_header(agent_site: Site) -> None:
    response = await agent_site.post(
        COMPLETIONS, ASKS[COMPLETIONS] | {"store": True}, Origin="http://localhost"
    )
    assert HEADER in response.headers["Access-Control-Expose-Headers"]


# ---- effort ---------------------------------------------------------------------------------

VARIABLES = (
    "{{ {'effort': reasoning_effort|default(None), 'on': enable_thinking|default(None),"
    " 'thinking': thinking|default(None), 'budget': thinking_budget|default(None)}|tojson }}"
)
OFF = {"effort": "none", "on": False, "thinking": False, "budget": 0}
NOTHING = dict.fromkeys(OFF)
ON = NOTHING | {"on": True, "thinking": True}
EFFORTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((COMPLETIONS, {"reasoning_effort": each}, NOTHING | {"effort": each})
      for each in ("minimal", "low", "medium", "high", "xhigh")),
    (COMPLETIONS, {"reasoning_effort": "none"}, OFF),
    (COMPLETIONS, {"reasoning_effort": None}, NOTHING),
    (COMPLETIONS,
     {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
     OFF | {"on": True}),
    (RESPONSES, {"reasoning": {"effort": "high"}}, NOTHING | {"effort": "high"}),
    (RESPONSES, {"reasoning": {"effort": "none"}}, OFF),
    (MESSAGES, {"thinking": {"type": "disabled"}}, OFF),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 0}}, NOTHING),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, ON),
    (MESSAGES, {"output_config": {"effort": "max"}}, NOTHING | {"effort": "max"}),
    (MESSAGES, {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, OFF),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "found"), EFFORTS)
async def test_efforts_reach_the_template(
    agent_site: Site, path: str, fields: dict[str, Any], found: dict[str, Any]
) -> None:
    agent_site.tokenizer.use_chat_template(VARIABLES)
    response = await agent_site.post(path, ASKS[path] | fields)
    assert response.status == 200, await response.text()
    prompt = agent_site.generator.requests[-1].prompt_token_ids
    assert json.loads(agent_site.tokenizer.decode(prompt)) == found


async def test_harmony_gets_the_nearest_of_its_efforts(agent_site: Site) -> None:
    agent_site.tokenizer.use_chat_template("<|message|>{{ reasoning_effort }}")
    for effort, found in {
        "none": "low",
        "minimal": "low",
        "medium": "medium",
        "xhigh": "high",
    }.items():
        await agent_site.chat(reasoning_effort=effort)
        prompt = agent_site.generator.requests[-1].prompt_token_ids
        assert agent_site.tokenizer.decode(prompt) == f"<|message|>{found}"


async def test_wrong_efforts_are_named_as_they_were_sent(agent_site: Site) -> None:
    for path, fields, param in (
        (COMPLETIONS, {"reasoning_effort": "huge"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        (MESSAGES, {"output_config": {"effort": "huge"}}, "output_config.effort"),
        ("/tokenize", {"messages": CHAT, "reasoning_effort": 5}, "reasoning_effort"),
    ):
        response = await agent_site.post(path, ASKS.get(path, {}) | fields)
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param)


async def test_an_output_format_is_a_structured_output(agent_site: Site) -> None:
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ):
        response = await agent_site.post(MESSAGES, ASKS[MESSAGES] | fields)
        assert response.status == 200, await response.text()
        assert HEADER not in response.headers
        assert '"x"' in agent_site.generator.requests[-1].sampling.grammar
    wrong = {"output_config": {"format": {"type": "xml"}}}
    assert (await agent_site.post(MESSAGES, ASKS[MESSAGES] | wrong)).status == 400


async def test_refusals_are_text_of_the_assistant(agent_site: Site) -> None:
    part = {"type": "refusal", "refusal": "I can't."}
    answer = [CHAT[0], {"role": "assistant", "content": [part]}, CHAT[0]]
    whole = [CHAT[0], {"role": "assistant", "content": None, "refusal": "I can't."}, CHAT[0]]
    for path, fields in (
        (COMPLETIONS, {"messages": answer}),
        (COMPLETIONS, {"messages": whole}),
        (RESPONSES, {"input": answer}),
    ):
        response = await agent_site.post(path, ASKS[path] | fields)
        assert response.status == 200, await response.text()
        prompt = agent_site.generator.requests[-1].prompt_token_ids
        assert "assistant\nI can't.<" in agent_site.tokenizer.decode(
            prompt, skip_special_tokens=False
        )


async def test_nothing_is_stored_and_the_answer_says_so(agent_site: Site) -> None:
    for fields in ({}, {"store": True}, {"store": False}):
        response = await agent_site.post(RESPONSES, ASKS[RESPONSES] | fields)
        assert (await response.json())["store"] is False
    for fields, param in (
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
    ):
        await check_error(await agent_site.post(RESPONSES, ASKS[RESPONSES] | fields), 400, param)


# ---- replayed items and blocks ----------------------------------------------------------------


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def called(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_codex_s_replayed_items_become_messages() -> None:
    action = {"type": "exec", "command": ["ls"]}
    body = ResponsesBody(
        instructions="be",
        input=[
            {"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "sandbox"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
            {"type": "reasoning", "summary": [], "content": 1.5},
            {"type": "reasoning", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** B"},
            {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": action},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done!"},
            {"type": "local_shell_call_output", "id": "c3", "output": "{}"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
            {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "a"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
            {"type": "message", "role": "user", "content": "more"},
        ],
    )  # fmt: skip
    ignored = Ignored()
    assert body.conversation(ignored) == [
        {"role": "system", "content": "be"},
        {"role": "developer", "content": text("sandbox")},
        {"role": "user", "content": text("go")},
        {"role": "assistant", "reasoning": "hm", "content": text("ok"),
         "tool_calls": [called("c1", "f", "{}"), called("c2", "apply_patch", {"input": "*** B"}),
                        called("c3", "local_shell", action)]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "Done!"},
        {"role": "tool", "tool_call_id": "c3", "content": "{}"},
        {"role": "tool", "tool_call_id": "c4", "content": '[{"stdout":"a"}]'},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    assert ignored.names == ("input.web_search_call",)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "stored"),
        ({"type": "compaction", "encrypted_content": "x"}, "stored"),
        ({"type": "wizardry"}, "must be a message"),
        ({"type": ["message"]}, "must be a message"),
        ({"type": "message", "role": "user", "content": [5]}, "parts of type text"),
        ({"type": "computer_call_output", "call_id": "c",
          "output": {"type": "computer_screenshot", "image_url": "x"}}, "images are not supported"),
        ({"type": "function_call_output", "call_id": "c",
          "output": [{"type": "input_image", "image_url": "x"}]}, "images are not supported"),
    ],
)  # fmt: skip
def test_items_that_cannot_be_left_out_are_refused(item: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ResponsesBody(input=[item]).conversation(Ignored())


def test_claude_code_s_replayed_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = MessagesBody(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "go", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
                {"type": "text", "text": ""},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2", "content": [
                    {"type": "tool_reference", "tool_name": "h"}, {"type": "text", "text": "r"}]},
                {"type": "document", "source": {"type": "text", "data": "doc"}}]},
            {"role": "system", "content": "reminder"},
        ],
    )  # fmt: skip
    ignored = Ignored()
    calls = [called("t1", "f", {"x": 1}), called("t2", "g", {})]
    assert body.conversation(ignored) == [
        {"role": "system", "content": text("You are an agent.")},
        {"role": "user", "content": text("go")},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "no"},
        {"role": "tool", "tool_call_id": "t2", "content": [*text("h"), *text("r")]},
        {"role": "user", "content": text("doc")},
        {"role": "system", "content": "reminder"},
    ]
    assert ignored.names == ("messages.server_tool_use", "messages.web_search_tool_result")


def test_an_empty_text_block_makes_no_turn() -> None:
    empty = {"type": "text", "text": ""}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    body = MessagesBody(
        messages=[
            {"role": "user", "content": [empty, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [empty]},
            {"role": "user", "content": [result, empty]},
        ]
    )
    assert body.conversation(Ignored()) == [
        {"role": "user", "content": text("a")},
        {"role": "tool", "tool_call_id": "t", "content": "r"},
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image", "source": {}}], "images are not supported"),
        ([{"type": "document", "source": {"type": "base64"}}], "files are not supported"),
        ([{"type": "tool_result", "content": [{"type": "image"}]}], "images are not supported"),
        ([{"type": "wizardry"}], "parts of type text"),
        ([5], "parts of type text"),
    ],
)
async def test_images_are_refused_by_name(agent_site: Site, content: list[Any], words: str) -> None:
    body = ASKS[MESSAGES] | {"messages": [{"role": "user", "content": content}]}
    error = (await (await agent_site.post(MESSAGES, body)).json())["error"]
    assert words in error["message"] and error["param"] == "messages[0].content"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "images are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "audio is not supported"),
        ({"type": "video_url"}, "videos are not supported"),
        ({"type": "file", "file": {}}, "files are not supported"),
        ({"type": "odd"}, "parts of type text"),
        ({"type": "text"}, "without text"),
    ],
)
async def test_parts_of_a_chat_are_refused_by_name(
    agent_site: Site, part: dict[str, Any], words: str
) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    response = await agent_site.post(COMPLETIONS, {"messages": [message]})
    error = await check_error(response, 400, "messages[0].content")
    assert words in error["message"]
    assert ("docs/clients.md#" in error["message"]) == ("not supported" in words)


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_namespaces_are_called(agent_site: Site, stream: bool) -> None:
    """Codex has those of an MCP server in one."""
    inner = [{"type": "function", "name": "f", "parameters": PARAMETERS}, {"type": "web_search"}]
    body = {
        "input": [
            {"role": "user", "content": "go"},
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "mcp__a",
             "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [OWN[RESPONSES], {"type": "namespace", "name": "mcp__a", "tools": inner}],
        "stream": stream,
    }  # fmt: skip
    agent_site.tokenizer.use_chat_template("{{ {'m': messages, 't': tools}|tojson }}")
    agent_site.generator.text = '<tool_call>{"name": "mcp__a.f", "arguments": {}}</tool_call>'
    response = await agent_site.post(RESPONSES, body)
    assert response.headers[HEADER] == "tools.web_search"
    given = json.loads(
        agent_site.tokenizer.decode(agent_site.generator.requests[-1].prompt_token_ids)
    )
    assert [tool["function"]["name"] for tool in given["t"]] == ["f", "mcp__a.f"]
    assert given["m"][1]["tool_calls"][0]["function"]["name"] == "mcp__a.f"
    text_ = await response.text()
    last = json.loads(text_.rpartition("data: ")[2])["response"] if stream else json.loads(text_)
    (call,) = last["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "f", "mcp__a")
