"""What was measured, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pdserve.bench.parts import ORDER
from pdserve.bench.step import Cell, Measured
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.core.host import cpu_name
from pdserve.common.planning.step_cost import Cost


def as_json(config: BenchStepConfig, found: Measured) -> dict[str, Any]:
    """Times in milliseconds."""
    return {
        "model": config.model.model or "the embedded model",
        "dtype": found.dtype,
        "quantization": config.model.quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "threads": torch.get_num_threads(),
        "clock": config.clock,
        "statistic": config.statistic,
        "repetitions": config.repetitions,
        "device": found.runner.device.type,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "peak_gflops": found.peaks.flops / 1e9,
        "read_gb_per_s": found.peaks.bandwidth / 1e9,
        "cells": {cell.name: _cell(found, cell) for cell in found.cells},
    }


def _cell(found: Measured, cell: Cell) -> dict[str, Any]:
    costs, step, seconds = found.cost.parts(cell.shape), found.step(cell), found.parts(cell)
    names = sorted(seconds, key=ORDER.index)
    parts = {name: _row(found, seconds[name], costs.get(name)) for name in names}
    total = found.cost.total(cell.shape)
    return {
        "step": {**_row(found, step, total), "samples_ms": _ms(found.cells[cell].steps)},
        "mfu": total.flops / step / found.peaks.flops,
        "bandwidth_utilisation": total.bytes / step / found.peaks.bandwidth,
        "parts": parts,
    }


def _row(found: Measured, seconds: float, cost: Cost | None) -> dict[str, Any]:
    row: dict[str, Any] = {"ms": 1e3 * seconds}
    if cost is not None:
        floor = found.floor(cost)
        row |= {"floor_ms": 1e3 * floor, "ratio": seconds / floor, "bound_by": found.bound(cost)}
        row |= {"flops": cost.flops, "bytes": cost.bytes}
    return row


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]
