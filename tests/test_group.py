"""The tensor-parallel group: sums, order, and an end to every wait. Groups are objects, so most
tests run both ranks as threads; a dead rank needs a process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from common.core.errors import NodeError
from common.distributed.group import TensorParallelGroup

T = TypeVar("T")


def on_two_ranks(
    tmp_path: Path, work: Callable[[TensorParallelGroup], T], timeout: float = 20.0
) -> list[T]:
    def run(rank: int) -> T:
        group = TensorParallelGroup(rank, 2, f"file://{tmp_path}/rendezvous", timeout=timeout)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def test_group_of_one_needs_nobody() -> None:
    group = TensorParallelGroup(0, 1)
    tensor = torch.tensor([1.0, 2.0])
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor, dim=0) is tensor
    group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce_sums_in_place(tmp_path: Path, dtype: torch.dtype) -> None:
    def work(group: TensorParallelGroup) -> list[int]:
        with torch.inference_mode():
            tensor = torch.tensor([1, 2], dtype=dtype) * (group.rank + 1)
            assert group.all_reduce(tensor) is tensor
            return tensor.tolist()

    assert on_two_ranks(tmp_path, work) == [[3, 6], [3, 6]]


def test_all_gather_joins_in_the_order_of_ranks(tmp_path: Path) -> None:
    def work(group: TensorParallelGroup) -> tuple[list[list[int]], list[list[int]]]:
        mine = torch.tensor([[group.rank, 10 + group.rank]])
        return group.all_gather(mine, dim=0).tolist(), group.all_gather(mine, dim=-1).tolist()

    expected = ([[0, 10], [1, 11]], [[0, 10, 1, 11]])
    assert on_two_ranks(tmp_path, work) == [expected, expected]


def test_all_gather_of_a_part_that_is_not_contiguous(tmp_path: Path) -> None:
    def work(group: TensorParallelGroup) -> list[list[int]]:
        mine = (torch.arange(6).view(2, 3) + 10 * group.rank)[:, ::2]
        return group.all_gather(mine, dim=1).tolist()

    assert on_two_ranks(tmp_path, work) == [[[0, 2, 10, 12], [3, 5, 13, 15]]] * 2


def test_silent_peer_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    def work(group: TensorParallelGroup) -> str:
        if group.rank == 0:
            time.sleep(2.0)
            return "silent"
        with pytest.raises(NodeError) as caught:
            group.all_reduce(torch.ones(1))
        return caught.value.code

    assert on_two_ranks(tmp_path, work, timeout=1.0) == ["silent", "RANK_LOST"]


def test_absent_peer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="could not meet"):
        TensorParallelGroup(0, 2, f"file://{tmp_path}/rendezvous", timeout=0.5)


PEER = """
import sys, time
from common.distributed.group import TensorParallelGroup

group = TensorParallelGroup(1, 2, sys.argv[1])
time.sleep(60)
"""


def test_dead_peer_is_an_error_at_once(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/rendezvous"
    with subprocess.Popen([sys.executable, "-c", PEER, address]) as peer:
        group = TensorParallelGroup(0, 2, address)
        peer.kill()
        peer.wait()
        started = time.monotonic()
        with pytest.raises(NodeError) as caught:
            group.all_reduce(torch.ones(1))
        assert time.monotonic() - started < 5.0
        assert caught.value.code == "RANK_LOST"
        group.close()
