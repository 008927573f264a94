"""schemathesis: requests that fit `/openapi.json`, or almost, get neither a 5xx nor an undocumented
status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
TIMEOUT = 3600  # seconds; only a hang takes so long, even on busy cores


@pytest.mark.timeout(TIMEOUT + 60)
def test_every_endpoint(server: Server, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    command = [str(program), "run", f"{server.url}/openapi.json", "--checks", CHECKS]
    command += ["--max-examples", "25", "--seed", "1", "--request-timeout", "60"]
    command += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
