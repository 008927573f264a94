"""The parent of a router's workers (`--router-workers`): start → watch → drain → stop.

It takes the ports of clients once, and holds them without listening. Each worker listens there, too
(SO_REUSEPORT), so the kernel deals connections out, and is a whole router: nodes register with
each, at a port of its own. A worker that dies is started again; its streams can go on at its
siblings.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from pdserve.common.config.options import to_environment, to_flags
from pdserve.common.config.router import RouterConfig
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.host import bind, role_environment
from pdserve.common.obs.process import (
    log_error,
    propagate_failure,
    serve_until_stopped,
    write_ports,
)
from pdserve.router.http.server import bind_http
from pdserve.router.workers.link import TIMEOUT, Link
from pdserve.router.workers.merge import counts_of_dead, merged_metrics, num_nodes
from pdserve.router.workers.siblings import GATHER, METRICS, SERVING, read_ask, write_answers

logger = logging.getLogger(__name__)

COLLECT_PERIOD = 5.0  # seconds; a killed worker's counts of this time may be lost
SETTLED = 60.0  # seconds after which a worker's death is its first again
LONGEST_BACKOFF = 30.0  # seconds
# Periods, each longer by `TIMEOUT`, after which a worker without an answer is killed: one that has
# served, and one that is started again.
HUNG, HUNG_AT_START = 6, 60
KILL_GRACE = 5.0  # seconds past the drain time-out until SIGKILL


@dataclass(eq=False)
class RouterWorker:
    """One worker's slot: its process is replaced by another one when it ends."""

    number: int
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    link: Link | None = None
    metrics: str = ""  # as this process exposed them last
    alone: int = 0  # periods without a node, while others have some
    silent: int = 0  # periods in which it did not answer

    @property
    def name(self) -> str:
        return f"worker {self.number}"


async def supervise(config: RouterConfig, stopping: Callable[[], None] = lambda: None) -> int:
    """Runs the workers until a signal and returns the exit code. Calls `stopping` when they have
    stopped serving.

    Raises:
        ConfigError: a port cannot be bound.
        PdserveError: a worker died before it served.
    """
    supervisor = Supervisor(config)
    try:
        await supervisor.start()
        return await supervisor.run_until_stopped()
    except Refused:
        return 2  # the worker has said why
    finally:
        stopping()
        await supervisor.stop()


class Refused(ConfigError):
    """A worker cannot start as configured."""


class Supervisor:
    """The workers, and what is kept for them."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.workers = [RouterWorker(number) for number in range(config.server.router_workers)]
        self._held: list[socket.socket] = []
        self._departed = ""  # the counters of workers that have died
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- start, drain, stop --------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when all workers serve."""
        await self.take_ports()
        first, *others = self.workers
        await self._start(first)  # alone, so that a wrong option is reported once
        await asyncio.gather(*map(self._start, others))
        self._tasks += [asyncio.create_task(self._watch(each)) for each in self.workers]
        self._tasks.append(asyncio.create_task(self._collect()))
        for task in self._tasks:
            propagate_failure(task, self._failed)
        logger.info(
            "%d workers serve, HTTP on port %d, gRPC on port %d; nodes register on port %d, and "
            "learn the other ports there",
            len(self.workers), self._ports["http"], self._ports["grpc"], self._ports["registry"],
        )  # fmt: skip

    async def run_until_stopped(self) -> int:
        """Returns the exit code."""
        if (ports_file := self._config.server.ports_file) is not None:
            write_ports(ports_file, self._ports)
        limit = self._config.server.drain_timeout + KILL_GRACE
        return await serve_until_stopped(self._failed, self._drain, limit)

    async def stop(self) -> None:
        """Ends what still runs: a second SIGTERM cuts a worker's drain short."""
        self._watch_no_more()
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_GRACE):
                await self._ended()
        self._signal(signal.SIGKILL)
        await self._ended()
        for each in self._held:
            each.close()

    async def _drain(self) -> None:
        self._watch_no_more()
        self._signal(signal.SIGTERM)
        await self._ended()

    def _watch_no_more(self) -> None:
        """Starts no more workers, not even those that wait for a restart."""
        for task in self._tasks:
            task.cancel()

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.send_signal(number)

    async def _ended(self) -> None:
        running = [each.process for each in self.workers if each.process is not None]
        await asyncio.gather(*(process.wait() for process in running))

    # ---- ports ---------------------------------------------------------------------------------

    async def take_ports(self) -> None:
        """Binds the ports for as long as this process lives, so that a port in use, even a shared
        one, is an error now."""
        server = self._config.server
        for each in await bind_http(server.host, server.port):
            port = each.getsockname()[1]
            each.close()
        self._held += await bind_http(server.host, port, shared=True)
        self._ports = {"http": port}
        self._ports["grpc"] = self._take(server.grpc_port, "gRPC", "--grpc-port")
        first = self._ports["registry"] = self._take(
            server.registry_port, "gRPC", "--registry-port"
        )
        self._registry_ports = [first]
        for worker in self.workers[1:]:
            try:
                wanted = first + worker.number if server.registry_port else 0
                port = self._take(wanted, "gRPC", "--registry-port")
            except ConfigError:  # nodes are told
                port = self._take(0, "gRPC", "--registry-port")
            self._registry_ports.append(port)

    def _take(self, port: int, purpose: str, flag: str) -> int:
        host = self._config.server.host.strip("[]")
        alone = bind(host, port, purpose, flag)
        port = alone.getsockname()[1]
        alone.close()
        self._held.append(bind(host, port, purpose, flag, shared=True))
        return port

    # ---- one worker ----------------------------------------------------------------------------

    async def _start(self, worker: RouterWorker) -> None:
        """Returns when the worker serves.

        Raises:
            Refused: it cannot start as configured.
            PdserveError: it ended.
        """
        ours, theirs = socket.socketpair()
        config = self._config_of(worker)
        seat = (str(theirs.fileno()), str(worker.number), ",".join(map(str, self._registry_ports)))
        command = (sys.executable, "-m", "pdserve.router.worker", *seat, *to_flags(config))
        with theirs:
            worker.process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                env=role_environment(to_environment(config)),
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        worker.serving.clear()
        worker.silent = 0
        worker.link = Link(partial(self._answer, worker))
        await worker.link.open(ours)
        serving = asyncio.create_task(worker.serving.wait())
        ended = asyncio.create_task(worker.process.wait())
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if not worker.serving.is_set():
            code = await ended
            what = f"{worker.name} of the router"
            if code == 2:
                raise Refused(f"{what} cannot start as configured")
            raise PdserveError(f"{what} ended with code {code} before it served")

    def _config_of(self, worker: RouterWorker) -> RouterConfig:
        """Returns the router's config with the worker's own registry port and part of the queue."""
        server, routing = self._config.server, self._config.routing
        server = replace(
            server,
            port=self._ports["http"],
            grpc_port=self._ports["grpc"],
            registry_port=self._registry_ports[worker.number],
            ports_file=None,
        )
        queued = -(-routing.max_queued_requests // len(self.workers))
        return replace(
            self._config, server=server, routing=replace(routing, max_queued_requests=queued)
        )

    async def _watch(self, worker: RouterWorker) -> None:
        """Starts the worker again whenever it ends: at once, then later and later if it dies again
        within a minute."""
        backoff = 0.0
        while True:
            assert worker.process is not None
            since = monotonic()
            code = await worker.process.wait()
            self._departed = _added(self._departed, counts_of_dead(worker.metrics))
            worker.metrics = ""
            backoff = 0.0 if monotonic() - since >= SETTLED else backoff
            logger.warning(
                "%s (pid %d) ended with code %d; it is started again %s",
                worker.name, worker.process.pid, code, f"in {backoff:.0f} s" if backoff else "now",
            )  # fmt: skip
            await asyncio.sleep(backoff)
            backoff = min(max(1.0, 2 * backoff), LONGEST_BACKOFF)
            try:
                await self._start(worker)
                logger.info("%s serves again, as pid %d", worker.name, worker.process.pid)
            except PdserveError as error:
                log_error(error, logging.WARNING)
            except OSError as error:
                logger.warning("%s", error)

    # ---- what workers ask ----------------------------------------------------------------------

    async def _answer(self, worker: RouterWorker, what: str, argument: bytes) -> bytes:
        if what == SERVING:
            worker.silent = 0
            worker.serving.set()
            return b""
        assert what == GATHER
        asked, argument = read_ask(argument)
        others = [each for each in self.workers if each is not worker and each.serving.is_set()]
        if asked != METRICS:
            return write_answers(await self._ask(others, asked, argument))
        worker.metrics = argument.decode()
        await self._ask(others, METRICS)
        return write_answers([each.encode() for each in self._known_metrics(but=worker)])

    async def _ask(
        self, workers: list[RouterWorker], what: str, argument: bytes = b""
    ) -> list[bytes]:
        """Returns the answers of live workers that answer in time; keeps their metrics."""
        answers = await asyncio.gather(*(self._ask_one(each, what, argument) for each in workers))
        return [answer for answer in answers if answer is not None]

    async def _ask_one(self, worker: RouterWorker, what: str, argument: bytes) -> bytes | None:
        assert worker.link is not None
        try:
            answer = await worker.link.call(what, argument)
        except (OSError, TimeoutError) as error:
            logger.debug("%s does not tell its %s: %r", worker.name, what, error)
            return None
        if what == METRICS:
            worker.metrics = answer.decode()
        return answer

    def _known_metrics(self, but: RouterWorker) -> list[str]:
        """Returns the last metrics of the other workers, and those of ended ones."""
        texts = [each.metrics for each in self.workers if each is not but]
        return [text for text in (*texts, self._departed) if text]

    async def _collect(self) -> None:
        """Polls all workers' metrics, so that they are known when one is killed."""
        while True:
            await asyncio.gather(*map(self.check, self.workers))
            self.compare()
            await asyncio.sleep(COLLECT_PERIOD)

    async def check(self, worker: RouterWorker) -> None:
        """Kills a worker that has not answered for long: its loop does not run, so the connections
        that the kernel gives it would wait forever."""
        answered = await self._ask_one(worker, METRICS, b"") is not None
        process = worker.process
        assert process is not None
        if answered or process.returncode is not None:
            worker.silent = 0
            return
        worker.silent += 1
        if worker.silent >= (HUNG if worker.serving.is_set() else HUNG_AT_START):
            logger.error(
                "%s (pid %d) has not answered for %.0f s; it is killed",
                worker.name, process.pid, worker.silent * (COLLECT_PERIOD + TIMEOUT),
            )  # fmt: skip
            process.kill()

    def compare(self) -> None:
        """Warns, once, about workers that nodes do not come to for two periods, though they come to
        others: its clients wait in vain."""
        counts = {each: num_nodes(each.metrics) for each in self.workers if each.metrics}
        for worker, count in counts.items():
            alone = not count and any(counts.values())
            worker.alone = worker.alone + 1 if alone else 0
            if worker.alone == 2:
                logger.warning(
                    "nodes register with other workers and not with %s: let them reach port %d of "
                    "this host, too",
                    worker.name, self._registry_ports[worker.number],
                )  # fmt: skip


def _added(one: str, other: str) -> str:
    return merged_metrics((one, other)).decode()
