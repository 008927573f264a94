"""Fixtures that tests of several parts of common use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def inference() -> Iterator[None]:
    """On one thread, without gradients."""
    from tiny_engine import single_threaded_inference

    with single_threaded_inference():
        yield
