"""The installed package: one name in site-packages, with all of it, from which a cluster runs."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

import pdserve
from cluster import Cluster
from paths import EXAMPLE, ROOT
from pdserve.common.core.prebuilt import FOLDER, MACHINE, VARIANTS, file_name, variants_of
from pdserve.common.model.kernels import KERNELS
from pdserve.kv_transfer.native import BLOCKS

FOLDERS = ("common", "kv_transfer", "prefill_node", "decode_node", "router")
FACE = ("bench", "cli", "client", "demo_model", "offline", "simulate")  # of `pdserve/` itself
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "models")
# A venv has no packages of its own; these are found after what is installed in it. Lines of such a
# file are folders, whose own .pth files (an editable pdserve's) are not read.
OTHERS = sysconfig.get_path("purelib")


def run(command: Sequence[str | Path], cwd: Path, *, fails: bool = False, **variables: str) -> str:
    """All that it prints. Whatever it imports is installed: `cwd` is no checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**environment, "PREBUILT": "none", **variables}  # compiling takes minutes
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert bool(ended.returncode) == fails, ended.stdout
    return ended.stdout


def build(kind: str, source: Path, out: Path, *, fails: bool = False, **variables: str) -> str:
    """Through the build backend, as `pip` and `build` do, with the setuptools that is here. In a
    process of its own, since a backend keeps what it has found."""
    code = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(out)!r})"
    return run([sys.executable, "-c", code], source, fails=fails, **variables)


def files_of(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def expected(folders: Sequence[str]) -> set[str]:
    """Returns what a wheel of these source folders has beneath `pdserve/`."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    kinds = {".py", ".pyi", ".cpp", ".h", ".html", ".css", ".js"}
    names = {f"pdserve/{path.relative_to(ROOT)}" for path in paths if path.suffix in kinds}
    face = (
        path.relative_to(ROOT) for name in FACE for path in (ROOT / "pdserve" / name).rglob("*.py")
    )
    models = "pdserve/common/model/models.json"
    return {"pdserve/__init__.py", "pdserve/py.typed", models, *names, *map(str, face)}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def source(work: Path) -> Path:
    """A copy of the checkout: a build leaves traces in its folder."""
    shutil.copytree(ROOT, work / "source", symlinks=True, ignore=SKIPPED)
    return work / "source"


@pytest.fixture(scope="module")
def wheel(work: Path, source: Path) -> Path:
    build("wheel", source, work)
    (wheel,) = work.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(work: Path, wheel: Path) -> Path:
    """A venv with the wheel of pdserve, that of the example's connector, and no more; the packages
    they need are this Python's."""
    connector = work / "connector"
    shutil.copytree(EXAMPLE, work / "example", ignore=SKIPPED)
    connector.mkdir()
    build("wheel", work / "example", connector)

    run([sys.executable, "-m", "venv", "--without-pip", work / "venv"], work)
    python = work / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    run([*pip, wheel, *connector.glob("*.whl")], work)
    site = Path(
        run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], work).strip()
    )
    (site / "others.pth").write_text(OTHERS)
    return python


def test_the_wheel_is_one_name_with_all_that_is_in_the_source_folders(wheel: Path) -> None:
    names = files_of(wheel).keys()
    info = f"pdserve-{pdserve.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected(FOLDERS)
    assert f"{info}licenses/LICENSE" in names


def test_a_wheel_brings_libraries_for_common_cpus(source: Path, tmp_path: Path) -> None:
    """Nothing is compiled at a start. The compiler of this test makes empty files."""
    compiler = tmp_path / "empty-g++"
    loop = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done; : > "$out"'
    compiler.write_text(f"#!/bin/sh\n{loop}\n")
    compiler.chmod(0o755)
    built = str(",".join(each.name for each in VARIANTS))
    build("wheel", source, tmp_path, PREBUILT=built, CXX=str(compiler))
    (wheel,) = tmp_path.glob("*.whl")
    if platform.machine() != MACHINE:
        assert wheel.name.endswith("-py3-none-any.whl")
        return
    assert wheel.name.endswith(f"-py3-none-linux_{MACHINE}.whl")
    found = {name for name in files_of(wheel) if name.endswith(".so")}
    assert found == {
        f"pdserve/{folder}/{FOLDER}/{file_name(library, variant)}"
        for folder, library in (("common/model/kernels", KERNELS), ("kv_transfer/native", BLOCKS))
        for variant in variants_of(library)
    }


@pytest.mark.parametrize(("variables", "tag", "said"), [
    ({"PREBUILT": "v3", "PATH": "/no/such", "CXX": ""}, "py3-none-any", "no C++ compiler found"),
    ({"PREBUILT": "v5"}, None, "PREBUILT=v5: v5 is not among"),
])  # fmt: skip
def test_a_wheel_is_built_without_a_compiler_but_not_for_unknown_cpus(
    source: Path, tmp_path: Path, variables: dict[str, str], tag: str | None, said: str
) -> None:
    output = build("wheel", source, tmp_path, fails=tag is None, **variables)
    assert said in output
    assert [path.name.split("-", 2)[2] for path in tmp_path.glob("*.whl")] == (
        [f"{tag}.whl"] if tag else []
    )


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(work: Path, source: Path, wheel: Path) -> None:
    build("sdist", source, work)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
        opened.extractall(work / "unpacked", filter="data")
    assert all(member.isfile() or member.isdir() for member in members), "no links"
    (unpacked,) = (work / "unpacked").iterdir()
    assert {path.name for path in unpacked.glob("proto/*")} == {
        path.name for path in ROOT.glob("proto/*")
    }
    assert not (unpacked / "tests").exists()
    again = work / "again"
    again.mkdir()
    build("wheel", unpacked, again)
    assert files_of(again / wheel.name) == files_of(wheel)


@pytest.mark.slow
@pytest.mark.parametrize("image", ["node", "router"])
def test_the_files_of_an_image_make_its_part_of_the_wheel(
    image: str, wheel: Path, tmp_path: Path
) -> None:
    """The links whose folders an image leaves out lead nowhere there."""
    dockerfile = (ROOT / "compose" / f"Dockerfile.{image}").read_text()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.+)$", dockerfile, re.M)]
    names = [name for words in copied for name in words]
    for path in (ROOT / name for name in names):
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name, symlinks=True, ignore=SKIPPED)
        else:
            shutil.copy(path, tmp_path)
    out = tmp_path / "wheels"
    out.mkdir()
    build("wheel", tmp_path, out)
    built, whole = files_of(out / wheel.name), files_of(wheel)
    folders = [folder for folder in FOLDERS if folder in names]
    assert {name for name in built if name.startswith("pdserve/")} == expected(folders)
    assert {name for name, data in built.items() if data != whole[name]} <= {
        f"pdserve-{pdserve.__version__}.dist-info/RECORD"
    }


@pytest.mark.slow
def test_a_checkout_without_links_is_no_wheel(source: Path, tmp_path: Path) -> None:
    """git makes files of links where core.symlinks is false, and so do tools that unpack zips."""
    shutil.copytree(source, tmp_path / "source", symlinks=True, ignore=SKIPPED)
    link = tmp_path / "source" / "pdserve" / "common"
    link.unlink()
    link.write_text("../common")
    said = build("wheel", tmp_path / "source", tmp_path, fails=True)
    assert "pdserve/common is a file where a symbolic link should be" in said
    assert not list(tmp_path.glob("*.whl"))


def test_pdserve_itself_imports_nothing(python: Path, work: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import pdserve
print(pdserve.__file__, pdserve.__version__, *(set(sys.modules) - before))
"""
    file, version, *imported = run([python, "-c", code], work).split()
    assert Path(file).is_relative_to(work / "venv")
    assert version == pdserve.__version__
    assert imported == ["pdserve"]
    assert run([python.with_name("pdserve"), "--version"], work) == f"pdserve {version}\n"


@pytest.mark.slow
def test_a_cluster_serves_from_the_wheel(python: Path, work: Path, tmp_path: Path) -> None:
    """The KV goes by a connector that is found by its entry point."""
    program = python.with_name("pdserve")
    config = json.dumps({"directory": str(tmp_path)})
    options = {"kv_connector": "file", "kv_connector_config": config}
    with Cluster("llama-gqa", {"PYTHONPATH": ""}, program, **options) as cluster:
        answer = cluster.complete(
            "the small fox walked over the hill", max_tokens=8, ignore_eos=True
        )
        assert answer["usage"]["completion_tokens"] == 8
        up, *children = cluster.home.processes()
        assert {str(each.cmdline()[0]) for each in (up, *children)} == {str(python)}
        cluster.wait_idle()
