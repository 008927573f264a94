"""Echo: the prompt and the answer are one text, wherever the prompt's ids end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_fallback_folder, byte_level_folder
from http_site import Site, serve

TEXT = "ab é 😀 c"


@pytest.fixture
async def bytes_site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serve(byte_level_folder(tmp_path)) as site:
        yield site


class Raw:
    """Makes the generator say these tokens, which no text may give."""

    def __init__(self, site: Site, token_ids: tuple[int, ...]) -> None:
        self._encode = site.tokenizer.encode
        self._token_ids = token_ids

    def __call__(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return self._token_ids if text == "RAW" else self._encode(text, add_special_tokens)


@pytest.mark.parametrize("cut", range(1, 11))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_may_end_within_a_character(
    bytes_site: Site, monkeypatch: pytest.MonkeyPatch, cut: int, stream: bool
) -> None:
    ids = bytes_site.tokenizer.encode(TEXT, add_special_tokens=False)
    monkeypatch.setattr(bytes_site.tokenizer, "encode", Raw(bytes_site, ids[cut:]))
    bytes_site.generator.text = "RAW"
    ask: dict[str, Any] = {"prompt": ids[:cut], "echo": True, "logprobs": 0, "max_tokens": 50}
    if stream:
        events = await bytes_site.events("/v1/completions", ask)
        choices = [event["choices"][0] for event in events if event["choices"]]
    else:
        choices = (await bytes_site.complete(**ask))["choices"]
    assert "".join(choice["text"] for choice in choices) == TEXT
    offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets) and max(offsets) <= len(TEXT)


async def test_a_prompt_that_ends_within_a_character_is_echoed_alone(bytes_site: Site) -> None:
    ids = bytes_site.tokenizer.encode("aé", add_special_tokens=False)[:-1]
    body = await bytes_site.complete(prompt=ids, echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == "a\ufffd"


async def test_an_incomplete_character_that_nothing_completes_is_one_mark(
    bytes_site: Site,
) -> None:
    ids = bytes_site.tokenizer.encode("aé", add_special_tokens=False)[:-1]
    bytes_site.generator.text = "hello"
    body = await bytes_site.complete(prompt=ids, echo=True, max_tokens=50)
    assert body["choices"][0]["text"] == "a\ufffdhello"


async def test_a_space_between_prompt_and_answer_is_kept(tmp_path: Path) -> None:
    """The decoder drops the first space of a text, which the answer's first token is not."""
    async with serve(byte_fallback_folder(tmp_path)) as site:
        ids = site.tokenizer.encode("a world")
        site.generator.text = "world"  # ▁world
        for prompt in ("a", list(ids[:3])):
            body = await site.complete(prompt=prompt, echo=True, max_tokens=50)
            assert body["choices"][0]["text"].endswith("a world")
