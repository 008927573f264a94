"""Compares step times and KV of a sliding window with full attention, by context length.

Two models with random weights that differ only in their window take the same steps: decodes of some
sequences, and a prompt chunk, after as many tokens. The cost of a window of 1,024 tokens must not
grow with the context. `KV` is the blocks that a sequence holds × their bytes.

    python benchmarks/bench_windows.py [--window 1024] [--contexts 4096,8192,16384,32768]
        [--sequences 4] [--chunk 256] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pdserve.bench.step import Cell
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.common.planning.kv_budget import format_bytes
from pdserve.common.worker.runner import ModelRunner

CPU, BLOCK_SIZE, ROUNDS = torch.device("cpu"), 16, 5
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 4096, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32", "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """`decode`, `chunk`: median milliseconds of a step. `kv`: bytes of KV per sequence."""

    window: int | None
    context: int
    decode: float
    chunk: float
    kv: int


def measure(window: int | None, context: int, sequences: int, chunk: int) -> Result:
    spec = ModelSpec.from_config({**CONFIG, "sliding_window": window})
    kernels = choose_kernels("native", CPU)
    sharding = Sharding(GroupCoordinator(), CPU, torch.float32, kernels=kernels)
    model = load_model(spec, ModelConfig(load_format="dummy"), sharding)
    (group,) = spec.kv_groups
    longest = -(-(context + chunk) // BLOCK_SIZE) - group.first_block(context, BLOCK_SIZE)
    shape = (len(group.layers), 2, sequences * longest, spec.num_kv_heads, BLOCK_SIZE)
    cache = torch.randn(*shape, spec.head_dim)
    runner = ModelRunner(model, [cache], CPU, samples=True)
    held = group.most_blocks(context, 1, BLOCK_SIZE)
    return Result(
        window,
        context,
        _milliseconds(runner, Cell.decode(sequences, context)),
        _milliseconds(runner, Cell("chunk", ((context, chunk),))),
        held * cache[:, :, 0].nbytes,
    )


def _milliseconds(runner: ModelRunner, cell: Cell) -> float:
    spec, took = runner.model.spec, []
    batch = cell.batch(BLOCK_SIZE, spec.vocab_size, spec.kv_groups)
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        runner.run(batch)
        took.append(time.perf_counter() - started)
    return 1e3 * statistics.median(took[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--contexts", default="4096,8192,16384,32768")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    results = [
        measure(window, int(context), options.sequences, options.chunk)
        for context in options.contexts.split(",")
        for window in (None, options.window)
    ]
    table = Table(title=f"{options.sequences} decodes, or a chunk of {options.chunk}")
    for column in ("context", "attention", "decode ms", "chunk ms", "KV of a sequence"):
        table.add_column(column, justify="right")
    for each in results:
        seen = f"window {each.window}" if each.window else "full"
        times = f"{each.decode:.1f}", f"{each.chunk:.1f}"
        table.add_row(f"{each.context:,}", seen, *times, format_bytes(each.kv))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=2))


if __name__ == "__main__":
    main()
