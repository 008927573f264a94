"""The kit's fixtures: one `kit` for each check and connector."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from pdserve.kv_transfer.conformance.ends import Target
from pdserve.kv_transfer.conformance.kit import Kit, Processes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        names = metafunc.config.getoption("--kv-connector", default=[])
        metafunc.parametrize("target", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    torch.set_num_threads(1)
    return Target(request.param, json.loads(request.config.getoption("--kv-connector-config")))


@pytest.fixture(scope="session", autouse=True)
def all_processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Starts processes ahead if checks need them; a run of all checks kills two."""
    remote = sum("processes" in getattr(item, "fixturenames", ()) for item in request.session.items)
    processes = Processes(min(2, remote))
    yield processes
    processes.close()


@pytest.fixture
def processes(all_processes: Processes) -> Processes:
    """Serves tests that use `kit.remote`."""
    return all_processes


@pytest.fixture
def kit(target: Target, all_processes: Processes) -> Iterator[Kit]:
    made = Kit(target, all_processes)
    yield made
    made.close()
