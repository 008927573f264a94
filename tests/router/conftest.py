"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fakes_pipeline import byte_level_folder
from http_site import Site, serve


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """The HTTP API with a fake generator, and without keys."""
    async with serve(byte_level_folder(tmp_path)) as site:
        yield site
