"""Modules are loaded without a collector, which comes back whatever happens."""

from __future__ import annotations

import gc

import pytest

from pdserve.common.core.host import loading


def test_what_is_loaded_is_not_looked_through() -> None:
    before = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() and len(kept) == 1000
    assert gc.get_freeze_count() >= before + 1000


def test_the_collector_is_back_when_loading_fails() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError("no such module")
    assert gc.isenabled()
