"""A wheel's libraries: built for kinds of CPUs, and chosen by the CPU's features."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.common.core import native, prebuilt
from pdserve.common.core.host import cpu_flags
from pdserve.common.core.native_library import BuildError, Library
from pdserve.common.core.prebuilt import VARIANTS
from pdserve.common.model.kernels import KERNELS
from pdserve.kv_transfer.native import BLOCKS

NAMES = frozenset(each.name for each in VARIANTS)
NEEDS = {each.name: each.needs for each in VARIANTS}
# Features of real CPUs, among those that variants need.
HASWELL = NEEDS["v3"]
ZEN_5 = NEEDS["v4-bf16"] | {"avx_vnni"}
SAPPHIRE_RAPIDS = NEEDS["v4-amx"] | {"avx_vnni"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512cd"}

TOY = """
#if defined(__AVX512BF16__)
const int kind = 3;
#elif defined(__AVX512F__)
const int kind = 2;
#elif defined(__AVX2__)
const int kind = 1;
#else
const int kind = 0;
#endif
extern "C" __attribute__((visibility("default"))) int twice(int x) { return 2 * x + 100 * kind; }
"""

has_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")
on_x86 = pytest.mark.skipif(not cpu_flags() >= HASWELL, reason="no CPU for any variant")


@pytest.fixture
def toy(tmp_path: Path) -> Library:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "toy.cpp").write_text(TOY)
    return Library("toys", tmp_path / "sources")


@pytest.fixture
def brought(toy: Library) -> Callable[..., None]:
    """Puts files in place as a wheel has them; their content is not looked at."""

    def bring(names: Iterable[str] = NAMES, content: bytes = b"not a library") -> None:
        folder = toy.sources / prebuilt.FOLDER
        folder.mkdir(exist_ok=True)
        for each in prebuilt.variants_of(toy):
            if each.name in names:
                (folder / prebuilt.file_name(toy, each)).write_bytes(content)

    return bring


def chosen(library: Library, cpu: Iterable[str]) -> tuple[str, set[str]] | None:
    """Returns the variant for a CPU, and the features that it lacks."""
    found = prebuilt.find(library, frozenset(cpu))
    return found and (re.sub("-[0-9a-f]{32}.so$", "", found.path.name), set(found.lacks))


def test_the_best_library_that_the_cpu_can_run_is_chosen(
    toy: Library, brought: Callable[..., None]
) -> None:
    assert prebuilt.find(toy) is None, "a checkout has none"
    brought()
    assert chosen(toy, HASWELL) == ("v3", set())
    assert chosen(toy, NEEDS["v4"]) == ("v4", set())
    assert chosen(toy, NEEDS["v4-vnni"]) == ("v4", set()), "the source has no code for VNNI"
    assert chosen(toy, ZEN_5) == ("v4-bf16", set())
    assert chosen(toy, SAPPHIRE_RAPIDS) == ("v4-bf16", set())
    assert chosen(toy, KNIGHTS_LANDING) == ("v3", {"avx512f"})
    assert chosen(toy, HASWELL - {"fma"}) is None
    assert chosen(toy, ()) is None


def test_every_kind_of_cpu_has_all_code_of_the_kernels(tmp_path: Path) -> None:
    for library in (KERNELS, BLOCKS):
        sources = tmp_path / library.name
        shutil.copytree(library.sources, sources, ignore=shutil.ignore_patterns("*.py", "gpu"))
        copy = replace(library, sources=sources)
        (sources / prebuilt.FOLDER).mkdir(exist_ok=True)
        for variant in prebuilt.variants_of(copy):
            (sources / prebuilt.FOLDER / prebuilt.file_name(copy, variant)).touch()
        for cpu in (*NEEDS.values(), ZEN_5, SAPPHIRE_RAPIDS):
            found = prebuilt.find(copy, frozenset(cpu))
            assert found is not None and not found.lacks
    assert [each.name for each in prebuilt.variants_of(KERNELS)] == [each.name for each in VARIANTS]
    assert [each.name for each in prebuilt.variants_of(BLOCKS)] == ["v3", "v4"]


def test_every_macro_by_which_the_sources_choose_code_is_known() -> None:
    """Otherwise a library without that code would pass for one with all code for the CPU."""
    texts = [path.read_text() for each in (KERNELS, BLOCKS) for path in each.files]
    named = {macro for text in texts for macro in re.findall(r"__[A-Z0-9_]+__", text)}
    others = {"__ATOMIC_ACQUIRE", "__ATOMIC_RELEASE", "__VA_ARGS__", "__GNUC__"}
    assert named - others == set(prebuilt.MACROS)


def test_a_library_of_other_sources_or_flags_is_never_used(
    toy: Library, brought: Callable[..., None]
) -> None:
    brought()
    assert chosen(replace(toy, flags=("-DOTHER",)), HASWELL) is None
    with (toy.sources / "toy.cpp").open("a") as file:
        file.write("// changed\n")
    assert chosen(toy, HASWELL) is None


@on_x86
@has_compiler
def test_nothing_is_compiled_where_a_prebuilt_library_fits(
    toy: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list(prebuilt.make(toy, toy.sources / prebuilt.FOLDER, NAMES))
    assert len(made) == len(prebuilt.variants_of(toy)) == 3
    native_kind = native.load_library(toy, tmp_path / "cache", use_prebuilt=False).twice(0)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    loaded = native.load_library(toy, tmp_path / "other")
    assert loaded.twice(21) == 42 + native_kind, "the code is that for this CPU"
    assert not (tmp_path / "other").exists()
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found: install"):
        native.load_library(toy, tmp_path / "other", use_prebuilt=False)


@on_x86
@has_compiler
def test_a_library_without_some_code_for_the_cpu_is_used_only_without_a_compiler(
    toy: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "avx512f" not in cpu_flags():
        pytest.skip("AVX2 is all that this CPU has")
    list(prebuilt.make(toy, toy.sources / prebuilt.FOLDER, frozenset({"v3"})))
    assert native.load_library(toy, tmp_path).twice(0) >= 200
    assert list((tmp_path / "toys").glob("*.so"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.load_library(toy, tmp_path).twice(0) == 100
    assert re.search(r"using the prebuilt toys, without avx512\w+.*: no C\+\+ compil", caplog.text)


@has_compiler
def test_a_library_that_cannot_be_loaded_is_compiled_and_the_log_says_why(
    toy: Library,
    tmp_path: Path,
    brought: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This happens on a host whose C library is older than that of the build."""
    brought()
    monkeypatch.setattr(prebuilt, "cpu_flags", lambda: HASWELL)
    assert native.load_library(toy, tmp_path).twice(21) % 100 == 42
    assert "the prebuilt toys cannot be used: " in caplog.text
