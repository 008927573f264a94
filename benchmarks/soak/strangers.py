"""Impostors: register fake nodes, impersonate others, or call what only the router may."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from benchmarks.fleet import Fleet, free_port
from benchmarks.soak.faults import Fault, Faults, Kind, NotNow
from benchmarks.soak.hostile import answer, calls
from pdserve.common.rpc.auth import TOKEN_KEY, ClusterKey
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc

ADMITTED = "admitted"  # the outcome of a stranger that a cluster with keys admits: a failure
ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
ROLE_NAMES = {number: name for name, number in ROLES.items()}
NOWHERE = "10.255.255.1"
LONGEST_LIE = 10.0  # seconds
TIMEOUT = 10.0  # seconds of one call
FAKES = 4  # fake nodes at a time


class Liar:
    """Talks to the registry like a node; `trusted` ones have the cluster's key, others another
    key."""

    def __init__(self, fleet: Fleet, channel: grpc.aio.Channel, trusted: bool) -> None:
        self._registry = fleet.registry
        key = fleet.cluster_key
        self._key = key and ClusterKey(key if trusted else "open sesame and let me in")
        self._channel = channel
        self._stub = pb_grpc.RegistryStub(channel)

    async def register(self, info: pb.NodeInfo) -> None:
        load = pb.NodeLoad(
            free_blocks=10**6, total_blocks=10**6, most_free_blocks=10**6, healthy=True
        )
        await self._call("Register", info, pb.RegisterRequest(node=info, load=load))

    async def heartbeat(self, info: pb.NodeInfo) -> None:
        load = pb.NodeLoad(healthy=False, reason="a stranger says so")
        same = {"node_id": info.node_id, "instance": info.instance}
        # Not as a stream: grpc.aio says INTERNAL of a call that ends during a write.
        beats = self._channel.unary_stream("/pdserve.v1.Registry/Heartbeats")(
            pb.HeartbeatRequest(load=load, **same).SerializeToString(),
            timeout=TIMEOUT,
            metadata=self._signed("Heartbeats", info, b""),
        )
        await beats.read()
        beats.cancel()

    async def deregister(self, info: pb.NodeInfo) -> None:
        same = {"node_id": info.node_id, "instance": info.instance}
        await self._call("Deregister", info, pb.DeregisterRequest(**same))

    async def _call(self, method: str, info: pb.NodeInfo, request: Any) -> None:
        metadata = self._signed(method, info, request.SerializeToString())
        await getattr(self._stub, method)(request, timeout=TIMEOUT, metadata=metadata)

    def _signed(self, method: str, info: pb.NodeInfo, said: bytes) -> list[tuple[str, str]]:
        if not self._key:
            return []
        role, path = ROLE_NAMES[info.role], f"/pdserve.v1.Registry/{method}"
        token = self._key.sign(role, info.node_id, path, self._registry, said)
        return [(TOKEN_KEY, token)]


async def _a_node(fleet: Fleet, rng: random.Random) -> pb.NodeInfo:
    """Returns the registration of a known node. Raises NotNow."""
    nodes = [node for node in (await asyncio.to_thread(fleet.state))["nodes"] if node["name"]]
    if not nodes:
        raise NotNow
    node = rng.choice(nodes)
    node["role"] = ROLES[node["role"]]
    return ParseDict(node, pb.NodeInfo(), ignore_unknown_fields=True)


def _fake(info: pb.NodeInfo, address: str, rng: random.Random) -> pb.NodeInfo:
    fake = pb.NodeInfo()
    fake.CopyFrom(info)
    fake.node_id, fake.address = f"fake-{rng.getrandbits(32):08x}", address
    fake.instance = fake.node_id
    return fake


Lie = Callable[[Liar, pb.NodeInfo, Fault], Awaitable[None]]


async def _registers(liar: Liar, info: pb.NodeInfo, fault: Fault) -> None:
    """Registers nodes that claim to be idle, at an address without a server."""
    rng = fault.random
    host = rng.choice(("127.0.0.1", NOWHERE))
    fakes = [_fake(info, f"{host}:{free_port()}", rng) for _ in range(rng.randint(1, FAKES))]
    for fake in fakes:
        await liar.register(fake)
    await asyncio.sleep(fault.seconds)
    for fake in fakes:
        await liar.deregister(fake)


async def _takes_over(liar: Liar, info: pb.NodeInfo, fault: Fault) -> None:
    fake = _fake(info, f"127.0.0.1:{free_port()}", fault.random)
    fake.node_id = info.node_id
    await liar.register(fake)


async def _says_it_is_ill(liar: Liar, info: pb.NodeInfo, fault: Fault) -> None:
    await liar.heartbeat(info)


async def _says_it_leaves(liar: Liar, info: pb.NodeInfo, fault: Fault) -> None:
    await liar.deregister(info)


def _lies(lie: Lie, trusted: bool) -> Callable[[Fleet, Fault], Awaitable[str]]:
    async def attack(fleet: Fleet, fault: Fault) -> str:
        info = await _a_node(fleet, fault.random)
        async with calls(fleet, fleet.registry, trusted) as channel:
            await lie(Liar(fleet, channel, trusted), info, fault)
        return "OK" if trusted or fleet.open else ADMITTED

    return attack


async def _generates(fleet: Fleet, fault: Fault) -> str:
    """Calls a node directly, past the router."""
    info = await _a_node(fleet, fault.random)
    job = pb.Job(request_id="stranger", prompt_token_ids=[5, 6, 7], choices=[pb.Choice()])
    async with calls(fleet, info.address, trusted=False) as channel:
        if info.role == pb.ROLE_DECODE:
            stub, name = pb_grpc.DecodeStub(channel), "stranger"
            events = stub.Events(pb.EventsRequest(stream=name), timeout=TIMEOUT)
            run = stub.Run(pb.DecodeRequest(job=job, stream=name), timeout=TIMEOUT)
            told = await run.code()
            events.cancel()
        else:
            call = pb_grpc.PrefillStub(channel).Run(pb.PrefillRequest(job=job), timeout=TIMEOUT)
            await call.read()
            told = await call.code() if call.done() else None
            call.cancel()
    if told not in (None, grpc.StatusCode.OK):
        return told.name
    return "OK" if fleet.open else ADMITTED


async def _garbage(fleet: Fleet, fault: Fault) -> str:
    """Sends bytes that are not gRPC."""
    host, _, port = fleet.registry.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(fault.random.randbytes(10_000))
    try:
        async with asyncio.timeout(TIMEOUT):
            while await reader.read(1 << 16):
                pass
    finally:
        writer.close()
    return "closed"


ATTACKS: dict[str, Callable[[Fleet, Fault], Awaitable[str]]] = {
    "registers": _lies(_registers, trusted=False),
    "takes an id over": _lies(_takes_over, trusted=False),
    "says that a node is ill": _lies(_says_it_is_ill, trusted=False),
    "says that a node leaves": _lies(_says_it_leaves, trusted=False),
    "asks a node": _generates,
    "sends garbage": _garbage,
    "dead nodes with the key": _lies(_registers, trusted=True),
    "takes an id over with the key": _lies(_takes_over, trusted=True),
}


async def stranger(faults: Faults, fault: Fault) -> None:
    name = fault.random.choice(list(ATTACKS))
    told = await answer(ATTACKS[name](faults.fleet, fault))
    faults.answers["stranger", f"{name}: {told}"] += 1


STRANGER_KINDS = {"stranger": Kind(stranger, ("registry",), LONGEST_LIE)}
