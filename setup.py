"""The options are in pyproject.toml. This builds C++ libraries for common CPUs into a wheel, and
stops a build that would make an empty one.

PREBUILT selects the libraries' variants (`common/core/prebuilt.py`): names with commas, or `none`.
Without a C++ compiler, or on another machine than x86-64, the wheel has none and nodes compile.
"""

import os
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

for path in Path("pdserve").iterdir():
    if path.is_file() and not path.suffix:
        raise SystemExit(
            f"{path} is a file where a symbolic link should be. Unpack the source with a tool that "
            "makes links; in a git clone: git config core.symlinks true && git checkout pdserve"
        )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from pdserve.common.core import prebuilt  # noqa: E402
from pdserve.common.core.native_library import BuildError, Library, find_compiler  # noqa: E402


def libraries() -> list[Library]:
    """Returns the libraries whose sources are here; the files of an image may lack some."""
    found = []
    if Path("pdserve/common/model").is_dir():
        from pdserve.common.model.kernels import KERNELS

        found.append(KERNELS)
    if Path("pdserve/kv_transfer").is_dir():
        from pdserve.kv_transfer.native import BLOCKS

        found.append(BLOCKS)
    return found


@cache
def variants() -> frozenset[str]:
    """Returns the names of the variants to build."""
    known = frozenset(each.name for each in prebuilt.VARIANTS)
    given = os.environ.get("PREBUILT", "none" if not libraries() else ",".join(known))
    if given == "none":
        return frozenset()
    chosen = frozenset(given.split(","))
    if unknown := chosen - known:
        raise SystemExit(
            f"PREBUILT={given}: {', '.join(sorted(unknown))} is not among {sorted(known)}"
        )
    if platform.machine() != prebuilt.MACHINE:
        print(f"no prebuilt libraries: they are for {prebuilt.MACHINE}; nodes compile theirs")
        return frozenset()
    try:
        find_compiler()
    except BuildError as error:
        print(f"no prebuilt libraries, so nodes compile theirs: {error}")
        return frozenset()
    return chosen


class WithLibraries(Distribution):
    """A package for one kind of machine if it brings libraries."""

    def has_ext_modules(self) -> bool:
        return bool(variants())


class BuildLibraries(build_py):
    """Builds the libraries beside the modules, except for an editable install."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for library in libraries():
            package = library.sources.relative_to(ROOT)
            folder = Path(self.build_lib) / package / prebuilt.FOLDER
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
            for made in prebuilt.make(library, folder, variants()):
                print(f"built {made}", flush=True)


class AnyPython(bdist_wheel):
    """The libraries have no Python headers, so a wheel suits every Python of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, system = super().get_tag()
        return "py3", "none", system


setup(
    distclass=WithLibraries,
    cmdclass={"build_py": BuildLibraries, "bdist_wheel": AnyPython},
)
