"""Pipelines through real processes: unequal cuts, clients that leave while chunks are in flight,
blocks that run out, a stage that dies, and options that cannot be."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

import reference
from cluster import MODELS, ask_until_preempted
from warm import WarmCluster, ranks_of, run_roles

NUM_TOKENS = 24
FEW_BLOCKS = 26


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Prompts of different numbers share no block."""
    return (5 + number, *(5 + (number + 7 * i) % 500 for i in range(1, length)))


def check(cluster: WarmCluster, case: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> None:
    answer = cluster.complete(list(case), max_tokens=num_tokens, ignore_eos=True)
    expected = reference.greedy(cluster.model, case, num_tokens)
    assert answer["choices"][0]["text"] == reference.decode(cluster.model, expected)


def check_at_once(cluster: WarmCluster, cases: list[tuple[int, ...]], num_tokens: int) -> None:
    for case in cases:
        reference.greedy(cluster.model, case, num_tokens)  # not while the nodes compute
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda case: check(cluster, case, num_tokens), cases))
    cluster.wait_idle()


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Layers 2 + 1 + 1 → 1 + 3, and few blocks to decode in."""
    with WarmCluster("qwen2", 0, 0, max_model_len=384) as made:
        made.start_node("prefill", pipeline_parallel_size=3, pipeline_partition="2,1,1")
        stages = {"pipeline_parallel_size": 2, "pipeline_partition": "1,3"}
        made.start_node("decode", num_gpu_blocks_override=FEW_BLOCKS, **stages)
        made.wait_nodes()
        yield made


def test_layers_are_cut_unevenly(cluster: WarmCluster) -> None:
    assert [node["pipeline_parallel_size"] for node in cluster.nodes("prefill")] == [3]
    for number, length in enumerate((1, 16, 100, 300)):
        check(cluster, prompt(number, length))
    cluster.wait_idle()


def test_blocks_run_out_while_steps_are_in_flight(cluster: WarmCluster) -> None:
    (node,) = cluster.nodes("decode")
    cases = [prompt(10 + number, 20) for number in range(7)]
    ask_until_preempted(node, lambda: check_at_once(cluster, cases, num_tokens=60))


def test_clients_leave_while_chunks_are_in_flight(cluster: WarmCluster) -> None:
    def leave(number: int) -> None:
        stream = cluster.stream(list(prompt(30 + number, 300)), max_tokens=60, ignore_eos=True)
        deque(islice(stream, number))  # a router that is late tells of many tokens at once
        stream.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leave, range(6)))
    cluster.wait_idle()
    check(cluster, prompt(40, 200))
    cluster.wait_idle()


def test_a_stage_dies_and_its_node_with_it(cluster: WarmCluster) -> None:
    """Last, for it leaves another node."""
    (name,) = cluster.names("decode")
    pid = cluster.pids[name]
    case, num_tokens = prompt(50, 40), 60
    expected = reference.greedy(cluster.model, case, num_tokens)
    fewer = {"num_gpu_blocks_override": FEW_BLOCKS - 1}  # the one that is to die is preferred
    cluster.start_node("decode", tensor_parallel_size=2, **fewer)
    cluster.wait_nodes()
    first, last = ranks_of(pid)
    stream = cluster.stream(list(case), max_tokens=num_tokens, ignore_eos=True)
    begin = list(islice(stream, 2))
    last.send_signal(signal.SIGKILL)
    del cluster.pids[name]
    text = "".join(each["choices"][0]["text"] for each in (*begin, *stream) if each["choices"])
    assert text == reference.decode(cluster.model, expected)
    cluster.wait_for(lambda: cluster.exit_code(pid) == 1)
    assert not first.is_running()
    assert f"rank 1 (pid {last.pid}) was killed by SIGKILL" in cluster.log()
    cluster.wait_idle()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-pp", "2", "--pipeline-partition", "1,2"], "--pipeline-partition 1,2 does not split 4"),
        (["-tp", "2", "-ep", "2"], "--expert-parallel-size 2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    command = ["decode_node", "--model", str(MODELS / "qwen2"), *flags]
    ((code, output),) = run_roles(tmp_path, [command])
    assert code == 2 and message in output, output
