"""How tests are spread over processes, and what holds in all of them."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from workers import Group, NoWaiting, Workers

# Tests use gRPC and start processes. Its fork handlers abort one of some thousand children between
# fork and exec, where nothing needs gRPC; `pdserve up`, which forks too, has none in its process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# In the background of a shell the suite ignores SIGINT, and whatever it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported

collect_ignore = ["clients"]  # they have an environment of their own: make test-clients

# Files whose tests wait for time-outs more than they compute.
WAITING = (
    *("test_failover", "test_lifecycle", "test_partition", "test_health", "test_routers"),
    *("test_group", "test_request_path", "test_watchdog", "test_executor", "test_connectors"),
    *("test_transfer_long", "test_grpc_doors", "test_kv_events", "test_spanned"),
)
# The others, from those on that take longest; what is in neither list fills up what is left.
LONGEST = (
    *("test_exact", "test_transformers", "test_offline", "test_kv_groups", "test_conformance"),
    *("test_adapters", "test_preprocess_workers", "test_api", "test_explorer", "test_promises"),
    *("test_up", "test_both", "test_chaos", "test_rollout", "test_speculative", "test_placement"),
    *("test_pipeline", "test_data_parallel", "test_fuzz", "test_expert_parallel", "test_bits"),
    *("test_broadcast", "test_tools", "test_attention", "test_windows", "test_quantization"),
    *("test_share_cores", "test_fair_nodes", "test_observed", "test_structured", "test_disconnect"),
    *("test_policies", "test_corrupt_kv", "test_quantized", "test_plan", "test_stored_weights"),
    *("test_lora", "test_call_formats", "test_graphs", "test_architecture", "test_start"),
    *("test_secured", "test_bad_checkpoints", "test_misdeployed"),
    *("test_ray_nodes", "test_ray", "test_haproxy", "test_bench_placement"),  # of make test-all
)
KINDS = ("waiting", "computing", "clusters")  # of files
DEALT_OUT = re.compile(  # what some cases have in common, of files whose cases are many
    r"test_exact\.py::(?!test_the_demo_model).*\[([a-z0-9]+(?:-moe|-gqa)?)[-\]]"
    r"|test_bits\.py::.*\[([a-z0-9-]+-(?:float32|bfloat16))"
)


@pytest.fixture(autouse=True)
def same_tensors() -> None:
    """Makes torch draw the same in every run."""
    import torch  # not where only some other files are collected

    torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes its caller's stack for CUDA
    torch.set_num_threads(1)  # several would spin, waiting for cores that other tests have


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors' ranks start in a moment, where the test is not about how they start."""
    import forked_ranks

    monkeypatch.setattr("pdserve.common.distributed.launch.spawn", forked_ranks.spawn)


def pytest_addoption(parser: pytest.Parser) -> None:
    workers = parser.getgroup("workers", "processes that run tests")
    workers._addoption(  # `addoption` keeps lower case for pytest and its plugins
        *("-n", "--numprocesses"), type=int, default=0, help="in how many processes tests run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NoWaiting())
    if (count := config.option.numprocesses) and not config.option.usepdb:  # it needs the terminal
        os.environ["TEST_RUN"] = uuid.uuid4().hex  # all its processes share what starts clusters
        config.pluginmanager.register(Workers(count, by_file, choose))


def by_file(items: list[pytest.Item]) -> list[Group]:
    """A file stays in one process, since its tests share clusters; but for `test_exact.py`, where a
    family does, whose answers are worked out once, and `test_bits.py`, where a model and type do,
    which have clusters of their own."""
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        found = DEALT_OUT.search(item.nodeid)
        part = found[1] or found[2] if found else ""
        groups.setdefault((item.path, part), []).append(item)
    return [*groups.values()]


def choose(worker: int, groups: list[Group]) -> int:
    """Each process takes files of one kind while there are any, so that few wait, and few clusters
    compute, at one time."""
    kinds = [kind_of(group[0].path) for group in groups]
    own = KINDS[worker % len(KINDS)]
    return next(kinds.index(kind) for kind in (own, *reversed(KINDS)) if kind in kinds)


def kind_of(file: Path) -> str:
    if file.stem in WAITING:
        return "waiting"
    return "clusters" if file.parent.name == "e2e" else "computing"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps what was imported out of garbage collections: to look through it takes half a second,
    and collections are many. In each phase of a test pytest adds its handlers to every logger that
    does not propagate: torch has forty."""
    gc.freeze()
    gc.enable()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    if session.config.option.numprocesses and not session.config.option.collectonly:
        compile_native_code()


def compile_native_code() -> None:
    """Has the compiled code on disk before the tests begin: a slow machine may need longer for it
    than a test waits for a node. A forked process does it, so that this one loads no library."""
    from pdserve.common.core.native import BuildError
    from pdserve.common.model.kernels import native
    from pdserve.kv_transfer.native.code import block_code

    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        with suppress(BuildError):
            block_code()
            native.load_library()
    finally:
        os._exit(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sizes = Counter(item.path for item in items)
    order = {stem: number for number, stem in enumerate((*WAITING, *LONGEST))}

    def place(item: pytest.Item) -> tuple[int, int, Path]:
        number = order.get(item.path.stem)
        rank = (len(order), -sizes[item.path]) if number is None else (number, 0)
        return (*rank, item.path)  # the same in each process, in whatever order it imported them

    items.sort(key=place)
