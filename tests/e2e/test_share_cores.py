"""Nodes that lend each other cores give the same bits as a node that has its cores for itself, also
when one dies that holds another's core."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.warm_start import alive
from cluster import node_metrics
from deaths import MORE_BLOCKS
from deaths import D as SESSION
from paths import MODELS
from pdserve.common.core.core_table import ENTRY_NBYTES, lent_seconds
from warm import WarmCluster
from wide_model import SHAPE

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 500) for _ in range(length)] for length in (300, 30, 200, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of tiny models are too short to be shared."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    shutil.copytree(MODELS / "qwen3", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("table") / "cores"
    file.write_bytes(bytes(4 * ENTRY_NBYTES))
    return file


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    with WarmCluster(model, 0, 0, **DUMMY) as cluster:
        cluster.start_node("both")
        cluster.wait_nodes()
        return [ask(cluster, number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def cluster(model: Path, table: Path) -> Iterator[WarmCluster]:
    with WarmCluster(model, 1, 1, share_cores=table, **DUMMY) as made:
        yield made


DUMMY = {"router": {"load_format": "dummy"}, "load_format": "dummy", "dtype": "bfloat16"}


def ask(cluster: WarmCluster, number: int, salt: str = "") -> str:
    body = {"max_tokens": 16, "ignore_eos": True, "logprobs": 3, "cache_salt": salt or None}
    return json.dumps(cluster.complete(PROMPTS[number], **body)["choices"])


def test_the_same_bits(cluster: WarmCluster, expected: list[str], table: Path) -> None:
    assert [ask(cluster, number) for number in range(len(PROMPTS))] == expected
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda i: ask(cluster, i % 4, str(i)) == expected[i % 4], range(8))
        assert all(found)
    assert sum(lent_seconds(table)) > 0
    lent = [node_metrics(node)["pdserve_lent_core_seconds_total"] for node in cluster.nodes()]
    assert len(lent) == 2 and sum(lent) > 0


def test_a_node_dies_that_may_hold_a_core(cluster: WarmCluster, expected: list[str]) -> None:
    arm = ("mortal:arm", "SIGKILL", f"{SESSION}.sampled", "13")
    mortal = cluster.start_node("decode", arm, num_gpu_blocks_override=MORE_BLOCKS)
    cluster.wait_nodes()
    pid = cluster.pids.pop(mortal)
    for number in range(10):
        assert ask(cluster, 0, f"death {number}") == expected[0]
        if not alive(pid):
            break
    else:
        raise AssertionError("it did not die")
    assert ask(cluster, 1, "after") == expected[1]
    cluster.start_node("decode")  # it takes over the core
    cluster.wait_nodes()
    assert ask(cluster, 2, "after") == expected[2]
