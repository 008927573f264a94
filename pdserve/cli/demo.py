"""`pdserve demo`: starts a cluster, asks one question, streams the answer, prints its timeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pdserve.cli.cluster import own_session
from pdserve.cli.up import make_cluster, model_name, with_model
from pdserve.client.server import Server
from pdserve.client.terminal import console_of
from pdserve.common.config.cluster import ClusterConfig, private_cluster
from pdserve.common.config.shared import option
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.request import Timeline
from pdserve.common.obs.metrics import time_per_output_token


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Demo

    The question, and a quiet cluster on free ports.
    """

    prompt: str = option("Why is the sky blue? Answer in two sentences.", "the question")
    max_tokens: int = option(96, "longest answer in tokens", minimum=1)
    cluster: ClusterConfig = field(
        default_factory=lambda: private_cluster(restart="no")  # a crash should be seen
    )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The timeline and token counts of a finished request."""

    timeline: Timeline
    prompt_tokens: int
    completion_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(
        DemoConfig,
        prog="pdserve demo",
        description="Start a cluster, ask it one question, show the request's timeline, stop.",
        argv=argv,
    )
    console = console_of()
    config = replace(config, cluster=with_model(config.cluster, console))
    return asyncio.run(demo(config, console))


async def demo(config: DemoConfig, console: Console) -> int:
    """Returns 0 after an answer, 1 on a failure, 130 when interrupted. The cluster is stopped."""
    cluster = make_cluster(config.cluster, console)
    try:
        with console.status("starting the cluster; loading weights"):
            started = await cluster.start()
        if started and await cluster.until_ended(show(cluster.url, config, console)):
            return 0
        return 130
    except PdserveError as error:
        console.print(f"pdserve demo: error: {error.message}", style="red")
        return 1
    finally:
        await cluster.stop()


async def show(url: str, config: DemoConfig, console: Console) -> None:
    """Asks, prints the answer while it streams, then its timeline."""
    console.print(f"{model_name(config.cluster)} at {url}/v1", style="dim")
    console.print(f"> {config.prompt}", style="bold")
    pieces: list[dict[str, Any]] = []
    async for chunk in ask(url, config):
        pieces.append(chunk)
        for choice in chunk.get("choices", ()):
            console.out(choice["delta"].get("content") or "", end="")
    console.print("\n")
    console.print(timeline_table(read_answer(pieces)))


async def ask(url: str, config: DemoConfig) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of a streamed chat completion.

    Raises:
        PdserveError: the server answered with an error, before or within the stream.
    """
    request = {
        "messages": [{"role": "user", "content": config.prompt}],
        "max_tokens": config.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with own_session(config.cluster.server) as session:
        server = Server(session, url)
        headers = {"X-Pdserve-Timeline": "1"}
        async for chunk in server.stream("/v1/chat/completions", request, headers):
            yield chunk


def read_answer(chunks: Sequence[dict[str, Any]]) -> DemoResult:
    """Finds the usage and the timeline among the chunks.

    Raises:
        NodeError: the stream ended without them.
    """
    found: dict[str, Any] = {}
    for chunk in chunks:
        found.update({key: chunk[key] for key in ("usage", "pdserve") if chunk.get(key)})
    if found.keys() != {"usage", "pdserve"}:
        raise NodeError("the stream ended without usage and timeline")
    return DemoResult(
        msgspec.convert(found["pdserve"]["timeline"], Timeline),
        found["usage"]["prompt_tokens"],
        found["usage"]["completion_tokens"],
    )


def timeline_table(answer: DemoResult) -> Table:
    """Returns the request's stages in order with their times, then TTFT, TPOT and the total."""
    line = answer.timeline
    table = Table("stage", "time", "what happened", title="where the time went")
    table.add_row("queue", _ms(line.queued), "waited for admission and nodes")
    if line.reserved is not None:
        reserve = _ms(_between(line.queued, line.reserved))
        table.add_row("reserve", reserve, "decode node reserved blocks")
    prefill = f"{answer.prompt_tokens} tokens, {line.cached_tokens} of them cached"
    since = line.queued if line.reserved is None else line.reserved
    table.add_row("prefill", _ms(_between(since, line.first_token)), prefill)
    if line.reserved is not None:
        moved = f"{line.transfer_bytes / 2**20:.2f} MiB at {_gigabytes_per_second(line)}"
        table.add_row("KV transfer", _ms(line.transfer_seconds), moved)
    decode = f"{answer.completion_tokens} tokens"
    table.add_row("decode", _ms(_between(line.first_token, line.finished)), decode)
    table.add_section()
    table.add_row("TTFT", _ms(line.first_token), "time to first token")
    tpot = time_per_output_token(line, answer.completion_tokens, 1)
    table.add_row("TPOT", _ms(tpot), "time per output token after the first")
    table.add_row("total", _ms(line.finished), "")
    return table


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"


def _gigabytes_per_second(line: Timeline) -> str:
    if not line.transfer_seconds:
        return "–"
    return f"{line.transfer_bytes / line.transfer_seconds / 1e9:.2f} GB/s"
