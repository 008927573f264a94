"""CrewAI's LLM, which calls the tool itself."""

from __future__ import annotations

from pathlib import Path

from weather import FOUND

from conftest import Server, apart, run

ASK = str(Path(__file__).parent / "apart" / "ask_crewai.py")


def test_a_call(tool_server: Server, tmp_path: Path) -> None:
    asked = [tool_server.base_url, tool_server.model, "What is the weather in Oslo?"]
    quiet = {"HOME": str(tmp_path), "CREWAI_DISABLE_TELEMETRY": "true"}
    said = run([apart("python"), ASK, *asked], env=quiet)
    assert FOUND["Oslo"] in said.splitlines(), said  # it also draws boxes, from another thread
