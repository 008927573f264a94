"""Vercel's AI SDK, in Node, from npm."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from weather import ANSWER, NEWS_WEATHER

from conftest import Server, run

SOURCE = Path(__file__).parent / "ai_sdk"
PACKAGES = Path(os.environ.get("CLIENTS_NPM", "")) / "node_modules"

pytestmark = pytest.mark.skipif(
    not shutil.which("node") or not (PACKAGES / "ai").is_dir(),
    reason="there is no Node, or make test-clients has not installed the AI SDK",
)


def node(folder: Path, program: str, server: Server) -> Any:
    """Node looks for packages beside the program."""
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    (folder / "node_modules").symlink_to(PACKAGES)
    return json.loads(run(["node", program, server.base_url, server.model], cwd=folder))


def test_a_loop(tool_server: Server, tmp_path: Path) -> None:
    told = node(tmp_path, "loop.mjs", tool_server)
    assert told["text"] == told["streamedText"] == ANSWER
    assert told["steps"] == told["streamedSteps"] == ["tool-calls", "stop"]
    assert told["usage"] == told["streamedUsage"]
    assert all(count > 0 for step in told["usage"] for count in step)
    assert told["required"] == [["get_weather", {"city": "Oslo"}]]
    assert told["object"] == NEWS_WEATHER.model_dump()


@pytest.mark.parametrize("name", ["tool_server", "small_server"])
def test_structured_output_keeps_within_its_budget(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    told = node(tmp_path, "budget.mjs", request.getfixturevalue(name))
    assert isinstance(told["ok"], bool) and told["mood"] in ("glad", "sad")
