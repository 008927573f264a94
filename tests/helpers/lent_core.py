"""A core that an idle owner lends to this process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.common.core.core_table import lock_entries, sized
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.worker.lent_cores import LentCores

OWNED, COMPUTING = (word.to_bytes(4, sys.byteorder) for word in (1, 3))


@contextmanager
def idle_owner(table: Path) -> Iterator[None]:
    """The table's first core has an owner that does not compute."""
    with table.open("r+b") as file:
        assert lock_entries(file.fileno(), sized(file.fileno(), 2), 1) == [0]
        file.write(OWNED)
        file.flush()
        yield


@contextmanager
def member(table: Path, kernels: NativeKernels) -> Iterator[LentCores]:
    """This process, which owns a core."""
    cores = LentCores(table, threads=1, cores=2, kernels=kernels)
    try:
        yield cores
    finally:
        cores.close()


@contextmanager
def lent_core(kernels: NativeKernels) -> Iterator[None]:
    """A step of this process beside an idle core."""
    with tempfile.NamedTemporaryFile() as file:
        table = Path(file.name)
        with idle_owner(table), member(table, kernels) as cores, cores.computing():
            yield
