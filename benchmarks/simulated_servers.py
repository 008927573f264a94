"""Simulates OpenAI servers without engines in one process, for routers that forward HTTP;
`simulated_nodes.py` is the counterpart for our router.

    python benchmarks/simulated_servers.py --model NAME --count 8

Prints the ports in one line. Requests get a token every `--step` seconds, the first immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdserve.common.core.host import raise_open_file_limit

WORDS = [f" word{number}" for number in range(50)]


class Servers:
    """All simulated servers."""

    def __init__(self, model: str, step: float) -> None:
        self._model = model
        self._step = step
        self._stepped = asyncio.Event()

    async def steps(self) -> None:
        """Gives all requests a token per step, like one batch. Never returns."""
        while True:
            await asyncio.sleep(self._step)
            self._stepped.set()
            self._stepped = asyncio.Event()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                pairs = (line.lower().partition(":") for line in lines)
                size = next((value for name, _, value in pairs if name == "content-length"), "0")
                body = await reader.readexactly(int(size))
                if first.startswith("POST /v1/completions"):
                    await self._stream(writer, json.loads(body))
                else:
                    self._tell(writer, first.split()[1])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    def _tell(self, writer: asyncio.StreamWriter, path: str) -> None:
        """Answers any other path with its health and its model."""
        models = [{"id": self._model, "object": "model", "owned_by": "simulated"}]
        told: dict[str, Any] = {"model_path": self._model, "served_model_name": self._model}
        told = {"object": "list", "data": models} if path.startswith("/v1/models") else told
        writer.write(_head("application/json", f"Content-Length: {len(json.dumps(told))}"))
        writer.write(json.dumps(told).encode())

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        count = body["max_tokens"]
        writer.write(_head("text/event-stream", "Transfer-Encoding: chunked"))
        for number in range(count):
            if number:
                await self._stepped.wait()
            if writer.is_closing():
                raise ConnectionError("the client has left")
            last = "length" if number + 1 == count else None
            choice = {"index": 0, "text": WORDS[number % len(WORDS)], "logprobs": None}
            chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1}
            chunk |= {"model": self._model, "choices": [choice | {"finish_reason": last}]}
            writer.write(_chunk(b"data: %b\n\n" % json.dumps(chunk).encode()))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def run(model: str, count: int, step: float) -> None:
    """Serves until cancelled."""
    servers = Servers(model, step)
    made = [await asyncio.start_server(servers.connected, "127.0.0.1", 0) for _ in range(count)]
    print(*(each.sockets[0].getsockname()[1] for each in made), flush=True)
    await servers.steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model name that the servers serve")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.01, help="seconds between two tokens")
    args = parser.parse_args()
    raise_open_file_limit(4096)
    asyncio.run(run(args.model, args.count, args.step))


if __name__ == "__main__":
    main()
