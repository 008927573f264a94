"""How a rank on a GPU starts and stops, with fakes for whatever needs CUDA."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paths import MODELS
from pdserve.common.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.distributed.communicator import CommunicatorContext
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.parallel_state import ParallelState
from pdserve.common.distributed.torch_communicator import START_SECONDS, NCCLCommunicator
from pdserve.common.model.kernels.quantized import Products
from pdserve.common.worker import sampler, worker
from pdserve.common.worker.input_batch import StepBatch
from pdserve.common.worker.runner import ModelRunner
from pdserve.common.worker.sampler import sample
from tiny_engine import CPU, load, new_cache, single_threaded_inference

CUDA = torch.device("cuda", 0)


def fake_runner(steps: list[tuple[int, int]], products: Products | None) -> Any:
    model = SimpleNamespace(
        kernels=SimpleNamespace(products=products),
        spec=SimpleNamespace(vocab_size=300),
        stage=SimpleNamespace(last=True),
    )
    runner = SimpleNamespace(device=CUDA, model=model, samples=True)
    runner.warm_up = lambda *step: steps.append(step)
    return runner


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the vocabularies for which the sampler's kernels were compiled."""
    found: list[int] = []
    monkeypatch.setattr(worker, "compile_kernels", lambda vocab, device: found.append(vocab))
    return found


def test_a_fake_gpu_is_warmed_up_with_single_queries_too(compiled: list[int]) -> None:
    """FlashInfer compiles their kernel at its first use, which takes longer than a step may."""
    steps: list[tuple[int, int]] = []
    runner = fake_runner(steps, None)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    worker._warm_up(runner, EngineConfig(scheduler=scheduler))
    assert steps == [(64, 8), (8, 8)]
    assert compiled == [300]


@pytest.mark.parametrize(("rows", "sampled"), [(8, [8, 8]), (20, [16, 16]), (100, [16, 32])])
def test_a_fake_gpu_is_warmed_up_with_all_sizes_of_products(rows: int, sampled: list[int]) -> None:
    """Triton compiles a kernel at its first use: for a range of tokens, and of rows of an int8
    head."""
    steps: list[tuple[int, int]] = []
    products: Any = SimpleNamespace(token_counts=(16, 32, 64, 128))
    scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(64, rows))
    worker._warm_up(fake_runner(steps, products), EngineConfig(scheduler=scheduler))
    found = dict(steps[2:])
    assert [found[size] for size in (16, 32)] == sampled
    assert all(tokens % count == 0 for tokens, count in steps[2:])
    assert set(found) == ({16, 32, 64} if rows > 64 else {16, 32})


def test_a_warm_up_samples_what_needs_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StepBatch] = []
    with single_threaded_inference():
        model = load(MODELS / "llama-gqa")
        runner = ModelRunner(model, new_cache(model), CPU, samples=True)
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda batch: seen.append(batch) or run(batch))
        runner.warm_up(12, 3)
    for sequence in seen[0].sequences:
        params = sequence.sampling
        assert params is not None and params.penalised and params.top_p < 1 and params.top_k
        assert params.logprobs and sequence.counts is not None


def test_parts_of_a_batch_draw_what_the_whole_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    with single_threaded_inference():
        model = load(MODELS / "llama-gqa")
        runner = ModelRunner(model, new_cache(model), CPU, samples=True)
        batches: list[StepBatch] = []
        monkeypatch.setattr(runner, "run", batches.append)
        runner.warm_up(5, 5)
    rows = list(batches[0].sequences)
    logits = torch.randn(5, model.spec.vocab_size)
    expected = sample(logits, rows).results()
    monkeypatch.setattr(sampler, "SAMPLED_AT_ONCE", 2 * model.spec.vocab_size + 1)
    assert sample(logits, rows).results() == expected


class FakeNCCL:
    """torch's `ProcessGroupNCCL`, as far as time-outs go."""

    class Options:
        _timeout = timedelta()

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.timeouts = [options._timeout.total_seconds()]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout.total_seconds())


def test_fake_nccl_waits_for_compilation_and_then_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    context = CommunicatorContext("tp", (0, 1), 0, ("a", "a"), ("127.0.0.1",) * 2, CUDA, None, 30.0)
    communicator = NCCLCommunicator(context)
    tp = GroupCoordinator("tp", (0, 1), 0, {"cuda": communicator}, CUDA)
    alone = GroupCoordinator()
    state = ParallelState(tp, tp, alone, alone, layout={})
    assert communicator._group.timeouts == [START_SECONDS]
    state.serve()
    assert set(communicator._group.timeouts[1:]) == {30.0}


def test_time_outs_are_long_until_a_rank_has_compiled_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU compiles and captures at the start, which are fakes here."""
    begun: list[str] = []

    def records(name: str) -> Any:
        return lambda *args: begun.append(name)

    monkeypatch.setattr(worker, "_warm_up", records("warm-up"))
    monkeypatch.setattr(worker, "build_graphs", records("graphs"))
    monkeypatch.setattr(ParallelState, "serve", records("serve"))
    cache = CacheConfig(num_gpu_blocks_override=20)
    model = ModelConfig(model=str(MODELS / "llama-gqa"), max_model_len=64)
    engine = EngineConfig(model=model, cache=cache, parallel=ParallelConfig(device="cpu"))
    (spec,) = worker.worker_specs(worker.WorkerConfig(engine))
    worker.build_worker(spec, lambda event: None).close()
    assert begun == ["warm-up", "graphs", "serve"]


def test_graphs_of_a_fake_gpu_end_before_its_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def thing(name: str) -> Any:
        return SimpleNamespace(close=lambda: ended.append(name))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ended.append("steps"))
    model: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=8, kv_groups=()))
    runner = ModelRunner(model, [torch.empty(1, 2, 1, 1, 16, 1)], CUDA, samples=False)
    runner.graphs = thing("graphs")
    unused: Any = None
    rank = worker.ModelWorker(
        0, thing("communicators"), runner, thing("cache"), unused, None, thing("grammars")
    )
    rank.close()
    assert ended == ["grammars", "graphs", "steps", "communicators", "cache"]
