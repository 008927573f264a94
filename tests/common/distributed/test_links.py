"""The links between hosts that tensor-parallel ranks are on: measured, and what they cost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.common.distributed.environment import init_distributed_environment
from pdserve.common.distributed.links import (
    HostLink,
    SpannedStage,
    _link,
    describe_cost,
    measure_stages,
)
from pdserve.common.distributed.parallel_state import initialize_model_parallel

LINK = HostLink(("10.0.0.1", "10.0.0.2"), 0.001, 1e6)


@pytest.mark.parametrize(
    ("hosts", "pipeline", "spanned"),
    [("aabb", 1, [(2, 6)]), ("abcc", 2, [(2, 6)]), ("aabb", 2, [])],
)
def test_stages_on_several_hosts_are_measured(
    hosts: str, pipeline: int, spanned: list[tuple[int, int]], tmp_path: Path
) -> None:
    def rank(number: int) -> list[SpannedStage]:
        where = f"file://{tmp_path}/rendezvous"
        environment = init_distributed_environment(number, 4, where)
        environment.hosts = tuple(hosts)
        state = initialize_model_parallel(environment, 4 // pipeline, pipeline)
        try:
            return measure_stages(environment, state, 6)
        finally:
            state.close()

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(rank, range(4))
    assert [(stage.hosts, stage.all_reduces) for stage in first] == spanned
    assert all(stage.slowest.latency > 0 and stage.slowest.bandwidth > 0 for stage in first)
    assert others == [first] * 3


def test_the_cost_of_the_slowest_link_per_step() -> None:
    """2 × (1 ms + 1 kB / 1 MB/s), and of four hosts a half more of each sum leaves one."""
    stages = [SpannedStage(2, 2, LINK)]
    assert describe_cost(stages, 1000, 100) == (
        "tensor-parallel ranks are on 2 hosts: the slowest link between them, 10.0.0.1 – 10.0.0.2, "
        "takes 1 ms and carries 1 MB/s, so 2 all-reduces add about 4 ms to a step of one token and "
        "202 ms to one of 100"
    )
    assert SpannedStage(4, 2, LINK).seconds(1000) == pytest.approx(0.005)


def test_a_busy_host_makes_no_link_quick() -> None:
    """Round trips of 4, 6 and 9 ms; a MiB in 12 and, quicker than any of them, in 1 ms."""
    quiet, busy = (_link(LINK.hosts, (0.006, 0.004, 0.009), bulk) for bulk in (0.012, 0.001))
    assert quiet.latency == busy.latency == 0.003
    assert quiet.bandwidth == pytest.approx((1 << 20) / 0.010)
    assert busy.bandwidth == pytest.approx((1 << 20) / 0.001)
