"""How the suite runs: several processes give the results that one would, and none waits at its end
for what a failed test has left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import told
import warm_kit
from benchmarks.fleet import SHARES, free_port

CONFTEST = """
from workers import NoWaiting, Workers

def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0)

def pytest_configure(config):
    config.pluginmanager.register(NoWaiting())
    if count := config.option.workers:
        config.pluginmanager.register(Workers(count, by_file))

def by_file(items):
    files = dict.fromkeys(item.path for item in items)
    return [[item for item in items if item.path == path] for path in files]
"""
FIRST = """
import asyncio, gc, os, threading, warnings

import pytest
from grpc import aio

@pytest.fixture(scope="module")
def module():
    yield os.getpid()
    with open("torn-down", "a") as file:
        file.write("once")

def test_one_process_has_a_file(module): assert module == os.getpid()

def test_leaves_no_event_loop(): asyncio.run(asyncio.sleep(0))

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()
    print("said by a test")
    assert False, "left a thread"

async def test_leaves_a_server():
    server = aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert False, "left a server"

def test_collects_the_server(): gc.collect()

def test_warns(): warnings.warn("seen by a user")
"""
DIES = """
import os

def test_before(): pass
def test_dies(): os._exit(0)
def test_after(): pass
"""
LAST = """
import pytest

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

@pytest.mark.parametrize("number", range(5))
def test_passes(number): pass
"""
PATIENCE = 60.0  # seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_last.py").write_text(LAST)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_are_those_of_one_process_and_nothing_hangs(folder: Path, workers: int) -> None:
    code, said = warm_kit.run(folder, ["-rs", f"--workers={workers}"], PATIENCE)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 9 passed, 1 skipped" in said
    assert (folder / "torn-down").read_text() == "once" and said.count("\nsaid by a test") == 1
    assert "left a thread" in said and "left a server" in said
    assert "seen by a user" in said and "not here" in said
    collected, results = told.read(folder)
    assert len(collected) == 12 and results.keys() == {*collected}


def test_a_test_that_ends_its_process_fails_and_the_others_run(folder: Path) -> None:
    (folder / "test_dies.py").write_text(DIES)
    code, said = warm_kit.run(folder, ["--workers=2"], PATIENCE)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "test_dies.py::test_dies - its process ended: 0" in said
    assert "3 failed, 11 passed, 1 skipped" in said


def test_the_first_failure_ends_the_run(folder: Path) -> None:
    (folder / "test_a.py").write_text("def test_fails(): assert False")
    code, said = warm_kit.run(folder, ["--workers=1", "-x"], PATIENCE)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in said and "\n1 failed" in said


def test_no_tests_are_reported_as_such(folder: Path) -> None:
    code, _ = warm_kit.run(folder, ["--workers=2", "-k", "absent"], PATIENCE)
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED


KEEPS = """
import os

os.environ["PYTEST_DEBUG_TEMPROOT"] = os.path.abspath("temp")
"""
WRITES = """
def test_writes(tmp_path): (tmp_path / "written").touch()
"""


def test_processes_share_a_folder_that_a_later_run_removes(folder: Path) -> None:
    (folder / "keeps.py").write_text(KEEPS)
    (folder / "temp").mkdir()
    for name in ("test_writes.py", "test_writes_too.py"):
        (folder / name).write_text(WRITES)
    arguments = ["-p", "keeps", "-o", "tmp_path_retention_count=1", "--workers=2", "-k", "writes"]
    for number in range(2):
        code, said = warm_kit.run(folder, arguments, PATIENCE)
        assert code == 0, said
        (user,) = (folder / "temp").iterdir()
        (shared,) = (path for path in user.iterdir() if not path.is_symlink())
        assert shared.name == f"pytest-{number}"
        assert len([*shared.rglob("written")]) == 2


def test_a_forked_process_has_ports_of_its_own() -> None:
    ours = free_port()
    end, said = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(said, str(free_port()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    theirs = int(os.read(end, 8))
    os.close(end)
    os.close(said)
    assert (ours - theirs) % SHARES
