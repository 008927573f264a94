"""python tests/clients/lock.py TORCH: what the clients' requirements stand for today, exactly.

Writes `requirements.lock` and `apart/requirements.lock` of new environments, and the AI SDK's
`package-lock.json` where there is npm. None says where packages come from: the host does.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
HEAD = "# Made by `make lock-clients` of requirements.txt beside it.\n"
# They come with torch, in the build that the Makefile names.
OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")


def lock(folder: Path, *first: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        venv.create(made, with_pip=True)
        pip = [f"{made}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        if first:
            subprocess.run([*pip, "install", "--quiet", *first], check=True)
        wanted = str(folder / "requirements.txt")
        subprocess.run([*pip, "install", "--quiet", "-r", wanted], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    lines = [line for line in frozen.splitlines(keepends=True) if not OF_TORCH.match(line)]
    (folder / "requirements.lock").write_text(HEAD + "".join(lines))


def lock_npm(folder: Path) -> None:
    file = folder / "package-lock.json"
    file.unlink(missing_ok=True)
    flags = ["--package-lock-only", "--omit-lockfile-registry-resolved", "--no-audit", "--no-fund"]
    subprocess.run(["npm", "install", *flags], cwd=folder, check=True)
    locked = json.loads(file.read_text())
    for package in locked["packages"].values():
        package.pop("funding", None)
    file.write_text(json.dumps(locked, indent=2) + "\n")


if __name__ == "__main__":
    lock(HERE)
    lock(HERE / "apart", *sys.argv[1].split())
    if shutil.which("npm"):
        lock_npm(HERE / "ai_sdk")
