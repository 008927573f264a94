"""Groups: their layout, their collectives over 2 and 4 processes, and an end to every wait."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import segments
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.distributed.environment import init_distributed_environment
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.hierarchical import HierarchicalCommunicator
from pdserve.common.distributed.measure import DTYPES, verify
from pdserve.common.distributed.parallel_state import (
    ParallelState,
    group_layout,
    initialize_model_parallel,
)
from pdserve.common.distributed.shared_memory import (
    SLOT_BYTES,
    Descriptors,
    SharedMemory,
    make_segment,
)
from pdserve.common.distributed.torch_communicator import add_up
from ranks import Ranks

T = TypeVar("T")
TRANSPORTS = {
    "shm-2": {"tp": 2, "communicator": "shm"},
    "gloo-2": {"tp": 2, "communicator": "gloo"},
    "shm-4": {"tp": 4, "communicator": "shm"},
    "gloo-4": {"tp": 4, "communicator": "gloo"},
    "two hosts": {"tp": 4, "hosts": "aabb"},
    "unequal hosts": {"tp": 4, "hosts": "abaa"},
}


@pytest.fixture(params=TRANSPORTS)
def run(request: pytest.FixtureRequest, ranks: Ranks) -> Callable[..., list[Any]]:
    """Runs a function on each rank of a tensor-parallel group, over one of the transports."""
    return lambda work, *args: ranks.run(work, *args, **TRANSPORTS[request.param])


# ---- layout ----


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "expected"),
    [
        (4, 1, 4, [[0, 1, 2, 3]]),
        (4, 1, 2, [[0, 2], [1, 3]]),
        (2, 2, 2, [[0, 1], [2, 3]]),
        (4, 2, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_experts_lie_on_the_ranks_of_a_tensor_parallel_group(
    tp: int, pp: int, ep: int, expected: list[list[int]]
) -> None:
    assert group_layout(tp * pp, tp, pp, ep)["ep"] == expected


@pytest.mark.parametrize(("sizes", "hint"), [((3, 2, 1, 1), "3 ranks"), ((4, 4, 1, 3), "divide")])
def test_sizes_that_do_not_fit(sizes: tuple[int, ...], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        group_layout(*sizes)


# ---- collectives ----


def _verify(state: ParallelState) -> list[tuple[str, str]]:
    checks = verify(state.tp)
    assert {check.dtype for check in checks} == {str(d).removeprefix("torch.") for d in DTYPES}
    return [(f"{each.operation} {each.dtype}", each.error) for each in checks if each.error]


def test_every_collective_of_every_dtype_is_right(run: Callable[..., list[Any]]) -> None:
    """Also of tensors that are not contiguous, and of empty ones."""
    assert not any(run(_verify))


def _random_sums(state: ParallelState) -> None:
    group = state.tp
    for columns in (333, 33_333):  # whole, and in shares
        parts = torch.randn(group.size, 5, columns, generator=torch.Generator().manual_seed(0))
        expected = parts[0] + parts[1]
        if group.size == 4:
            expected = expected + (parts[2] + parts[3])
        assert torch.equal(group.all_reduce(parts[group.rank].clone()), expected)


@pytest.mark.parametrize("name", sorted(TRANSPORTS.keys() - {"unequal hosts"}))
def test_sums_have_the_same_bits_over_every_transport(name: str, ranks: Ranks) -> None:
    ranks.run(_random_sums, **TRANSPORTS[name])


def _random_sum(state: ParallelState) -> bytes:
    part = torch.randn(5, 333, generator=torch.Generator().manual_seed(state.tp.rank))
    return state.tp.all_reduce(part).numpy().tobytes()


def test_sums_are_bit_identical_on_all_ranks(run: Callable[..., list[Any]]) -> None:
    first, again = run(_random_sum), run(_random_sum)
    assert len({*first, *again}) == 1


def test_more_parts_than_a_power_of_two() -> None:
    parts = [torch.full((2,), 10.0**power) for power in range(7)]
    out = torch.empty(2)
    for count in range(2, 8):
        add_up(parts[:count], out)
        assert out.tolist() == [float("1" * count)] * 2


def _large(state: ParallelState) -> None:
    """Several slots long, in parts that do not divide evenly."""
    group, count = state.tp, 3 * SLOT_BYTES // 4 + 4
    numbers = torch.arange(count, dtype=torch.float32) % 1000
    assert torch.equal(group.all_reduce(numbers.clone()), numbers * group.size)
    share = count // group.size
    mine = group.reduce_scatter(numbers, 0)
    assert torch.equal(mine, numbers[group.rank * share :][:share] * group.size)
    rows = group.all_gather((numbers + group.rank)[None], 0)
    assert torch.equal(rows, torch.stack([numbers + rank for rank in range(group.size)]))
    assert torch.equal(group.broadcast(numbers + group.rank, src=1), numbers + 1)
    column = torch.zeros(3, 4)[:, 1]
    assert group.all_reduce(column.fill_(1.0)) is column, "in place, whatever its strides"
    assert (column == group.size).all()


def test_tensors_larger_than_a_slot_and_in_place(run: Callable[..., list[Any]]) -> None:
    run(_large)


def _uneven(state: ParallelState, width: int) -> None:
    """Rank r sends `(r + 2 p) % 5` rows to rank p, each its own numbers; with many columns several
    slots long."""
    group = state.tp

    def rows(source: int, target: int) -> torch.Tensor:
        numbers = torch.arange((source + 2 * target) % 5 * width, dtype=torch.float32) % 1000
        return numbers.view(-1, width) + 10_000 * source + 100_000 * target

    leaving = [rows(group.rank, peer) for peer in range(group.size)]
    coming = [rows(peer, group.rank) for peer in range(group.size)]
    counts = [[len(part) for part in parts] for parts in (leaving, coming)]
    assert torch.equal(group.all_to_all(torch.cat(leaving), *counts), torch.cat(coming))


def test_all_to_all_of_uneven_parts_and_of_nothing(run: Callable[..., list[Any]]) -> None:
    for width in (1, 5, 200_000):
        run(_uneven, width)
    run(_nothing_to_anyone)


def _nothing_to_anyone(state: ParallelState) -> None:
    group, nothing = state.tp, [0] * state.tp.size
    for shape in ((0, 4), (0, 0)):
        assert group.all_to_all(torch.ones(shape), nothing, nothing).shape == shape
    everything = [0] * (group.size - 1) + [3]  # all to the last rank, nothing to all others
    received = group.all_to_all(
        torch.full((3, 2), 1.0 * group.rank), everything, everything[group.rank :][:1] * group.size
    )
    last = group.rank == group.size - 1
    assert received[:, 0].tolist() == [rank for rank in range(group.size) if last for _ in range(3)]
    with pytest.raises(ValueError, match="3 rows cannot be sent as"):
        group.all_to_all(torch.ones(3), [1] * group.size, [1] * (group.size - 3))


def test_rows_that_were_not_expected_are_an_error(tmp_path: Path) -> None:
    def work(state: ParallelState) -> str:
        with pytest.raises(NodeError) as caught:
            state.tp.all_to_all(torch.ones(2, 3), [1, 1], [1, 1 + state.tp.rank])
            state.tp.barrier()  # who got what it expected hears of it here
        return caught.value.message

    assert "rank 1 sends 12 bytes, not 24" in on_threads(tmp_path, 2, work)[1]


def _disagree(state: ParallelState) -> tuple[str, str]:
    state.tp.agree({"b": 1, "a": [2]}, "the weather")
    with pytest.raises(NodeError) as caught:
        state.tp.agree(0 if state.tp.rank < state.tp.size - 1 else 5, "the block count")
    state.tp.barrier()  # nothing is broken
    return caught.value.code, caught.value.message


def test_ranks_that_disagree_are_named(ranks: Ranks) -> None:
    for code, message in ranks.run(_disagree, tp=4, communicator="shm"):
        assert code == "RANKS_DISAGREE"
        assert message.endswith("disagree on the block count: ranks 0, 1, 2: 0; rank 3: 5")


def on_threads(
    folder: Path,
    size: int,
    work: Callable[[ParallelState], T],
    timeout: float = 20.0,
    hosts: str = "",
    **sizes: int,
) -> list[T]:
    """Groups are objects, so ranks may be threads. `hosts`: as for `Ranks`."""

    def rank(number: int) -> T:
        where = f"file://{folder}/rendezvous"
        environment = init_distributed_environment(number, size, where, timeout=timeout)
        environment.hosts = tuple(hosts) or environment.hosts
        tp, pp = sizes.get("tp", size), sizes.get("pp", 1)
        state = initialize_model_parallel(environment, tp, pp, sizes.get("ep", 1))
        try:
            return work(state)
        finally:
            state.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def _dictionary(state: ParallelState) -> None:
    """From each rank to the others, which do not know what comes."""
    group = state.tp
    for src in range(group.size):
        sent = {
            "name": "größe",
            "plain": [1, 2.5, None, True, {"rows": [3, 4]}],
            "column": torch.arange(12.0).view(3, 4)[:, src],
            "large": torch.full((SLOT_BYTES // 2 + 3,), src, dtype=torch.bfloat16),
            "empty": torch.empty(0, 5, dtype=torch.int8),
            "scalar": torch.tensor(src == 1),
            "eight bits": torch.ones(2, 3).to(torch.float8_e4m3fn),
        }
        given = sent if group.rank == src else None
        got = group.broadcast_tensor_dict(given, src)
        assert list(got) == list(sent)
        for name, value in sent.items():
            if isinstance(value, torch.Tensor):
                assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
                assert torch.equal(got[name].float(), value.float())
            else:
                assert got[name] == value
    assert group.broadcast_tensor_dict({} if group.rank == 0 else None) == {}


def test_a_dictionary_of_tensors(run: Callable[..., list[Any]]) -> None:
    run(_dictionary)
    alone = {"a": torch.ones(2), "b": 1}
    assert GroupCoordinator().broadcast_tensor_dict(alone) == alone


# ---- an end to every wait ----


def test_an_absent_peer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="could not meet") as caught:
        init_distributed_environment(0, 2, f"file://{tmp_path}/rendezvous", timeout=0.5)
    assert caught.value.code == "RANK_LOST"


def hurry(group: GroupCoordinator, seconds: float) -> None:
    """A time-out for what comes after the meeting."""
    for communicator in group._communicators.values():
        communicator.context = replace(communicator.context, timeout=seconds)


def test_a_silent_peer_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    over = threading.Event()

    def work(state: ParallelState) -> str:
        if state.tp.rank == 0:
            over.wait(60)
            return "silent"
        hurry(state.tp, 0.5)  # the meeting has taken its time
        started = time.monotonic()
        with pytest.raises(NodeError) as caught:
            state.tp.all_reduce(torch.ones(1))
        assert time.monotonic() - started > 0.4
        with pytest.raises(NodeError) as again:  # the group is of no use any more
            state.tp.barrier()
        assert again.value is caught.value
        with pytest.raises(NodeError, match="the group is closed"):  # it has the same ranks
            state.world.barrier()
        with pytest.raises(NodeError, match="the group is closed"):
            state.ep.send(torch.ones(1), 0)
        over.set()
        return f"{caught.value.code} {caught.value.message}"

    silent, message = on_threads(tmp_path, 2, work, ep=2)
    assert silent == "silent"
    assert message.startswith("RANK_LOST") and "rank 0 did not arrive in time" in message


@pytest.mark.parametrize(
    ("silent", "who", "message"),
    [
        ({3}, 2, "rank 3 did not arrive in time"),
        (
            {2, 3},
            0,
            r"no answer from rank 2 on host 127\.0\.0\.1 to rank 0 on host 127\.0\.0\.1 within "
            r"0\.5 s: check the link between the hosts",
        ),
    ],
)
def test_a_silent_rank_or_host_is_an_error_on_all_hosts(
    silent: set[int], who: int, message: str, tmp_path: Path
) -> None:
    over, begun = threading.Barrier(4), threading.Barrier(4 - len(silent))

    def work(state: ParallelState) -> str:
        via = state.tp._communicators["cpu"]
        assert isinstance(via, HierarchicalCommunicator)
        if state.tp.rank in silent:
            over.wait(60)
            return ""
        for part in filter(None, (via._local, via._leaders)):
            part.context = replace(part.context, timeout=0.5)
        via.context = replace(via.context, timeout=0.6)
        if via._leaders is not None:
            via._leaders._group._set_default_timeout(timedelta(seconds=0.5))
        begun.wait(60)
        with pytest.raises(NodeError) as caught:
            state.tp.all_reduce(torch.ones(1))
        assert caught.value.code == "RANK_LOST"
        over.wait(60)
        return caught.value.message

    messages = on_threads(tmp_path, 4, work, hosts="aabb")
    assert re.search(message, messages[who])


def _until_lost(state: ParallelState) -> tuple[str, str, float]:
    """Collectives without end."""
    while True:
        try:
            state.world.all_reduce(torch.ones(100))
        except NodeError as error:
            return error.code, error.message, time.monotonic()


def _receive_from_the_last(state: ParallelState) -> tuple[str, str, float]:
    try:
        state.world.recv((1000,), torch.float32, src=state.world.size - 1)
        raise AssertionError("who should have sent this?")
    except NodeError as error:
        return error.code, error.message, time.monotonic()


def _hello(state: ParallelState) -> None:
    state.world.barrier()


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("shm-4", _until_lost),
        ("gloo-4", _until_lost),
        ("two hosts", _until_lost),
        ("shm-4", _receive_from_the_last),
    ],
)
def test_a_killed_rank_is_an_error_in_all_others(
    name: str, work: Callable[..., Any], tmp_path: Path
) -> None:
    """At once; but gloo sometimes misses, on one rank, that all connections broke. Then its
    time-out ends the wait."""
    names, timeout = segments.names(), 60.0
    processes = Ranks(4, tmp_path, timeout)
    try:
        processes.run(_hello, **TRANSPORTS[name])
        count = processes.start(work, **TRANSPORTS[name])
        if work is _receive_from_the_last:
            processes.signal(3, signal.SIGSTOP)  # it must not wait for itself
        time.sleep(0.3)
        killed = time.monotonic()
        processes.signal(3, signal.SIGKILL)
        told = processes.results(range(count - 1))
        assert {code for code, _, _ in told} == {"RANK_LOST"}
        if name == "shm-4" and work is _until_lost:
            assert all("is gone" in message for _, message, _ in told)
        waits = sorted(heard - killed for _, _, heard in told)
        late = 0 if name == "shm-4" else 1
        assert waits[0] >= 0 and waits[-1 - late] < timeout / 2
        assert waits[-1] < timeout + 30.0
    finally:
        processes.close()
    segments.check_none_left(names)


def test_a_closed_group_keeps_no_descriptor(tmp_path: Path) -> None:
    on_threads(tmp_path, 2, _hello)  # what torch opens once
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        on_threads(folder, 2, _hello)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- the meeting place in memory ----


def two_views() -> tuple[SharedMemory, SharedMemory]:
    segment, pipes = make_segment(2), [os.pipe(), os.pipe()]
    own = [write for _, write in pipes]

    def view(rank: int) -> SharedMemory:
        living = [os.dup(read) for read, _ in pipes]
        return SharedMemory(rank, (4, 7), Descriptors(os.dup(segment), living, own[rank]))

    views = view(0), view(1)
    for fd in (segment, *(read for read, _ in pipes)):
        os.close(fd)
    return views


def test_a_rank_that_published_before_its_death_is_not_missed() -> None:
    first, second = two_views()
    with suppress(NodeError):
        second.barrier(deadline=0.0)  # publishes its slot, waits in vain
    second.close()
    first.barrier(time.monotonic() + 30)
    with pytest.raises(NodeError, match="rank 7 is gone"):
        first.barrier(time.monotonic() + 30)
    first.close()


def test_the_last_rank_may_die_before_it_signals() -> None:
    first, second = two_views()
    with ThreadPoolExecutor(1) as thread:
        meeting = thread.submit(first.barrier, time.monotonic() + 30)
        time.sleep(0.1)
        second._words[16] = 1  # it only published, without waking the other
        second.close()
        meeting.result(timeout=30)
    assert not first._spins  # who was late once may be so again
    first.close()


def test_a_segment_cannot_shrink() -> None:
    segment = make_segment(2)
    with pytest.raises(PermissionError):
        os.ftruncate(segment, 0)
    os.close(segment)
