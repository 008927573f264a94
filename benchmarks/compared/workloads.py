"""The workloads for every server, run by `pdserve bench serve`'s load generator."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.compared.servers import Running
from pdserve.bench.serving.client import Client, Record
from pdserve.bench.serving.datasets import Prompt, RandomSpec, Vocabulary, random_prompts
from pdserve.bench.serving.load import run_load
from pdserve.bench.serving.metrics import Summary, summarize

WORDS = Vocabulary(as_ids=False)  # text, which every server accepts; about one token per word
REQUEST_TIMEOUT = 300.0
WARM_UP_TOKENS = 4

Metrics = Mapping[str, float]


class Failed(Exception):
    """Requests failed; the message says how."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Always `clients` requests in flight."""

    input_len: int
    output_len: int
    clients: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.input_len:,}/{self.output_len}, {self.clients} clients"

    async def run(self, client: Client, seed: int) -> Metrics:
        spec = RandomSpec(self.input_len, self.output_len)
        prompts = random_prompts(spec, self.requests, WORDS, seed)
        return _latencies(_summary(await run_load(client, prompts, None, self.clients)))

    async def warm_up(self, client: Client) -> None:
        spec = RandomSpec(self.input_len, WARM_UP_TOKENS)
        prompts = random_prompts(spec, min(self.clients, 4), WORDS, seed=10**6)
        _summary(await run_load(client, prompts, None, self.clients))


@dataclass(frozen=True, slots=True)
class Mixed:
    """Streams that decode while long prompts are computed."""

    streams: int
    input_len: int
    output_len: int
    long_len: int
    every: float  # seconds from one long prompt to the next
    most: int  # most long prompts: bounds the backlog of a slow server
    long_output_len: int = 8

    @property
    def name(self) -> str:
        return f"{self.streams} streams beside {self.long_len:,}-token prompts"

    async def run(self, client: Client, seed: int) -> Metrics:
        short = RandomSpec(self.input_len, self.output_len)
        streams = random_prompts(short, self.streams, WORDS, seed)
        async with asyncio.TaskGroup() as group:
            read = group.create_task(run_load(client, streams, None, None))
            long = group.create_task(self._beside(read, client, seed))
        found = _summary(read.result()), _summary(long.result())
        return {**_latencies(found[0]), "long_ttft_p50": _latencies(found[1])["ttft_p50"]}

    async def _beside(
        self, read: asyncio.Task[list[Record]], client: Client, seed: int
    ) -> list[Record]:
        """Sends long prompts, the first after half a period, while the streams run."""
        sent: list[asyncio.Task[Record]] = []
        await asyncio.wait([read], timeout=self.every / 2)
        async with asyncio.TaskGroup() as group:
            for prompt in self._long_prompts(seed):
                sent.append(group.create_task(client.send(prompt)))
                if (await asyncio.wait([read], timeout=self.every))[0]:
                    break
        return [each.result() for each in sent]

    def _long_prompts(self, seed: int) -> Sequence[Prompt]:
        spec = RandomSpec(self.long_len, self.long_output_len)
        return random_prompts(spec, self.most, WORDS, seed + 10**5)

    async def warm_up(self, client: Client) -> None:
        _summary([await client.send(self._long_prompts(seed=10**6)[0])])


Workload = Closed | Mixed
FULL: tuple[Workload, ...] = (
    Closed(128, 64, 1, 6),
    Closed(128, 64, 8, 32),
    Closed(128, 64, 32, 96),
    Closed(1024, 32, 8, 24),
    Mixed(streams=4, input_len=64, output_len=400, long_len=1500, every=2.0, most=10),
)
QUICK: tuple[Workload, ...] = (
    Closed(128, 64, 1, 2),
    Closed(128, 64, 8, 16),
    Closed(128, 64, 32, 32),
    Closed(1024, 32, 8, 8),
    Mixed(streams=4, input_len=64, output_len=200, long_len=1500, every=2.0, most=4),
)


async def measure(workload: Workload, running: Running, seed: int) -> Metrics:
    """Returns metric → seconds or tokens per second. Raises Failed."""
    async with aiohttp.ClientSession(
        # New connections: some servers close idle ones just when they are reused.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=2**20,
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT),
    ) as session:
        return await workload.run(client_of(running, session), seed)


async def warm_up(workloads: Sequence[Workload], running: Running) -> None:
    """Generates a few tokens of each workload. Raises Failed."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
    async with aiohttp.ClientSession(read_bufsize=2**20, timeout=timeout) as session:
        for workload in workloads:
            await workload.warm_up(client_of(running, session))


def client_of(running: Running, session: aiohttp.ClientSession) -> Client:
    body = {"model": running.server.model, "temperature": 0, **running.server.body}
    url, says_done = f"{running.url}/v1/completions", running.server.says_done
    return Client(session, url, False, body, says_done)


def _summary(records: Sequence[Record]) -> Summary:
    summary, _ = summarize(records, {})
    if summary.failed:
        raise Failed(f"{summary.failed} of {len(records)} requests failed: {summary.errors}")
    return summary


def _latencies(summary: Summary) -> dict[str, float]:
    ttft, itl = summary.latencies["ttft"], summary.latencies["itl"]
    found = {
        "tok_s": summary.output_throughput,
        "prompt_tokens": summary.total_input_tokens / summary.completed,
        "output_tokens": summary.total_output_tokens / summary.completed,
    }
    if ttft is not None:
        found["ttft_p50"] = ttft.median / 1e3
    if itl is not None:
        found |= {"itl_p50": itl.median / 1e3, "itl_p99": itl.p99 / 1e3}
    return found
