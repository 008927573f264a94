"""OpenAI's own package."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from conftest import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed_agree(server: Server, client: openai.OpenAI) -> None:
    options = {
        "model": server.model, "messages": [{"role": "user", "content": "Write about a dog."}],
        "max_completion_tokens": 12, "temperature": 0,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12


def test_responses_whole_and_streamed_agree(server: Server, client: openai.OpenAI) -> None:
    options = {"model": server.model, "input": "Write about a dog.", "temperature": 0}
    whole = client.responses.create(**options, max_output_tokens=12)
    *events, last = client.responses.create(**options, max_output_tokens=12, stream=True)
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == last.response.output_text == whole.output_text != ""
    assert (last.type, whole.status) == ("response.incomplete", "incomplete")


def test_a_refusal_is_typed(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=server.model, prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
