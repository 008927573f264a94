"""The pages say what the code says."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT
from pdserve.common.config.sources import ROLE_CONFIGS, options
from pdserve.common.obs.metrics import RouterMetrics

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["operate.md", "internals.md", "clients.md"])
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


def test_benchmark_commands_in_the_pages_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from serving.options import parse_args

    commands = _commands(r"python benchmarks/bench_serving\.py")
    assert commands
    for command in commands:
        parse_args(shlex.split(command.replace("\\\n", " "))[2:])


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_pages_exist(page: Path) -> None:
    """Words in backticks that look like files or folders of this repository."""
    words = re.findall(r"`([a-z_]+(?:/[\w.]+)*/?)`", page.read_text(encoding="utf-8"))
    paths = [word for word in words if "/" in word]
    assert [path for path in paths if not (ROOT / path).exists()] == []
