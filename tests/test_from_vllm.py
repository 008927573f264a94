"""The flags that docs/from-vllm.md names exist, or do not, as it says."""

from __future__ import annotations

import re

from paths import ROOT
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.options import options

PAGE = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")


def column_here(heading: str) -> str:
    """The second column of the tables of a part."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(row.split("|")[2] for row in part.splitlines() if row.startswith("| `"))


def flags_of_up() -> set[str]:
    found = list(options(ClusterConfig()))
    return {option.flag for option in found} | {o.metadata.get("short", "") for o in found}


def test_every_flag_is_one_of_up() -> None:
    flags = flags_of_up()
    same = PAGE.partition("The same under")[2].partition("\n\n")[0]
    named = re.findall(r"`(--[a-z0-9-]+)`", same + column_here("Flags"))
    assert len(named) > 30
    assert [flag for flag in named if flag not in flags] == []


def test_a_flag_that_is_not_here_is_not_here() -> None:
    rows = re.findall(r"^\| `(--[a-z0-9-]+)` \| – \|", PAGE, re.M)
    assert rows
    assert flags_of_up().intersection(rows) == set()
