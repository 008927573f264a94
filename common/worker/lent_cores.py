"""Cores that ranks of one host lend each other while they do not compute: `--share-cores FILE`.

The file is a table with an entry of 64 bytes per core (`kernels/lent_cores.cpp`). A rank owns as
many of them as it has threads. It locks their first bytes; Linux drops the locks when the rank
ends, so the next rank to start takes over a dead one's cores.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pdserve.common.core.core_table import ENTRY_NBYTES, CoresTaken, lock_entries, sized
from pdserve.common.core.errors import ConfigError
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import Kernels

PATIENCE_S = 5.0  # for ranks that are about to end

logger = logging.getLogger(__name__)


class LentCores:
    """Makes this process the owner of `threads` cores of the table and starts threads that use
    other ranks' cores. Use one object per process; `close` gives the cores up."""

    def __init__(self, file: Path, threads: int, cores: int, kernels: NativeKernels) -> None:
        """`cores`: the host's, the size of a table that is new.

        Raises:
            ConfigError: the file cannot be used.
            CoresTaken: too few cores have no owner.
        """
        self._fd = -1
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            count = sized(self._fd, max(cores, threads))
            self.own = tuple(lock_entries(self._fd, count, threads))
            self._table = mmap.mmap(self._fd, count * ENTRY_NBYTES)
        except BaseException as error:
            if self._fd >= 0:
                os.close(self._fd)
            if isinstance(error, OSError):
                raise ConfigError(f"--share-cores {file}: {error.strerror}") from error
            raise
        self._memory = ctypes.c_char.from_buffer(self._table)
        self._library = kernels.library
        owned = np.asarray(self.own, np.int32)
        self._library.lend_join(
            ctypes.byref(self._memory),
            ctypes.c_int64(count),
            ctypes.c_void_p(owned.ctypes.data),
            ctypes.c_int64(len(owned)),
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Marks a step: meanwhile this rank's cores are its own, and it may use others'."""
        self._library.lend_begin()
        try:
            yield
        finally:
            self._library.lend_end()

    def close(self) -> None:
        self._library.lend_leave()
        del self._memory
        self._table.close()
        os.close(self._fd)


def join_lent_cores(
    file: str | None, threads: int, cores: int, kernels: Kernels
) -> LentCores | None:
    """Returns None without --share-cores, with kernels that cannot share, and if other processes
    keep all cores of the table: ranks of a node that has just died may have some for a while.

    Raises:
        ConfigError: the file cannot be used.
    """
    if not file:
        return None
    if not isinstance(kernels, NativeKernels):
        logger.warning("--share-cores has no effect: only --cpu-kernels native use lent cores")
        return None
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return LentCores(Path(file), threads, cores, kernels)
        except CoresTaken as error:
            if time.monotonic() > end:
                logger.warning("--share-cores %s: %s; this rank shares none", file, error)
                return None
            time.sleep(0.1)
