"""`pdserve run-batch`: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from pdserve.cli.cluster import own_session
from pdserve.cli.up import make_cluster, with_model
from pdserve.client.server import Answer, Server, client_session, key_from_environment
from pdserve.client.terminal import console_of
from pdserve.common.config.batch import BatchConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, DeadlineExceeded, NodeError, PdserveError
from pdserve.common.core.printable import printable
from pdserve.offline.batch_file import Failures, Item, Output, answered, failed, read_items
from pdserve.offline.llm import places

TRIES = 6  # per request with a retryable failure: about 15 seconds
CONCURRENCY = 64  # requests at once to a server of unknown size
# These statuses concern the server or the key, so all requests: they end the run.
_ENDS_RUN = (401, 403, 429, 503)

INTERRUPTED = "interrupted"
OnDone = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BatchSummary:
    requests: int
    answered: int  # with status 200
    failed: int
    earlier: int  # how many an earlier run had answered
    output_file: str
    commonest_error: Failures | None = None
    ended_by: str | None = None  # why the run ended before all were answered


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when all requests were answered, 1 when some failed or the run ended early, 130
    when interrupted. Running the same command again answers the missing ones."""
    config = parse(
        BatchConfig,
        prog="pdserve run-batch",
        description="Answer a file of requests in OpenAI's batch format. After an interruption the "
        "same command continues.",
        argv=argv,
    )
    config.check()
    console = console_of(stderr=True)
    path = Path(config.input_file or "")
    try:
        count = sum(1 for _ in read_items(path))
        output = Output(Path(config.output_file or ""))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    earlier = sum(output.done.has(item) for item in read_items(path))
    ended_by: str | None = None
    try:
        with closing(output):
            ended_by = _answer(config, output, count, earlier, console)
    except OSError as error:
        ended_by = f"{error.filename or output.path}: {error.strerror}"
    _report(config, _summary(output, path, earlier, ended_by), console)
    if ended_by == INTERRUPTED:
        return 130
    return 1 if ended_by or output.done.failed else 0


def _answer(
    config: BatchConfig, output: Output, count: int, earlier: int, console: Console
) -> str | None:
    """Answers the missing requests; returns why the run ended early, or None."""
    try:
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=console
        ) as bar:
            task = bar.add_task("requests", total=count, completed=earlier)
            finished = asyncio.run(_run(config, output, lambda: bar.advance(task), console))
        return None if finished else INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError:
        raise
    except PdserveError as error:
        return error.message


async def _run(config: BatchConfig, output: Output, on_done: OnDone, console: Console) -> bool:
    """Answers the missing requests; returns False when interrupted."""
    path = Path(config.input_file or "")
    if config.url is not None:
        limit = config.max_concurrency or CONCURRENCY
        async with client_session(key_from_environment(), timeout=config.timeout) as session:
            await answer_all(Server(session, config.url), path, output, limit, on_done)
        return True
    config = replace(config, cluster=with_model(config.cluster, console))
    cluster = make_cluster(config.cluster, console)
    limit = config.max_concurrency or places(config.cluster)
    try:
        if not await cluster.start():
            return False
        async with own_session(config.cluster.server, config.timeout) as session:
            server = Server(session, cluster.url)
            return await cluster.until_ended(answer_all(server, path, output, limit, on_done))
    finally:
        await cluster.stop()


async def answer_all(
    server: Server, path: Path, output: Output, limit: int, on_done: OnDone
) -> None:
    """Sends the requests that `output` lacks, `limit` at once.

    Raises:
        PdserveError: the server is away, stays overloaded, refuses the key, or is not a server of
            this API.
    """
    places = asyncio.Semaphore(limit)

    async def one(item: Item) -> None:
        try:
            await output.record(await _line(server, item))
            on_done()
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for item in read_items(path):
                if not output.done.has(item):
                    await places.acquire()
                    group.create_task(one(item))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _line(server: Server, item: Item) -> dict[str, object]:
    if item.error is not None:
        return failed(item, item.error)
    try:
        answer = await server.ask(item.url, item.body, tries=TRIES)
    except DeadlineExceeded as error:
        return failed(item, error)
    if answer.status in _ENDS_RUN and not _forbids_line(answer):
        raise answer.error()
    if answer.status == 200 and not isinstance(answer.body, dict):
        raise NodeError(f"{server.url}{item.url} answers, but not with JSON", code="INVALID_JSON")
    return answered(item, answer)


def _forbids_line(answer: Answer) -> bool:
    """Returns whether the key lacks permission only for this line's path, e.g. an operator's."""
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    return isinstance(error, dict) and error.get("code") == "permission_denied"


def _summary(output: Output, path: Path, earlier: int, ended_by: str | None) -> BatchSummary:
    items = list(map(output.done.has, read_items(path)))
    return BatchSummary(
        requests=len(items),
        answered=sum(items) - output.done.failed,
        failed=output.done.failed,
        earlier=earlier,
        output_file=str(output.path),
        commonest_error=output.done.commonest(),
        ended_by=ended_by,
    )


def _report(config: BatchConfig, summary: BatchSummary, console: Console) -> None:
    if config.json:
        json.dump(asdict(summary), sys.stdout, indent=2)
        print()
        return
    missing = summary.requests - summary.answered - summary.failed
    console.print(
        f"{summary.requests} requests: {summary.answered} answered, {summary.failed} failed, "
        f"{missing} missing ({summary.earlier} from an earlier run); {summary.output_file}",
        soft_wrap=True,
    )
    if (error := summary.commonest_error) is not None:
        code = printable(f"{error.code}: " if error.code else "")
        times = "once" if error.count == 1 else f"{error.count} times"
        said = Text(f"the commonest error, {times}: {code}{printable(error.message)}")
        console.print(said, soft_wrap=True)
    if summary.ended_by:
        console.print(
            f"pdserve run-batch: {summary.ended_by}; run the same command to continue",
            soft_wrap=True,
        )
