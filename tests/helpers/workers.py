"""Runs tests in several processes, forked once all tests are imported and collected.

    pytest ── collects tests, deals them out in groups, reports
      ├─ worker      runs groups, with their fixtures
      └─ worker

pytest-xdist's workers would import and collect all tests each. Here no process waits at its end, as
Python does, for threads and servers that a failed test has left.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from _pytest.capture import CaptureManager
from _pytest.config import create_terminal_writer

Group = Sequence[pytest.Item]


class Workers:
    """A plugin that runs the session's tests in `count` processes."""

    def __init__(
        self,
        count: int,
        divide: Callable[[list[pytest.Item]], list[Group]],
        choose: Callable[[int, list[Group]], int] = lambda worker, groups: 0,
    ) -> None:
        """`divide` returns the groups of tests, each of which one process runs; `choose(worker,
        groups)` the place of the one among those left that a worker takes next."""
        self._count, self._divide, self._choose = count, divide, choose
        self._groups: list[Group] = []
        self._places: dict[pytest.Item, int] = {}  # in `session.items`
        self._workers: dict[Connection, _Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None  # for pytest's own loop
        self._groups = self._divide(session.items)
        self._places = {item: place for place, item in enumerate(session.items)}
        _tmp_path_factory(session.config).getbasetemp()  # one for all, removed by a later run
        if terminal := session.config.pluginmanager.getplugin("terminalreporter"):
            terminal.showfspath = False  # several files run at one time
        try:
            for number in range(min(self._count, len(self._groups))):
                self._fork(session, number)
            while self._workers:
                for connection in wait([*self._workers]):
                    assert isinstance(connection, Connection)
                    self._receive(session, connection)
        finally:
            for connection, worker in self._workers.items():
                connection.close()  # ends the worker after its test
                os.waitpid(worker.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, session: pytest.Session, number: int) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            for each in (ours, *self._workers):
                each.close()
            _work(session, theirs, number)
        theirs.close()
        self._workers[ours] = _Worker(number, pid)

    def _receive(self, session: pytest.Session, connection: Connection) -> None:
        worker, hook = self._workers[connection], session.config.hook
        try:
            what, content = connection.recv()
        except (EOFError, ConnectionResetError):
            what, content = "end", None
        if what == "end":
            self._ended(session, self._workers.pop(connection))
        elif what == "next":
            group = None if _stops(session) else self._take(worker.number)
            worker.tests.extend(group or ())
            with suppress(ConnectionError):  # it was dismissed
                connection.send(group and [self._places[item] for item in group])
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
            if _stops(session):
                self._dismiss()
        elif what == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        elif what == "stop":
            session.shouldstop = content
            self._dismiss()
        elif what == "error":
            raise RuntimeError(f"worker {worker.number}: {content}")
        else:
            item = worker.tests[0]
            if what == "finish":
                worker.tests.popleft()
            worker.running = what == "start"
            log = hook.pytest_runtest_logstart if worker.running else hook.pytest_runtest_logfinish
            log(nodeid=item.nodeid, location=item.location)

    def _take(self, number: int) -> Group | None:
        return self._groups.pop(self._choose(number, self._groups)) if self._groups else None

    def _dismiss(self) -> None:
        for connection in self._workers:
            with suppress(ConnectionError):
                connection.send(None)

    def _ended(self, session: pytest.Session, worker: _Worker) -> None:
        """Reports the test during which a worker died; another worker runs the others."""
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.running:
            item = worker.tests.popleft()
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", f"its process ended: {status}", "call"
            )
            session.config.hook.pytest_runtest_logreport(report=report)
        if worker.tests:
            self._groups.insert(0, [*worker.tests])
        if self._groups and not _stops(session):
            self._fork(session, worker.number)


class _Worker:
    def __init__(self, number: int, pid: int) -> None:
        self.number, self.pid = number, pid
        self.tests = deque[pytest.Item]()  # that were dealt to it and have not ended
        self.running = False  # the first of them


def _in_a_loop() -> bool:
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


class NoWaiting:
    """A plugin by which no process waits for what a failed test has left."""

    def __init__(self) -> None:
        self._session: pytest.Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of gRPC's thread, never closed

    def pytest_exception_interact(self) -> None:
        """Keeps gRPC's thread for asyncio: with the last of its users, a server that was not
        stopped, a garbage collection would wait for it forever."""
        if _in_a_loop():  # of a browser's client
            return
        if self._loop is None and (grpc := sys.modules.get("grpc.aio")):
            self._loop = asyncio.new_event_loop()
            self._loop.run_until_complete(_call(grpc.init_grpc_aio))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        """Ends the process once all is reported: Python waits for threads."""
        if self._session:
            atexit._run_exitfuncs()  # some end processes and remove files
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._session.exitstatus)


async def _call(function: Callable[[], None]) -> None:
    """Calls a function that needs a running event loop."""
    function()


def _tmp_path_factory(config: pytest.Config) -> pytest.TempPathFactory:
    return config._tmp_path_factory  # type: ignore[attr-defined, no-any-return]


def _stops(session: pytest.Session) -> bool:
    return bool(session.shouldfail or session.shouldstop)


# ---- in a worker ----


class _Reporter:
    """Sends the collecting process what pytest would print."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._reported = True  # the warnings that pytest repeats to a new plugin
        config.pluginmanager.register(self)
        self._reported = False

    def pytest_runtest_logstart(self) -> None:
        self._connection.send(("start", None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self._connection.send(("report", to_data(config=self._config, report=report)))

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(("finish", None))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if self._reported:
            return
        seen = warning_message
        message = warnings.WarningMessage(
            str(seen.message), seen.category, seen.filename, seen.lineno
        )
        content = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", content))


def _work(session: pytest.Session, connection: Connection, number: int) -> NoReturn:
    code = 1
    try:
        _separate(session.config, connection, number)
        try:
            _run(session, connection)
        finally:
            session._setupstate.teardown_exact(None)  # after an interrupt
        code = 0
    except (ConnectionError, EOFError):  # the collecting process has ended
        pass
    except (KeyboardInterrupt, pytest.exit.Exception) as stop:
        with suppress(OSError):
            connection.send(("stop", str(stop) or type(stop).__name__))
    except BaseException:
        with suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(code)


def _separate(config: pytest.Config, connection: Connection, number: int) -> None:
    """Gives this process files and output of its own."""
    capture: CaptureManager = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = _tmp_path_factory(config)
    factory._basetemp = factory.mktemp(f"worker-{number}-", numbered=True)
    writer = create_terminal_writer(config, sys.stderr)
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
    config.pluginmanager.unregister(name="terminalreporter")
    _Reporter(config, connection)


def _run(session: pytest.Session, connection: Connection) -> None:
    indices = _dealt(connection)
    following = next(indices, None)
    # A message would say that another worker's failure ends the run.
    while following is not None and not _stops(session) and not connection.poll():
        index, following = following, next(indices, None)
        item = session.items[index]
        nextitem = None if following is None else session.items[following]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)


def _dealt(connection: Connection) -> Iterator[int]:
    while True:
        connection.send(("next", None))
        if (group := connection.recv()) is None:
            return
        yield from group
