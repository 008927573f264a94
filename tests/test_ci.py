"""Workflows, issue forms and hooks: they parse, and all that they call exists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paths import ROOT
from typed import check, commands

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_exist(file: Path) -> None:
    shown = list(steps(yaml.safe_load(file.read_text())))
    for step in shown:
        if "run" in step:
            for command in commands(step["run"]):
                check(command)
        else:
            assert re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", step["uses"])
    assert any("run" in step for step in shown)


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of all jobs; of a job with a matrix, those that run something once for each of its
    values."""
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            yield from each_run(step, job.get("strategy", {}).get("matrix", {}))


def each_run(step: dict[str, Any], matrix: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    run = step.get("run", "")
    used = [name for name in matrix if f"${{{{ matrix.{name} }}}}" in run]
    if not used:
        yield step
    for name in used:
        for value in matrix[name]:
            yield {**step, "run": run.replace(f"${{{{ matrix.{name} }}}}", value)}


def test_the_nightly_workflow_runs_every_part_of_test_all() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    made = {word for step in steps(workflow) for word in step.get("run", "").split()}
    parts = re.search(r"^test-all: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert parts is not None
    assert {*parts[1].split()} <= made


def test_make_sets_no_variable_that_pdserve_would_refuse() -> None:
    """A cluster that a test starts takes PDSERVE_… for an option."""
    assert not re.findall(r"\bPDSERVE_\w+=", (ROOT / "Makefile").read_text())


def test_continuous_integration_runs_on_every_python_that_the_package_takes() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    project = (ROOT / "pyproject.toml").read_text()
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={versions[0]}"' in project


def test_forms_ask_each_thing_once() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        ids = [field["id"] for field in form.get("body", []) if "id" in field]
        assert len(ids) == len(set(ids))


def test_hooks_use_the_tools_of_the_virtual_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repo in config["repos"]:
        assert repo["repo"] == "local"
        for hook in repo["hooks"]:
            program, *arguments = hook["entry"].split()
            assert program.startswith(".venv/bin/")
            assert all((ROOT / word).exists() for word in arguments if word.endswith(".py"))


def test_every_development_tool_is_locked() -> None:
    lock = (ROOT / "requirements-dev.lock").read_text().lower().replace("_", "-")
    wanted = re.search(r"^dev = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert wanted is not None
    for name in re.findall(r'"([\w-]+)', wanted[1]):
        # A torch for CUDA asks for its own version of Triton.
        assert f"\n{name.lower()}==" in lock or name == "triton"


def test_no_private_key_is_committed() -> None:
    words = ["git", "grep", "--cached", "-l", "-e", "BEGIN .*PRIVATE " + "KEY"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode == 128:
        pytest.skip("no git checkout")
    assert found.stdout == ""
