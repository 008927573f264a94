"""Chooses compiled code or its Python counterpart."""

from __future__ import annotations

import pytest

from pdserve.kv_transfer import blocks
from pdserve.kv_transfer.connectors.base import sockets
from pdserve.kv_transfer.native.code import block_code


def use_compiled_code(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches this process's KV code; skips the test if compiled code cannot be built."""
    if compiled and block_code() is None:
        pytest.skip("no C++ compiler")
    for module in (blocks, sockets):
        monkeypatch.setattr(module, "block_code", block_code if compiled else lambda: None)
