"""Replicas of one node: who takes a job, who answers for a transfer, and what a failure ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import forked_ranks
from live_node import node_config
from one_group import one_group
from pdserve.common.config.engine import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.block_hash import hash_blocks
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.distributed.executor import WorkerSpec
from pdserve.common.engine.rates import MeasuredRates
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.node import ranks
from pdserve.common.node.balance import Candidate, candidate, choose
from pdserve.common.node.load import SchedulerCollector, node_load
from pdserve.common.worker import kv_cache, worker
from pdserve.common.worker.worker import WorkerConfig, worker_specs
from pdserve.decode_node.node import DecodeNode
from processes import alive

# ---- the choice -----------------------------------------------------------------------------

IDLE = Candidate(
    replica=0, pending_tokens=0, decoding_tokens=0, missing_tokens=100, num_sequences=0, fits=True
)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ([{}, {}], 0),  # equal: the lowest index
        ([{"pending_tokens": 1}, {}], 1),
        ([{"decoding_tokens": 1}, {}], 1),
        ([{}, {"missing_tokens": 99}], 1),
        # A cached prefix is worth its tokens, and no more.
        ([{"pending_tokens": 63, "missing_tokens": 36}, {}], 0),
        ([{"pending_tokens": 65, "missing_tokens": 36}, {}], 1),
        ([{"decoding_tokens": 65, "missing_tokens": 36}, {}], 1),
        # As much to do: the fewest sequences.
        ([{"pending_tokens": 5, "num_sequences": 2}, {"decoding_tokens": 5}], 1),
        # A replica without free blocks comes last, whatever it has cached.
        ([{"fits": False, "missing_tokens": 0}, {"decoding_tokens": 10_000}], 1),
        ([{"fits": False, "pending_tokens": 9}, {"fits": False, "pending_tokens": 8}], 1),
    ],
)  # fmt: skip
def test_least_work_before_the_first_token(changes: list[dict[str, Any]], chosen: int) -> None:
    offers = [replace(IDLE, replica=index, **each) for index, each in enumerate(changes)]
    assert choose(offers) == chosen
    assert choose(reversed(offers)) == chosen, "the order of the offers says nothing"


def scheduler(num_blocks: int = 16, max_num_seqs: int = 4) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8)
    return Scheduler(one_group(num_blocks, block_size=4), config, eos_token_ids=())


def sequence(num_tokens: int, first: int = 0, remote: bool = False) -> EngineSequence:
    tokens = list(range(first, first + num_tokens))
    return EngineSequence(first, SamplingParams(max_tokens=9), tokens, num_tokens, remote=remote)


def compute(it: Scheduler, one: EngineSequence, num_tokens: int) -> None:
    it.schedule()
    it.computed(one, num_tokens)


def test_an_offer_counts_what_is_still_to_be_computed_and_what_decodes_whole() -> None:
    it, one, two = scheduler(), sequence(10), sequence(7, first=50)
    it.add(one)
    it.add(two)
    assert candidate(0, it, 5, []) == Candidate(0, 17, 0, 5, num_sequences=2, fits=True)
    it.admit()
    compute(it, one, 8)
    assert candidate(0, it, 5, []).pending_tokens == 2 + 7
    it.release(two)
    it.add(remote := sequence(9, first=70, remote=True))
    it.admit()
    assert candidate(0, it, 5, []).decoding_tokens == 9, "its KV comes, it is not computed here"
    compute(it, one, 2)
    one.append(SampledToken(1))
    offer = candidate(0, it, 5, [])
    assert (offer.decoding_tokens, offer.pending_tokens) == (9 + 11, 0)
    it.release(one)
    it.release(remote)
    assert candidate(0, it, 5, []) == Candidate(0, 0, 0, 5, num_sequences=0, fits=True)


def test_each_router_hears_what_the_others_have_placed() -> None:
    it, mine, theirs = scheduler(), sequence(10), sequence(7, first=50)
    mine.router, theirs.router = "router-a", "router-b"
    it.add(mine)
    it.add(theirs)
    it.add(remote := sequence(9, first=70, remote=True))
    remote.router = "router-b"
    it.admit()
    compute(it, mine, 8)
    rates = MeasuredRates()
    for _ in range(20):
        rates.step(100, 0, 0.5)
    replicas: Any = [SimpleNamespace(scheduler=it, engine=SimpleNamespace(rates=rates))]

    def others(router: str) -> tuple[int, int]:
        load = node_load(replicas, True, "ok", router)
        assert load.running + load.waiting == 3
        assert load.rates.prefill == 0.005
        return load.others, load.others_tokens

    assert others("router-a") == (2, 7), "what comes from another node is not computed here"
    assert others("router-b") == (1, 2)
    assert others("") == (3, 9), "one that has just come has placed nothing"


def test_an_offer_leaves_out_what_is_cached() -> None:
    it, one = scheduler(), sequence(10)
    it.add(one)
    it.admit()
    compute(it, one, 10)
    hashes = hash_blocks([*range(10), 99, 98, 97], 4)
    assert candidate(0, it, 13, hashes).missing_tokens == 13 - 8
    assert candidate(0, it, 13, hash_blocks([9, *range(1, 10)], 4)).missing_tokens == 13


@pytest.mark.parametrize(
    ("num_tokens", "held", "waiting", "fits"),
    [
        (64, 0, 0, True),
        (65, 0, 0, False),
        (56, 4, 0, True),  # a block is held, one is spare for the sequence that runs
        (57, 4, 0, False),
        (32, 0, 32, True),
        (33, 0, 32, False),  # who waits goes first
    ],
)
def test_whether_a_job_fits(num_tokens: int, held: int, waiting: int, fits: bool) -> None:
    it = scheduler()
    if held:
        it.add(sequence(held))
        it.admit()
    if waiting:
        it.add(sequence(waiting, first=100))
    assert candidate(0, it, num_tokens, []).fits is fits


# ---- where the ranks are --------------------------------------------------------------------


def test_replicas_share_their_host() -> None:
    parallel = ParallelConfig(
        data_parallel_size=3, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    config = WorkerConfig(EngineConfig(parallel=parallel))
    specs = [worker_specs(config, "decode", replica=index) for index in range(3)]
    assert [[each.rank for each in one] for one in specs] == 3 * [[0, 1, 2, 3]]
    assert [each.local_rank for one in specs for each in one] == list(range(12))
    assert {(each.world_size, each.local_world_size) for one in specs for each in one} == {(4, 12)}
    assert [one[0].role for one in specs] == ["decode.0", "decode.1", "decode.2"]


@pytest.mark.parametrize(("replicas", "share"), [(1, 0.1), (2, 0.1), (8, 0.5 / 16)])
def test_ranks_of_a_cpu_node_leave_memory(
    replicas: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = ParallelConfig(data_parallel_size=replicas, tensor_parallel_size=2)
    found = kv_cache.psutil.virtual_memory()._replace(total=10**9)
    monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(kv_cache, "memory_limit", lambda: None)
    assert room_on_cpu(parallel) == int(10**9 * share)


def test_kv_size_on_cpus_does_not_depend_on_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the nodes that `up` starts here, and on their weights."""
    whole = kv_cache.psutil.virtual_memory()._replace(total=10**9)
    monkeypatch.setattr(kv_cache, "memory_limit", lambda: None)
    for free in (9 * 10**8, 10**6):
        now = whole._replace(available=free, free=free, percent=50.0)
        monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda now=now: now)
        assert room_on_cpu(ParallelConfig()) == 10**8
        assert room_on_cpu(ParallelConfig(host_nodes=10)) == 5 * 10**7
        assert room_on_cpu(ParallelConfig(host_nodes=10), weights=5 * 10**7) == 25 * 10**6
        assert room_on_cpu(ParallelConfig(), weights=2 * 10**9) == 0
    with pytest.raises(ConfigError, match=r"does not fit into .* of free memory: set a smaller"):
        kv_cache.check_ram(10**8)


def room_on_cpu(parallel: ParallelConfig, max_model_len: int = 16, weights: int = 0) -> int:
    """Returns the room of a rank whose blocks of 16 tokens have 1 KiB."""
    unused: Any = None
    engine = EngineConfig(parallel=parallel)
    spec = SimpleNamespace(kv_groups=(KVGroup((0,), 1, 8),))
    model: Any = SimpleNamespace(spec=spec, weights_bytes=weights)
    cpu = worker.torch.device("cpu")
    return kv_cache.available_bytes(engine, model, unused, [1024], max_model_len, cpu, unused)


def test_a_container_s_cache_is_sized_from_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of 100 MiB holds 10,240 blocks, half 51,200; one sequence comes before the tenth."""
    monkeypatch.setattr(kv_cache, "memory_limit", lambda: 500 * 10**6)
    assert room_on_cpu(ParallelConfig()) == 50 * 10**6
    monkeypatch.setattr(kv_cache, "memory_limit", lambda: 100 * 2**20)
    assert room_on_cpu(ParallelConfig(), 16 * 40_000) == 40_000 * 2**10
    assert room_on_cpu(ParallelConfig(), 16 * 60_000) == 50 * 2**20
    pair = ParallelConfig(tensor_parallel_size=2)
    assert room_on_cpu(pair, 16 * 40_000) == 25 * 2**20


def test_too_little_memory_and_missing_gpus_name_the_option_to_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache's pages are taken when first written: the kernel would kill the node under load."""
    monkeypatch.setattr(kv_cache, "memory_left", lambda: 2**20)
    kv_cache.check_ram(2**20)
    with pytest.raises(ConfigError, match=r"of 2\.0 MiB .* 1\.0 MiB .*--kv-cache-memory"):
        kv_cache.check_ram(2**21)
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 2 of the node .*--data-parallel-size"):
        worker.choose_device("cuda", 2)


# ---- starting -------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_ranks")
async def test_when_one_replica_cannot_start_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def specs(config: WorkerConfig, role: str, log: LogConfig, replica: int) -> list[WorkerSpec]:
        if replica == 1:
            config = replace(config, engine=replace(config.engine, model=ModelConfig(model="/no")))
        return worker_specs(config, role, log, replica)

    def start(*command: str) -> int:
        started.append(fork(*command))
        return started[-1]

    monkeypatch.setattr(ranks, "worker_specs", specs)
    fork = forked_ranks.start
    monkeypatch.setattr(forked_ranks, "start", start)
    with pytest.raises(ConfigError, match="/no"):
        await DecodeNode(node_config(replicas=2)).serve()
    assert started and not any(map(alive, started))


class Started:
    """An executor of which only the end is of interest."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.stopped = fails, False

    async def shutdown(self, deadline: float) -> None:
        self.stopped = True
        if self.fails:
            raise NodeError("a rank does not end")


async def test_one_that_does_not_stop_keeps_no_other_from_it() -> None:
    executors: Sequence[Any] = [Started(), Started(fails=True), Started()]
    none: Any = None
    with pytest.raises(NodeError, match="does not end"):
        await ranks.stop_ranks([ranks.Ranks(each, (), none) for each in executors])
    assert all(each.stopped for each in executors)


# ---- metrics --------------------------------------------------------------------------------


def test_metrics_name_the_replica() -> None:
    one, two = scheduler(), scheduler(num_blocks=8)
    two.add(sequence(5))
    samples = {
        (sample.name, sample.labels["engine"]): sample.value
        for metric in SchedulerCollector([one, two]).collect()
        for sample in metric.samples
    }
    assert samples["pdserve_kv_blocks", "0"] == 16
    assert samples["pdserve_kv_blocks", "1"] == 8
    assert samples["pdserve_num_requests_waiting", "1"] == 1
    assert samples["pdserve_prompt_tokens_total", "0"] == 0


def test_steps_are_counted_by_their_tokens() -> None:
    two = scheduler(), scheduler()
    for each, tokens in zip(two, (1, 3), strict=True):
        each.add(sequence(tokens))
        each.admit()
        assert each.schedule() is not None
    two[0].step_sizes.update(two[1].step_sizes)
    (found,) = (
        each
        for each in SchedulerCollector(two[:1]).collect()
        if each.name == "pdserve_iteration_tokens"
    )
    values = {(each.name, each.labels.get("le")): each.value for each in found.samples}
    assert values[f"{found.name}_bucket", "1.0"] == 1
    assert values[f"{found.name}_bucket", "8.0"] == values[f"{found.name}_count", None] == 2
    assert values[f"{found.name}_sum", None] == 1 + 3
