"""`--help=TOPIC`: the help of one group of options, or of those with a word in their names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pdserve.common.config import vllm
from pdserve.common.config.options import Option
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import nearest

ALL, GROUPS = ("all", "page"), "listgroup"


def about(parser: argparse.ArgumentParser, found: Sequence[Option], topic: str) -> str:
    """Returns the help of `topic`: `all`, `listgroup`, a group by its title or its class, a flag
    or a part of one; names as vLLM's.

    Raises:
        ConfigError: there is nothing of that name.
    """
    word = topic.lower().removeprefix("--").replace("_", "-")
    if word in ALL:
        return parser.format_help()
    titles = {option.group: option.owner for option in found}
    if word == GROUPS:
        return "".join(f"{owner:<22}{title}\n" for title, owner in titles.items())
    chosen = (
        [each for each in found if word in (each.group.lower(), each.owner.lower())]
        or [each for each in found if word == each.key]
        or [each for each in found if word in each.key]
    )
    if chosen:
        return _sections(parser, {each.name for each in chosen})
    if (flag := vllm.find(word)) is not None:
        return f"{vllm.Given('--' + word, '', flag[0]).about}\n"
    near = nearest(topic, [*titles, *titles.values(), *(each.key for each in found)])
    raise ConfigError(
        f"no option and no group is called {topic}; {near or f'--help={GROUPS} lists the groups'}"
    )


def _sections(parser: argparse.ArgumentParser, names: set[str]) -> str:
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest in names]
        formatter.start_section(group.title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()
