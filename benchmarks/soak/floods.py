"""Attacks on the servers: floods, decompression bombs, and input that no parser expects. Most come
without a key."""

from __future__ import annotations

import asyncio
import json
import socket
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any

import grpc

from benchmarks.soak.attack import (
    HEALTH,
    HUNG,
    UNEXPLAINED,
    Attack,
    Hostile,
    Wait,
    at_grpc,
    at_http,
    calls,
    nodes_of,
)
from benchmarks.soak.crowd import burst
from benchmarks.soak.hostile import ADDRESS, MB, TEXT, http, named
from benchmarks.soak.subscribers import kv_ports, subscribers

BOMBS = 8  # bodies at a time
BOMB_MB = 1024  # megabytes of zeros in one megabyte of body
FLOODS = 12  # messages at a time
MAX_TAKEN = 128 * 2**10  # most bytes read of each, with TLS and HTTP/2 overhead
MAX_READ = 2**18  # more bytes for a method that the clients' port reads: a health request
SILENT = 1300  # connections to a port
LONGEST_IDLE = 8.0
TAKEN = "taken"  # an outcome that should have been a refusal: a failure

# ---- decompression bombs ----


@cache
def _bomb() -> bytes:
    """Returns a zlib stream of zeros: one compressed block, repeated; after a full flush each copy
    decompresses independently."""
    packer = zlib.compressobj(9)
    first = packer.compress(bytes(MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * (BOMB_MB - 1)


def _bombs() -> dict[str, tuple[str, str, str]]:
    """Returns reason for a refusal → (method, path, headers)."""
    json_type = "Content-Type: application/json\r\n"
    return {
        "no key": ("POST", TEXT, json_type),
        "no such path": ("POST", "/nowhere", json_type),
        "no such method": ("PUT", TEXT, json_type),
        "another type": ("POST", TEXT, "Content-Type: text/plain\r\n"),
        "health": ("GET", "/health", ""),
        "metrics": ("GET", "/metrics", ""),
    }


async def bomb(attack: Attack) -> None:
    """Sends eight bodies of one megabyte that decompress to a gigabyte, to the router or a node's
    metrics port, and keeps the connections open after the answers."""
    rng, fleet = attack.random, attack.fleet
    ways = [rng.choice(list(_bombs().items())) for _ in range(BOMBS)]
    ports = [("127.0.0.1", fleet.ports["http"]), *_metrics_ports(await nodes_of(fleet))]
    targets = [(name, rng.choice(ports), way) for name, way in ways]
    await asyncio.gather(
        *(
            attack.ask(name, partial(_explode, port, way, attack.seconds), at_http(port))
            for name, port, way in targets
        )
    )


async def _explode(
    port: tuple[str, int], way: tuple[str, str, str], seconds: float, wait: Wait
) -> str:
    method, path, headers = way
    body = _bomb()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Encoding: deflate\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await _open(port)
    try:
        writer.write(head.encode() + body)
        line = (await reader.readline()).decode(errors="replace").split()
        await wait.rest(seconds)
        return line[1] if len(line) > 1 else "closed"
    finally:
        writer.transport.abort()


# ---- floods without a key ----


async def grpc_flood(attack: Attack) -> None:
    """Sends twelve large messages without a key: to the clients' port, and to reflection and health
    at the registry and the nodes. The server must not read more of each than a flow-control
    window."""
    rng, fleet = attack.random, attack.fleet
    clients, registry = f"127.0.0.1:{fleet.ports['grpc']}", fleet.registry
    nodes = [node["address"] for node in await nodes_of(fleet)]
    size = rng.choice((MB // 5, 30 * MB, 60 * MB))
    ways = {
        "Generate": (clients, "/pdserve.v1.Inference/Generate"),
        "reflection": (
            rng.choice((registry, *nodes)),
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ),
        "health": (rng.choice((clients, registry, *nodes)), HEALTH),
    }
    name = rng.choice(list(ways))
    address, method = ways[name]
    reads = name == "health" and address == clients
    most = MAX_TAKEN + MAX_READ * reads
    attack.tell(f"{name}: {await _flood(attack, address, method, size, most)}")


async def _flood(attack: Attack, address: str, method: str, size: int, most: int) -> str:
    # An unknown field, which every protobuf parser has to accept.
    message = b"\xfa\x7f" + _varint(size) + bytes(size)

    async def one(channel: grpc.aio.Channel, wait: Wait) -> str:
        call = channel.stream_stream(method)(iter([message]))
        is_told = await call.read() is not grpc.aio.EOF
        return "told" if is_told else (await call.code()).name

    look = at_grpc(attack.fleet, address)
    async with (
        _counting(address) as (near, sent),
        calls(attack.fleet, near, name=address) as channel,
    ):
        asks = (attack.outcome_of(partial(one, channel), look) for _ in range(FLOODS))
        told = {*await asyncio.gather(*asks)}
    for failure in (UNEXPLAINED, HUNG):
        if failure in told:
            return failure
    return TAKEN if sum(sent) > FLOODS * most else ", ".join(sorted(told))


@asynccontextmanager
async def _counting(address: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Relays to `address`; yields the relay's address and the sizes of data sent through it."""
    sent: list[int] = []
    pumps: list[asyncio.Task[None]] = []

    async def join(*near: Any) -> None:
        try:
            far = await _open(_split(address))
        except OSError:  # so that the client does not wait for a server that has ended
            near[1].transport.abort()
        else:
            pumps.append(asyncio.create_task(_pump(near[0], far[1], sent)))
            pumps.append(asyncio.create_task(_pump(far[0], near[1], [])))

    server = await asyncio.start_server(join, "127.0.0.1", 0, limit=2**14)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
    finally:
        server.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: list[int]
) -> None:
    try:
        with suppress(OSError):
            while data := await reader.read(2**14):
                writer.write(data)
                await writer.drain()
                sent.append(len(data))
    finally:
        writer.transport.abort()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


# ---- silent connections ----


async def idle(attack: Attack) -> None:
    """Opens 1,300 silent connections to a port of the router or of a node."""
    rng, fleet = attack.random, attack.fleet
    node = rng.choice(await nodes_of(fleet))
    ports: dict[str, tuple[str, int]] = {
        "HTTP": ("127.0.0.1", fleet.ports["http"]),
        "gRPC": ("127.0.0.1", fleet.ports["grpc"]),
        "registry": ("127.0.0.1", fleet.ports["registry"]),
        "a node's gRPC": _split(node["address"]),
        "a node's metrics": _split(node["metrics_address"]),
    }
    if kv := await asyncio.to_thread(kv_ports, fleet, node):
        ports["a node's KV"] = rng.choice(kv)
    name = rng.choice(list(ports))
    await attack.ask(name, partial(_stay, ports[name], attack.seconds))


async def _stay(port: tuple[str, int], seconds: float, wait: Wait) -> str:
    """Returns whether most connections were closed by the time this client left. A frozen process
    accepts as many as the kernel's queue holds, and the rest wait: that counts as an answer."""
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for _ in range(SILENT):
            one = socket.socket()
            one.setblocking(False)
            sockets.append(one)
        dials = (loop.sock_connect(one, port) for one in sockets)
        try:
            async with asyncio.timeout(seconds + 5):
                await asyncio.gather(*dials, return_exceptions=True)
        except TimeoutError:
            return "the queue of the port was full"
        await wait.rest(seconds)
        closed = sum(_is_closed(one) for one in sockets)
        return "most were closed" if closed > SILENT / 2 else "most stayed open"
    finally:
        for one in sockets:
            one.close()


def _is_closed(one: socket.socket) -> bool:
    try:
        while one.recv(4096):  # HTTP/2 servers send first
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


# ---- unexpected input ----

HALF = "\\ud800"  # of a surrogate pair, as JSON writes it
DEEP = 20_000


def _odd() -> dict[str, str]:
    tool = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
    user = '{"role": "user", "content": "x"}'
    call = (
        '{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": '
        '{"name": "f", "arguments": "%s"}}]}, {"role": "tool", "tool_call_id": "1", "content": "x"}'
    )
    nested = "[" * DEEP + "]" * DEEP
    return {
        "half a surrogate": _chat(f"{user}, {call % (HALF * 3)}"),
        "half a surrogate, escaped": _chat(f"{user}, {call % ('{' + chr(92) * 2 + 'ud800')}"),
        "deep arguments": _chat(f"{user}, {call % nested}"),
        "wide arguments": _chat(f"{user}, {call % ('[' + '[],' * 300_000 + '[]]')}"),
        "a schema of huge numbers": _chat(user, tool % f'{{"maximum": {10**400}}}'),
        "a schema with half a surrogate": _chat(user, tool % f'{{"{HALF}": "{HALF}"}}'),
        "a large schema": _chat(user, tool % f'{{"enum": ["{HALF}", "{"x" * 100_000}"]}}'),
        "a deep schema": _chat(user, tool % ('{"not":' * DEEP + "{}" + "}" * DEEP)),
    }


def _chat(messages: str, tool: str = "") -> str:
    tools = f', "tools": [{tool}]' if tool else ""
    return f'{{"max_tokens": 2, "messages": [{messages}]{tools}}}'


async def odd(attack: Attack) -> None:
    """Sends strings and schemas that are valid JSON but unusual; none may give a 500."""
    name, body = attack.random.choice(list(_odd().items()))
    async with http(attack.fleet) as session:

        async def ask(wait: Wait) -> str:
            path, headers = "/v1/chat/completions", {"Content-Type": "application/json"}
            headers |= named(wait)
            async with session.post(path, data=body.encode(), headers=headers) as response:
                await response.read()
                return UNEXPLAINED if response.status == 500 else str(response.status)

        await attack.ask(name, ask)


async def foreign(attack: Attack) -> None:
    """Sends requests as a browser sends them for a page of another origin: without a key, and with
    a content type that needs no preflight."""
    path = attack.random.choice((TEXT, "/reset_prefix_cache", "/v1/load_lora_adapter"))
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    if attack.random.random() < 0.5:
        del headers["Content-Type"]
    async with http(attack.fleet, known=False) as session:
        data = json.dumps({"prompt": [5], "max_tokens": 1}).encode()

        async def ask(wait: Wait) -> str:
            async with session.post(
                path, data=data, headers=headers, skip_auto_headers=("Content-Type",)
            ) as response:
                await response.read()
                return TAKEN if response.status == 200 else str(response.status)

        await attack.ask(path, ask)


# ---- shared code ----


def _metrics_ports(nodes: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    return [_split(node["metrics_address"]) for node in nodes]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def _open(port: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    local = (ADDRESS, 0) if port[0].startswith("127.") else None
    return await asyncio.open_connection(*port, local_addr=local)


FLOOD_ATTACKS = {
    "bomb": Hostile(bomb),
    "grpc-flood": Hostile(grpc_flood),
    # It takes seconds of the router's time.
    "burst": Hostile(burst, weight=0.25, crowds=True, apart=True),
    "idle": Hostile(idle, longest=LONGEST_IDLE, crowds=True),
    "subscribers": Hostile(subscribers, longest=LONGEST_IDLE, crowds=True),
    "odd": Hostile(odd),
    "foreign": Hostile(foreign),
}
