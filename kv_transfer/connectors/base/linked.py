"""What the built-in connectors share: a server for the sink, links for the source."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from pdserve.common.core.errors import Blame, ConfigError
from pdserve.kv_transfer.connector import (
    BlockRun,
    KVConnector,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.intake import Intake, Pulse, as_transfer_error
from pdserve.kv_transfer.connectors.base.links import Channel, Links
from pdserve.kv_transfer.connectors.base.server import PipeServer
from pdserve.kv_transfer.pipe import KVPipe, PipeListener

logger = logging.getLogger(__name__)


class LinkedConnector(KVConnector):
    """Subclasses say how to listen, how to dial and how to serve a connection."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        device = context.view.cache.device.type
        if device not in self.capabilities.devices:
            raise ConfigError(
                f"{type(self).__name__} cannot move KV of a {device} cache: "
                "choose another --kv-connector (tcp can)"
            )
        self.intake = Intake(context.view, context.emit)
        self._links = Links(self.dial, context.emit, context.view.cache)
        self._server: PipeServer | None = None
        self._starting = threading.Lock()

    @abstractmethod
    def listen(self, host: str) -> PipeListener: ...

    @abstractmethod
    def dial(self, endpoint: bytes) -> Channel:
        """Connects and introduces itself. Raises OSError or TransferError."""

    @abstractmethod
    def serve(self, pipe: KVPipe) -> None:
        """Greets the source behind `pipe` and takes its blocks until it leaves (OSError).

        Raises:
            TransferError: the source broke the rules.
        """

    @property
    def counts(self) -> Counter[str]:
        """Late, duplicate, foreign and drained frames, connections refused or ended, and bytes."""
        return self.intake.counts

    def endpoint(self) -> bytes:
        with self._starting:
            if self._server is None:
                listener = self.listen(self.context.bind_host)
                self._server = PipeServer(listener, self._serve, self.counts)
            return self._server.endpoint

    def _serve(self, pipe: KVPipe) -> None:
        pipe.on_moved = Pulse(partial(self.intake.moving, pipe))
        try:
            self.serve(pipe)
        except Exception as error:
            typed = as_transfer_error(error, Blame.PREFILL)
            self.counts[typed.code] += 1
            if typed.code != "PEER_LOST":  # which is how every connection ends
                logger.warning("a KV connection was refused: %s", typed)
            self.intake.disconnected(pipe, typed)

    def accept(self, transfer: SinkTransfer) -> None:
        self.intake.accept(transfer)

    def submit(self, transfer: SourceTransfer) -> None:
        self._links.submit(transfer)

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self._links.ready(transfer_id, run, block_ids, last)

    def quiesce(self, transfer_id: bytes) -> None:
        self.intake.forget(transfer_id)
        self._links.forget(transfer_id)

    def close(self, deadline: float) -> None:
        self._links.close(deadline)
        if self._server is not None:
            self._server.close(deadline)
