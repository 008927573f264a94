"""Fixtures that tests of several parts of common use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paths import MODELS


@pytest.fixture
def inference() -> Iterator[None]:
    """On one thread, without gradients."""
    from tiny_engine import single_threaded_inference

    with single_threaded_inference():
        yield


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four processes."""
    from ranks import Ranks

    processes = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def tokens() -> Any:
    """The vocabulary of qwen3, of 512 tokens; 0 and 2 end a text."""
    from pdserve.common.text.grammar import GrammarTokens
    from pdserve.common.text.tokenizer_file import read_tokenizer_json

    return GrammarTokens(read_tokenizer_json(str(MODELS / "qwen3"), None, None), 512, (0, 2))
