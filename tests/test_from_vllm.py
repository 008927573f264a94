"""docs/from-vllm.md: whatever it says is here, is here."""

from __future__ import annotations

import importlib.util
import re

from paths import ROOT
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.sources import options

PAGE = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")


def column_here(heading: str) -> str:
    """The second column of the tables of a part."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(row.split("|")[2] for row in part.splitlines() if row.startswith("| `"))


def test_every_flag_is_one_of_up() -> None:
    flags = {option.flag for option in options(ClusterConfig())}
    same = PAGE.partition("The same under")[2].partition("\n\n")[0]
    named = re.findall(r"`(--[a-z0-9-]+)`", same + column_here("Flags"))
    assert len(named) > 30
    assert [flag for flag in named if flag not in flags] == []


def test_every_metric_is_one_of_the_router_or_a_node() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    known = "\n".join([*generate.router_metrics(), *generate.node_metrics()])
    named = re.findall(r"`(pdserve:\w+)`", column_here("Metrics"))
    assert len(named) > 10
    assert [name for name in named if f"`{name}`" not in known] == []
