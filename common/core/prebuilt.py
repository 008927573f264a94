"""Shared libraries that a wheel brings for common CPUs, so that nothing is compiled at a start.

`setup.py` builds each library for `VARIANTS` when it builds a wheel. The file's name has a digest
of sources and flags, so a library of other sources is never used. A process takes the best variant
that its CPU can run: all processes of one host take the same.

A variant that has every instruction set for which the sources have code of their own computes the
same bits as a library compiled for this very CPU: the order of sums is that of the source, and the
compiler may not change it.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.core.host import cpu_flags
from pdserve.common.core.native_library import Library, build, find_compiler

FOLDER = "prebuilt"  # below a library's sources
MACHINE = "x86_64"

_V3 = frozenset(
    {
        "ssse3", "sse4_1", "sse4_2", "cx16", "popcnt", "lahf_lm", "avx", "avx2", "bmi1", "bmi2",
        "f16c", "fma", "abm", "movbe", "xsave",
    }
)  # fmt: skip
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Macros by which sources choose code, and the names of these features in /proc/cpuinfo.
MACROS = {
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16",
    "__AMX_BF16__": "amx_bf16",
}
_MACRO = re.compile("|".join(MACROS))


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of CPU: the compiler's flags for it, and the features it must have, as named in
    /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V4_VNNI = ("-march=x86-64-v4", "-mavx512vnni")
_V4_BF16 = (*_V4_VNNI, "-mavx512bf16")
VARIANTS = (  # from the least to the best
    Variant("v3", ("-march=x86-64-v3",), _V3),  # Haswell, Zen 1 to 3
    Variant("v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),  # Alder Lake
    Variant("v4", ("-march=x86-64-v4",), _V4),  # Skylake-SP
    Variant("v4-vnni", _V4_VNNI, _V4 | {"avx512_vnni"}),  # Cascade Lake, Ice Lake
    Variant("v4-bf16", _V4_BF16, _V4 | {"avx512_vnni", "avx512_bf16"}),  # Zen 4 and 5
    Variant(  # Sapphire Rapids
        "v4-amx",
        (*_V4_BF16, "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    ),
)


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A library's file for this host's CPU. `lacks`: features of the CPU for which the sources have
    code that is not in the file."""

    library: Library
    path: Path
    lacks: frozenset[str]

    def load(self) -> ctypes.CDLL:
        """Raises OSError if the host lacks something, such as a C library as new as the build's."""
        for path in self.library.linked:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # the file names no libraries to load
        return ctypes.CDLL(str(self.path))


def find(library: Library, cpu: frozenset[str] | None = None) -> Prebuilt | None:
    """Returns the best file for the CPU, which has the features `cpu` (default: this host's); None
    if the installation has none that fits."""
    folder = library.sources / FOLDER
    if not folder.is_dir():
        return None
    cpu = cpu_flags() if cpu is None else cpu
    for variant in reversed(variants_of(library)):
        path = folder / file_name(library, variant)
        if variant.needs <= cpu and path.is_file():
            return Prebuilt(library, path, _used(library, cpu) - variant.needs)
    return None


def file_name(library: Library, variant: Variant) -> str:
    return f"{variant.name}-{library.digest(variant.flags)}.so"


def variants_of(library: Library) -> list[Variant]:
    """Returns the variants, from the least to the best, without those that add nothing for which
    the sources have code."""
    named = _features(library)
    different: dict[frozenset[str], Variant] = {}
    for variant in VARIANTS:
        different.setdefault(variant.needs & named, variant)
    return list(different.values())


def _features(library: Library) -> frozenset[str]:
    texts = (path.read_text() for path in library.files)
    return frozenset(MACROS[macro] for text in texts for macro in _MACRO.findall(text))


def _used(library: Library, cpu: frozenset[str]) -> frozenset[str]:
    """Returns features of the CPU for which the sources have code. AVX-512 takes precedence over
    AVX-VNNI."""
    used = _features(library) & cpu
    return used - {"avx_vnni"} if "avx512f" in used else used


def make(library: Library, folder: Path, names: frozenset[str]) -> Iterator[Path]:
    """Builds the library into `folder` for the variants called `names`; yields each file. Names in
    linked libraries stay open: the process has loaded these.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    for variant in variants_of(library):
        if variant.name in names:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / file_name(library, variant)
            with tempfile.TemporaryDirectory() as scratch:
                build(library, (find_compiler(), *variant.flags), ("-s",), str(path), scratch)
            yield path
