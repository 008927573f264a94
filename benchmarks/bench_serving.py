"""Load generator for any OpenAI-compatible server.

    python benchmarks/bench_serving.py --num-prompts 200 --request-rate 4 \\
        --random-input-len 256 --random-output-len 64 --ignore-eos --goodput ttft:500 tpot:50

A finite --request-rate is an open loop: requests arrive by a random process whether or not
earlier ones are answered. --max-concurrency alone is a closed loop: a new request for each
answered one. Flags and JSON keys follow `vllm bench serve` where it has them; what the
latencies mean is written in `serving/metrics.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from serving.arrivals import gamma_arrivals, trace_arrivals
from serving.client import Client, Record
from serving.datasets import (
    DatasetError,
    Prompt,
    RandomSpec,
    Vocabulary,
    random_prompts,
    read_trace,
    trace_prompts,
)
from serving.load import run_load
from serving.metrics import summarize
from serving.options import parse_args
from serving.report import as_json, plot, print_tables, warn_if_late


def load_prompts(args: argparse.Namespace) -> tuple[list[Prompt], list[float] | None]:
    """The prompts and when they are due; None is a closed loop."""
    vocabulary = _vocabulary(args)
    offsets = None
    if args.dataset_name == "trace":
        rows = read_trace(args.dataset_path, args.num_prompts)
        prompts = trace_prompts(rows, args.trace_length_scale, vocabulary, args.seed)
        offsets = trace_arrivals([row.timestamp for row in rows], args.trace_speedup)
    else:
        spec = RandomSpec(
            args.random_input_len,
            args.random_output_len,
            args.random_range_ratio,
            args.random_prefix_len,
        )
        prompts = random_prompts(spec, args.num_prompts, vocabulary, args.seed)
    rate = args.request_rate or (math.inf if offsets is None else None)
    if rate is not None:
        closed = math.isinf(rate) and args.max_concurrency is not None
        offsets = None if closed else gamma_arrivals(len(prompts), rate, args.burstiness, args.seed)
    return prompts, offsets


def _vocabulary(args: argparse.Namespace) -> Vocabulary:
    default = "words" if args.backend == "openai-chat" else "ids"
    return Vocabulary((args.prompt_format or default) == "ids", args.vocab_size)


async def measure_server(args: argparse.Namespace, console: Console) -> list[Record]:
    """Warms the server up, then runs the load."""
    prompts, offsets = load_prompts(args)
    async with _session(args) as session:
        client = await _client(session, args)
        first = RandomSpec(prompts[0].input_len, prompts[0].output_len)
        warmups = random_prompts(first, args.num_warmups, _vocabulary(args), args.seed + 1)
        for record in await run_load(client, warmups, None, args.max_concurrency or 1):
            if record.error is not None:
                raise DatasetError(f"a warm-up request failed: {record.error}")
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("requests", total=len(prompts))
            return await run_load(
                client, prompts, offsets, args.max_concurrency, lambda: bar.advance(task)
            )


def _session(args: argparse.Namespace) -> aiohttp.ClientSession:
    key = os.environ.get("OPENAI_API_KEY")
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=2**20,  # an event must fit
        timeout=aiohttp.ClientTimeout(total=args.timeout),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


async def _client(session: aiohttp.ClientSession, args: argparse.Namespace) -> Client:
    base = args.base_url.rstrip("/")
    chat = args.backend == "openai-chat"
    model = args.model
    if model is None:
        async with session.get(f"{base}/v1/models", raise_for_status=True) as response:
            model = (await response.json())["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "temperature": args.temperature, **args.extra_body}
    if args.ignore_eos:
        body["ignore_eos"] = True
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Client(session, base + path, chat, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every request completed, 1 when one failed, 2 for a bad start."""
    args = parse_args(argv)
    console = Console(stderr=args.json)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        records = asyncio.run(measure_server(args, console))
    except (DatasetError, OSError, aiohttp.ClientError) as error:
        console.print(f"[red]{error}")
        return 2
    summary, timings = summarize(records, dict(args.goodput))
    result = json.dumps(as_json(summary, _config(args), date), indent=2)
    if args.json:
        print(result)
    else:
        print_tables(summary, console)
    if args.max_concurrency is None:
        warn_if_late(summary, console)
    if args.save_result:
        args.save_result.write_text(result + "\n", encoding="utf-8")
    if args.plot:
        plot(timings, summary.slo, args.plot)
    return 1 if summary.failed else 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON; JSON has no infinity."""
    config = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    if args.request_rate is not None and math.isinf(args.request_rate):
        config["request_rate"] = "inf"
    return config


if __name__ == "__main__":
    sys.exit(main())
