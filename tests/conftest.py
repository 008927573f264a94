"""How tests are spread over processes, and what holds in all of them."""

from __future__ import annotations

import os

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests use gRPC and start processes. Its fork handlers abort one of some thousand children between
# fork and exec, where nothing needs gRPC; `pdserve up`, which forks too, has none in its process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


collect_ignore = ["clients"]  # they have an environment of their own: make test-clients


class ByFile(LoadScopeScheduling):
    """A file stays in one process, since its tests share clusters; but for the topologies of
    `test_exact.py`, which have a cluster each. (Its demo model's answers are worked out once.)
    xdist hands out what has the fewest tests last, so that these fill up what is left."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        alone = file.endswith("test_exact.py") and "demo_model" not in nodeid
        return nodeid if alone else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)
