"""Where a sink rank takes data, through every connector it speaks."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from common.core.errors import Blame
from kv_transfer.frame import bad_frame


def host_identity() -> str:
    """Equal for processes that meet at an abstract Unix socket and may pass each other memory:
    same kernel, same network namespace, same user. (Containers may share a host name and
    nothing else, or the reverse.)"""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"


class Endpoints(msgspec.Struct, frozen=True):
    """What a ticket carries for each sink rank, as msgpack."""

    host: str  # `host_identity`
    connectors: dict[str, bytes]  # name → the connector's own endpoint

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoints:
        """Raises TransferError (BAD_FRAME)."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise bad_frame(f"a decode rank's endpoint: {error}", Blame.DECODE) from error
