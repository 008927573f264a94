"""Links between a client and a server, which tests cut and measure."""

from __future__ import annotations

import asyncio


class Link:
    """A TCP proxy. Once cut, it reads bytes and forwards none."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pumps: set[asyncio.Task[None]] = set()
        self.cut = False
        self.sent = 0  # bytes that clients have sent

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = (reader, writer), await asyncio.open_connection("127.0.0.1", self._port)
        self._pumps |= {
            asyncio.create_task(self._pump(near[0], far[1], counts=True)),
            asyncio.create_task(self._pump(far[0], near[1])),
        }

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool = False
    ) -> None:
        while data := await reader.read(65536):
            self.sent += len(data) if counts else 0
            if not self.cut:
                writer.write(data)

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
