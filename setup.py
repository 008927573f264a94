"""All of it is in pyproject.toml. This stops a build that would make an empty wheel."""

from pathlib import Path

from setuptools import setup

for path in Path("pdserve").iterdir():
    if path.is_file() and not path.suffix:
        raise SystemExit(
            f"{path} is a file where a symbolic link should be. Unpack the source with a tool that "
            "makes links; in a git clone: git config core.symlinks true && git checkout pdserve"
        )

setup()
