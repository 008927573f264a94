"""`pdserve simulate`: replays a trace through the router's and the nodes' own rules."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.client.terminal import console_of
from pdserve.common.config.simulate import SimulateConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError
from pdserve.router.cluster.placement import load_policies
from pdserve.simulate.calibration import read_calibration
from pdserve.simulate.cluster import Setup, read_layout, simulate
from pdserve.simulate.outcome import table
from pdserve.simulate.traces import read_trace
from pdserve.simulate.workloads import Arrival

MOST_BLOCKS = 10_000_000  # of a node
MOST_SECONDS = 1e9  # from the first request to the last


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(
        SimulateConfig,
        prog="pdserve simulate",
        description="Replay a trace of requests through the production admission, placement and "
        "scheduling code on a layout of nodes, on a virtual clock, with the durations that pdserve "
        "calibrate has measured. An hour takes seconds. Prints a table.",
        argv=argv,
    )
    if config.trace is None or config.calibration is None:
        raise ConfigError("--trace (the requests) and --calibration (the durations) are required")
    if config.json and not Path(config.json).resolve().parent.is_dir():
        raise ConfigError(f"--json {config.json}: its folder does not exist")
    row = run(config)
    console_of().print(table([row]))
    if config.json:
        Path(config.json).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return 0


def run(config: SimulateConfig) -> dict[str, Any]:
    """Returns the figures of the run, by name.

    Raises:
        ConfigError: a file cannot be read, or an option's value is invalid.
    """
    assert config.trace is not None and config.calibration is not None
    read_layout(config.layout)
    num_blocks = max(1, config.kv_cache_tokens // config.block_size)
    if num_blocks > MOST_BLOCKS:
        raise ConfigError(
            f"--kv-cache-tokens {config.kv_cache_tokens}: at most {MOST_BLOCKS} blocks of "
            f"--block-size {config.block_size}"
        )
    setup = Setup(
        layout=config.layout,
        calibration=read_calibration(Path(config.calibration)),
        policies=load_policies(config.routing),
        routing=config.routing,
        scheduler=config.scheduler,
        host_cores=config.host_cores,
        seed=config.seed,
        num_blocks=num_blocks,
        block_size=config.block_size,
    )
    arrivals = _arrivals(config, setup.num_blocks * setup.block_size)
    began = time.process_time()
    found = simulate(setup, arrivals)
    return {
        "layout": config.layout,
        "prefill_policy": config.routing.prefill_policy,
        "decode_policy": config.routing.decode_policy,
        **found.row(
            config.goodput_ttft or config.routing.slo_ttft,
            config.goodput_itl or config.routing.slo_itl,
        ),
        "cpu_s": round(time.process_time() - began, 1),
    }


def _arrivals(config: SimulateConfig, room: int) -> list[Arrival]:
    assert config.trace is not None
    most = config.skip + config.requests if config.requests else None
    found = read_trace(Path(config.trace), most, config.block_size)[config.skip :]
    if not found:
        raise ConfigError(f"--skip {config.skip}: the trace has no more requests")
    longest = max(each.num_tokens + each.output_tokens for each in found)
    if longest > room:
        raise ConfigError(
            f"--kv-cache-tokens {config.kv_cache_tokens}: the longest request has {longest} tokens"
        )
    begun = found[0].time
    if (lasts := (found[-1].time - begun) / config.speed) > MOST_SECONDS:
        raise ConfigError(
            f"--trace {config.trace}: its requests come within {lasts:.3g} s at --speed "
            f"{config.speed:g}, more than {MOST_SECONDS:.0e}: are its times in seconds?"
        )
    return [replace(each, time=(each.time - begun) / config.speed) for each in found]
