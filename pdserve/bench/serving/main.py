"""`pdserve bench serve`: a load generator for any OpenAI-compatible server.

A finite --request-rate is an open loop: requests arrive by a random process whether or not
earlier ones are answered. --max-concurrency alone is a closed loop: each answer starts the next
request. With --slo-… it searches the capacity with runs at several rates (`capacity.py`). Flags and
JSON keys follow `vllm bench serve`; `metrics.py` defines the latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from pdserve.bench.serving.capacity import find_capacity
from pdserve.bench.serving.client import Client, Record
from pdserve.bench.serving.datasets import (
    DatasetError,
    PrefixSpec,
    Prompt,
    RandomSpec,
    Vocabulary,
    prefix_prompts,
    random_prompts,
    read_trace,
    sharegpt_prompts,
    trace_prompts,
)
from pdserve.bench.serving.load import gamma_arrivals, run_load, trace_arrivals
from pdserve.bench.serving.metrics import summarize
from pdserve.bench.serving.options import fit_lengths, limits, parse_args, seeks_capacity
from pdserve.bench.serving.report import as_json, plot, print_tables, warn_if_late
from pdserve.client.server import LOOK_TIMEOUT, Server, key_from_environment
from pdserve.client.terminal import console_of
from pdserve.common.core.errors import ConfigError, PdserveError


def load_prompts(args: argparse.Namespace) -> tuple[list[Prompt], list[float] | None]:
    """Returns (prompts, arrival times in seconds); without arrival times it is a closed loop."""
    vocabulary = _vocabulary(args)
    offsets = None
    if args.dataset_name == "trace":
        rows = read_trace(args.dataset_path, args.num_prompts)
        prompts = trace_prompts(rows, args.trace_length_scale, vocabulary, args.seed)
        offsets = trace_arrivals([row.timestamp for row in rows], args.trace_speedup)
    elif args.dataset_name == "sharegpt":
        prompts = sharegpt_prompts(args.num_prompts, vocabulary, args.seed, args.sharegpt_max_len)
    elif args.dataset_name == "prefix_repetition":
        shared = PrefixSpec(
            args.prefix_repetition_prefix_len,
            args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes,
            args.prefix_repetition_output_len,
        )
        prompts = prefix_prompts(shared, args.num_prompts, vocabulary, args.seed)
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


async def measure_server(args: argparse.Namespace, console: Console) -> tuple[list[Record], Found]:
    """Warms the server up and runs the load, or searches the capacity. Returns the records of the
    (last good) run and, after a search, its result."""
    async with _session(args) as session:
        client = await _client(session, args)
        window = await _window(Server(session, args.base_url), client)
        if fitted := fit_lengths(args, window):
            console.print(f"the server's context is {window} tokens, so: {' '.join(fitted)}")
        prompts, offsets = load_prompts(args)
        first = RandomSpec(prompts[0].input_len, prompts[0].output_len)
        warmups = random_prompts(first, args.num_warmups, _vocabulary(args), args.seed + 1)
        for record in await run_load(client, warmups, None, args.max_concurrency or 1):
            if record.error is not None:
                why = f" ({record.reason})" if record.reason else ""
                raise DatasetError(f"a warm-up request failed: {record.error}{why}")
        if seeks_capacity(args):
            return await _seek(client, args, console)
        return await _run(client, prompts, offsets, args, console), {}


Found = dict[str, Any]


async def _run(
    client: Client,
    prompts: list[Prompt],
    offsets: list[float] | None,
    args: argparse.Namespace,
    console: Console,
    name: str = "requests",
) -> list[Record]:
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(name, total=len(prompts))
        return await run_load(
            client, prompts, offsets, args.max_concurrency, lambda: bar.advance(task)
        )


async def _seek(
    client: Client, args: argparse.Namespace, console: Console
) -> tuple[list[Record], Found]:
    """Searches the capacity. Each run draws new prompts, so that none hits the prefix cache."""
    runs: dict[float, list[Record]] = {}

    async def measure(rate: float) -> float:
        again = argparse.Namespace(**{**vars(args), "seed": args.seed + 2 + len(runs)})
        again.request_rate = rate
        prompts, offsets = load_prompts(again)
        name = f"{rate:.3g} requests/s"
        runs[rate] = await _run(client, prompts, offsets, args, console, name)
        share = summarize(runs[rate], limits(args))[0].goodput_share or 0.0
        console.print(f"{name}: {share:.1%} meet the limits")
        return share

    start = args.request_rate or 1.0
    precision = 1 + args.capacity_precision
    capacity, steps = await find_capacity(measure, start, args.slo_attainment, precision)
    found = {"capacity": capacity, "steps": [asdict(step) for step in steps]}
    return runs[capacity or steps[-1].rate], found


def _session(args: argparse.Namespace) -> aiohttp.ClientSession:
    key = key_from_environment()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=2**20,  # an event must fit
        timeout=aiohttp.ClientTimeout(total=args.timeout),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


async def _client(session: aiohttp.ClientSession, args: argparse.Namespace) -> Client:
    server = Server(session, args.base_url)
    chat = args.backend == "openai-chat"
    model = args.model if args.model is not None else await server.model()
    body: dict[str, Any] = {"model": model, "temperature": args.temperature, **args.extra_body}
    if args.ignore_eos:
        body["ignore_eos"] = True
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Client(session, server.url + path, chat, body)


async def _window(server: Server, client: Client) -> int | None:
    """Returns the server's max_model_len in tokens, or None if it does not say."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT):
            cards = await server.models()
    except (PdserveError, TimeoutError):  # some servers have no /v1/models
        return None
    mine = [card for card in cards if card["id"] == client.body["model"]]
    found = (*mine, *cards)[0].get("max_model_len")
    return found if isinstance(found, int) and found > 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every request completed, 1 when one failed or no rate meets the limits."""
    args = parse_args(argv)
    console = console_of(stderr=args.json)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        records, found = asyncio.run(measure_server(args, console))
    except (DatasetError, OSError) as error:
        raise ConfigError(str(error)) from error
    summary, timings = summarize(records, limits(args))
    result = json.dumps({**as_json(summary, _config(args), date), **found}, indent=2)
    if args.json:
        print(result)
    else:
        print_tables(summary, console)
    if found:
        console.print(f"capacity: {found['capacity']:.3g} requests/s")
    elif args.max_concurrency is None:
        warn_if_late(summary, console)
    if args.save_result:
        args.save_result.write_text(result + "\n", encoding="utf-8")
    if args.plot:
        plot(timings, summary.slo, args.plot)
    return 1 if summary.failed or found.get("capacity") == 0 else 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options as JSON data; infinity becomes "inf"."""
    config = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    if args.request_rate is not None and math.isinf(args.request_rate):
        config["request_rate"] = "inf"
    return config
