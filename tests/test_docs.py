"""The pages say what the code says."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT
from pdserve.common.bench.serving.options import parse_args
from pdserve.common.config.sources import ROLE_CONFIGS, options
from pdserve.common.obs.metrics import RouterMetrics
from test_architecture import ALLOWED

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = ("common", "kv_transfer", "prefill_node", "decode_node", "router")
OTHERS = ("pdserve", "proto", "tests", "benchmarks", "examples", "docs", "compose")
# What follows class, def, message …, is assigned to, or is an error's code.
DEFINED = re.compile(
    r"""\b(?:class|def|message|service|rpc|enum) +(\w+)|\bself\.(\w+)|^ *(\w+) *[:=]|"(\w+)\"""",
    re.M,
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["operate.md", "internals.md", "clients.md", "cli.md"])
def test_generated_parts_are_up_to_date(generate: ModuleType, name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "<!-- begin" in page
    assert generate.rewrite(page) == page, "run: python docs/generate.py"


def test_every_flag_and_metric_is_in_operate() -> None:
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    flags = {option.flag for config in ROLE_CONFIGS for option in options(config())}
    metrics = {metric.name for metric in RouterMetrics().registry.collect()}
    assert [name for name in sorted(flags | metrics) if f"`{name}" not in page] == []


def test_flags_in_the_pages_exist() -> None:
    known = {option.flag for config in ROLE_CONFIGS for option in options(config())}
    commands = _commands(r"pdserve (?:up|router|prefill|decode)\b")
    assert commands
    used = {flag for command in commands for flag in re.findall(r"--[a-z-]+", command)}
    assert used - known - {"--config"} == set()


def test_benchmark_commands_in_the_pages_parse() -> None:
    commands = _commands(r"pdserve bench serve")
    assert commands
    for command in commands:
        parse_args(shlex.split(command.replace("\\\n", " "))[3:])


def _commands(start: str) -> list[str]:
    """Shell commands of all pages that begin so, continued lines included."""
    pattern = re.compile(rf"^{start}.*?(?<!\\)$", re.M | re.S)
    return [found for page in PAGES for found in pattern.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Heading anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


# ---- names, so that nobody renames a file, a class or a test and leaves the pages behind ----


@pytest.fixture(scope="module")
def files() -> set[str]:
    """All of this repository, as paths from its root."""
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*") if path.is_file()}
    for folder in (*SOURCES, *OTHERS):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def code(files: set[str]) -> dict[str, str]:
    """Python and protobuf files by path."""
    return {name: (ROOT / name).read_text() for name in files if name.endswith((".py", ".proto"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_pages_exist(page: Path, files: set[str]) -> None:
    """Words in backticks that look like files, folders or tests of this repository; a file's name
    alone is enough where a page has said which folder it speaks of."""
    words = re.findall(r"`([\w./-]+(?:::\w+)?)`", page.read_text(encoding="utf-8"))
    assert [word for word in words if not _exists(word, files)] == []


def _exists(word: str, files: set[str]) -> bool:
    path, _, test = word.partition("::")
    if test:
        return path in files and f"def {test}(" in (ROOT / path).read_text()
    if path.partition("/")[0] in (*SOURCES, *OTHERS) and "/" in path:
        return (ROOT / path).exists()
    if re.fullmatch(r"(?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|proto)", path):
        return any(f"/{name}".endswith(f"/{path}") for name in files)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_in_the_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bpdserve(?:\.[a-z_0-9]+)+(?=[`:, ;]|$)", text, re.M):
        package = name.split(".")[1]
        if package in SOURCES:  # not an entry point's group, nor a host's name
            path = ROOT.joinpath(*name.split(".")[1:])
            assert path.is_dir() or path.with_suffix(".py").is_file(), name


@pytest.mark.parametrize("name", ["internals.md", "where-do-i-add.md", "write-a-connector.md"])
def test_names_in_the_pages_are_in_the_code(name: str, code: dict[str, str]) -> None:
    """Classes, their methods and constants, in backticks or in a picture."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```(.*?)```", page, re.DOTALL)
    pictures = " ".join(block for block in blocks if block.startswith("\n"))  # not of a language
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = re.findall(r"`([A-Z]\w+(?:\.\w+)*)(?:\(.*?\))?`", text)
    words += re.findall(r"\b[A-Z]\w+\.\w+|\b[A-Z]+[a-z]+[A-Z]\w+", pictures)
    known = {"".join(found) for text in code.values() for found in DEFINED.findall(text)}
    assert [w for w in words if not known.issuperset(w.split("."))] == []
    threads = re.findall(r"\bkv-\w+", pictures)
    assert [t for t in threads if not any(f'"{t}"' in text for text in code.values())] == []


def test_the_table_of_rooms_is_the_one_that_is_held() -> None:
    """Which package may import which: `test_architecture.py` has the same."""
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    table = page.partition("## Rooms")[2].partition("## ")[0]
    rooms = {}
    for row in re.findall(r"^\| `[a-z_.]+[a-z]` .*", table, re.M):
        _, room, *_, imports, _ = row.split("|")
        names = re.findall(r"`(\w+)`", imports)
        rooms[room.strip(" `")] = {n if n in SOURCES else f"common.{n}" for n in names}
    assert rooms == ALLOWED


def test_files_named_in_the_code_exist(files: set[str]) -> None:
    """`name.py` in comments and docstrings of the product."""
    wrong = [
        f"{name}: {word}"
        for name in sorted(files)
        if name.startswith(SOURCES) and name.endswith(".py")
        for word in re.findall(r"`([\w./-]+\.(?:py|proto|md))`", (ROOT / name).read_text())
        if not (ROOT / word).is_file()
        and not any(f"/{each}".endswith(f"/{word}") for each in files)
    ]
    assert wrong == []


def test_every_helper_of_the_tests_is_on_their_page() -> None:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    names = {path.stem for path in (ROOT / "tests" / "helpers").iterdir()} - {"__pycache__"}
    assert [name for name in sorted(names) if not re.search(rf"`{name}/?`", page)] == []
