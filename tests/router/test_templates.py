"""Chat templates that take content in one form or another, and system messages here or there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import Site, serve
from pdserve.common.config.router import ChatConfig

STRING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}<{{ p.text }}>{% endfor %}"
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)
# Like Llama 3.2 with vision: the system's content must be a string.
MIXED = EITHER.replace("m.content is string", "m.content is string or m.role == 'system'")
FIRST = (  # like Qwen 3.5, Mistral and Gemma
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TWO = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[Site]:
    async with serve(byte_level_folder(tmp_path)) as site:
        yield site


async def rendered(site: Site, template: str, path: str, **body: Any) -> str:
    site.tokenizer.use_chat_template(template)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = await site.post(path, body | {limit: 1})
    assert response.status == 200, await response.text()
    return site.tokenizer.decode(site.generator.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("template", "system", "user", "plain_user"),
    [
        (STRING, "[system]a\nb", "[user]a\nb", "[user]c"),
        (PARTS, "[system]<a><b>", "[user]<a><b>", "[user]<c>"),
        (EITHER, "[system]<a><b>", "[user]<a><b>", "[user]c"),
        (MIXED, "[system]a\nb", "[user]<a><b>", "[user]c"),
    ],
)
async def test_the_template_decides_how_texts_are_joined(
    plain: Site, template: str, system: str, user: str, plain_user: str
) -> None:
    """For chat, Responses and Messages alike."""
    messages = [{"role": "system", "content": TWO}, {"role": "user", "content": TWO}]
    last = {"role": "user", "content": "c"}
    found = [
        await rendered(plain, template, "/v1/chat/completions", messages=[*messages, last]),
        await rendered(plain, template, "/v1/responses", input=[*messages, last]),
        await rendered(plain, template, "/v1/messages", system=TWO, messages=[messages[1], last]),
    ]
    assert found == [system + user + plain_user] * 3


@pytest.mark.parametrize(
    ("format", "found"), [("string", "[user]a\nb"), ("openai", "[user]<a><b>")]
)
async def test_the_format_can_be_set(tmp_path: Path, format: str, found: str) -> None:
    chat = ChatConfig(chat_template_content_format=format)
    messages = [{"role": "user", "content": TWO}]
    async with serve(byte_level_folder(tmp_path), chat=chat) as site:
        given = await rendered(site, EITHER, "/v1/chat/completions", messages=messages)
    assert given == found


async def test_system_messages_behind_others_are_moved_where_a_template_refuses_them(
    plain: Site,
) -> None:
    """Codex sends instructions and then a developer's message; Claude Code reminds in between."""
    said = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "v"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "w"},
    ]
    items = [{"role": "developer", "content": "b"}, *said]
    ask: dict[str, Any] = {"instructions": "a", "input": items}
    in_place = "[system]a[system]b[user]u[assistant]v[system]c[user]w"
    assert await rendered(plain, STRING, "/v1/responses", **ask) == in_place
    moved = "[system]a\nb\nc[user]u[assistant]v[user]w"
    assert await rendered(plain, FIRST, "/v1/responses", **ask) == moved
    ask = {"system": "a\nb", "messages": said}
    assert await rendered(plain, FIRST, "/v1/messages", **ask) == moved


async def test_thoughts_are_replayed_for_the_template_to_use(plain: Site) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content|default('-') }}"
        "{{ m.content }}{% endfor %}"
    )
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "v"}]}
    ask = {"messages": [{"role": "user", "content": "u"}, turn, {"role": "user", "content": "w"}]}
    found = await rendered(plain, template, "/v1/messages", **ask)
    assert found == "[user]-u[assistant]hmv[user]-w"
