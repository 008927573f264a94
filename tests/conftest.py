"""How tests are spread over processes."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling


class ByFile(LoadScopeScheduling):
    """A file stays in one process, since its tests share clusters; but for the topologies of
    `test_exact.py`, which have a cluster each."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file.endswith("test_exact.py") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)
