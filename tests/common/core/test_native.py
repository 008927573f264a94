"""C++ is built once for a machine, and what cannot be built is told."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdserve.common.core import native, private_folder, waits
from pdserve.common.core.native_library import BuildError, Library, find_compiler
from pdserve.common.core.private_folder import has_private_file
from waiting import wait_until

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")


@pytest.fixture
def toy(tmp_path: Path) -> Library:
    (tmp_path / "sources").mkdir()
    code = 'extern "C" __attribute__((visibility("default"))) int twice(int x) { return 2 * x; }'
    (tmp_path / "sources" / "toy.cpp").write_text(code)
    return Library("toys", tmp_path / "sources")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """g++ that notes each call in the file returned."""
    notes, script = tmp_path / "calls", tmp_path / "noting-g++"
    script.write_text(f'#!/bin/sh\necho "$*" >> {notes}\nexec g++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return notes


def links(notes: Path) -> int:
    """How often a library was made."""
    return sum("-shared" in line for line in notes.read_text().splitlines())


def test_a_library_is_built_once_for_all_that_start_at_once_and_few_are_kept(
    tmp_path: Path, compiler: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(native.load_library, [toy] * 4, [tmp_path] * 4))
    assert [each.twice(21) for each in made] == [42] * 4
    assert links(compiler) == 1
    native.load_library(toy, tmp_path)
    assert links(compiler) == 1
    native.load_library(replace(toy, flags=("-DOTHER",)), tmp_path)
    assert links(compiler) == len(list((tmp_path / "toys").glob("*.so"))) == 2
    monkeypatch.setattr(native, "KEPT", 1)
    native.load_library(replace(toy, flags=("-DTHIRD",)), tmp_path)
    assert len(list((tmp_path / "toys").glob("*.so"))) == 1


def test_of_a_linked_library_the_content_counts_and_not_the_folder(
    tmp_path: Path, compiler: Path, toy: Library
) -> None:
    """Another virtual environment has the same OpenMP library."""
    code, places = toy.sources / "toy.cpp", [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    made = places[0] / "libtwice.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,twice", "-o", made, code], check=True)
    shutil.copy(made, places[1])
    ctypes.CDLL(str(made))
    code.write_text(
        'extern "C" int twice(int);\n'
        'extern "C" __attribute__((visibility("default"))) int user(int x) { return twice(x); }'
    )
    for place in places:
        user = replace(toy, linked=(str(place / "libtwice.so"),))
        assert native.load_library(user, tmp_path).user(21) == 42
    assert links(compiler) == 1
    with (places[1] / "libtwice.so").open("ab") as file:
        file.write(b"another version")
    native.load_library(user, tmp_path)
    assert links(compiler) == 2


def test_neither_a_compiler_that_fails_nor_a_killed_build_leaves_anything_behind(
    tmp_path: Path, toy: Library
) -> None:
    with pytest.raises(BuildError, match=r"no-such-header\.h"):
        native.load_library(replace(toy, flags=("-include", "no-such-header.h")), tmp_path)
    assert [path.name for path in (tmp_path / "toys").iterdir()] == ["lock"]
    left = tmp_path / "toys" / ".build-killed"
    left.mkdir()
    (left / "toy.o").touch()
    native.load_library(toy, tmp_path)
    assert not left.exists()


def prepared(folder: Path, toy: Library, value: int) -> None:
    """A library of the toy's name that gives `value`, built as its owner would."""
    code = toy.sources / "toy.cpp"
    honest = code.read_text()
    code.write_text(honest.replace("2 * x", str(value)))
    native.load_library(toy, folder)
    (made,) = (folder / "toys").glob("*.so")
    code.write_text(honest)
    os.rename(made, made.with_name(f"{native._digest(toy, find_compiler())}.so"))


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")


@pytest.mark.parametrize("owned", [False, pytest.param(True, marks=as_root)])
def test_code_below_another_user_s_folder_is_not_executed(
    tmp_path: Path, toy: Library, owned: bool
) -> None:
    """A user who may rename a folder on the way puts his own code in its place."""
    cache = tmp_path / "one" / "two" / "three"
    cache.mkdir(parents=True)
    prepared(cache, toy, 13)
    for folder in (cache / "toys", cache, *list(cache.parents)[:2]):
        before = folder.stat()
        if owned:
            os.chown(folder, 4711, -1)
        else:
            folder.chmod(0o777)
        with pytest.raises(BuildError, match=r"others may write|another user") as caught:
            native.load_library(toy, cache)
        assert "set PDSERVE_CACHE to another folder" in str(caught.value)
        folder.chmod(before.st_mode & 0o777)
        os.chown(folder, before.st_uid, -1)


def test_a_folder_that_is_swapped_after_it_was_checked_is_not_loaded_from(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, evil = tmp_path / "cache", tmp_path / "evil"
    prepared(evil, toy, 13)
    native.load_library(toy, good)
    checked: list[str] = []

    def check_and_swap(fd: int, name: str) -> bool:
        found = has_private_file(fd, name)
        good.rename(tmp_path / "aside")
        evil.rename(good)
        checked.append(name)
        return found

    monkeypatch.setattr(native, "has_private_file", check_and_swap)
    assert native.load_library(toy, good).twice(21) == 42
    assert checked and (good / "toys" / checked[0]).exists()  # it was there, and not taken


def test_code_that_others_may_write_is_not_executed(tmp_path: Path, toy: Library) -> None:
    prepared(tmp_path, toy, 13)
    (made,) = (tmp_path / "toys").glob("*.so")
    made.chmod(0o666)
    with pytest.raises(BuildError, match="others may write to it: delete it"):
        native.load_library(toy, tmp_path)
    made.unlink()
    made.symlink_to("/dev/null")
    with pytest.raises(BuildError, match="not a regular file"):
        native.load_library(toy, tmp_path)


def test_folders_are_found_through_links_and_made(tmp_path: Path, toy: Library) -> None:
    """A home may be a link; a folder is made for its user alone."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "disk" / "absolute").symlink_to(tmp_path / "disk")
    made = native.load_library(toy, tmp_path / "home" / "absolute" / ".." / "disk" / "new")
    assert made.twice(21) == 42
    assert (tmp_path / "disk" / "new" / "toys").stat().st_mode & 0o777 == 0o700
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(BuildError, match="symbolic links"):
        native.load_library(toy, tmp_path / "round")


@as_root
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, toy: Library) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 4711, -1, follow_symlinks=False)
    with pytest.raises(BuildError, match="another user"):
        native.load_library(toy, tmp_path / "link")


def test_a_user_s_own_group_may_write(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems make a group for each user, and folders that it may write to."""
    tmp_path.chmod(0o775)
    me = pwd.getpwuid(os.geteuid()).pw_name
    for name, members, ok in ((me, [], True), (me, ["eve"], False), ("staff", [], False)):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(private_folder.grp, "getgrgid", lambda gid, group=group: group)
        with nullcontext() if ok else pytest.raises(BuildError, match="others may write"):
            native.load_library(toy, tmp_path)


def test_a_full_folder_is_noticed_before_anything_is_compiled(
    tmp_path: Path, compiler: Path, toy: Library
) -> None:
    """It would take the compiler half a minute at every start to find that there is no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (native.ROOM_NBYTES // 2, limits[1]))
    try:
        with pytest.raises(BuildError, match="needs 16 MiB of disk") as caught:
            native.load_library(toy, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) in str(caught.value) and "free some space" in str(caught.value)
    assert not compiler.exists()  # it was never run
    assert [path.name for path in (tmp_path / "toys").iterdir()] == ["lock"]


def test_a_cache_that_is_no_folder_and_a_build_that_never_ends_are_errors_with_a_fix(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toys").write_text("")
    with pytest.raises(BuildError, match="PDSERVE_CACHE"):
        native.load_library(toy, tmp_path)
    (tmp_path / "toys").unlink()
    (tmp_path / "toys").mkdir(mode=0o700)
    monkeypatch.setattr(native, "LOCK_TIMEOUT", 0.1)
    with open(tmp_path / "toys" / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match="another process has held"):
            native.load_library(toy, tmp_path)


def slow_compiler(folder: Path, seconds: float) -> str:
    """g++ on a busy machine."""
    script = folder / "slow-g++"
    script.write_text(f'#!/bin/sh\nsleep {seconds}\nexec g++ "$@"\n')
    script.chmod(0o755)
    return str(script)


def compiling(toy: Library, folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Returns another process, of another version, which has begun to compile."""
    code = f"""
from pathlib import Path
from pdserve.common.core import native, native_library, waits
waits.EVERY, waits.SOON = 0.1, 0.01
toy = native_library.Library("toys", Path({str(toy.sources)!r}), ("-DOTHER",))
native.load_library(toy, Path({str(folder)!r}))
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "CXX": slow_compiler(folder, seconds)},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: bool(list(folder.glob("toys/.build-*"))))
    return other


def test_a_slow_compiler_is_not_silent_nor_is_a_process_that_waits_for_it(
    tmp_path: Path,
    toy: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Intervals are a hundredth of a start's: at most ten seconds of silence."""
    monkeypatch.setattr(waits, "EVERY", 0.1)
    monkeypatch.setattr(waits, "SOON", 0.01)
    caplog.set_level("INFO")
    other = compiling(toy, tmp_path, 1.0)
    began = time.time()
    assert native.load_library(toy, tmp_path).twice(21) == 42
    _, said = other.communicate(timeout=60)
    waited = "waiting for another process that compiles toys, "
    times = [began, *(each.created for each in caplog.records if waited in each.getMessage())]
    assert max(after - before for before, after in pairwise(times)) < 1.0
    assert len(times) > 10
    assert "compiling toys for this machine, once (0 of 1 files), 0 s so far\n" in said
    assert len(said.splitlines()) > 10


def test_a_process_takes_over_from_one_of_another_version_that_is_killed_while_it_compiles(
    tmp_path: Path,
    toy: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = compiling(toy, tmp_path, 600)
    try:
        monkeypatch.setattr(waits, "SOON", 0.01)
        caplog.set_level("INFO")
        with ThreadPoolExecutor() as pool:
            loading = pool.submit(native.load_library, toy, tmp_path)
            wait_until(lambda: "waiting for another process that compiles toys" in caplog.text)
            assert not loading.done()
            os.killpg(other.pid, signal.SIGKILL)
            assert loading.result().twice(21) == 42
    finally:
        with suppress(ProcessLookupError):
            os.killpg(other.pid, signal.SIGKILL)
        other.communicate()
    assert not list(tmp_path.glob("toys/.build-*"))


def test_a_compiler_that_is_killed_or_cannot_run_is_an_error_that_says_so(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "g++-of-a-full-host"
    script.write_text("#!/bin/sh\nkill -KILL $$\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match=r"was killed by SIGKILL: .*memory"):
        native.load_library(toy, tmp_path)
    script.write_text("#!/no/such/shell\n")
    with pytest.raises(BuildError, match="cannot be run"):
        native.load_library(toy, tmp_path)


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.load_library(toy, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(native, "file_lock", refuse)
    assert native.load_library(toy, tmp_path).twice(21) == 42
    with pytest.raises(BuildError, match="Read-only file system: set PDSERVE_CACHE"):
        native.load_library(replace(toy, flags=("-DOTHER",)), tmp_path)
