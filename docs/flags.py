"""Writes the options table of `docs/operate.md` from the config classes.

    python docs/flags.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.config.schema import ClusterConfig, RouterConfig, WorkerNodeConfig
from common.config.sources import Option, options

PAGE = Path(__file__).with_name("operate.md")
BEGIN, END = "<!-- options: begin (python docs/flags.py) -->", "<!-- options: end -->"
COMMANDS = {"up": ClusterConfig, "router": RouterConfig, "prefill, decode": WorkerNodeConfig}

Found = dict[str, Option]  # by command


def markdown() -> str:
    """One table for each group of options."""
    return "\n".join(line for name, group in _groups().items() for line in _table(name, group))


def rewrite(page: str) -> str:
    """The page with the table as the classes say now."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{markdown()}\n{END}{tail}"


def _groups() -> dict[str, dict[str, Found]]:
    groups: dict[str, dict[str, Found]] = {}
    for command, config in COMMANDS.items():
        for option in options(config()):
            group = groups.setdefault(option.group, {})
            group.setdefault(option.flag, {})[command] = option
    return groups


def _table(name: str, group: dict[str, Found]) -> Iterator[str]:
    commands = list(dict.fromkeys(command for found in group.values() for command in found))
    yield f"\n**{name}** ({', '.join(commands)})\n"
    yield "| flag | default | meaning |"
    yield "|---|---|---|"
    for found in group.values():
        option = next(iter(found.values()))
        yield f"| {_flag(option)} | {_defaults(found)} | {_meaning(option)} |"


def _flag(option: Option) -> str:
    short = f", `{option.metadata['short']}`" if "short" in option.metadata else ""
    negated = f", `--no-{option.key}`" if option.kind is bool else ""
    return f"`{option.flag}`{short}{negated}"


def _defaults(found: Found) -> str:
    shown = {command: _default(option) for command, option in found.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{command}: {value}" for command, value in shown.items())


def _default(option: Option) -> str:
    if option.kind is bool:
        return "on" if option.default else "off"
    return "–" if option.default is None else f"`{option.default}`"


def _meaning(option: Option) -> str:
    choices = option.metadata.get("choices")
    text = option.metadata["help"] + (f" (one of: {', '.join(choices)})" if choices else "")
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
