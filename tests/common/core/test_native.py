"""C++ is built once for a machine, and what cannot be built is told."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.common.core import native
from pdserve.common.core.native import Library

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")


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


@needs_compiler
def test_a_library_is_built_once_for_all_that_start_at_once(
    tmp_path: Path, compiler: Path, toy: Library
) -> None:
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(native.load_library, [toy] * 4, [tmp_path] * 4))
    assert [each.twice(21) for each in made] == [42] * 4
    assert links(compiler) == 1
    native.load_library(toy, tmp_path)
    assert links(compiler) == 1
    native.load_library(replace(toy, flags=("-DOTHER",)), tmp_path)
    assert links(compiler) == 2
    assert len(list((tmp_path / "toys").glob("*.so"))) == 2


@needs_compiler
def test_old_libraries_are_forgotten(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "KEPT", 1)
    native.load_library(toy, tmp_path)
    native.load_library(replace(toy, flags=("-DOTHER",)), tmp_path)
    assert len(list((tmp_path / "toys").glob("*.so"))) == 1


@needs_compiler
def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, compiler: Path, toy: Library
) -> None:
    with pytest.raises(native.BuildError, match=r"no-such-header\.h"):
        native.load_library(replace(toy, flags=("-include", "no-such-header.h")), tmp_path)
    assert [path.name for path in (tmp_path / "toys").iterdir()] == ["lock"]


@needs_compiler
def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path, toy: Library) -> None:
    left = tmp_path / "toys" / ".build-killed"
    left.mkdir(parents=True, mode=0o700)
    left.parent.chmod(0o700)
    (left / "toy.o").touch()
    native.load_library(toy, tmp_path)
    assert not left.exists()


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path, toy: Library) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys").chmod(0o777)
    with pytest.raises(native.BuildError, match="others may write"):
        native.load_library(toy, tmp_path)


@needs_compiler
def test_a_cache_that_is_no_folder_is_an_error_with_a_mend(tmp_path: Path, toy: Library) -> None:
    (tmp_path / "toys").write_text("")
    with pytest.raises(native.BuildError, match="PDSERVE_CACHE"):
        native.load_library(toy, tmp_path)


@needs_compiler
def test_a_build_that_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, toy: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LOCK_TIMEOUT", 0.1)
    (tmp_path / "toys").mkdir(mode=0o700)
    with (
        native._locked(tmp_path / "toys" / "lock"),
        pytest.raises(native.BuildError, match="another process holds"),
    ):
        native.load_library(toy, tmp_path)
