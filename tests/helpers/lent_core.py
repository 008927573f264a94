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
    """Has an idle process own the table's first core."""
    with table.open("r+b") as file:
        assert lock_entries(file.fileno(), sized(file.fileno(), 2), 1) == [0]
        file.write(OWNED)
        file.flush()
        yield


@contextmanager
def member(table: Path, kernels: NativeKernels) -> Iterator[LentCores]:
    """Yields this process as the owner of a core."""
    cores = LentCores(table, threads=1, cores=2, kernels=kernels)
    try:
        yield cores
    finally:
        cores.close()


@contextmanager
def lent_core(kernels: NativeKernels) -> Iterator[None]:
    """Runs the block as a step of this process, with an idle core to borrow."""
    with tempfile.NamedTemporaryFile() as file:
        table = Path(file.name)
        with idle_owner(table), member(table, kernels) as cores, cores.computing():
            yield
