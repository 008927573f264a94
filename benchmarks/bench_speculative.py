"""Measures speculative decoding: output tok/s with and without it, and the acceptance rate.

    python benchmarks/bench_speculative.py --model FOLDER [--draft-model FOLDER] [--clients 1 8]
    python benchmarks/bench_speculative.py --model tests/models/llama-gqa --draft-model \\
        tests/models/mistral --dtype float32 --rounds 1 --json speculative.json

Runs a node of both roles per drafting method. All get the same prompts in turns, so that other load
affects all; figures are medians over rounds. Prompts are token ids, answers greedy. `repetitive`
repeats a passage, the best case for prompt lookup; `random` cannot be predicted from the prompt. `a
step` is the tokens per sequence and step with drafts; 1 means that drafting gains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fleet import Fleet
from benchmarks.warm_start import WarmStart
from pdserve.common.core.model_spec import ModelSpec

WORKLOADS = ("repetitive", "random")
PASSAGE = 24  # tokens
DRAFTS = "pdserve_spec_decode_num_drafts_total"
GUESSED = "pdserve_spec_decode_num_draft_tokens_total"
RIGHT = "pdserve_spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Row:
    """One drafting method under one load; medians over the rounds."""

    workload: str
    clients: int
    way: str
    tok_s: float
    faster: float  # output rate ÷ that without drafts
    acceptance: float  # share of drafts that were accepted
    tokens_a_step: float


@dataclass
class Shape:
    """A cluster and the results of its rounds: seconds, and the increase of its counters."""

    way: str
    fleet: Fleet

    def ask(self, prompts: Sequence[list[int]], output_len: int) -> tuple[float, float, float]:
        """Returns (tokens per second, share of accepted drafts, tokens per step with drafts)."""
        before, started = self._counters(), time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self._complete(prompt, output_len), prompts))
        seconds = time.monotonic() - started
        grown = {name: value - before[name] for name, value in self._counters().items()}
        return (
            len(prompts) * output_len / seconds,
            grown[RIGHT] / max(1, grown[GUESSED]),
            1 + grown[RIGHT] / max(1, grown[DRAFTS]),
        )

    def _complete(self, prompt: list[int], output_len: int) -> None:
        body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.fleet.ports['http']}/v1/completions"
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=3600) as answer:
            got = json.load(answer)["usage"]["completion_tokens"]
        if got != output_len:
            raise RuntimeError(f"{self.way}: {got} tokens, not {output_len}")

    def _counters(self) -> dict[str, float]:
        values = dict.fromkeys((DRAFTS, GUESSED, RIGHT), 0.0)
        for node in self.fleet.state()["nodes"]:
            with urlopen(f"http://{node['metrics_address']}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            for name, _, value in (line.rpartition(" ") for line in lines):
                if (plain := name.partition("{")[0]) in values:
                    values[plain] += float(value)
        return values


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER")
    add("--draft-model", type=Path, metavar="FOLDER", help="draft model with the same vocabulary")
    add("--dtype", default="auto")
    add("--num-speculative-tokens", type=int, default=4, metavar="N")
    add("--clients", type=int, nargs="+", default=[1, 8], metavar="N")
    add("--input-len", type=int, default=256, metavar="TOKENS")
    add("--output-len", type=int, default=128, metavar="TOKENS")
    add("--rounds", type=int, default=3, metavar="N")
    add("--cpu-threads", type=int, default=0, metavar="N")
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    counts = (*options.clients, options.input_len, options.output_len, options.rounds)
    if min(counts) < 1:
        parser.error("clients, lengths and rounds must be at least 1")
    return options


def ways(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns method name → --speculative-config."""
    count = {"num_speculative_tokens": options.num_speculative_tokens}
    lookup = {"method": "ngram", **count, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    found: dict[str, dict[str, Any]] = {"none": {}, "ngram": lookup}
    if options.draft_model is not None:
        model = str(options.draft_model.resolve())
        found["draft_model"] = {"method": "draft_model", "model": model, **count}
    return found


@contextmanager
def started(options: argparse.Namespace, folder: Path) -> Iterator[list[Shape]]:
    """Runs a cluster per method; yields them once all are ready."""
    environment = {"TMPDIR": str(folder)}
    warm = WarmStart(environment)
    shapes: list[Shape] = []
    try:
        for way, config in ways(options).items():
            log = folder / f"{way}.log"
            fleet = Fleet(options.model.resolve(), log, environment, warm=warm)
            shapes.append(Shape(way, fleet))
            fleet.start_router()
            guess = {"speculative_config": json.dumps(config)} if config else {}
            window = options.input_len + options.output_len
            fleet.start_node(
                "both", dtype=options.dtype, max_model_len=window,
                cpu_threads=options.cpu_threads, **guess,
            )  # fmt: skip
        for shape in shapes:
            shape.fleet.wait_ready()
        yield shapes
    finally:
        for shape in shapes:
            shape.fleet.stop()
        warm.close()


def prompts(workload: str, count: int, length: int, vocab: int, chance: random.Random) -> list[Any]:
    """Returns new prompts, so that the prefix cache has no hits."""
    size = PASSAGE if workload == "repetitive" else length
    passages = [chance.choices(range(3, vocab), k=size) for _ in range(count)]
    return [(passage * (length // size + 1))[:length] for passage in passages]


def measure(shapes: Sequence[Shape], options: argparse.Namespace) -> list[Row]:
    vocab, chance = ModelSpec.from_folder(options.model).vocab_size, random.Random(0)
    rows = []
    for workload in WORKLOADS:
        for clients in options.clients:
            rounds: dict[str, list[tuple[float, float, float]]] = {s.way: [] for s in shapes}
            for _ in range(options.rounds):
                asked = prompts(workload, clients, options.input_len, vocab, chance)
                for shape in shapes:
                    rounds[shape.way].append(shape.ask(asked, options.output_len))
            medians = {
                way: [statistics.median(column) for column in zip(*each, strict=True)]
                for way, each in rounds.items()
            }
            for way, (tok_s, acceptance, step) in medians.items():
                faster = tok_s / medians["none"][0]
                rows.append(Row(workload, clients, way, tok_s, faster, acceptance, step))
    return rows


def show(rows: Sequence[Row]) -> None:
    names = ("workload", "clients", "guesses", "tok/s", "× none", "right", "a step")
    table = Table(*names)
    for row in rows:
        figures = (f"{row.tok_s:.1f}", f"{row.faster:.2f}")
        guessed = (f"{100 * row.acceptance:.0f} %", f"{row.tokens_a_step:.2f}")
        table.add_row(
            row.workload, str(row.clients), row.way, *figures,
            *(guessed if row.way != "none" else ("–", "–")),
        )  # fmt: skip
    Console(highlight=False).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="bench-speculative-") as folder,
        started(options, Path(folder)) as shapes,
    ):
        rows = measure(shapes, options)
    show(rows)
    if options.json:
        result = {"cpus": os.cpu_count(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
