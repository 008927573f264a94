"""A node says how much of its ranks it uses: arithmetic, with times that tests make up."""

from __future__ import annotations

import grpc
import pytest
import torch

from clock import Clock
from live_node import MODEL, decode_node, generate
from pdserve.common.config.engine import MachineConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.messages import Peaks
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.node.utilisation import WINDOW, Utilisation
from pdserve.common.planning.footprint import Footprint
from pdserve.common.planning.step_cost import StepCost
from pdserve.common.worker.peaks import peaks_of

COST = StepCost.whole(Footprint(ModelSpec.from_folder(MODEL), "float32"))
STEP = StepShape.of([(30, 1)] * 4, sampled=4)


def made(stages: int = 1) -> tuple[Utilisation, StepShape, Clock]:
    """Returns that of ranks of which one would compute STEP in a tenth of a second, and read it in
    a fifth."""
    total, done, clock = COST.total(STEP), StepShape(), Clock()
    peaks = Peaks(flops=total.flops * 10, bandwidth=total.bytes * 5)
    return Utilisation(done, COST, stages, peaks, clock), done, clock


def compute(done: StepShape, times: int) -> None:
    for _ in range(times):
        done.add_step([30] * 4, [], sampled=4)


def test_shares_are_of_what_ranks_could_have_done() -> None:
    used, done, clock = made()
    assert used.shares() == (0.0, 0.0)
    compute(done, times=3)
    clock.time += 1.0
    assert used.shares() == pytest.approx((0.3, 0.6))
    clock.time += 1.0  # idle
    assert used.shares() == pytest.approx((0.15, 0.3))


def test_stages_share_a_step() -> None:
    used, done, clock = made(stages=2)
    compute(done, times=4)
    clock.time += 1.0
    assert used.shares() == pytest.approx((0.2, 0.4))
    assert used.totals()[0].flops == pytest.approx(2 * COST.total(STEP).flops)


def test_gauges_forget_and_counters_do_not() -> None:
    used, done, clock = made()
    compute(done, times=50)
    for _ in range(int(WINDOW)):
        clock.time += 1.0
        used.sample()
    assert used.shares()[0] == pytest.approx(50 / WINDOW / 10)
    clock.time += 1.0
    used.sample()
    assert used.shares() == (0.0, 0.0), "all of it was before the window"
    cost, written = used.totals()
    assert cost.flops == pytest.approx(50 * COST.total(STEP).flops)
    assert written == 200 * COST.footprint.kv_per_token(COST.stage)


def test_added_steps_cost_what_each_of_them_does() -> None:
    both = StepShape()
    both.add_step([30] * 4, [], sampled=4)
    both.add_step([12], [(0, 40), (16, 9)], sampled=1)
    other = StepShape.of([(12, 1), (0, 40), (16, 9)], sampled=1)
    assert both - other == STEP
    together = COST.total(STEP) + COST.total(other)
    assert COST.total(both).flops == pytest.approx(together.flops)
    assert COST.total(both).bytes == pytest.approx(together.bytes)


def test_options_are_taken_for_peaks_and_what_they_leave_is_measured() -> None:
    cpu = torch.device("cpu")
    given = MachineConfig(peak_tflops=2.5, peak_bandwidth=40.0)
    assert peaks_of(given, cpu, torch.float32, 1 << 20, TorchKernels()) == Peaks(2.5e12, 40e9)
    given = MachineConfig(peak_bandwidth=40.0)
    measured = peaks_of(given, cpu, torch.float32, 1 << 20, TorchKernels())
    assert measured.flops > 0 and measured.bandwidth == 40e9
    assert peaks_of(MachineConfig(), cpu, torch.bfloat16, 0, TorchKernels()).bandwidth > 0


@pytest.mark.usefixtures("forked_ranks")
async def test_a_node_counts_what_it_computes() -> None:
    async with (
        decode_node(replicas=2) as (node, _, _),
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        assert await generate(channel) == 4

        def of(name: str, engine: int = 0) -> float:
            found = node.metrics.registry.get_sample_value(
                f"pdserve_{name}", {"engine": str(engine)}
            )
            assert found is not None
            return found

        steps = [(0, 37), *((37 + i, 1) for i in range(3))]
        flops = sum(COST.total(StepShape.of([each], sampled=1)).flops for each in steps)
        assert of("estimated_flops_per_gpu_total") == pytest.approx(flops)
        written = 40 * COST.footprint.kv_per_token(COST.stage)
        assert of("estimated_write_bytes_per_gpu_total") == written
        assert of("estimated_flops_per_gpu_total", 1) == of("mfu", 1) == 0
        for name in ("mfu", "bandwidth_utilisation", "peak_flops_per_second"):
            assert of(name) > 0
