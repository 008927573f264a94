"""Builds the C++ beside this file for this machine, once, and loads it
([`native.py`](../../core/native.py)).

It needs none of torch's headers, which take half a minute to compile. It is linked with the OpenMP
that torch has loaded: a second one would be a second pool of threads, which fights the first for
the cores.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from pdserve.common.core import native

# No -ffast-math: NaN and infinity mean something here. No contraction: what torch rounds twice is
# rounded twice; where a fused multiply-add is meant, the source says so.
FLAGS = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")


def load_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The kernels.

    Raises:
        BuildError: they cannot be built here.
    """
    openmp = _loaded_openmp()
    linked = () if openmp is None else (openmp,)
    made_of = native.Library("kernels", Path(__file__).parent, FLAGS, linked, (torch.__version__,))
    return native.load_library(made_of, cache_dir)


def _loaded_openmp() -> str | None:
    """The OpenMP runtime of this process, which torch brought with it; None: torch has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith(("libgomp", "libiomp5")):
            return f"/{path}"
    return None
