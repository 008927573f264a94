"""Measures the cost of sending steps to ranks: bytes, and milliseconds of scheduling and encoding
on the node's event loop, and of decoding and applying on a rank.

    python benchmarks/bench_steps.py [--sequences 16] [--tokens 131072] [--no-penalties] [--json F]

`first` is the step after the admission of all sequences, which contains all of their data; `later`
are steps in which each sequence decodes one token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.messages import StepDelta
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence
from pdserve.common.worker.input_batch import InputBatch

BLOCK_SIZE, VOCAB = 16, 128 * 1024
TOKEN = SampledToken(7)


def decoding(sequences: int, tokens: int, penalties: bool) -> Scheduler:
    """Returns a scheduler whose sequences' KV has just arrived."""
    blocks = sequences * (tokens // BLOCK_SIZE + 64)
    pool = KVPool([KVGroup((0,), 1, 1)], [blocks], BLOCK_SIZE)
    scheduler = Scheduler(pool, SchedulerConfig(max_num_seqs=sequences), eos_token_ids=(0,))
    params = SamplingParams(repetition_penalty=1.1 if penalties else 1.0)
    for seq_id in range(sequences):
        prompt = [(seq_id * tokens + position) % VOCAB for position in range(tokens)]
        sequence = Sequence(seq_id, params, prompt, tokens, remote=True)
        scheduler.add(sequence)
        scheduler.admit()
        scheduler.activate(sequence, TOKEN)
    return scheduler


def measure(scheduler: Scheduler, steps: int) -> list[dict[str, float]]:
    known = InputBatch(BLOCK_SIZE, VOCAB, torch.device("cpu"), samples=True)
    decoder = msgspec.msgpack.Decoder(StepDelta)
    rows = []
    for _ in range(steps):
        started = time.perf_counter()
        delta = scheduler.schedule()
        message = msgspec.msgpack.encode(delta)
        told = time.perf_counter()
        known.apply(decoder.decode(message))
        applied = time.perf_counter()
        rows.append(
            {
                "bytes": len(message),
                "node_ms": 1e3 * (told - started),
                "rank_ms": 1e3 * (applied - told),
            }
        )
        for sequence in scheduler.running:
            scheduler.computed(sequence, 1)
            sequence.append(TOKEN)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128 * 1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-penalties", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scheduler = decoding(options.sequences, options.tokens, not options.no_penalties)
    first, *later = measure(scheduler, options.steps)
    medians = {key: statistics.median(row[key] for row in later) for key in first}
    result = {"sequences": options.sequences, "tokens": options.tokens}
    table = Table(title=f"{options.sequences} sequences of {options.tokens} tokens")
    for column in ("step", "bytes", "node ms", "rank ms"):
        table.add_column(column, justify="right")
    for name, row in (("first", first), ("later, median", medians)):
        table.add_row(
            name, f"{row['bytes']:,.0f}", f"{row['node_ms']:.2f}", f"{row['rank_ms']:.2f}"
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({**result, "first": first, "later": medians}, indent=2))


if __name__ == "__main__":
    main()
