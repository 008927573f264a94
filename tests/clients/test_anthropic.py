"""Anthropic's own package."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from conftest import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_messages_whole_and_streamed_agree(server: Server, client: anthropic.Anthropic) -> None:
    options = {
        "model": server.model, "max_tokens": 12, "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Write of a dog."}]}],
    }  # fmt: skip
    whole = client.messages.create(**options, extra_body={"temperature": 0})
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""
        assert stream.get_final_message().stop_reason == "max_tokens"
    del options["max_tokens"]
    read = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert client.messages.count_tokens(**options).input_tokens == read


def test_a_refusal_is_typed(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages is an empty list"):
        client.messages.create(model=server.model, max_tokens=2, messages=[])
