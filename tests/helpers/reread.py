"""The shm and TCP connectors with sinks that do not claim to be the only writer, so that landed
blocks are read again to compute digests."""

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
