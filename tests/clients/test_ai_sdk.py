"""Vercel's AI SDK, in Node, from npm."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from weather import ANSWER, NEWS_WEATHER

from conftest import Server

SOURCE = Path(__file__).parent / "ai_sdk"


@pytest.mark.skipif(not shutil.which("npm"), reason="there is no Node here")
def test_a_loop(tool_server: Server, tmp_path: Path) -> None:
    folder = shutil.copytree(SOURCE, tmp_path / "ai_sdk")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(install, cwd=folder, check=True, timeout=200)
    command = ["node", "loop.mjs", tool_server.base_url, tool_server.model]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["text"] == told["streamedText"] == ANSWER
    assert told["steps"] == told["streamedSteps"] == ["tool-calls", "stop"]
    assert told["required"] == [["get_weather", {"city": "Oslo"}]]
    assert told["object"] == NEWS_WEATHER.model_dump()
