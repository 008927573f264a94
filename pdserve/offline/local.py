"""Runs a local cluster in a background thread, for synchronous programs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from dataclasses import replace
from threading import Thread
from typing import Any, TypeVar

import aiohttp

from pdserve.cli.cluster import Cluster, own_session
from pdserve.cli.host_share import node_shares
from pdserve.cli.up import log_writer, with_model
from pdserve.client.server import Server
from pdserve.client.terminal import console_of
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import NodeError, PdserveError

T = TypeVar("T")

LOOK_UP = 0.2  # seconds between checks for signals
TRIES = 5  # per request with a retryable failure


class LocalCluster:
    """The processes of `pdserve up`, supervised by a thread of this process. They end with this
    process. The owner must call `close`."""

    def __init__(self, config: ClusterConfig) -> None:
        """Returns once the cluster can serve; a failed start leaves no process behind.

        Raises:
            ConfigError: it cannot start as configured.
            NodeError: one of its processes died.
        """
        console = console_of(stderr=True)
        config = replace(config, server=with_keys(config.server))
        self.config = with_model(config, console)
        self._log = log_writer(self.config, console)
        self._last_words: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None
        self._cluster: Cluster | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="pdserve-cluster", daemon=True)
        self._thread.start()
        try:
            with console.status("starting the cluster; loading weights"):
                self._wait(self._start())
        except PdserveError as error:
            self.close()
            words = self._last_words.get(error.message.partition(" ")[0])
            raise type(error)(f"{error.message}: {words}" if words else error.message) from error
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the cluster's event loop and returns its result. An interrupt cancels the
        work; the cluster stays usable.

        Raises:
            NodeError: the cluster has ended.
        """
        return self._wait(self._until_ended(work))

    def close(self) -> None:
        """Drains and ends all processes; kills them when interrupted. Later calls do nothing."""
        if not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        try:
            _result(ending)
        except BaseException:
            self._loop.call_soon_threadsafe(self._kill)
            _result(ending)
            raise
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(self._known(work), self._loop)
        try:
            return _result(running)
        except BaseException:
            running.cancel()
            raise

    async def _known(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def _start(self) -> None:
        self._session = own_session(self.config.server)
        self._cluster = Cluster(self.config, node_shares(self.config), self._write)
        await self._cluster.start()
        self.server = Server(self._session, self._cluster.url)

    async def _until_ended(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._cluster is not None
        results: list[T] = []

        async def note() -> None:
            results.append(await work)

        if not await self._cluster.until_ended(note()):
            raise NodeError("the cluster was stopped")
        return results[0]

    async def _stop(self) -> None:
        for task in self._tasks:  # a second cancel would interrupt the cleanup after the first
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._cluster is not None:
            await self._cluster.stop()

    def _kill(self) -> None:
        for _ in range(3):  # its third call kills
            if self._cluster is not None:
                self._cluster.interrupt()

    def _write(self, name: str, line: str) -> None:
        if line.strip():
            self._last_words[name] = line
        self._log(name, line)


def _result(running: Future[T]) -> T:
    """Waits with a short time-out in a loop: a signal that arrives just before the wait, or on
    another thread, would not wake it."""
    while not wait([running], timeout=LOOK_UP).done:
        pass
    return running.result()


def with_keys(server: ServerConfig) -> ServerConfig:
    """Returns `server` with a random API key, against use by others on this host, unless it has
    one. With several API keys it also gets an admin key, which loading adapters then needs."""
    key = server.api_key or secrets.token_hex(16)
    admin_key = server.admin_api_key or (secrets.token_hex(16) if "," in key else None)
    return replace(server, api_key=key, admin_api_key=admin_key)
