"""KV that is spoilt never becomes a token: dozens of faults in live nodes, and the answers are
those of transformers; without digests they are not. It is spoilt on the way, where both sides hash
it as it moves, or after it has landed, where the sink reads it again."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reference
from cluster import node_metrics
from thinned import only
from tiny_engine import some_tokens
from warm import WarmCluster
from windowed import make_windowed

ON_THE_WAY = "corrupt_way:SpoiltShm", "corrupt_way:SpoiltTCP"
LANDED = "corrupt_connector:CorruptShm", "corrupt_connector:CorruptTCP"
SHM, TCP = 0, 1
WHEN = {"on the way": ON_THE_WAY, "landed": LANDED}
FAULTS, GROUP_FAULTS = 60, 20  # at least
NUM_PROMPTS, NUM_TOKENS = 16, 6
CLIENTS = 12
MORE_BLOCKS = 600  # than the others: least-load placement prefers this node
# No transfer ends because somebody is late: what was spoilt would not be looked at.
PATIENT: Any = {
    "router": {"heartbeat_timeout": 30},
    "kv_lease": 30,
    "no_enable_prefix_caching": "",
}
GROUPS = {  # kind of KV: a model with it, its connector, the prefill node's ranks
    "window": ("qwen3", TCP, 2),
    "latent": ("deepseek", SHM, 1),
    "state": ("qwen3-next", TCP, 2),
    "indexer": ("deepseek-v3.2", TCP, 2),
}

Prompt = tuple[int, ...]


def speaks(
    ledger: Path, *connectors: str, seed: int = 0, probability: float = 0.7, kind: str = "any"
) -> Any:
    """Options of a node whose sink spoils what lands."""
    config = {"probability": probability, "seed": seed, "ledger": str(ledger), "kind": kind}
    several = dict.fromkeys(connectors, config)
    return {
        "kv_connector": ",".join(connectors),
        "kv_connector_config": json.dumps(several if len(several) > 1 else config),
    }


@pytest.fixture(scope="module", params=only(WHEN, ["on the way"]))
def connectors(request: pytest.FixtureRequest) -> tuple[str, str]:
    return WHEN[request.param]


@pytest.fixture(scope="module")
def cluster(connectors: tuple[str, str]) -> Iterator[WarmCluster]:
    """Two prefill nodes that speak shm and tcp; a decode node for each of them."""
    with WarmCluster("llama-gqa", 0, 0, **PATIENT) as made:
        for _ in range(2):
            made.start_node("prefill", **speaks(ledger(made), *connectors))
        for seed, connector in enumerate(connectors):
            made.start_node("decode", **speaks(ledger(made), connector, seed=seed))
        made.wait_nodes()
        yield made


def ledger(cluster: WarmCluster) -> Path:
    return cluster.home.path / "ledger"


@pytest.fixture(scope="module")
def cases(cluster: WarmCluster) -> dict[Prompt, str]:
    """Prompts of one to six blocks and the right answers."""
    rng = random.Random(0)
    prompts = [
        tuple(rng.randrange(3, 400) for _ in range(8 + 4 * number)) for number in range(NUM_PROMPTS)
    ]
    return answered(cluster.model, prompts)


def answered(folder: Path, prompts: Iterable[Prompt]) -> dict[Prompt, str]:
    """The prompts and transformers' answers."""
    return {
        prompt: reference.decode(folder, reference.greedy(folder, prompt, NUM_TOKENS))
        for prompt in prompts
    }


def ask(cluster: WarmCluster, prompt: Prompt) -> str:
    answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
    return str(answer["choices"][0]["text"])


def spoilt(cluster: WarmCluster) -> Counter[str]:
    """Faults so far, by kind."""
    return Counter(ledger(cluster).read_text().split())


def counted(cluster: WarmCluster, role: str, metric: str) -> int:
    return int(sum(node_metrics(node).get(metric, 0) for node in cluster.nodes(role)))


def test_no_fault_becomes_a_token(cluster: WarmCluster, cases: dict[Prompt, str]) -> None:
    requests = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        while requests == 0 or spoilt(cluster).total() < FAULTS:
            answers = list(pool.map(lambda prompt: ask(cluster, prompt), cases))
            assert answers == list(cases.values())
            requests += len(cases)
    cluster.wait_idle()
    faults = spoilt(cluster)
    print(f"\n{requests} requests, {faults.total()} faults: {dict(faults)}")
    for node in cluster.nodes("decode"):  # one speaks shm, the other tcp
        assert node_metrics(node)[event("stopped/DIGEST_MISMATCH")] > FAULTS / 5
    # Each of them was found, and nothing else was suspected.
    assert counted(cluster, "decode", event("stopped/DIGEST_MISMATCH")) == faults.total()
    # Sent again by the same node, by the other one; at last the decode node computed.
    assert counted(cluster, "prefill", event("repulled")) > FAULTS / 5
    assert counted(cluster, "prefill", outcome("DIGEST_MISMATCH")) > FAULTS / 10
    assert 0 < counted(cluster, "decode", outcome("OK")) < requests


def event(name: str) -> str:
    return f'pdserve_kv_transfer_events_total{{event="{name}"}}'


def outcome(code: str) -> str:
    return f'pdserve_kv_transfers_total{{outcome="{code}"}}'


def test_without_digests_tokens_are_wrong(
    cluster: WarmCluster, connectors: tuple[str, str], cases: dict[Prompt, str]
) -> None:
    """Else the test above would prove nothing."""
    options = speaks(ledger(cluster), connectors[SHM], probability=1.0)
    trusting = cluster.start_node(
        "decode", num_gpu_blocks_override=MORE_BLOCKS, no_enable_kv_digests="", **options
    )
    cluster.wait_nodes()
    wrong = sum(ask(cluster, prompt) != answer for prompt, answer in cases.items())
    cluster.wait_idle()
    cluster.kill(trusting)
    print(f"\n{wrong} of {len(cases)} answers wrong")
    assert wrong > 0


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", GROUPS)
def test_no_fault_of_a_kv_group_becomes_a_token(kind: str, when: str, tmp_path: Path) -> None:
    """The state that a model keeps beside full attention, or in its place, is as well guarded, and
    was spoilt: a node without digests says wrong tokens."""
    model, which, ranks = GROUPS[kind]
    connector = WHEN[when][which]
    folder = make_windowed(model, tmp_path)
    cases = answered(folder, [tuple(some_tokens(70 + 9 * i, seed=i)) for i in range(8)])
    with WarmCluster(folder, 0, 0, max_model_len=1024, **PATIENT) as cluster:
        spoils = {"kind": kind, "probability": 0.7}
        cluster.start_node(
            "prefill", tensor_parallel_size=ranks, **speaks(ledger(cluster), connector)
        )
        cluster.start_node("decode", **speaks(ledger(cluster), connector, **spoils))
        cluster.wait_nodes()
        with ThreadPoolExecutor(len(cases)) as pool:
            while not ledger(cluster).exists() or spoilt(cluster).total() < GROUP_FAULTS:
                answers = list(pool.map(lambda prompt: ask(cluster, prompt), cases))
                assert answers == list(cases.values())
        cluster.wait_idle()
        assert counted(cluster, "decode", event("stopped/DIGEST_MISMATCH")) == (
            spoilt(cluster).total()
        )
        assert counted(cluster, "decode", outcome("OK"))
        trusting = speaks(ledger(cluster), connector, **{**spoils, "probability": 1.0})
        more = {"num_gpu_blocks_override": MORE_BLOCKS, "no_enable_kv_digests": ""}
        cluster.start_node("decode", **more, **trusting)
        cluster.wait_nodes()
        wrong = sum(ask(cluster, prompt) != answer for prompt, answer in cases.items())
        print(f"\n{kind}: {spoilt(cluster)}; {wrong} of {len(cases)} wrong without digests")
        assert wrong > 0
