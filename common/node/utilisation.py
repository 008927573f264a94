"""The utilisation of a replica's ranks: computed FLOPs and bytes of its steps, divided by time and
by the ranks' peaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from time import monotonic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.common.config.engine import ParallelConfig
from pdserve.common.core.core_table import lent_seconds
from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.messages import Peaks
from pdserve.common.node.model_facts import ModelFacts
from pdserve.common.node.ranks import Ranks
from pdserve.common.planning.footprint import Footprint
from pdserve.common.planning.step_cost import Cost, StepCost

WINDOW = 10.0  # seconds that the gauges cover, at least


class Utilisation:
    """Computes the figures of one replica, per rank, as the mean of its ranks."""

    def __init__(
        self,
        done: StepShape,
        cost: StepCost,
        stages: int,
        peaks: Peaks,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`done`: the scheduler's running sum of steps. `cost`: of all stages together."""
        self.peaks = peaks
        self._done, self._cost, self._stages, self._now = done, cost, stages, now
        self._samples = deque([(now(), copy(done))])  # the oldest is WINDOW old, or the first

    @classmethod
    def of(cls, ranks: Ranks, facts: ModelFacts, parallel: ParallelConfig) -> Utilisation:
        footprint = Footprint(
            facts.spec.on_gpus() if facts.device == "cuda" else facts.spec,
            facts.dtype,
            parallel.tensor_parallel_size,
            parallel.expert_parallel_size,
            facts.kv_cache_dtype,
        )
        done, stages = ranks.scheduler.computed_steps, parallel.pipeline_parallel_size
        return cls(done, StepCost.whole(footprint), stages, ranks.ready[0].peaks)

    def sample(self) -> None:
        """Takes a sample; call it about every second."""
        now = self._now()
        self._samples.append((now, copy(self._done)))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()

    def shares(self) -> tuple[float, float]:
        """Returns MFU and bandwidth utilisation since the oldest sample, idle time included."""
        then, before = self._samples[0]
        seconds = self._now() - then
        if seconds <= 0.0:
            return 0.0, 0.0
        cost = self._cost.total(self._done - before)
        per_second = self._stages * seconds
        return (
            cost.flops / per_second / self.peaks.flops,
            cost.bytes / per_second / self.peaks.bandwidth,
        )

    def totals(self) -> tuple[Cost, float]:
        """Returns FLOPs and all bytes since start, and the written part of the bytes."""
        cost, written = self._cost.total(self._done), self._cost.written(self._done)
        return Cost(cost.flops / self._stages, cost.bytes / self._stages), written / self._stages


class UtilisationCollector(Collector):
    """Exports the figures; the counters' names and the label `engine` are vLLM's."""

    def __init__(self, replicas: Sequence[Utilisation]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        last = f"of the last {WINDOW:.0f} s, idle time included"
        shares = [each.shares() for each in self._replicas]
        peaks = [each.peaks for each in self._replicas]
        mfu, used = zip(*shares, strict=True) if shares else ((), ())
        yield _gauge("mfu", f"FLOPs of a rank ÷ its peak, {last}", mfu)
        yield _gauge("bandwidth_utilisation", f"Bytes a rank must move ÷ its peak, {last}", used)
        yield _gauge(
            "peak_flops_per_second",
            "Peak of a rank in large matrix products: --peak-tflops, or measured at start",
            [each.flops for each in peaks],
        )
        yield _gauge(
            "peak_bytes_per_second",
            "Peak memory bandwidth of a rank: --peak-bandwidth, or measured at start",
            [each.bandwidth for each in peaks],
        )

    def _counters(self) -> Iterator[Metric]:
        totals = [each.totals() for each in self._replicas]
        for name, help, values in (
            ("flops", "FLOPs of a rank's steps", [cost.flops for cost, _ in totals]),
            ("read_bytes", "Weights and KV read by a rank", [c.bytes - w for c, w in totals]),
            ("write_bytes", "KV written by a rank", [written for _, written in totals]),
        ):
            found = CounterMetricFamily(
                f"pdserve_estimated_{name}_per_gpu", f"{help}, by arithmetic", labels=("engine",)
            )
            for engine, value in enumerate(values):
                found.add_metric((str(engine),), value)
            yield found


class LentCoresCollector(Collector):
    """Exports for how long the entries `cores` of the table `file` (--share-cores) were lent."""

    def __init__(self, file: str, cores: Sequence[int]) -> None:
        self._file, self._cores = Path(file), cores

    def collect(self) -> Iterator[Metric]:
        found = CounterMetricFamily(
            "pdserve_lent_core_seconds",
            "Time for which other nodes computed on this one's cores while it did not",
        )
        with suppress(OSError):  # the file has been deleted
            seconds = lent_seconds(self._file)
            found.add_metric((), sum(seconds[core] for core in self._cores))
        yield found


def _gauge(name: str, help: str, values: Sequence[float]) -> Metric:
    found = GaugeMetricFamily(f"pdserve_{name}", help, labels=("engine",))
    for engine, value in enumerate(values):
        found.add_metric((str(engine),), value)
    return found
