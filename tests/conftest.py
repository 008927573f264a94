"""How tests are spread over processes, and what holds in all of them."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import Counter
from contextlib import suppress

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests use gRPC and start processes. Its fork handlers abort one of some thousand children between
# fork and exec, where nothing needs gRPC; `pdserve up`, which forks too, has none in its process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# In the background of a shell the suite ignores SIGINT, and whatever it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported

collect_ignore = ["clients"]  # they have an environment of their own: make test-clients

# Files that take longest come first, so that the others fill up what is left.
LONGEST = (
    *("test_exact", "test_failover", "test_partition", "test_ray_nodes", "test_request_path"),
    *("test_conformance", "test_routers", "test_kv_groups", "test_lifecycle", "test_up"),
    *("test_wheel", "test_speculative", "test_observed", "test_adapters", "test_offline"),
    *("test_chaos", "test_watchdog", "test_transfer_long", "test_connectors", "test_fuzz"),
    *("test_health", "test_explorer", "test_preprocess_workers", "test_both", "test_group"),
    *("test_rollout", "test_expert_parallel", "test_executor", "test_disconnect"),
    *("test_transformers", "test_grpc_doors", "test_pipeline", "test_quantized"),
    *("test_structured", "test_api", "test_data_parallel", "test_standstill", "test_secured"),
    *("test_corruption", "test_grpc", "test_cluster_check", "test_corrupt_kv", "test_graphs"),
    *("test_fuzzed_requests", "test_full_queues"),
)
FAMILY = re.compile(r"test_exact\.py::(?!test_the_demo_model).*\[([a-z0-9]+(?:-moe|-gqa)?)[-\]]")


@pytest.fixture(autouse=True)
def same_tensors() -> None:
    """Makes torch draw the same in every run."""
    import torch  # not in the process that only deals the tests out

    torch.manual_seed(0)
    torch.set_num_threads(1)  # several would spin, waiting for cores that other tests have


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors' ranks start in a moment, where the test is not about how they start."""
    import forked_ranks

    monkeypatch.setattr("pdserve.common.distributed.launch.spawn", forked_ranks.spawn)


class ByFile(LoadScopeScheduling):
    """A file stays in one process, since its tests share clusters; but for `test_exact.py`, whose
    topologies have a cluster each: there a family does, whose answers are worked out once."""

    def _split_scope(self, nodeid: str) -> str:
        file, found = nodeid.partition("::")[0], FAMILY.search(nodeid)
        return f"{file}::{found[1]}" if found else file


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """The compiled code is there before the whole suite begins: a slow machine may need longer for
    it than a test waits for a node."""
    if hasattr(session.config, "workerinput"):
        from pdserve.common.core.native import BuildError
        from pdserve.common.model.kernels import native
        from pdserve.kv_transfer.native.code import block_code

        block_code()
        with suppress(BuildError):
            native.load_library()


def pytest_collection_finish() -> None:
    """Keeps what was imported out of garbage collections: to look through it takes half a second,
    and collections are many."""
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    config.option.loadscopereorder = False  # the order below holds
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sizes = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        longest = item.path.stem in LONGEST
        return (LONGEST.index(item.path.stem), 0) if longest else (len(LONGEST), -sizes[item.path])

    items.sort(key=place)
