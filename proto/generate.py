"""Generates `common/rpc/pb/` from `proto/`: `python proto/generate.py [OUT_DIR]`.

The stubs are committed; a test generates them again and compares.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The class of static methods that grpc_tools adds to each service; nothing calls them.
STATIC = re.compile(r"\n\n *# This class is part of an EXPERIMENTAL.*?(?=\n\n\nclass |\Z)", re.S)


def generate(out: Path) -> None:
    """Writes the stubs for every `proto/*.proto` into `out`."""
    from grpc_tools import protoc

    sources = sorted(str(path) for path in (ROOT / "proto").glob("*.proto"))
    wellknown = files("grpc_tools") / "_proto"
    flags = [f"-I{ROOT / 'proto'}", f"-I{wellknown}"]
    outputs = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", *flags, *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")
    for path in out.glob("*_pb2*.py*"):
        # protoc writes top-level imports; the stubs live inside a package.
        text = re.sub(
            r"^import (\w+_pb2)",
            r"from pdserve.common.rpc.pb import \1",
            path.read_text(),
            flags=re.M,
        )
        if path.name.endswith("_grpc.py"):
            text = STATIC.sub("", text)
        path.write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "common" / "rpc" / "pb")
