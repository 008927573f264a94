"""How nodes share a GPU's memory, with a made-up card (`fake_card.py`)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_card import GIB, FakeCard
from paths import MODELS
from pdserve.common.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.node import engine_node
from pdserve.common.worker import kv_cache, worker
from pdserve.common.worker.gpu_memory import MAX_OUTSIDE_BYTES, GpuMemory, check_free

CUDA = torch.device("cuda", 0)
SHARE, WEIGHTS, STEP = 0.45, 16 * GIB, 2 * GIB


def kv_bytes(memory: GpuMemory, utilization: float = SHARE) -> int:
    """Returns what `available_bytes` leaves for KV; the step's peak is given."""
    engine, unused = EngineConfig(cache=CacheConfig(gpu_memory_utilization=utilization)), None
    model: Any = SimpleNamespace(spec=ModelSpec.from_folder(MODELS / "qwen3"), dtype=torch.bfloat16)
    shapes: Any = unused
    link: Any = unused
    return kv_cache.available_bytes(engine, model, shapes, [], 64, CUDA, link, memory)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    card = FakeCard()
    card.install(monkeypatch)
    monkeypatch.setattr(kv_cache, "_peak_of_largest_step", lambda *args: WEIGHTS + STEP)
    return card


def expected(card: FakeCard, utilization: float = SHARE) -> int:
    return int(card.total * utilization) - card.context - WEIGHTS - STEP


def test_a_second_node_on_a_fake_card_gets_what_the_first_one_got(card: FakeCard) -> None:
    for neighbour in (0, int(card.total * SHARE)):
        card.neighbour, card.outside, card.inside = neighbour, 0, 0
        memory = GpuMemory.enter(CUDA)
        memory.check_share(SHARE)
        card.inside = WEIGHTS + STEP
        assert kv_bytes(memory) == expected(card)


def test_a_neighbour_on_a_fake_card_that_starts_meanwhile_takes_little(card: FakeCard) -> None:
    """Its weights and cache come while this process loads its own."""
    memory = GpuMemory.enter(CUDA)
    card.inside, card.neighbour = WEIGHTS + STEP, int(card.total * SHARE)
    left = kv_bytes(memory)
    assert left == int(card.total * SHARE) - MAX_OUTSIDE_BYTES - WEIGHTS - STEP
    card.neighbour = 0  # it has left: no less than nothing is held outside torch
    card.outside = -GIB
    assert kv_bytes(memory) == int(card.total * SHARE) - WEIGHTS - STEP


def test_a_fake_card_that_others_use_is_refused_before_the_weights(card: FakeCard) -> None:
    card.neighbour = 50 * GIB
    with pytest.raises(ConfigError, match=r"0\.45 asks for 36\.00 GiB, .* 30\.00 GiB of 80\.00"):
        GpuMemory.enter(CUDA).check_share(SHARE)
    given = CacheConfig(num_gpu_blocks_override=8, gpu_memory_utilization=SHARE)
    assert worker._enter(CUDA, given) is not None


def test_without_nvml_the_context_on_a_fake_card_is_estimated(card: FakeCard) -> None:
    card.nvml = False
    memory = GpuMemory.enter(CUDA)
    assert card.total - GIB < memory.free_before <= card.total
    memory.check_share(0.99)


def test_a_cache_that_a_fake_card_cannot_hold_is_refused(card: FakeCard) -> None:
    card.neighbour, card.outside, card.inside = 40 * GIB, GIB, 20 * GIB
    check_free(19 * GIB, CUDA)
    with pytest.raises(ConfigError, match=r"20\.00 GiB does not fit into the 19\.00 GiB"):
        check_free(20 * GIB, CUDA)


def test_as_many_blocks_as_asked_for_must_fit_on_a_fake_card(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share was not checked, since the options state the number."""
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device: tensor(data))
    groups = ModelSpec.from_folder(MODELS / "qwen3").kv_groups

    def choose(count: int) -> tuple[int, ...]:
        engine = EngineConfig(cache=CacheConfig(num_gpu_blocks_override=count))
        world = GroupCoordinator()
        return kv_cache.choose_num_blocks(engine, groups, [GIB], 64, 0, world, CUDA)

    assert choose(70) == (70,)
    with pytest.raises(ConfigError, match=r"90\.00 GiB does not fit into the 80\.00 GiB"):
        choose(90)


@pytest.mark.parametrize(
    ("memory", "given", "expected"),
    [
        (80 * GIB, {}, (256, 8192)),
        (24 * GIB, {}, (256, 2048)),
        (0, {}, (256, 2048)),  # the ranks are on other hosts
        (80 * GIB, {"max_num_seqs": 64}, (64, 8192)),
        (80 * GIB, {"max_num_batched_tokens": 100}, (100, 100)),
        (80 * GIB, {"max_num_seqs": 9000}, (9000, 9000)),
    ],
)
def test_steps_of_a_fake_gpu_are_larger_unless_options_say_otherwise(
    memory: int,
    given: dict[str, int],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_node, "gpu_bytes", lambda: memory)
    config = WorkerNodeConfig(engine=EngineConfig(scheduler=SchedulerConfig(**given)))  # type: ignore[arg-type]
    assert engine_node.on_device(config, "cpu") is config
    scheduler = engine_node.on_device(config, "cuda").engine.scheduler
    assert (scheduler.seqs, scheduler.tokens) == expected
    shared = replace(config.engine, cache=CacheConfig(gpu_memory_utilization=0.35))
    scheduler = engine_node.on_device(replace(config, engine=shared), "cuda").engine.scheduler
    assert scheduler.tokens == given.get("max_num_batched_tokens", max(2048, scheduler.seqs))
