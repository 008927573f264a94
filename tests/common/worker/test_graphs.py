"""Captured decode steps, without a GPU: what torch's tracer records of a step stands for what CUDA
records. Both replay it over the same memory, and neither calls Python again."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fake_flashinfer
from paths import MODELS
from pdserve.common.config.compilation import CompilationConfig
from pdserve.common.config.engine import EngineConfig, SchedulerConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import DRAWN, StepOutput
from pdserve.common.model import expert_weights
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.stages import Stage
from pdserve.common.worker.graphs import Compute, DecodeGraphs, kept_bytes, why_eager
from pdserve.common.worker.input_batch import StepBatch, StepSequence
from pdserve.common.worker.runner import ModelRunner
from pdserve.common.worker.token_feed import TokenFeed
from tiny_engine import BLOCK_SIZE, CPU, load, new_cache, some_tokens
from windowed import make_windowed

pytestmark = pytest.mark.usefixtures("inference")

FLASHINFER = "pdserve.common.model.attention_flashinfer"
SIZES = (2, 4)
GREEDY = SamplingParams(temperature=0.0)
# Of six sequences the blocks, in no order, and how long their prompts are.
PROMPTS = [(3, [9, 3]), (17, [7, 12]), (16, [1, 11]), (1, [2, 10]), (30, [8, 4, 0]), (15, [5, 6])]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[CausalLM]:
    """With FlashInfer's backend over the fake."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, FLASHINFER, raising=False)
    found = load(MODELS / "llama-gqa", kernels="torch")
    module = importlib.import_module(FLASHINFER)
    (shape,) = [each.shape for each in found.attentions]
    found.attentions = [module.FlashInferAttention(shape, CPU, torch.float32)]
    yield found
    del sys.modules[FLASHINFER]


class Recorder:
    """A `Capture`, which counts its replays."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def __call__(self, compute: Compute) -> Callable[[], object]:
        output = compute()
        recorded: Any = make_fx(compute)()

        def replay() -> None:
            self.replayed.append(len(output))
            recorded()

        return replay


def steps(runner: ModelRunner, counts: list[int]) -> list[dict[int, int]]:
    """Prompts, then one step for each of `counts`, of so many of the sequences. KV groups use the
    same blocks of their caches."""
    tokens = [[*some_tokens(length, seed=i)] for i, (length, _) in enumerate(PROMPTS)]
    found = []
    for count in [len(PROMPTS), *counts]:
        rows = []
        for seq_id in range(count):
            start = 0 if not found else len(tokens[seq_id]) - 1
            new = tuple(tokens[seq_id][start:])
            tables = (tuple(PROMPTS[seq_id][1]),) * len(runner.caches)
            rows.append(StepSequence(seq_id, new, start, tables, GREEDY))
        output = runner.run(StepBatch(1, tuple(rows)))
        found.append({seq_id: token.token_id for seq_id, token in output.tokens})
        for seq_id, token in found[-1].items():
            tokens[seq_id].append(token)
    return found


def steps_ahead(runner: ModelRunner, counts: list[int]) -> list[dict[int, int]]:
    """Like `steps`, but each step begins before the result of the last one is taken."""
    tokens = [[*some_tokens(length, seed=i)] for i, (length, _) in enumerate(PROMPTS)]
    ends = [length for length, _ in PROMPTS]
    found: list[dict[int, int]] = []
    pending: Callable[[], StepOutput] | None = None
    before = 0
    for count in [len(PROMPTS), *counts, 0]:
        rows = []
        for seq_id in range(count):
            start = ends[seq_id] - 1 if before else 0
            new = (DRAWN,) if seq_id < before else tuple(tokens[seq_id][start:])
            tables = (tuple(PROMPTS[seq_id][1]),) * len(runner.caches)
            rows.append(StepSequence(seq_id, new, start, tables, GREEDY))
            ends[seq_id] += 1
        begun = runner.begin(StepBatch(1, tuple(rows))) if rows else None
        if pending is not None:
            found.append({seq_id: token.token_id for seq_id, token in pending().tokens})
            for seq_id, token in found[-1].items():
                tokens[seq_id].append(token)
        pending, before = begun, count
    return found


def test_steps_take_the_tokens_of_the_step_before(model: CausalLM) -> None:
    """Replayed or not, without their result."""
    counts = [4, 3, 6, 2, 2, 5, 4, 1]
    expected = steps(ModelRunner(model, new_cache(model), CPU, samples=True), counts)
    for graphed in (False, True):
        feed, cache = TokenFeed(GroupCoordinator()), new_cache(model)
        runner = ModelRunner(model, cache, CPU, samples=True, feed=feed)
        if graphed:
            runner.graphs = DecodeGraphs(model, cache, SIZES, [3], again)
        assert steps_ahead(runner, counts) == expected


def test_replayed_steps_are_those_computed_eagerly(model: CausalLM) -> None:
    counts = [1, 2, 3, 4, 3, 6, 1, 4]  # each graph, with and without rows to fill up; none for 6
    caches = [new_cache(model), new_cache(model)]
    eager = ModelRunner(model, caches[0], CPU, samples=True)
    captured = ModelRunner(model, caches[1], CPU, samples=True)
    recorder = Recorder()
    captured.graphs = DecodeGraphs(model, caches[1], SIZES, [3], recorder)
    for (cache,) in caches:  # what was there before must not matter
        cache.fill_(torch.nan)
    expected = steps(eager, counts)
    assert steps(captured, counts) == expected
    assert recorder.replayed == [2, 2, 4, 4, 4, 2, 4]
    used = sorted({block for _, table in PROMPTS for block in table})
    torch.testing.assert_close(caches[1][0][:, :, used], caches[0][0][:, :, used], equal_nan=True)


def test_windows_are_captured_each_with_its_blocks(model: CausalLM, tmp_path: Path) -> None:
    """Sequences of 30 tokens and more see a window of 24 in every other layer."""
    windowed = load(make_windowed("qwen3", tmp_path), kernels="torch")
    backend = type(model.attentions[0])
    windowed.attentions = [backend(each.shape, CPU, torch.float32) for each in windowed.attentions]
    caches = [new_cache(windowed), new_cache(windowed)]
    expected = steps(ModelRunner(windowed, caches[0], CPU, samples=True), [4, 3, 5, 2])
    captured = ModelRunner(windowed, caches[1], CPU, samples=True)
    sizes = (2, 8)
    captured.graphs = DecodeGraphs(windowed, caches[1], sizes, [3, 3], recorder := Recorder())
    assert steps(captured, [4, 3, 5, 2]) == expected
    assert recorder.replayed == [8, 8, 8, 2]
    windowed.attentions = [backend(each.shape, CPU, torch.float32) for each in windowed.attentions]
    known = storages([windowed, caches[1]])
    graphs = DecodeGraphs(windowed, caches[1], sizes, [3, 2], once)
    for context in (context for graph in graphs._graphs for context in graph.contexts):
        context.wrapper.calls.clear()  # what only the fake keeps
        context.wrapper.forget_plan()
    kept = {each: size for each, size in storages(graphs).items() if each not in known}
    assert sum(kept.values()) == kept_bytes(windowed, sizes, [3, 2])


def test_mixtures_are_captured_where_a_kernel_counts(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's grouped product, as a CPU computes it, stands for the kernel of a GPU."""
    mixture = load(MODELS / "mixtral", kernels="torch")
    mixture.attentions = [
        type(model.attentions[0])(each.shape, CPU, torch.float32) for each in mixture.attentions
    ]
    caches = [new_cache(mixture), new_cache(mixture)]
    eager = ModelRunner(mixture, caches[0], CPU, samples=True)
    expected, loads = steps(eager, [2, 3, 4]), mixture.expert_loads()
    monkeypatch.setattr(expert_weights, "_has_kernel", lambda weight: True)
    assert why_eager(mixture) == ""
    captured = ModelRunner(mixture, caches[1], CPU, samples=True)
    captured.graphs = DecodeGraphs(mixture, caches[1], SIZES, [3], recorder := Recorder())
    assert steps(captured, [2, 3, 4]) == expected
    assert recorder.replayed == [2, 4, 4]
    assert torch.equal(mixture.expert_loads(), loads)  # no rows were filled up in the last step


@pytest.mark.parametrize("stage", [None, Stage(1, 2, first=False, last=False)], ids=str)
def test_the_memory_of_graphs_is_counted(model: CausalLM, stage: Stage | None) -> None:
    """Counts all tensors that live after capture: one buffer of logits, however many graphs."""
    part = load(MODELS / "llama-gqa", kernels="torch", stage=stage)
    part.attentions = model.attentions
    cache = new_cache(part)
    known = storages([part, cache])
    graphs = DecodeGraphs(part, cache, (2, 4, 8), [3], once)
    for graph in graphs._graphs:  # what only the fake keeps
        graph.contexts[0].wrapper.calls.clear()
        graph.contexts[0].wrapper.forget_plan()
    kept = {each: size for each, size in storages(graphs).items() if each not in known}
    assert sum(kept.values()) == kept_bytes(part, (2, 4, 8), [3])


def test_closed_graphs_are_gone(model: CausalLM) -> None:
    """A graph with collectives must go before its communicator, so no cycle may keep it."""
    captured: list[weakref.ref[Callable[[], object]]] = []

    def capture(compute: Compute) -> Callable[[], object]:
        compute()

        def replay() -> None: ...

        captured.append(weakref.ref(replay))
        return replay

    gc.disable()
    try:
        graphs = DecodeGraphs(model, new_cache(model), SIZES, [3], capture)
        assert [each() is None for each in captured] == [False, False]
        graphs.close()
        assert [each() is None for each in captured] == [True, True]
        assert not graphs.take(AttentionBatch([1], [0], [[1]], BLOCK_SIZE), 1)
    finally:
        gc.enable()


def once(compute: Compute) -> Callable[[], object]:
    """A `Capture` that keeps nothing."""
    compute()
    return bool


def storages(root: object) -> dict[int, int]:
    """The bytes of all memory that tensors within `root` use, by address."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
            continue
        left += gc.get_referents(each)
    return found


def again(compute: Compute) -> Callable[[], object]:
    """A `Capture` that records nothing."""
    compute()
    return compute


def test_stages_of_a_pipeline_have_graphs_of_their_own(model: CausalLM) -> None:
    rows = AttentionBatch([1, 1, 1], [0, 16, 5], [[9], [7, 12], [1]], BLOCK_SIZE)
    whole = DecodeGraphs(model, new_cache(model), [4], [2], again)
    expected = whole.run([5, 6, 7], rows.starts, [rows], None).clone()
    hidden = None
    for stage in (Stage(0, 1, last=False), Stage(1, model.spec.num_layers, first=False)):
        part = load(MODELS / "llama-gqa", kernels="torch", stage=stage)
        part.attentions = model.attentions
        graphs = DecodeGraphs(part, new_cache(part), [4], [2], again)
        hidden = graphs.run([5, 6, 7], rows.starts, [rows], hidden)
    torch.testing.assert_close(hidden, expected)


@pytest.mark.parametrize(("queries", "sampled"), [([1, 2], 2), ([1, 1], 1), ([1] * 5, 5)], ids=str)
def test_other_steps_are_no_graph_s(model: CausalLM, queries: list[int], sampled: int) -> None:
    graphs = DecodeGraphs(model, new_cache(model), SIZES, [2], again)
    tables = [[0, 1]] * len(queries)
    batch = AttentionBatch(queries, [3] * len(queries), tables, BLOCK_SIZE)
    assert not graphs.take(batch, sampled)


def test_why_steps_are_not_captured(model: CausalLM) -> None:
    assert why_eager(model) == ""
    assert "FlashInfer" in why_eager(load(MODELS / "llama-gqa", kernels="torch"))
    assert "expert" in why_eager(load(MODELS / "mixtral", kernels="torch"))


def engine(max_num_seqs: int, **options: Any) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
    return EngineConfig(scheduler=scheduler, compilation=CompilationConfig(**options))


def test_sizes() -> None:
    assert engine(1).graph_sizes == (1,)
    assert engine(3).graph_sizes == (1, 2, 3)
    assert engine(20).graph_sizes == (1, 2, 4, 8, 16, 20)
    assert engine(1000).graph_sizes[-2:] == (504, 512)
    assert engine(64, cuda_graph_sizes="8, 2,2").graph_sizes == (2, 8)
    assert engine(64, enforce_eager=True).graph_sizes == ()
    for wrong in ("", "0", "1,,2", "-4", "1;2", "65", "²"):
        with pytest.raises(ConfigError, match="--cuda-graph-sizes"):
            engine(64, cuda_graph_sizes=wrong)
