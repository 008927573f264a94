"""KV blocks through a shared directory: one folder a rank, one file a run.

Not fast, but it needs nothing but a file system that both ranks mount, with `flock` across
hosts if there are several. It shows how a whole KVConnector is made: one thread of its own
does all the work, the methods only leave notes for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from pdserve.common.core.errors import ConfigError
from pdserve.kv_transfer.connector import (
    BlockRun,
    Capabilities,
    KVConnector,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve_file_connector.folder import Folder, sweep
from pdserve_file_connector.sink import Sink
from pdserve_file_connector.source import Endpoint, Source

BUSY_POLL_S = 0.002  # between two looks while a transfer is under way
IDLE_POLL_S = 0.05
PEER_CHECK_S = 0.2

logger = logging.getLogger(__name__)


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """`--kv-connector-config`."""

    directory: str  # exists; the same for all nodes


class FileConnector(KVConnector):
    capabilities: ClassVar[Capabilities] = Capabilities(push=True)

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        try:
            directory = Path(msgspec.convert(dict(config), Options).directory)
            sweep(directory)
            self._folder = Folder(directory)
        except (msgspec.ValidationError, OSError) as error:
            raise ConfigError(f"--kv-connector-config of file: {error}") from error
        path = self._folder.path
        self._sink = Sink(context.view, path, context.emit)
        self._source = Source(context.view, path, context.fingerprint, context.emit)
        self._next_check = 0.0
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-file", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Mapping[str, int]:
        return self._sink.counts

    def endpoint(self) -> bytes:
        return msgspec.json.encode(Endpoint(self._folder.name, self.context.fingerprint))

    def accept(self, transfer: SinkTransfer) -> None:
        self._sink.accept(transfer)
        self._wake.set()

    def submit(self, transfer: SourceTransfer) -> None:
        self._source.submit(transfer)
        self._wake.set()

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self._source.ready(transfer_id, run, block_ids, last)
        self._wake.set()

    def quiesce(self, transfer_id: bytes) -> None:
        self._sink.forget(transfer_id)
        self._source.forget(transfer_id)

    def close(self, deadline: float) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(deadline)
        self._source.close()
        self._folder.close()

    def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                moved = self._step()
            except OSError:  # the directory went away; peers and leases will notice, too
                logger.exception("the shared directory fails")
                moved = False
            if not moved:
                live = self._sink.live() or self._source.live()
                self._wake.wait(BUSY_POLL_S if live else IDLE_POLL_S)

    def _step(self) -> bool:
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + PEER_CHECK_S
            self._sink.check_sources()
            self._source.check_sinks()
        taken, moved = self._sink.take_all(), self._source.move_all()
        return taken or moved
