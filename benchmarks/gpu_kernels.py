"""Brings FlashInfer's compiled modules to the GPU host and back, one archive for each version of
FlashInfer and architecture: `flashinfer-kernels-0.6.6-90a.tgz` holds `MODULE/MODULE.so`.

FlashInfer loads what it finds in `data/aot` beside its sources as it is. Its cache, in contrast, is
compiled anew when a header is newer, which each installation makes it.
"""

from __future__ import annotations

import shutil
import tarfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

SITE = Path(__file__).parents[1] / "build" / "gpu-site"  # the packages that the run may change
CACHE = Path.home() / ".cache" / "flashinfer"


def unpack(folder: Path) -> int:
    """Unpacks the archive of this host's FlashInfer and GPU, if `folder` has it. Returns the number
    of modules."""
    found, archive = aot_folder(), folder / archive_name()
    if found is None or not archive.exists():
        return 0
    with tarfile.open(archive) as packed:
        packed.extractall(found, filter="data")
    return len(list(found.glob("*/*.so")))


def pack(folder: Path) -> Path | None:
    """Writes the archive of all modules that this host has. Returns None if it has none."""
    found = aot_folder()
    if found is None:
        return None
    for library in (CACHE / _version() / architecture() / "cached_ops").glob("*/*.so"):
        target = found / library.parent.name / library.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)
    return write(folder / archive_name(), sorted(found.glob("*/*.so")))


def write(archive: Path, libraries: list[Path]) -> Path | None:
    if not libraries:
        return None
    with tarfile.open(archive, "w:gz") as packed:
        for library in libraries:
            packed.add(library, f"{library.parent.name}/{library.name}")
    return archive


def archive_name(arch: str = "") -> str:
    """`arch`: as FlashInfer names its folders; default: this host's."""
    return f"flashinfer-kernels-{_version()}-{arch or architecture()}.tgz"


def architecture() -> str:
    """Returns FlashInfer's name for the first GPU's architecture, "" without one."""
    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(0)
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def aot_folder() -> Path | None:
    """Returns the folder of FlashInfer's modules; None if it is not installed in `SITE`."""
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None or SITE not in Path(spec.origin).parents:
        return None
    return Path(spec.origin).parent / "data" / "aot"


def _version() -> str:
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return ""
