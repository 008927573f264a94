"""The connectors of one host and of TCP, whose sinks do not say that they alone write: what has
landed is read again for its digests."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.connectors.shm import ShmConnector
from pdserve.kv_transfer.connectors.tcp import TCPConnector


class RereadShm(ShmConnector):
    capabilities: ClassVar[Capabilities] = replace(ShmConnector.capabilities, sink_writes=False)


class RereadTCP(TCPConnector):
    capabilities: ClassVar[Capabilities] = replace(TCPConnector.capabilities, sink_writes=False)
