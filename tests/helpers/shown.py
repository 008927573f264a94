"""Fenced blocks and commands of documentation pages, and checks of their data and code."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from paths import ROOT
from typed import Command, Wrong, check, check_body, route_of

SHELLS = ("bash", "sh", "console", "shell")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """The text between two fences."""

    place: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        body = re.sub(rf"^{found[1]}", "", found[3], flags=re.M)
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[2], body)


def inline_commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, command) of `pdserve …` in sentences, without commands with an ellipsis."""
    text = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))
    for found in re.finditer(r"`(pdserve [^`…|]+)`", text):
        line = text.count("\n", 0, found.start()) + 1
        yield f"{page.relative_to(ROOT)}:{line}", re.sub(r"\bN\b", "1", found[1]).replace("\n", " ")


# ---- data and code ------------------------------------------------------------------------------


def check_data(block: Block) -> None:
    """Raises Wrong for invalid JSON, TOML or YAML, and for options or request fields in it that do
    not exist."""
    try:
        made = READERS[block.language](block.text)
    except (ValueError, yaml.YAMLError) as error:
        raise Wrong(str(error)) from error
    if found := re.match(r"# .*, for: (pdserve \w+) --config", block.text):
        flags = [f"--{name}={value}" for name, value in made.items()]
        check(Command([*found[1].split(), *flags], {}))
    if isinstance(made, dict) and made.keys() >= {"method", "url", "body"}:
        check_body(route_of(made["method"], made["url"]), json.dumps(made["body"]))


READERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}


def check_code(block: Block) -> None:
    """Raises Wrong for Python that does not compile, or imports missing names from pdserve."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        raise Wrong(str(error)) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pdserve"):
            _import(node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("pdserve"):
                    _import(alias.name, [])


def _import(module: str, names: list[str]) -> None:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Wrong(str(error)) from error
    for name in names:
        if not hasattr(found, name) and find_spec(f"{module}.{name}") is None:
            raise Wrong(f"{module} has no {name}")
